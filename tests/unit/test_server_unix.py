"""The unix socket: its file, and who may come by it."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.server_fixture import Served

from gpuflight.errors import ConfigError
from gpuflight.server import auth
from gpuflight.server.backends.uvicorn import Uvicorn, connections_limit
from gpuflight.server.listeners import UnixListener, check_path
from gpuflight.server.peers import PEER_KEY, Peer, PeerRoles, peer_of
from gpuflight.server.tokens import Role, TokenStore
from gpuflight.settings import Settings


def _peer(uid: int, *groups: int) -> Peer:
    return Peer(pid=1, uid=uid, gid=groups[0] if groups else uid, groups=frozenset(groups or (uid,)))


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "s")


def _mode(path: str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_the_file_is_private_whatever_the_umask_and_goes_with_the_listener(path: str) -> None:
    before = os.umask(0)
    try:
        listener = UnixListener(path)
    finally:
        os.umask(before)
    assert _mode(path) == 0o600
    listener.close()
    listener.close()
    assert not os.path.exists(path)


def test_others_may_connect_if_some_of_them_have_a_role(path: str) -> None:
    before = os.umask(0o077)
    try:
        listener = UnixListener(path, for_others=True)
    finally:
        os.umask(before)
    assert _mode(path) == 0o666
    listener.close()


def test_a_stale_socket_is_replaced(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
        dead.listen()
    assert os.path.exists(path)
    UnixListener(path).close()
    assert not os.path.exists(path)


def test_a_socket_on_which_somebody_listens_stays(path: str) -> None:
    first = UnixListener(path)
    with pytest.raises(OSError, match="somebody listens") as refused:
        UnixListener(path)
    assert refused.value.errno == errno.EADDRINUSE and refused.value.filename == path
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
    first.close()


def test_one_that_is_too_busy_to_answer_is_not_stale(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(path)
        busy.listen(0)
        waiting = []
        try:
            while True:
                client = socket.socket(socket.AF_UNIX)
                waiting.append(client)
                client.setblocking(False)
                client.connect(path)
        except BlockingIOError:
            pass
        with pytest.raises(OSError, match="somebody listens"):
            UnixListener(path)
        for client in waiting:
            client.close()
    assert os.path.exists(path)


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_no_socket_stays(path: str, tmp_path: Path, kind: str) -> None:
    if kind == "file":
        Path(path).write_text("mine")
    elif kind == "folder":
        os.mkdir(path)
    else:
        os.symlink(tmp_path / "elsewhere", path)
    with pytest.raises(OSError, match="no socket"):
        UnixListener(path)
    assert os.path.lexists(path) and not (tmp_path / "elsewhere").exists()


def test_the_file_of_another_one_is_not_removed(path: str) -> None:
    ours = UnixListener(path)
    os.unlink(path)
    theirs = UnixListener(path)
    ours.close()
    assert os.path.exists(path)
    theirs.close()
    assert not os.path.exists(path)


@pytest.mark.parametrize("bad", ["relative", "/" + "x" * 120, "/a\0b"])
def test_paths_that_no_socket_can_have(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.socket"):
        check_path(bad)


def test_a_missing_folder_is_an_error_with_the_path(path: str) -> None:
    with pytest.raises(OSError) as refused:
        UnixListener(path + "/in/none")
    assert refused.value.filename == path + "/in/none"


def test_the_kernel_says_who_connected() -> None:
    class Transport:
        def __init__(self, connection: Any) -> None:
            self.connection = connection

        def get_extra_info(self, name: str) -> Any:
            return self.connection

    one, other = socket.socketpair()
    with one, other, socket.socket() as tcp:
        peer = peer_of(Transport(one))
        assert peer is not None
        assert (peer.pid, peer.uid, peer.gid) == (os.getpid(), os.geteuid(), os.getegid())
        assert peer.groups == {os.getegid(), *os.getgroups()}
        assert peer_of(Transport(tcp)) is None and peer_of(Transport(None)) is None


def test_roles_of_users_and_groups() -> None:
    server = Settings(
        server={
            "socket_users": {"4001": "operator", "0": "viewer"},
            "socket_groups": {"5001": "viewer", "5002": "admin"},
        }
    ).server
    roles = PeerRoles(server)
    assert roles.for_others
    assert roles.role_of(_peer(os.geteuid())) is Role.ADMIN
    assert roles.role_of(_peer(0)) is Role.ADMIN, "root could take it anyway"
    assert roles.role_of(_peer(4001)) is Role.OPERATOR
    assert roles.role_of(_peer(4001, 5002)) is Role.OPERATOR, "what a user is given goes before its groups"
    assert roles.role_of(_peer(4002, 1, 5001)) is Role.VIEWER
    assert roles.role_of(_peer(4002, 5001, 5002)) is Role.ADMIN
    assert roles.role_of(_peer(4002)) is None
    assert not PeerRoles(Settings().server).for_others


@pytest.mark.parametrize("field", ["socket_users", "socket_groups"])
def test_unknown_names_are_refused_at_the_start(field: str, path: str) -> None:
    settings = Settings(server={field: {"nobody-is-called-so": "viewer"}, "socket": path})
    with pytest.raises(ConfigError, match=rf"server\.{field}: .*nobody-is-called-so"):
        Uvicorn(settings).check(TokenStore())
    with pytest.raises(ValueError):
        Settings(server={field: {"root": "king"}})


def _scope(peer: Peer | None, *headers: tuple[bytes, bytes], served: Served) -> Any:
    scope: dict[str, Any] = {"type": "http", "headers": list(headers), "client": None, "app": served.client.app}
    return scope | ({PEER_KEY: peer} if peer is not None else {})


def test_who_comes_by_the_socket_has_its_role_tokens_or_not() -> None:
    with Served(server={"socket_users": {"4001": "viewer"}}) as served:
        tokens = served.state.tokens
        mine, viewer, stranger = _peer(os.geteuid()), _peer(4001), _peer(4002)
        for _ in range(2):
            assert auth.authenticate(_scope(mine, served=served), tokens).role is Role.ADMIN
            found = auth.authenticate(_scope(viewer, served=served), tokens)
            assert found == auth.Principal("uid:4001", Role.VIEWER)
            assert auth.still_valid(_scope(viewer, served=served), tokens)
            with pytest.raises(auth.ApiError) as refused:
                auth.authenticate(_scope(stranger, served=served), tokens)
            assert refused.value.status == 401
            token = tokens.create(Role.OPERATOR)[0]  # the second time with tokens
        bearer = (b"authorization", f"Bearer {token}".encode())
        assert auth.authenticate(_scope(stranger, bearer, served=served), tokens).role is Role.OPERATOR
        with pytest.raises(auth.ApiError):  # a wrong token is wrong, whoever brings it
            auth.authenticate(_scope(mine, (b"authorization", b"Bearer x"), served=served), tokens)
        with pytest.raises(auth.ApiError):  # a proxy asks for others
            auth.authenticate(_scope(mine, (b"x-forwarded-for", b"10.0.0.9"), served=served), tokens)


def test_guesses_are_counted_by_user() -> None:
    with Served() as served:
        wrong = (b"authorization", b"Bearer gpfl_wrong")
        statuses = []
        for uid in (4001,) * 12 + (4002,):
            with pytest.raises(auth.ApiError) as refused:
                auth.authenticate(_scope(_peer(uid), wrong, served=served), served.state.tokens)
            statuses.append(refused.value.status)
        assert statuses == [401] * 10 + [429] * 2 + [401]


@pytest.fixture
def backend(path: str) -> Iterator[Uvicorn]:
    made = Uvicorn(Settings(server={"host": None, "socket": path}))
    yield made
    made._close()


def test_alone_it_needs_no_token(backend: Uvicorn, path: str) -> None:
    backend.check(TokenStore())
    backend.bind()
    assert backend._tcp is None and stat.S_ISSOCK(os.stat(path).st_mode)
    with pytest.raises(ConfigError, match="nothing to listen on"):
        Uvicorn(Settings(server={"host": None})).check(TokenStore())


def test_if_one_cannot_be_had_the_other_is_given_back(path: str) -> None:
    Path(path).write_text("mine")
    backend = Uvicorn(Settings(server={"port": 0, "socket": path}))
    with pytest.raises(OSError):
        backend.bind()
    assert backend._tcp is None and backend._unix is None


@pytest.mark.parametrize(
    ("allowed", "wanted", "expected"), [(1024, 2000, 768), (65536, 2000, 2000), (-1, 2000, 2000), (100, 2000, 1)]
)
def test_clients_leave_descriptors_for_the_rounds(
    allowed: int, wanted: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (allowed, allowed))
    assert connections_limit(wanted) == expected
