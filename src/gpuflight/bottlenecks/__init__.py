"""The rules that judge a window of rounds. See ``base`` for the contract; the rules themselves come later."""
