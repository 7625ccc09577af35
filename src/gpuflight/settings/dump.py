"""Settings as plain data for people to see: nothing secret in it."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, SecretStr

MASK = "********"

_SECRET_NAME = re.compile(
    r"(^|_)(token|password|passwd|passphrase|secret|credentials?|authorization|api_?key|access_?key|private_?key|cookie|uri)"
    r"(_|$)",
    re.IGNORECASE,
)
# A path is no secret, and people must see which file is meant.
_NOT_SECRET_SUFFIX = ("_file", "_path", "_dir", "_s", "_bytes", "_count")
_URL_USER = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s@]*@")


def is_secret(name: str) -> bool:
    """True for the name of a setting whose value is not to be shown."""
    name = name.replace("-", "_").replace(".", "_")
    return bool(_SECRET_NAME.search(name)) and not name.lower().endswith(_NOT_SECRET_SUFFIX)


def mask(value: Any, name: str = "") -> Any:
    """``value`` as plain data, with secrets and the user part of URLs replaced; the order of keys is kept."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="python")
    if isinstance(value, SecretStr):
        return MASK if value.get_secret_value() else ""
    if isinstance(value, dict):
        return {str(key): mask(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [mask(inner, name) for inner in value]
    if isinstance(value, bool) or value is None:
        return value
    if name and is_secret(name):
        return MASK if value != "" else ""
    if isinstance(value, str):
        return _URL_USER.sub(rf"\g<scheme>{MASK}@", value)
    return value if isinstance(value, (int, float)) else str(value)


def dump(settings: BaseModel) -> dict[str, Any]:
    """The effective settings as plain data in the shape of a configuration file, secrets masked."""
    result: dict[str, Any] = mask(settings)
    return result
