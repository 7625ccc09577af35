"""One file per observation domain; each turns sources into entities and edges. See ``base`` for the contract."""
