"""Typed settings: command line > environment (``GPUFLIGHT_…``) > file (``--config``) > defaults.

Importing this package costs pydantic; import it where settings are needed, not at the top of a command.
"""

from gpuflight.settings.dump import dump, mask
from gpuflight.settings.files import read_config_file
from gpuflight.settings.load import ENVIRONMENT_PREFIX, load
from gpuflight.settings.model import (
    Auth,
    History,
    Limits,
    LogLevel,
    Remote,
    Server,
    Settings,
    SubscriberEntry,
    Tls,
)
from gpuflight.settings.problems import nearest, problems, validate

__all__ = [
    "ENVIRONMENT_PREFIX",
    "Auth",
    "History",
    "Limits",
    "LogLevel",
    "Remote",
    "Server",
    "Settings",
    "SubscriberEntry",
    "Tls",
    "dump",
    "load",
    "mask",
    "nearest",
    "problems",
    "read_config_file",
    "validate",
]
