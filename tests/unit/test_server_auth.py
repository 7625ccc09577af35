"""Who may: tokens, loopback, roles, failed logins, the Host and the Origin of a request."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Depends, FastAPI
from starlette.testclient import TestClient

from gpuflight.errors import ConfigError
from gpuflight.server import errors
from gpuflight.server.auth import Principal, is_loopback, require
from gpuflight.server.hosts import HostCheck, check_bind, cors
from gpuflight.server.login_limit import LoginLimit
from gpuflight.server.tokens import Role, TokenStore
from gpuflight.settings import Settings


@pytest.fixture
def tokens(tmp_path: Path) -> TokenStore:
    return TokenStore(str(tmp_path / "tokens.json"))


def application(tokens: TokenStore, **server: Any) -> FastAPI:
    app = FastAPI()
    app.state.gpuflight = SimpleNamespace(tokens=tokens)
    errors.install(app)
    for role in Role:

        async def who(principal: Principal = Depends(require(role))) -> dict[str, str]:  # noqa: B008
            return {"name": principal.name, "role": principal.role.label}

        app.add_api_route(f"/{role.label}", who, methods=["GET", "POST"])
    settings = Settings.model_validate({"server": server}).server
    cors(app, settings)
    app.add_middleware(HostCheck, settings=settings)
    return app


def client_from(tokens: TokenStore, address: str = "127.0.0.1", host: str = "127.0.0.1", **server: Any) -> TestClient:
    return TestClient(application(tokens, **server), base_url=f"http://{host}", client=(address, 1))


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def test_loopback_is_admin_while_there_is_no_token(tokens: TokenStore) -> None:
    for address in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"):
        assert client_from(tokens, address).get("/admin").json() == {"name": "loopback", "role": "admin"}
    for address in ("192.168.1.5", "::ffff:10.0.0.1", "fe80::1", "testclient", ""):
        answer = client_from(tokens, address).get("/viewer")
        assert answer.status_code == 401 and answer.headers["www-authenticate"].startswith("Bearer")
    tokens.create(Role.VIEWER)
    assert client_from(tokens).get("/viewer").status_code == 401


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "X-Real-IP"])
def test_a_proxy_on_loopback_lends_nobody_its_rights(tokens: TokenStore, header: str) -> None:
    assert client_from(tokens).get("/viewer", headers={header: "127.0.0.1"}).status_code == 401


def test_a_wrong_token_is_refused_from_anywhere(tokens: TokenStore) -> None:
    client = client_from(tokens)
    for authorization in ("Bearer gpfl_wrong", "Bearer ", "Bearer", "Basic YTpi", "gpfl_x", "Bearer \xe9"):
        answer = client.get("/viewer", headers={"authorization": authorization.encode("latin-1")})
        assert answer.status_code == 401, authorization
        assert answer.json()["error"]["code"] == "unauthorized"


@pytest.mark.parametrize("has", list(Role))
@pytest.mark.parametrize("needs", list(Role))
def test_roles(tokens: TokenStore, has: Role, needs: Role) -> None:
    token, info = tokens.create(has)
    answer = client_from(tokens, "10.0.0.1").get(f"/{needs.label}", headers=bearer(token))
    if has >= needs:
        assert answer.json() == {"name": info.name, "role": has.label}
    else:
        assert answer.status_code == 403 and needs.label in answer.json()["error"]["message"]


def test_brute_force_is_slowed_down_by_address(tokens: TokenStore) -> None:
    token, _ = tokens.create(Role.VIEWER)
    app = application(tokens)
    now = [0.0]
    limit = app.state.gpuflight_login_limit = LoginLimit(burst=3, refill_s=10, now_s=lambda: now[0])
    client = TestClient(app, base_url="http://127.0.0.1", client=("10.0.0.1", 1))
    other = TestClient(app, base_url="http://127.0.0.1", client=("10.0.0.2", 1))
    assert [client.get("/viewer", headers=bearer(f"gpfl_{n}")).status_code for n in range(5)] == [401] * 3 + [429] * 2
    refused = client.get("/viewer", headers=bearer(token))  # also the right one: it could be a guess
    assert refused.status_code == 429 and refused.headers["retry-after"] == "10"
    assert refused.json()["error"]["code"] == "too_many_failed_logins"
    assert other.get("/viewer", headers=bearer(token)).status_code == 200
    now[0] = 10.0
    assert client.get("/viewer", headers=bearer(token)).status_code == 200
    assert client.get("/viewer", headers=bearer("gpfl_x")).status_code == 401
    assert client.get("/viewer", headers=bearer("gpfl_x")).status_code == 429
    assert (limit.failures_count, limit.refused_count) == (4, 4)
    assert client.get("/viewer").status_code == 401  # without a token nothing is guessed


def test_the_limit_counts_an_ipv6_network_as_one_and_forgets_the_oldest() -> None:
    limit = LoginLimit(burst=1, refill_s=10, max_addresses=2, now_s=lambda: 0.0)
    limit.failed("2001:db8::1")
    assert limit.wait_s("2001:db8::2") == 10 and limit.wait_s("2001:db8:0:1::1") == 0
    limit.failed("::ffff:10.0.0.1")
    assert limit.wait_s("10.0.0.1") == 10
    limit.failed("10.0.0.2")
    assert limit.wait_s("2001:db8::1") == 0 and limit.wait_s("10.0.0.1") == 10


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:9477", "localhost", "LOCALHOST:1", "localhost.", "[::1]:9477", "10.1.2.3", "gpu-box:80"],
)
def test_names_that_are_ours(tokens: TokenStore, host: str) -> None:
    client = client_from(tokens, allowed_hosts=["GPU-box"])
    assert client.get("/viewer", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "",
        "a@localhost",
        "localhost/x",
        "localhost:x",
        "[",
    ],
)
def test_dns_rebinding_is_refused(tokens: TokenStore, host: str) -> None:
    answer = client_from(tokens).get("/viewer", headers={"host": host})
    assert answer.status_code == 421 and answer.json()["error"]["code"] == "wrong_host"


def test_web_pages_of_others_may_change_nothing(tokens: TokenStore) -> None:
    client = client_from(tokens, host="localhost:9477", cors_origins=["https://ours.example"])
    for origin, status in (
        ("http://localhost:9477", 200),
        ("https://ours.example", 200),
        ("http://localhost:8080", 403),
        ("https://evil.example", 403),
        ("null", 403),
        ("", 403),
    ):
        assert client.post("/admin", headers={"origin": origin}).status_code == status, origin
        assert client.get("/admin", headers={"origin": origin}).status_code == 200
    assert client.post("/admin").status_code == 200  # no browser
    allowed = client.get("/admin", headers={"origin": "https://ours.example"})
    assert allowed.headers["access-control-allow-origin"] == "https://ours.example"
    asked = {"origin": "https://ours.example", "access-control-request-method": "POST"}
    assert client.options("/admin", headers=asked).status_code == 200
    assert "access-control-allow-origin" not in client.get("/admin", headers={"origin": "https://evil.example"}).headers
    plain = client_from(tokens, host="localhost:9477").get("/admin", headers={"origin": "https://ours.example"})
    assert not [name for name in plain.headers if name.startswith("access-control")]


def test_listening_for_strangers_needs_a_token(tokens: TokenStore) -> None:
    def server(host: str) -> Any:
        return Settings.model_validate({"server": {"host": host}}).server

    for host in ("127.0.0.1", "::1", "localhost"):
        check_bind(server(host), tokens)
    for host in ("0.0.0.0", "::", "10.0.0.1", "gpu-box"):
        with pytest.raises(ConfigError, match="token create"):
            check_bind(server(host), tokens)
    tokens.create(Role.VIEWER)
    check_bind(server("0.0.0.0"), tokens)


def test_what_loopback_is() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("::1")
    assert not is_loopback("") and not is_loopback("0.0.0.0") and not is_loopback("localhost")
