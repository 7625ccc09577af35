"""``gpuflight-server --consume``: what changes when a server serves a fleet instead of its host."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuflight.server.consume.loop import Loop
    from gpuflight.settings import Settings

KINDS = ("kafka",)
FLEET = "fleet"
FOLDER = "consume"
"""Below the state folder, so that the server of this very host can have the rest."""


def for_consumer(settings: Settings) -> Settings:
    """The settings of a server that consumes: it looks at the fleet's database in place of its host, unless a collector
    is enabled by name, and keeps apart from a server of this host. Raises ConfigError."""
    from pydantic import SecretStr

    from gpuflight.cli.plugin_settings import collector_names, make_consume
    from gpuflight.subscribers.spool import state_folder

    consume = make_consume(settings)
    mongodb = consume.mongodb
    blocks: dict[str, dict[str, Any]] = {
        name: {"enabled": name == FLEET, **settings.collectors.get(name, {})} for name in collector_names()
    }
    blocks |= {name: block for name, block in settings.collectors.items() if name not in blocks}  # told as unknown
    shared = {
        "uri": SecretStr(mongodb.full_uri()),
        "database": mongodb.database,
        "tls_ca_file": mongodb.tls_ca_file,
        "tls_certificate_key_file": mongodb.tls_certificate_key_file,
    }
    limits = settings.limits
    room = {"max_entities": limits.max_nodes * 9 // 10, "max_edges": limits.max_edges * 9 // 10, "show_own": True}
    if FLEET in blocks:
        elsewhere = "uri" in blocks[FLEET]
        blocks[FLEET] = {**room, **({} if elsewhere else shared), **blocks[FLEET]}
    folder = os.path.join(settings.server.state_folder or state_folder(), FOLDER)
    changed = settings.model_copy(
        update={"collectors": blocks, "server": settings.server.model_copy(update={"state_folder": folder})}
    )
    changed._file, changed._file_name = settings._file, settings._file_name
    return changed


def make_consumer(settings: Settings) -> Loop:
    """The consumer, not started. Raises ConfigError, MissingExtra."""
    from gpuflight.cli.plugin_settings import make_consume
    from gpuflight.server.consume.make import make_loop

    return make_loop(make_consume(settings))


def lock_path() -> str:
    """The lock of this user's consuming server on this host."""
    from gpuflight.core.lockfile import default_lock_path

    return default_lock_path().replace(".lock", "-consume.lock")
