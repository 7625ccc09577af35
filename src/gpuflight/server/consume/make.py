"""A consumer from its settings."""

from __future__ import annotations

from gpuflight.server.consume.kafka import KafkaClient, require
from gpuflight.server.consume.loop import Loop
from gpuflight.server.consume.settings import ConsumeSettings
from gpuflight.server.consume.store import FleetWriter


def make_loop(settings: ConsumeSettings) -> Loop:
    """A consumer that has not been started, and has touched nothing. Raises MissingExtra, ConfigError."""
    from importlib.util import find_spec

    from gpuflight.errors import MissingExtra

    require()
    if find_spec("pymongo") is None:
        raise MissingExtra("pymongo", "mongodb", "writing rounds to MongoDB")
    mongodb = settings.mongodb
    options = mongodb.options()
    return Loop(
        lambda: KafkaClient(settings, settings.group),
        lambda: FleetWriter(options, mongodb.database, mongodb.retention_days),
        settings,
    )
