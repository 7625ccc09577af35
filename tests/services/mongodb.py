"""A server that speaks MongoDB's wire protocol, for the tests.

``mongod`` where it is on PATH, else SecantusDB (PyPI, single node: no replica set, no sharding) as a process of its
own. ``GPUFLIGHT_TEST_MONGODB=mongod|secantusdb`` insists on one. One is shared by all workers of a run, each test with
a database of its own; whoever has to kill one starts their own.
"""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pymongo
import pymongo.errors
import pytest
from tests.services.certificates import make_certificates
from tests.services.service import Service

_NAMES_FOR_ALL_TABLES = 64
USER, PASSWORD = "writer", "pass/word:that@needs%escaping"


class MongoServer(Service):
    """One server: ``uri``, ``start``, ``kill``, ``stop``, ``client``. With ``login`` it wants ``USER``."""

    login = False
    tls = False
    durable = True
    """Whether what was acknowledged survives ``kill``: SecantusDB keeps its log in memory otherwise."""
    _has_tables = False

    @property
    def uri(self) -> str:
        return f"mongodb://{self.address}"

    @property
    def ca_path(self) -> Path:
        """The certificate to trust (PEM), with ``tls``."""
        return self.folder / "ca.pem"

    def ready(self) -> bool:
        try:
            with self.client() as client:
                client.admin.command("ping")
        except pymongo.errors.OperationFailure:
            return True  # it wants a login
        except pymongo.errors.PyMongoError:
            return False
        return True

    def start(self) -> None:
        super().start()
        if self.durable and not self.login and not self._has_tables and _program() == "secantusdb":
            # It makes one of its 16 tables when something is first written there, and one that it is killed at makes
            # its files unreadable: that is about it, not about us.
            with self.client() as client:
                for number in range(_NAMES_FOR_ALL_TABLES):
                    client["first"].create_collection(str(number))
                client.drop_database("first")
            self._has_tables = True

    def client(self, **options: Any) -> pymongo.MongoClient[dict[str, Any]]:
        if self.tls:
            options["tlsCAFile"] = str(self.ca_path)
        return pymongo.MongoClient(self.uri, serverSelectionTimeoutMS=1000, tls=self.tls, **options)

    def argv(self) -> list[str]:
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        port = str(self.ports["main"])
        if _program() == "mongod":
            more = ["--auth"] if self.login else []
            if self.tls:
                more += ["--tlsMode", "requireTLS", "--tlsCertificateKeyFile", self._certificate()]
            return ["mongod", "--bind_ip", "127.0.0.1", "--port", port, "--dbpath", str(data), "--nounixsocket", *more]
        config = self.folder / "secantusd.toml"
        config.touch()
        program = Path(sys.executable).with_name("secantusd-py")
        more = ["--auth"] if self.login else []
        # A cache that is full of what an old reader holds stops all of its threads for good: 128M once was.
        if self.durable:
            more.append("--sync-on-commit")
        if self.tls:
            more += ["--tls-cert-file", self._certificate(), "--tls-key-file", self._certificate()]
        return [
            str(program), "--config", str(config), "--host", "127.0.0.1", "--port", port, "--storage-path", str(data),
            "--standalone", "--cache-size", "1G", "--log-level", "WARNING", *more,
        ]  # fmt: skip

    def _certificate(self) -> str:
        if not self.ca_path.exists():
            make_certificates(self.folder)
        return str(self.folder / "broker.pem")

    def require_login(self) -> None:
        """Make ``USER``, then start again, wanting it."""
        self.start()
        with self.client() as client:
            roles = [{"role": "readWriteAnyDatabase", "db": "admin"}]
            client.admin.command("createUser", USER, pwd=PASSWORD, roles=roles)
        self.stop()
        self.login = True
        self.start()


def _program() -> str:
    wanted = os.environ.get("GPUFLIGHT_TEST_MONGODB", "")
    if wanted == "mongod" or (not wanted and shutil.which("mongod")):
        return "mongod"
    return "secantusdb"


def new_database() -> str:
    """A name that no other test uses."""
    return f"t{uuid.uuid4().hex[:16]}"


@pytest.fixture(scope="session")
def shared_mongodb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MongoServer]:
    """The server that all tests of this run share. Not to be killed."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    server = MongoServer(base / "mongodb")
    server.durable = False
    server.start()
    yield server
    server.release()


@pytest.fixture
def mongodb(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MongoServer]:
    """The shared server, or with the mark ``undisturbed`` one of the test's own: large writes beside those of others
    may stop SecantusDB for good. Not to be killed."""
    if request.node.get_closest_marker("undisturbed") is None:
        yield request.getfixturevalue("shared_mongodb")
        return
    server = MongoServer(tmp_path / "mongodb")
    server.durable = False
    server.start()
    yield server
    server.kill()
    server.release()


@pytest.fixture
def own_mongodb(tmp_path: Path) -> Iterator[Callable[[], MongoServer]]:
    """Makes servers of the test's own, to be killed."""
    made: list[MongoServer] = []

    def make() -> MongoServer:
        server = MongoServer(tmp_path / f"mongodb-{len(made)}")
        made.append(server)
        return server

    yield make
    for server in made:
        server.kill()
        server.release()
