"""The controller: expansion, rounds, history, lifecycle."""

from gpuflight.core.controller import Controller

__all__ = ["Controller"]
