"""``gpuflight subscriber``: what it says of configurations and servers, good and bad. Never a traceback."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.services.s3 import Fault, Front, settings

from gpuflight.cli import main
from gpuflight.registry import plugins
from gpuflight.subscribers.base import Subscriber


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("GPUFLIGHT_"):
            monkeypatch.delenv(name)


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str]) -> Any:
    """Exit code, stdout, stderr of ``gpuflight subscriber …``."""

    def run(*words: str) -> tuple[int, str, str]:
        code = main(["subscriber", *words])
        out, err = capsys.readouterr()
        assert "Traceback" not in err and "defect" not in err
        return code, out, err

    return run


@contextmanager
def server(status: int = 200, body: Any = None, headers: dict[str, str] | None = None) -> Iterator[Front]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with Front(0, lambda _: Fault(status, headers=headers or {}, body=raw)) as front:
        yield front


def refusal(message: str) -> dict[str, Any]:
    return {"error": {"code": "x", "message": message, "detail": None}}


# --- without a server ------------------------------------------------------------------------------------------------


def test_types_are_all_that_are_registered_with_their_schemas(says: Any) -> None:
    code, out, _ = says("types", "--json")
    found = json.loads(out)["types"]
    assert code == 0 and set(found) == set(plugins(Subscriber))
    assert "bucket" in found["s3"]["properties"]
    code, out, _ = says("types", "s3")
    assert code == 0 and json.loads(out) == found["s3"]
    code, out, _ = says("types")
    assert code == 0 and all(name in out for name in found)
    assert says("types", "s4")[0] == 2


def write(path: Path, subscribers: list[Any]) -> str:
    off = {name: {"enabled": False} for name in ("process_tree", "sockets", "threads", "unix_sockets", "mounts")}
    path.write_text(json.dumps({"subscribers": subscribers, "collectors": off}))
    return str(path)


def test_each_subscriber_of_a_configuration_is_tried(says: Any, tmp_path: Path) -> None:
    config = write(
        tmp_path / "c.json",
        [
            {"type": "file_json", "name": "good", "path": str(tmp_path / "graph.json")},
            {"type": "file_json", "name": "bad", "path": str(tmp_path / "nowhere" / "graph.json")},
            settings("http://127.0.0.1:9", "rounds", name="archive"),
        ],
    )
    code, out, err = says("test", "--config", config)
    assert code == 1 and not err
    good, bad, archive = out.splitlines()
    assert good.startswith("good: ok in ")
    assert bad.startswith("bad: failed: ") and "No such file" in bad
    assert archive.startswith("archive: failed: http://127.0.0.1:9") and "tried again" in archive
    assert not (tmp_path / "graph.json").exists(), "a trial leaves nothing"
    code, out, _ = says("test", "--config", config, "good")
    assert code == 0 and len(out.splitlines()) == 1
    code, out, _ = says("test", "--config", config, "good", "bad", "--json")
    assert code == 1 and [line["ok"] for line in json.loads(out)["subscribers"]] == [True, False]
    assert says("test", "--config", config, "better") == (
        2,
        "",
        f"gpuflight: there is no subscriber 'better' in {config}; there are: good, bad, archive\n",
    )


def test_one_that_never_answers_is_left(says: Any, tmp_path: Path) -> None:
    with Front(0, lambda _: Fault(hang=True)) as front:
        config = write(tmp_path / "c.json", [{"type": "http_post", "name": "slow", "url": front.url}])
        code, out, _ = says("test", "--config", config, "--timeout", "0.2")
    assert code == 1 and "no answer within 0.2 s" in out


def test_configurations_that_cannot_be_used(says: Any, tmp_path: Path) -> None:
    assert says("test", "--config", write(tmp_path / "none.json", []))[0] == 2
    assert says("test", "--config", str(tmp_path / "missing.json"))[0] == 2
    secret = "secret-of-the-tests/0123456789abcdef"
    wrong = settings("ftp://x", "a/b", kms_key_id="k", session_token=secret)
    code, _, err = says("test", "--config", write(tmp_path / "wrong.json", [wrong]))
    assert code == 2 and "subscribers[0].bucket" in err and secret not in err
    contradiction = settings("http://x", "rounds", kms_key_id="k", session_token=secret)
    code, _, err = says("test", "--config", write(tmp_path / "wrong.json", [contradiction]))
    assert code == 2 and "kms_key_id needs" in err and secret not in err


@pytest.mark.parametrize(
    "words",
    [
        ("test",),
        ("pause",),
        ("delete", "a", "b"),
        ("list", "a"),
        ("types", "a", "b"),
        ("create",),
        ("create", "type"),
        ("create", "=x"),
        ("list", "--file", "x"),
        ("list", "--config", "x"),
        ("test", "a", "--replay", "x"),
        ("stats", ".."),
        ("create", "--file", "/nowhere.json", "type=memory"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_line(words: tuple[str, ...], says: Any) -> None:
    code, out, err = says(*words)
    assert (code, out) == (2, "") and len(err.splitlines()) == 1


# --- servers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [" ", "127.0.0.1", "ftp://h", "http://", "http://u:p@h", "http://h:x", "http://h:99999", "http://h/?a", "http://ä",
     "http://a b", "unix:", "http://[::1", "https://h\n"],
)  # fmt: skip
def test_a_bad_url_is_one_line(url: str, says: Any) -> None:
    code, out, err = says("list", "--url", url)
    assert (code, out) == (2, "") and len(err.splitlines()) == 1, err


def test_no_server(says: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    code, _, err = says("list", "--url", f"http://127.0.0.1:{port}")
    assert code == 1 and "no server is there" in err and len(err.splitlines()) == 1
    code, _, err = says("list", "--url", f"unix:{tmp_path}/none.sock")
    assert code == 1 and "no server is there" in err


@pytest.mark.parametrize(
    ("status", "body", "code", "line"),
    [
        (401, refusal("a token is needed"), 2, "give one with --token-file"),
        (403, refusal("admin is needed"), 2, "admin is needed"),
        (404, refusal("there is no subscriber 'x'"), 2, "there is no subscriber 'x'"),
        (429, refusal("too many"), 1, "too many"),
        (503, refusal("no round\nhas been completed"), 1, "no round has been completed"),
        (500, b"<html>", 1, "status 500: that is no gpuflight-server"),
        (404, b"<html>", 1, "that is no gpuflight-server"),
        (200, b"hello", 1, "that is no gpuflight-server"),
        (200, [], 1, "that is no gpuflight-server"),
        (200, b"\xff", 1, "that is no gpuflight-server"),
        (200, b"[" * 100_000, 1, "that is no gpuflight-server"),
        (302, b"", 1, "redirects are not followed"),
    ],
)
def test_whatever_a_server_says_is_one_line(status: int, body: Any, code: int, line: str, says: Any) -> None:
    with server(status, body, {"Location": "http://127.0.0.1:9/"}) as front:
        for words in (("list",), ("stats", "x"), ("test", "x"), ("delete", "x"), ("pause", "x")):
            found = says(*words, "--url", front.url)
            assert found[0] == code and line in found[2] and len(found[2].splitlines()) == 1


@pytest.mark.parametrize("body", [{}, {"subscribers": 5}, {"subscribers": [5, {"statistics": 5}]}, {"statistics": 5}])
def test_answers_of_another_shape_are_no_defect(body: Any, says: Any) -> None:
    with server(200, body) as front:
        for words in (("list",), ("stats", "x"), ("test", "x"), ("delete", "x"), ("pause", "x"), ("create", "type=x")):
            assert says(*words, "--url", front.url)[0] in (0, 1)


def test_a_server_that_never_answers(says: Any) -> None:
    with Front(0, lambda _: Fault(hang=True)) as front:
        code, _, err = says("list", "--url", front.url, "--timeout", "0.2")
    assert code == 1 and "no answer within 0.2 s" in err


def test_a_server_that_drips(says: Any) -> None:
    """Its bytes begin the socket's timeout anew, not the deadline."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(65536)
                peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
                while not over.wait(0.02):
                    try:
                        peer.sendall(b" ")
                    except OSError:
                        return

        thread = threading.Thread(target=drip)
        thread.start()
        code, _, err = says("list", "--url", f"http://127.0.0.1:{listener.getsockname()[1]}", "--timeout", "0.3")
        over.set()
        thread.join()
    assert code == 1 and "no answer within 0.3 s" in err


