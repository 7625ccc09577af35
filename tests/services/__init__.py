"""Real servers that tests deliver to, each in a process of its own on loopback."""
