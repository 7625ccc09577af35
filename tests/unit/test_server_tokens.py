"""Access tokens: kept hashed, in a file of their own, told once; the command and the routes that manage them."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from gpuflight.cli import main
from gpuflight.errors import ConfigError, InputError
from gpuflight.server.app import create_app
from gpuflight.server.state import ServerState
from gpuflight.server.tokens import PREFIX, Role, TokenStore, default_store_path
from gpuflight.settings import Settings


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "tokens.json"


def test_a_token_is_random_and_only_its_hash_is_kept(path: Path) -> None:
    store = TokenStore(str(path))
    assert not store.configured
    first, info = store.create(Role.VIEWER, "one")
    second, _ = store.create(Role.ADMIN)
    assert first.startswith(PREFIX) and len(first) == len(PREFIX) + 43 and first != second
    kept = path.read_text()
    assert first not in kept and first[len(PREFIX) :] not in kept
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert store.configured
    assert store.verify(first) == info and info.rank is Role.VIEWER
    assert store.verify(first[:-1]) is None and store.verify("") is None and store.verify("x" * 10_000) is None
    assert store.verify("\ud800é") is None
    assert {entry.name.split(".")[-1] for entry in path.parent.iterdir()} == {"json", "lock"}  # nothing half written


def test_the_file_stays_private_whatever_the_umask(path: Path) -> None:
    before = os.umask(0)
    try:
        TokenStore(str(path)).create(Role.ADMIN)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_running_server_sees_what_the_command_does(path: Path) -> None:
    server, command = TokenStore(str(path)), TokenStore(str(path))
    assert not server.configured
    token, info = command.create(Role.OPERATOR)
    assert server.configured and server.verify(token) is not None
    command.revoke(info.id)
    assert server.verify(token) is None
    assert server.configured  # revoking the last one must not open the door
    path.unlink()
    assert server.configured


def test_names_are_unique_and_plain(path: Path) -> None:
    store = TokenStore(str(path))
    _, info = store.create(Role.VIEWER, "a")
    for taken in ("a", info.id):
        with pytest.raises(InputError, match="already"):
            store.create(Role.VIEWER, taken)
    for bad in ("", "a b", "../x", "é", "x" * 65, "-x"):
        with pytest.raises(InputError, match="cannot be the name"):
            store.create(Role.VIEWER, bad)
    with pytest.raises(InputError, match="no token 'b'; there are: a"):
        store.revoke("b")
    assert [info.name for info in store.all()] == ["a"]


def test_many_who_create_at_once_lose_nothing(path: Path) -> None:
    def create(name: str) -> None:
        TokenStore(str(path)).create(Role.VIEWER, name)

    threads = [threading.Thread(target=create, args=(f"t{index}",)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {info.name for info in TokenStore(str(path)).all()} == {f"t{index}" for index in range(8)}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"schema":2,"tokens":[]}', b"\xff\xfe", b'{"schema":1,"tokens":[{"id":"x"}]}',
     b'{"schema":1,"tokens":[{"id":"x","name":"x","role":"god","created":"","sha256":""}]}'],
)  # fmt: skip
def test_a_broken_file_lets_nobody_in(path: Path, content: bytes) -> None:
    store = TokenStore(str(path))
    token, _ = store.create(Role.ADMIN)
    path.write_bytes(content)
    assert store.configured and store.verify(token) is None
    with pytest.raises(ConfigError, match=r"tokens\.json"):
        TokenStore.from_settings(SimpleNamespace(token=None, token_file=None, store_file=str(path)))
    fresh = TokenStore(str(path))
    assert fresh.configured and fresh.verify(token) is None
    with pytest.raises(InputError):
        store.create(Role.ADMIN)
    assert path.read_bytes() == content


def test_a_file_that_others_may_write_is_refused(path: Path) -> None:
    store = TokenStore(str(path))
    token, _ = store.create(Role.ADMIN)
    path.chmod(0o666)
    os.utime(path)
    assert store.verify(token) is None
    path.chmod(0o600)
    assert store.verify(token) is not None


def test_tokens_of_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a-token-from-a-file\n")
    settings = Settings.model_validate(
        {
            "server": {
                "auth": {
                    "token": "a-token-from-settings",
                    "token_file": str(file),
                    "store_file": str(tmp_path / "t.json"),
                }
            }
        }
    )
    store = TokenStore.from_settings(settings.server.auth)
    for token in ("a-token-from-settings", "a-token-from-a-file"):
        found = store.verify(token)
        assert found is not None and found.rank is Role.ADMIN
    assert store.configured
    for content in ("", "short", "with space inside it", "é" * 20):
        file.write_text(content)
        with pytest.raises(ConfigError, match="token"):
            TokenStore.from_settings(settings.server.auth)
    file.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        TokenStore.from_settings(settings.server.auth)


def test_the_default_place_is_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", "/x")
    assert default_store_path() == "/x/gpuflight/tokens.json"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_store_path() == "/var/lib/gpuflight/tokens.json"


def test_the_command(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.json"
    config.write_text(json.dumps({"server": {"auth": {"store_file": str(path)}}}))
    assert main(["token", "create", "--role", "viewer", "--name", "grafana", "--config", str(config)]) == 0
    out, err = capsys.readouterr()
    token = out.strip()
    assert token not in err and str(path) in err
    found = TokenStore(str(path)).verify(token)
    assert found is not None and found.name == "grafana"
    assert main(["token", "list", "--file", str(path), "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out)["tokens"][0] == found.public() and found.sha256 not in out
    assert main(["token", "list", "--file", str(path)]) == 0
    assert "grafana" in capsys.readouterr().out
    assert main(["token", "revoke", "grafana", "--file", str(path)]) == 0
    assert TokenStore(str(path)).verify(token) is None
    assert main(["token", "list", "--file", str(path)]) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["create"], "--role"),
        (["create", "x", "--role", "viewer"], "--name x"),
        (["list", "x"], "no name"),
        (["revoke"], "needs the name"),
        (["revoke", "x"], "no token 'x'"),
        (["list", "--role", "viewer"], "go with create"),
        (["create", "--role", "viewer", "--name", "a b"], "cannot be the name"),
    ],
)
def test_wrong_usage_of_the_command(
    arguments: list[str], says: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["token", *arguments, "--file", str(path)]) == 2
    assert says in capsys.readouterr().err


def client_of(path: Path) -> TestClient:
    state = ServerState(
        controller=SimpleNamespace(latest=None),  # type: ignore[arg-type]
        settings=Settings(),
        tokens=TokenStore(str(path), ("a-token-from-settings",)),
    )
    return TestClient(create_app(state), base_url="http://127.0.0.1", client=("127.0.0.1", 1))


def test_the_routes(path: Path) -> None:
    client = client_of(path)
    admin = {"authorization": "Bearer a-token-from-settings"}
    made = client.post("/api/v1/tokens", json={"role": "viewer", "name": "v"}, headers=admin)
    assert made.status_code == 201
    viewer = {"authorization": f"Bearer {made.json()['token']}"}
    assert client.get("/api/v1/tokens", headers=viewer).status_code == 403
    listed = client.get("/api/v1/tokens", headers=admin)
    assert [token["name"] for token in listed.json()["tokens"]] == ["settings-0", "v"]
    assert "sha256" not in listed.text and made.json()["token"] not in listed.text
    assert client.post("/api/v1/tokens", json={"role": "viewer", "name": "v"}, headers=admin).status_code == 409
    for bad in ({"role": "god"}, {"role": "viewer", "name": "a b"}, {}, {"role": "viewer", "x": 1}):
        assert client.post("/api/v1/tokens", json=bad, headers=admin).status_code == 422
    assert client.delete("/api/v1/tokens/nobody", headers=admin).status_code == 404
    assert client.delete("/api/v1/tokens/settings-0", headers=admin).status_code == 409
    assert client.delete("/api/v1/tokens/v", headers=admin).json()["revoked"]["name"] == "v"
    assert client.get("/api/v1/tokens", headers=viewer).status_code == 401