def test_the_token_goes_there_and_is_not_shown(says: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("gpfl_of_the_file\n")
    with server(403, refusal("no")) as front:
        monkeypatch.setenv("GPUFLIGHT_URL", front.url)
        monkeypatch.setenv("GPUFLIGHT_TOKEN", "gpfl_of_the_environment")
        assert "gpfl" not in says("list")[2]
        says("list", "--token-file", str(file))
        first, second = (request.headers["authorization"] for request in front.seen)
        assert (first, second) == ("Bearer gpfl_of_the_environment", "Bearer gpfl_of_the_file")
        for content in (b"", b"two words", b"\xff\xfe", b"a\r\nX: y"):
            file.write_bytes(content)
            code, _, err = says("list", "--token-file", str(file))
            assert code == 2 and len(err.splitlines()) == 1
        assert says("list", "--token-file", str(tmp_path / "none"))[0] == 2
        assert len(front.seen) == 2


def test_what_is_created(says: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "archive.yaml"
    file.write_text("type: s3\nbucket: rounds\nsecret_key: s\n")
    with server(201, {"name": "archive\x1b[2J"}) as front:
        monkeypatch.setenv("GPUFLIGHT_URL", front.url + "/behind/")
        code, out, _ = says("create", "--file", str(file), "bucket=other", "max_items=5", 'headers={"a": "b"}')
        assert (code, out) == (0, "archive\\x1b[2J: created\n")
        monkeypatch.setattr(sys, "stdin", io.StringIO('{"type": "memory"}'))
        assert says("create", "--file", "-")[0] == 0
        for wrong in ("[]", "{", ""):
            monkeypatch.setattr(sys, "stdin", io.StringIO(wrong))
            assert says("create", "--file", "-")[0] == 2
    first, second = front.seen
    assert first.path == "/behind/api/v1/subscribers"
    expected = {"type": "s3", "bucket": "other", "secret_key": "s", "max_items": 5, "headers": {"a": "b"}}
    assert json.loads(first.body) == expected
    assert json.loads(second.body) == {"type": "memory"}


def test_names_are_one_part_of_the_path(says: Any) -> None:
    with server(404, refusal("none")) as front:
        says("stats", "../../x y", "--url", front.url)
    assert front.seen[0].path == "/api/v1/subscribers/..%2F..%2Fx%20y/statistics"
