"""Session folders of every generation on disk: what lies where, in which order, and reading it.

``find_sessions(folder)`` → ``SessionFolder``; ``SessionReader(folder)`` or ``read_session(path)`` → batches.
"""

from gpuflight.events.files.folder import SessionFolder, find_sessions
from gpuflight.events.files.names import CHANNELS, Window, parse_name
from gpuflight.events.files.reader import SessionReader, read_session

__all__ = ["CHANNELS", "SessionFolder", "SessionReader", "Window", "find_sessions", "parse_name", "read_session"]
