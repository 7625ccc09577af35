"""Judgement: rules look at each round and say what holds the machine back. ``base`` is the contract of a rule."""
