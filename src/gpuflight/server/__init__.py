"""The online server: one backend serves, see ``base``; the REST application comes later."""
