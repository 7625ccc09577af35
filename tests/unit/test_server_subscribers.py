"""Subscribers over REST: everything that can be asked and done, what is refused, and what a restart brings back."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.http_receiver import Answer, Receiver
from tests.unit.server_fixture import Served, small

from gpuflight.errors import DeliveryError
from gpuflight.registry import plugins
from gpuflight.rounds import Round
from gpuflight.server.subscriber_manager import MAX_CREATED, SubscriberManager
from gpuflight.server.tokens import Role
from gpuflight.subscribers import worker
from gpuflight.subscribers.base import Subscriber, SubscriberSettings
from gpuflight.subscribers.memory import Memory, MemorySettings
from gpuflight.subscribers.netguard import Rules
from gpuflight.subscribers.spool import spool_path

ROOT = "/api/v1/subscribers"
LONG_S = 60.0
MEMORY = {"type": "memory", "name": "recent", "rounds_count": 3}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with small() as served:
        served.subscribers.rules = Rules(folders=(str(tmp_path / "out"),), url_hosts=("127.0.0.1",))
        served.subscribers.path = str(tmp_path / "state" / "subscribers.json")
        (tmp_path / "out").mkdir()
        yield served


def create(served: Served, status: int = 201, **settings: Any) -> Any:
    return served.send("POST", ROOT, status, settings).json()


def again(served: Served) -> SubscriberManager:
    """The manager of the next process."""
    manager = SubscriberManager(served.subscribers.rules, served.subscribers.path)
    manager.restore()
    return manager


def test_created_read_changed_deleted(served: Served) -> None:
    made = create(served, **MEMORY)
    assert made["settings"]["rounds_count"] == 3
    assert (made["name"], made["type"], made["origin"]) == ("recent", "memory", "rest")
    served.round()
    assert served.subscribers.flush(LONG_S)
    (line,) = served.get(ROOT).json()["subscribers"]
    assert "settings" not in line
    assert line["statistics"]["received"] == line["statistics"]["sent"] == 1
    assert served.get(f"{ROOT}/recent/statistics").json()["statistics"]["dropped"] == 0
    changed = served.send("PATCH", f"{ROOT}/recent", 200, {"expected_update_interval_s": 7}).json()
    assert (changed["settings"]["rounds_count"], changed["settings"]["expected_update_interval_s"]) == (3, 7)
    assert served.get(f"{ROOT}/recent").json()["settings"] == changed["settings"]
    assert served.send("DELETE", f"{ROOT}/recent").json() == {"deleted": "recent", "ended_in_time": True}
    assert served.get(ROOT).json() == {"subscribers": []}
    assert served.error("GET", f"{ROOT}/recent", 404)["code"] == "no_such_subscriber"


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", ""), ("PATCH", ""), ("DELETE", ""), ("GET", "/statistics")]
    + [("POST", f"/{what}") for what in ("pause", "resume", "test")],
)
def test_what_does_not_exist(served: Served, method: str, path: str) -> None:
    body = {} if method == "PATCH" else None
    answer = served.send(method, f"{ROOT}/absent{path}", 404, body).json()
    assert answer["error"]["code"] == "no_such_subscriber"


def test_types_have_schemas_that_tell_the_truth(served: Served) -> None:
    types = {line["type"]: line for line in served.get(f"{ROOT}/types").json()["types"]}
    assert set(types) == set(plugins(Subscriber))
    schema = types["http_post"]["schema"]
    assert schema["required"] == ["url"] and schema["additionalProperties"] is False
    assert schema["properties"]["secret"]["anyOf"][0]["format"] == "password"
    assert types["memory"]["description"]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({}, "type"),
        ({"type": "memmory"}, "type"),
        ({"type": 5}, "type"),
        ({"type": ["memory"]}, "type"),
        (MEMORY | {"rounds_count": 0}, "rounds_count"),
        (MEMORY | {"rounds_count": "3"}, "rounds_count"),
        (MEMORY | {"rounds_cuont": 3}, "rounds_cuont"),
        (MEMORY | {"policy": "spool"}, "policy"),
        (MEMORY | {"policy": "newest"}, "policy"),
        (MEMORY | {"name": "../../etc"}, "name"),
        (MEMORY | {"name": ""}, "name"),
        (MEMORY | {"name": "x" * 65}, "name"),
        (MEMORY | {"name": "a\nb"}, "name"),
        ({"type": "http_post"}, "url"),
        ({"type": "http_post", "url": "ftp://h/"}, "url"),
        ({"type": "file_json"}, "path"),
    ],
    ids=str,
)
def test_bad_settings_are_422_with_the_field(served: Served, settings: dict[str, Any], field: str) -> None:
    error = create(served, 422, **settings)["error"]
    assert error["code"] == "bad_settings"
    assert field in [line["field"] for line in error["detail"]], error
    assert served.subscribers.names() == []


def test_a_suggestion_is_made(served: Served) -> None:
    assert "did you mean memory?" in create(served, 422, type="memmory")["error"]["message"]


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://[fd00:ec2::254]/",
        "http://[::ffff:169.254.169.254]/",
        "http://10.0.0.1/",
        "http://[::1]/",
        "http://127.0.0.2/",
        "http://example.org/",
    ],
)
def test_f22_hosts_that_the_configuration_does_not_allow(served: Served, url: str) -> None:
    """Row F22."""
    error = create(served, 422, type="http_post", url=url)["error"]
    assert error["code"] == "not_allowed"
    assert error["detail"][0]["field"] == "url"
    assert served.subscribers.names() == []


def test_nothing_is_allowed_by_default(tmp_path: Path) -> None:
    with small() as served:
        for settings in ({"type": "file_json", "path": str(tmp_path / "f")}, {"type": "http_post", "url": "http://h/"}):
            assert create(served, 422, **settings)["error"]["code"] == "not_allowed"


@pytest.mark.parametrize("kind", ["file_json", "file_text"])
def test_files_only_in_the_folders_of_the_configuration(served: Served, tmp_path: Path, kind: str) -> None:
    (tmp_path / "out" / "link").symlink_to(tmp_path)
    for path in ("/etc/cron.d/x", str(tmp_path / "f"), str(tmp_path / "out/../f"), str(tmp_path / "out/link/f"), "f"):
        assert create(served, 422, type=kind, path=path)["error"]["code"] == "not_allowed"
    create(served, type=kind, path=str(tmp_path / "out" / "f"))
    served.round()
    assert served.subscribers.flush(LONG_S)
    assert (tmp_path / "out" / "f").stat().st_size > 0
    spool = {"policy": "spool", "spool_folder": str(tmp_path / "elsewhere")}
    error = create(served, 422, type=kind, name="other", path=str(tmp_path / "out" / "g"), **spool)["error"]
    assert error["code"] == "not_allowed"
    assert served.send("PATCH", f"{ROOT}/{kind}", 422, {"path": "/etc/passwd"}).json()["error"]["code"] == "not_allowed"


def test_a_type_that_does_not_say_what_it_touches_is_only_for_the_configuration(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Secretive(Subscriber):
        """Touches who knows what."""

        abstract = True

        def deliver(self, completed: Round) -> None:
            """Somewhere."""

    monkeypatch.setitem(Subscriber.family.plugins, "secretive", Secretive)
    assert create(served, 422, type="secretive")["error"]["code"] == "not_allowed"


def test_names_are_unique_also_against_the_configuration(served: Served) -> None:
    served.subscribers.add(Memory(MemorySettings(name="configured")))
    assert create(served, 409, type="memory", name="configured")["error"]["code"] == "name_taken"
    create(served, **MEMORY)
    assert create(served, 409, **MEMORY)["error"]["code"] == "name_taken"
    assert served.subscribers.names() == ["configured", "recent"]


def test_what_the_configuration_says_stays(served: Served) -> None:
    served.subscribers.add(Memory(MemorySettings(name="configured")))
    for method, body in (("PATCH", {"rounds_count": 1}), ("DELETE", None)):
        assert served.send(method, f"{ROOT}/configured", 409, body).json()["error"]["code"] == "of_the_configuration"
    assert served.send("POST", f"{ROOT}/configured/pause").json()["state"] == "paused"
    assert served.get(f"{ROOT}/configured").json()["origin"] == "configuration"


@pytest.mark.parametrize("name", ["cache", "graph_cache", "history", "controller", "hub"])
def test_the_graph_of_the_controller_is_nothing_that_can_be_removed(served: Served, name: str) -> None:
    assert served.get(ROOT).json()["subscribers"] == []
    served.error("DELETE", f"{ROOT}/{name}", 404)
    number = served.round()
    assert served.get("/api/v1/graph").json()["round"] == number


def test_pause_and_resume(served: Served) -> None:
    create(served, **MEMORY)
    assert served.send("POST", f"{ROOT}/recent/pause").json()["state"] == "paused"
    for _ in range(3):
        served.round()
    statistics = served.get(f"{ROOT}/recent/statistics").json()["statistics"]
    assert (statistics["received"], statistics["queued"], statistics["dropped_by"]) == (3, 1, {"replaced": 2})
    served.send("POST", f"{ROOT}/recent/resume")
    assert served.subscribers.flush(LONG_S)
    assert served.get(f"{ROOT}/recent/statistics").json()["statistics"]["sent"] == 1


def test_a_restart_brings_all_back(served: Served, tmp_path: Path) -> None:
    create(served, **MEMORY)
    create(served, type="http_post", url="http://127.0.0.1:1/", headers={"Authorization": "Bearer abc"}, secret="xyz")
    served.send("POST", f"{ROOT}/http_post/pause")
    served.send("PATCH", f"{ROOT}/recent", 200, {"rounds_count": 5})
    manager = again(served)
    assert manager.names() == ["recent", "http_post"]
    assert manager.describe("recent")["settings"]["rounds_count"] == 5
    settings = manager.member("http_post").settings
    assert settings.secret.get_secret_value() == "xyz"
    assert settings.headers["Authorization"].get_secret_value() == "Bearer abc"
    assert manager.describe("http_post")["state"] == "paused"
    assert manager.member("http_post").rules is manager.rules
    manager.delete("recent")
    manager.close(0.0)
    last = again(served)
    assert last.names() == ["http_post"]
    last.close(0.0)
    assert (tmp_path / "state" / "subscribers.json").stat().st_mode & 0o777 == 0o600


def test_what_is_not_allowed_any_more_is_left_out_and_kept_in_the_file(served: Served, tmp_path: Path) -> None:
    create(served, type="file_json", path=str(tmp_path / "out" / "f"))
    create(served, **MEMORY)
    served.subscribers.rules = Rules()
    manager = again(served)
    assert manager.names() == ["recent"]
    manager.set_paused("recent", True)
    manager.close(0.0)
    served.subscribers.rules = Rules(folders=(str(tmp_path / "out"),))
    manager = again(served)
    assert sorted(manager.names()) == ["file_json", "recent"]
    manager.close(0.0)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 99, "subscribers": []}', b"\xff", b"null"])
def test_a_damaged_file_does_not_keep_the_server_from_starting(served: Served, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state" / "subscribers.json"
    path.parent.mkdir()
    path.write_bytes(content)
    assert again(served).names() == []
    (aside,) = path.parent.iterdir()
    assert aside.read_bytes() == content and "damaged" in aside.name


@pytest.mark.parametrize("line", [None, 3, {}, {"settings": 5, "paused": False}, {"settings": {}, "paused": False}])
def test_a_damaged_line_costs_that_one(served: Served, tmp_path: Path, line: Any) -> None:
    path = tmp_path / "state" / "subscribers.json"
    path.parent.mkdir()
    good = {"settings": MEMORY, "paused": False}
    path.write_text(json.dumps({"version": 1, "subscribers": [line, good]}))
    manager = again(served)
    assert manager.names() == ["recent"]
    manager.close(0.0)


def test_what_cannot_be_saved_is_not_done(served: Served, tmp_path: Path) -> None:
    create(served, **MEMORY)
    state = tmp_path / "state"
    (state / "subscribers.json").unlink()
    state.rmdir()
    state.write_text("not a folder")
    requests: list[tuple[str, str, Any]] = [
        ("POST", "", {"type": "memory", "name": "more"}),
        ("PATCH", "/recent", {"rounds_count": 9}),
        ("DELETE", "/recent", None),
        ("POST", "/recent/pause", None),
    ]
    for method, path, body in requests:
        assert served.send(method, ROOT + path, 503, body).json()["error"]["code"] == "not_saved"
    assert served.subscribers.names() == ["recent"]
    found = served.get(f"{ROOT}/recent").json()
    assert found["settings"]["rounds_count"] == 3 and found["state"] != "paused"


def test_secrets_are_masked_and_can_be_sent_back(served: Served) -> None:
    made = create(
        served, type="http_post", url="http://127.0.0.1:1/", headers={"Authorization": "Bearer abc"}, secret="xyz"
    )
    assert "abc" not in json.dumps(made) and "xyz" not in json.dumps(made)
    changed = served.send("PATCH", f"{ROOT}/http_post", 200, made["settings"] | {"compression": "zstd"}).json()
    assert changed["settings"]["compression"] == "zstd"
    settings = served.subscribers.member("http_post").settings
    assert settings.secret.get_secret_value() == "xyz"
    assert settings.headers["Authorization"].get_secret_value() == "Bearer abc"


@pytest.mark.parametrize("fixed", [{"name": "other"}, {"type": "console"}])
def test_name_and_type_cannot_change(served: Served, fixed: dict[str, str]) -> None:
    create(served, **MEMORY)
    assert served.send("PATCH", f"{ROOT}/recent", 422, fixed).json()["error"]["code"] == "bad_settings"


def test_trials(served: Served, tmp_path: Path) -> None:
    with Receiver() as receiver:
        create(served, type="http_post", url=receiver.url)
        done = served.send("POST", f"{ROOT}/http_post/test").json()
        assert (done["ok"], done["error"]) == (True, "")
        assert receiver.received[0].headers["gpuflight-trial"] == "true"
        receiver.answer = lambda _: Answer(503)
        done = served.send("POST", f"{ROOT}/http_post/test").json()
        assert (done["ok"], done["retryable"]) == (False, True)
        assert "503" in done["error"]
    path = tmp_path / "out" / "f"
    create(served, type="file_json", path=str(path))
    assert served.send("POST", f"{ROOT}/file_json/test").json()["ok"]
    assert list((tmp_path / "out").iterdir()) == []
    path.parent.rmdir()
    assert not served.send("POST", f"{ROOT}/file_json/test").json()["ok"]
    statistics = served.get(f"{ROOT}/file_json/statistics").json()["statistics"]
    assert statistics["received"] == 0


def test_a_trial_that_hangs_is_given_up_and_not_repeated(served: Served) -> None:
    with Receiver(lambda _: Answer(hang=True)) as receiver:
        create(served, type="http_post", url=receiver.url)
        latest = served.controller.latest
        assert latest is not None
        done = served.subscribers.trial("http_post", latest, 0.05)
        assert (done["ok"], done["retryable"]) == (False, True)
        assert served.error("POST", f"{ROOT}/http_post/test", 409)["code"] == "trial_under_way"


def test_a_trial_of_a_subscriber_that_raises_anything(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    create(served, **MEMORY)

    def broken(self: Memory, completed: Round) -> None:
        raise KeyError("x")

    monkeypatch.setattr(Memory, "trial", broken)
    assert served.send("POST", f"{ROOT}/recent/test").json()["error"] == "KeyError: 'x'"


def test_a_trial_needs_a_round() -> None:
    with Served() as served:
        create(served, **MEMORY)
        assert served.error("POST", f"{ROOT}/recent/test", 503)["code"] == "no_round"


def test_deleting_takes_the_spool_along_and_changing_does_not(served: Served, tmp_path: Path) -> None:
    folder = str(tmp_path / "out")
    settings = {"policy": "spool", "spool_folder": folder, "url": "http://127.0.0.1:1/"}
    create(served, type="http_post", **settings)
    served.round()
    deadline_s = time.monotonic() + LONG_S
    while not served.get(f"{ROOT}/http_post/statistics").json()["statistics"]["queued_bytes"]:
        assert time.monotonic() < deadline_s
    # Deliveries fail for ever; do not wait for them.
    served.send("POST", f"{ROOT}/http_post/pause")
    served.send("PATCH", f"{ROOT}/http_post", 200, {"compression": "none"})
    while served.get(f"{ROOT}/http_post/statistics").json()["statistics"]["recovered"] != 1:
        assert time.monotonic() < deadline_s
    path = Path(spool_path(folder, "http_post"))
    assert path.exists()
    served.send("DELETE", f"{ROOT}/http_post")
    assert not path.exists()


def test_their_number_is_limited(served: Served) -> None:
    for index in range(MAX_CREATED):
        served.subscribers.create({"type": "memory", "name": f"m{index}"})
    assert create(served, 409, **MEMORY)["error"]["code"] == "too_many"


@pytest.mark.parametrize(
    ("role", "allowed"),
    [
        (Role.VIEWER, {"GET ", "GET /types", "GET /recent/statistics"}),
        (Role.OPERATOR, {"GET ", "GET /types", "GET /recent/statistics", "POST /recent/pause", "POST /recent/resume"}),
    ],
)
def test_roles(served: Served, role: Role, allowed: set[str]) -> None:
    create(served, **MEMORY)
    token = served.state.tokens.create(role)[0]
    for request in (
        "GET ", "POST ", "GET /types", "GET /recent", "PATCH /recent", "DELETE /recent", "GET /recent/statistics",
        "POST /recent/pause", "POST /recent/resume", "POST /recent/test",
    ):  # fmt: skip
        method, _, path = request.partition(" ")
        body = {} if method == "PATCH" or request == "POST " else None
        answer = served.client.request(method, ROOT + path, headers={"authorization": f"Bearer {token}"}, json=body)
        assert (answer.status_code == 200) == (request in allowed), request
        assert answer.status_code in (200, 403)


@pytest.mark.parametrize(
    "body", ["null", "[]", "3", '"x"', "{", '{"type": NaN}', '{"type": "memory", "name": "\\ud800"}']
)
@pytest.mark.parametrize("method", ["POST", "PATCH"])
def test_bodies_that_are_no_settings(served: Served, method: str, body: str) -> None:
    create(served, **MEMORY)
    answer = served.client.request(
        method,
        ROOT if method == "POST" else f"{ROOT}/recent",
        content=body,
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 422, answer.text
    assert list(answer.json()) == ["error"]


def test_a_sink_that_fails_shows_why(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.log, "disabled", True)  # xdist cannot take such text

    class Broken(Subscriber):
        abstract = True

        def deliver(self, completed: Round) -> None:
            raise DeliveryError("the \ud800 disk", retryable=False)

    served.subscribers.add(Broken(SubscriberSettings(name="broken")))
    served.round()
    assert served.subscribers.flush(LONG_S)
    line = served.get(f"{ROOT}/broken/statistics").json()
    assert line["state"] == "recoverable_error"
    assert line["statistics"]["dropped_by"] == {"failed": 1}
    assert "disk" in line["statistics"]["last_error"]
