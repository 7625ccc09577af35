"""Events of GPU sessions over HTTP: what agents send is stored once, and acknowledged when it is safe."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from tests.unit import gpufl_files
from tests.unit.events_fixture import SESSION, STREAM, EventServer, lines_of_window, window_of
from tests.unit.gpufl_files import CLEAN, DATA

from gpuflight.errors import InputError
from gpuflight.events.tables import TABLES
from gpuflight.server.events.ingest import Block
from gpuflight.server.events.service import EventService, EventsOff
from gpuflight.server.events.settings import EventsSettings
from gpuflight.server.events.writer import NotStored
from gpuflight.server.tokens import Role

OBSERVED = DATA / "observed-agent-traffic"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EventServer]:
    with EventServer(tmp_path) as made:
        yield made


def observed(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (OBSERVED / name).read_text().splitlines()]


def test_what_the_real_agent_sent_is_taken_and_makes_the_session_that_its_files_make(server: EventServer) -> None:
    """The recorded requests with their own headers; the payloads are the fixture's windows, of which those with a
    job_start were written into another folder than the recorded ones."""
    token, _ = server.state.tokens.create(Role.INGEST)
    requests = observed("stream-clean-ack.jsonl")
    for request in requests:
        headers = {**request["hdr"], "Authorization": f"Bearer {token}"}
        headers.pop("Content-Length")
        body = b""
        if request["path"] == STREAM:
            body, window = window_of(
                CLEAN, headers["X-GpuFlight-Window-Channel"], int(headers["X-GpuFlight-Window-Sequence"])
            )
            if headers["X-GpuFlight-Window-CRC32"] != window["X-GpuFlight-Window-CRC32"]:
                assert b"job_start" in gzip.decompress(body)
                headers["X-GpuFlight-Window-CRC32"] = window["X-GpuFlight-Window-CRC32"]
        answer = server.client.post(request["path"], content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        if request["path"] == STREAM:
            assert answer.json()["window_acknowledged"] is True
            assert answer.json()["accepted"] == request["lines"] and answer.json()["rejected"] == 0
    assert requests[-1]["path"].endswith("session-complete")
    session = server.events.store.session(SESSION)
    assert session is not None and session.completed_ns is not None and session.end_ns is not None
    assert session.app == "fixture_app"
    batches, _ = gpufl_files.read(CLEAN)
    wanted = gpufl_files.counts(batches)
    assert len(wanted) > 15
    for table, count in wanted.items():
        stored = server.rows(table)
        if TABLES[table].key:  # told more than once, kept once
            keys = {tuple(row.get(name) for name in TABLES[table].key) for row in gpufl_files.rows(batches, table)}
            assert len(stored) == len(keys), table
        else:
            assert len(stored) == count, table


def test_the_order_in_which_channels_arrive_does_not_matter(tmp_path: Path) -> None:
    every = [("scope", n) for n in (1, 2, 3, 4)] + [("device", n) for n in range(1, 12)]
    every += [("system", n) for n in (1, 2, 3)] + [("sass", 1)]
    counts = []
    for folder, order in (("a", every), ("b", sorted(every, key=lambda window: (window[1], window[0])))):
        with EventServer(tmp_path / folder) as server:
            for channel, number in order:
                assert server.window(channel, number)["rejected"] == 0
            counts.append({t: len(server.rows(t)) for t in ("kernel", "kernel_detail", "memcpy", "scope", "name")})
    assert counts[0] == counts[1] and counts[0]["kernel"] > 0


def test_single_events_in_the_agents_envelope(server: EventServer) -> None:
    """The legacy mode: of the recorded requests the beginning of each body is known, the rest is the fixture's."""
    lines = [lines_of_window(CLEAN, "device", number).splitlines() for number in range(1, 12)]
    flat = [line for window in lines for line in window]
    for request, line in zip(observed("legacy-mode-first40.jsonl"), flat, strict=False):
        kind = json.loads(line)["type"]
        body = {"agentSendingTime": 1, "data": line.decode(), "type": kind, "hostname": "vm", "ipAddr": "10.0.0.9"}
        headers = {"X-Key": request["hdr"]["X-Key"], "X-Topic": request["hdr"]["X-Topic"]}
        answer = server.post(f"/api/v1/events/{kind}", json.dumps(body), content_type="application/json", **headers)
        assert answer["status"] == "success" and answer["eventType"] == kind and answer["accepted"] == 1
        repeated = {**body, "agentSendingTime": 2}
        again = server.post(f"/api/v1/events/{kind}", json.dumps(repeated), content_type="application/json", **headers)
        assert again["repeated"] is True
    wanted, _ = gpufl_files.decode(b"\n".join(flat[:40]) + b"\n")
    for table in ("kernel", "kernel_detail"):
        assert len(server.rows(table)) == len(gpufl_files.rows(wanted, table)) > 0


def test_a_host_that_only_the_agent_tells_is_known(server: EventServer) -> None:
    line = gpufl_files.start("old").decode()
    server.post("/api/v1/events/device", json.dumps({"data": line, "hostname": "n7", "ipAddr": "10.0.0.7"}),
                content_type="application/json")  # fmt: skip
    session = server.events.store.session("old")
    assert session is not None and (session.hostname, session.ip_addr) == ("n7", "10.0.0.7")


@pytest.mark.parametrize("encoding", ["", "gzip", "zstd"])
def test_lines_in_every_encoding(server: EventServer, encoding: str) -> None:
    body = gpufl_files.start() + gpufl_files.kernels([[0, 1, 7, 10, 1], [5, 1, 7, 10, 2]])
    packed = {"": body, "gzip": gzip.compress(body), "zstd": zstandard.ZstdCompressor().compress(body)}[encoding]
    headers = {"content-encoding": encoding} if encoding else {}
    answer = server.post(STREAM, packed, **headers)
    assert answer == {"accepted_for_processing": True, "accepted": 2, "rejected": 0, "errors": []}
    assert [row["corr_id"] for row in server.rows("kernel", "s")] == [1, 2]
    assert server.post(STREAM, packed, **headers)["repeated"] is True
    assert len(server.rows("kernel", "s")) == 2


def test_lines_that_are_of_no_use_are_listed_by_number_and_the_others_stored(server: EventServer) -> None:
    body = b"\n".join(
        [
            gpufl_files.start().strip(), b"{nonsense", b"", b"[]", b'{"a":1}', b"\xff\xfe\xff",
            b'{"type":"kernel_event_batch","session_id":"s","columns":5,"rows":[]}',
            gpufl_files.kernels([[0, 1, 7, 10, 1]]).strip(), b'{"type":"shutdown","sess',
        ]
    )  # fmt: skip
    answer = server.post(STREAM, body)
    errors = [(error["line"], error["reason"]) for error in answer["errors"]]
    assert errors == [
        (2, "not_json"), (4, "not_object"), (5, "no_type"), (6, "not_json"), (7, "bad_batch"), (9, "not_json"),
    ]  # fmt: skip
    assert answer["accepted"] == 2 and answer["rejected"] == 6
    assert len(server.rows("kernel", "s")) == 1
    assert server.events.figures.losses["not_json"] == 3


def test_line_numbers_are_right_beyond_the_first_piece_and_across_its_edge(server: EventServer) -> None:
    filler = gpufl_files.line("memset_event", start_ns=1, end_ns=2, corr_id=1, bytes=3).strip()
    many = [filler] * 30_000
    many[7] = many[12_345] = many[29_999] = b"{bad"
    answer = server.post(STREAM, b"\n".join(many))
    assert [error["line"] for error in answer["errors"]] == [8, 12_346, 30_000]
    edge = b'{"bad' + b"x" * (1 << 20)  # begins in one piece, ends in the next
    answer = server.post(STREAM, b"\n".join([filler, filler, edge, filler, b"{"]))
    assert [error["line"] for error in answer["errors"]] == [3, 5]


def test_a_line_beyond_the_limit_costs_only_itself(tmp_path: Path) -> None:
    with EventServer(tmp_path, max_line_bytes=1 << 20) as server:
        body = (
            gpufl_files.start()
            + b'{"type":"x","a":"'
            + b"y" * 3_000_000
            + b'"}\n'
            + gpufl_files.kernels([[0, 1, 7, 10, 1]])
        )
        answer = server.post(STREAM, body)
        assert answer["accepted"] == 2 and [error["reason"] for error in answer["errors"]] == ["line_too_long"]
        assert len(server.rows("kernel", "s")) == 1


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_a_bomb_is_refused_and_nothing_of_it_is_stored(tmp_path: Path, encoding: str) -> None:
    with EventServer(tmp_path, max_block_bytes=1 << 21) as server:
        content = gpufl_files.kernels([[0, 1, 7, 10, 1]]) + b" " * (1 << 30 if encoding == "zstd" else 1 << 26)
        packed = zstandard.ZstdCompressor().compress(content) if encoding == "zstd" else gzip.compress(content, 1)
        assert len(packed) < 1 << 20
        headers = {"content-encoding": encoding, "X-GpuFlight-Session-Id": "s"}
        assert server.post(STREAM, packed, 413, **headers)["error"]["code"] == "too_large"
        assert server.events.store.session("s") is None or not server.rows("kernel", "s")
        # What was decoded before it was refused is not taken for stored.
        assert server.post(STREAM, gpufl_files.kernels([[0, 1, 7, 10, 1]]))["accepted"] == 1
        assert len(server.rows("kernel", "s")) == 1


def test_a_body_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    with EventServer(tmp_path, max_body_bytes=4096) as server:
        assert server.post(STREAM, b"x" * 5000, 413)["error"]["code"] == "too_large"
        chunks = (b"x" * 1000 for _ in range(10))
        answer = server.client.post(STREAM, content=chunks)
        assert answer.status_code == 413
        assert server.events.figures.waiting_bytes == server.events.figures.waiting_requests == 0


def test_a_window_sent_twice_is_stored_once_and_acknowledged_twice(server: EventServer) -> None:
    first = server.window("device", 1)
    before = {table: len(server.rows(table)) for table in ("kernel", "kernel_detail", "memset", "memcpy")}
    again = server.window("device", 1)
    assert first["window_acknowledged"] and again["window_acknowledged"] and again["repeated"]
    assert {table: len(server.rows(table)) for table in before} == before
    assert server.events.figures.repeated == 1


def test_a_window_sent_twice_at_the_same_time_is_stored_once(server: EventServer) -> None:
    server.window("system", 1)  # the store is open
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(server.window("device", 3))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8 and all(answer["window_acknowledged"] for answer in answers)
    with EventServer(Path(server.events.folder).parent / "alone") as alone:
        alone.window("device", 3)
        for table in ("memset", "kernel", "kernel_detail", "memcpy"):
            assert len(server.rows(table)) == len(alone.rows(table))


def test_a_window_of_the_same_id_with_other_content_is_a_conflict(server: EventServer) -> None:
    payload, headers = window_of(CLEAN, "device", 1)
    server.post(STREAM, payload, **headers)
    other = gzip.compress(gzip.decompress(payload) + b"\n", 9)
    changed = {**headers, "X-GpuFlight-Window-CRC32": str(zlib.crc32(other))}
    assert server.post(STREAM, other, 409, **changed)["error"]["code"] == "window_identity_conflict"
    assert server.post(STREAM, payload, **headers)["window_acknowledged"]


def test_a_body_that_was_damaged_on_its_way_is_refused_and_can_come_again(server: EventServer) -> None:
    payload, headers = window_of(CLEAN, "device", 1)
    damaged = payload[:100] + bytes([payload[100] ^ 1]) + payload[101:]
    assert server.post(STREAM, damaged, 400, **headers)["error"]["code"] == "checksum_mismatch"
    assert server.post(STREAM, payload, **headers)["accepted"] > 0


def test_a_window_that_was_damaged_at_its_sender_is_read_as_far_as_it_goes_and_not_let_go(server: EventServer) -> None:
    payload, headers = window_of(CLEAN, "device", 3)
    cut = payload[: len(payload) // 2]
    answer = server.post(STREAM, cut, **{**headers, "X-GpuFlight-Window-CRC32": str(zlib.crc32(cut))})
    assert answer["window_acknowledged"] is False and answer["damaged"]
    assert answer["errors"][-1]["reason"] == "corrupt_file"
    assert any(
        loss["reason"] == "corrupt_file" for loss in server.events.store.losses(server.events.store.session(SESSION))
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "code", "headers"),
    [
        (415, "unsupported_encoding", {"content-encoding": "br"}),
        (422, "bad_request", {"X-GpuFlight-Window-CRC32": "x"}),
        (422, "bad_request", {"X-GpuFlight-Window-CRC32": "-1"}),
        (422, "bad_request", {"X-GpuFlight-Window-CRC32": str(1 << 32)}),
        (422, "bad_request", {"X-GpuFlight-Window-Sequence": "1" * 30}),
        (422, "bad_request", {"X-GpuFlight-Session-Id": "s" * 300}),
    ],
)
def test_heads_that_make_no_sense(server: EventServer, status: int, code: str, headers: dict[str, str]) -> None:
    assert server.post(STREAM, b"", status, **headers)["error"]["code"] == code


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b"null", b"\xff", b'{"data": 5}', b'{"data": "{"}', b'{"type": 1}', b'"x"']
)
def test_a_single_event_that_is_none_is_422(server: EventServer, body: bytes) -> None:
    error = server.post("/api/v1/events/kernel_event", body, 422, content_type="application/json")
    assert error["error"]["code"] == "bad_event"


def test_too_much_at_once_is_told_to_wait(tmp_path: Path) -> None:
    with EventServer(tmp_path, max_waiting_requests=1, max_waiting_bytes=10_000) as server:
        server.post(STREAM, gpufl_files.start())
        held, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            assert go_on.wait(30)

        server.events.ingest.writer.call(hold)
        assert held.wait(30)
        answers: list[Any] = []
        sender = threading.Thread(target=lambda: answers.append(server.post(STREAM, gpufl_files.shutdown())))
        sender.start()
        while server.events.figures.waiting_requests == 0:
            server.events._stopping.wait(0.002)
        refused = server.client.post(STREAM, content=gpufl_files.start("t"))
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "busy"
        go_on.set()
        sender.join()
        assert answers[0]["accepted"] == 1
        assert server.post(STREAM, gpufl_files.start("t"))["accepted"] == 1
        assert server.events.figures.refused["busy"] == 1


def test_nothing_more_is_decoded_while_too_much_waits_to_be_stored(
    server: EventServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpuflight.server.events import writer as module

    monkeypatch.setattr(module, "_ROWS_WAITING", 1)
    server.post(STREAM, gpufl_files.start())
    go_on = threading.Event()
    server.events.ingest.writer.call(go_on.wait)
    answers: list[Any] = []

    def send(number: int) -> None:
        answers.append(server.post(STREAM, gpufl_files.kernels([[0, 1, 7, 10, number]], number=number)))

    first = threading.Thread(target=send, args=(1,))
    first.start()
    writer = server.events.ingest.writer
    while not writer._rows_waiting:
        server.events._stopping.wait(0.002)
    raw_bytes = server.events.figures.raw_bytes
    second = threading.Thread(target=send, args=(2,))
    second.start()
    while server.events.figures.waiting_requests < 2:
        server.events._stopping.wait(0.002)
    assert server.events.figures.raw_bytes == raw_bytes and not answers
    go_on.set()
    first.join()
    second.join()
    assert [answer["accepted"] for answer in answers] == [1, 1] and len(server.rows("kernel", "s")) == 2


def test_what_the_store_refuses_is_not_acknowledged_and_comes_again_whole(
    server: EventServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk: the decoder believes that it told names and batches, and none of it is stored."""
    server.window("device", 1)
    store = server.events.store

    def full(parts: Any) -> Any:
        raise InputError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(store, "write_parts", full)
        error = server.window("device", 2, 503)
        assert error["error"]["code"] == "not_stored" and "disk full" in error["error"]["message"]
    for number in range(2, 12):
        assert server.window("device", number)["window_acknowledged"]
    with EventServer(Path(server.events.folder).parent / "alone") as alone:
        for number in range(1, 12):
            alone.window("device", number)
        for table in ("kernel", "kernel_detail", "name", "kernel_shape", "memcpy", "memset"):
            assert len(server.rows(table)) == len(alone.rows(table)), table
    assert server.events.state()["failed_writes"] == 1


def test_a_defect_with_one_sender_does_not_cost_the_others(
    server: EventServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.post(STREAM, gpufl_files.start())
    store, writer = server.events.store, server.events.ingest.writer
    write = store.write_parts

    def picky(parts: Any) -> Any:
        if any(batch.session_id == "poison" for part in parts for batch in part.batches):
            raise ZeroDivisionError
        return write(parts)

    monkeypatch.setattr(store, "write_parts", picky)
    go_on = threading.Event()
    writer.call(go_on.wait)
    statuses: dict[str, int] = {}

    def send(session: str) -> None:
        statuses[session] = server.client.post(STREAM, content=gpufl_files.start(session)).status_code

    threads = [threading.Thread(target=send, args=(name,)) for name in ("a", "poison", "b")]
    for thread in threads:
        thread.start()
    while server.events.figures.waiting_requests < 3:
        server.events._stopping.wait(0.002)
    go_on.set()
    for thread in threads:
        thread.join()
    assert statuses == {"a": 200, "poison": 503, "b": 200}


def test_the_state_of_sessions_is_forgotten_without_a_loss(tmp_path: Path) -> None:
    """One session's state at a time: every window meets a new decoder, as after a restart."""
    with EventServer(tmp_path / "one", max_sessions_under_way=1) as server, EventServer(tmp_path / "all") as other:
        for number in range(1, 12):
            server.post(STREAM, gpufl_files.start(f"between-{number}"), **{"X-GpuFlight-Session-Id": f"b{number}"})
            server.window("device", number)
            other.window("device", number)
            assert server.events.state()["under_way"] <= 1
        for table in ("kernel", "kernel_detail", "name", "kernel_shape", "session_start"):
            assert len(server.rows(table)) == len(other.rows(table)), table


def test_after_a_restart_windows_are_known_and_names_still_there(tmp_path: Path) -> None:
    with EventServer(tmp_path) as server:
        server.window("device", 1)
        kernels = len(server.rows("kernel"))
    with EventServer(tmp_path) as server:
        assert server.window("device", 1)["repeated"] is True
        assert len(server.rows("kernel")) == kernels
        server.window("device", 2)
        # Clocks are told apart by the session's start, which only the first window told.
        assert server.events.ingest.decoders.get(SESSION, None).decoder.session(SESSION).has_epoch


@pytest.mark.parametrize("headers", [True, False])
def test_a_server_that_is_started_anew_for_each_window_stores_what_the_files_hold(
    tmp_path: Path, headers: bool
) -> None:
    """Lines that go to every channel come four times, to decoders that know nothing of each other; with ``headers``
    False the windows are those of old clients, which have no identity, and their channel is not told."""
    windows = [
        (c, n) for c, last in (("device", 11), ("scope", 4), ("system", 3), ("sass", 1)) for n in range(1, last + 1)
    ]
    for channel, number in windows:
        with EventServer(tmp_path) as server:
            payload, told = window_of(CLEAN, channel, number)
            kept = told if headers else {name: told[name] for name in ("Content-Encoding", "X-GpuFlight-Session-Id")}
            server.post(STREAM, payload, **kept)
    batches, _ = gpufl_files.read(CLEAN)
    with EventServer(tmp_path) as server:
        for table, count in gpufl_files.counts(batches).items():
            if not TABLES[table].key:
                assert len(server.rows(table)) == count, table


@pytest.mark.parametrize(
    ("role", "ingest", "query"),
    [(Role.INGEST, 200, 403), (Role.VIEWER, 403, 200), (Role.OPERATOR, 200, 200), (Role.ADMIN, 200, 200)],
)
@pytest.mark.parametrize("header", ["Authorization", "X-API-Key"])
def test_who_may(server: EventServer, role: Role, ingest: int, query: int, header: str) -> None:
    token, _ = server.state.tokens.create(role)
    value = f"Bearer {token}" if header == "Authorization" else token
    headers = {header: value}
    assert server.client.post(STREAM, content=gpufl_files.start(), headers=headers).status_code == ingest
    complete = {**headers, "X-GpuFlight-Session-Id": "s"}
    assert server.client.post("/api/v1/events/session-complete", headers=complete).status_code == ingest
    assert server.client.get("/api/v1/sessions", headers=headers).status_code == query
    assert server.client.get("/api/v1/graph", headers=headers).status_code in (query, 503)
    assert server.client.post(STREAM, content=b"", headers={header: value + "x"}).status_code == 401


def test_a_server_without_the_extra_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpuflight.cli.server import start_events
    from gpuflight.server.events import service
    from gpuflight.settings import Server, Settings

    monkeypatch.setattr(service, "find_spec", lambda name: None)
    assert start_events(Settings(server=Server(state_folder=str(tmp_path)))) is None
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "gpuflight[events]" in error


def test_a_store_that_cannot_be_opened_is_told_and_the_server_goes_on(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("no folder")
    with EventServer(tmp_path) as server:
        answer = server.client.post(STREAM, content=gpufl_files.start())
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "events_off"
        assert server.client.get("/api/v1/sessions").status_code == 503
        assert "gpuflight_events_store_open 0" in server.get("/metrics").text
        assert server.get("/healthz").json() == {"status": "ok"}


def test_metrics_tell_what_was_taken_in(server: EventServer) -> None:
    server.window("device", 1)
    server.window("device", 1)
    server.post(STREAM, b"{bad\n")
    text = server.get("/metrics").text
    rows = len(server.rows("kernel"))
    for line in (
        "gpuflight_events_sessions 1", f'gpuflight_events_rows_total{{table="kernel"}} {rows}',
        "gpuflight_events_repeated_total 1", 'gpuflight_events_losses_total{reason="not_json"} 1',
        "gpuflight_events_rejected_lines_total 1", "gpuflight_events_waiting_bytes 0",
    ):  # fmt: skip
        assert line in text, line
    size = next(line for line in text.splitlines() if line.startswith("gpuflight_events_store_bytes "))
    assert int(size.split()[1]) > 0


def test_retention_is_enforced_while_the_server_runs(tmp_path: Path) -> None:
    day_ns = 86_400 * 10**9
    now = [1_790_000_000 * 10**9]
    settings = EventsSettings(retention={"max_age_days": 1}, retention_interval_s=0.01)  # type: ignore[arg-type]
    service = EventService(settings, str(tmp_path / "events"), wall_ns=lambda: now[0])
    service.start()
    try:
        asyncio.run(service.ingest.take(Block(body=gpufl_files.start("gone"))))
        asyncio.run(service.ingest.take(Block(body=gpufl_files.start("kept"))))
        kept = service.store.session("kept")
        assert kept is not None
        service.store.catalogue.set_retention(kept.session_no, 0)
        now[0] += 2 * day_ns
        while service.figures.removed_sessions == 0:
            service._stopping.wait(0.01)
        assert service.store.session("gone") is None and service.store.session("kept") is not None
        # What is sent of it now begins anew.
        asyncio.run(service.ingest.take(Block(body=gpufl_files.start("gone"))))
        assert service.store.session("gone") is not None
    finally:
        assert service.stop(10)


def test_it_is_all_stored_when_the_server_is_told_to_stop(tmp_path: Path) -> None:
    server = EventServer(tmp_path)
    with server:
        server.post(STREAM, gpufl_files.start())
    with EventServer(tmp_path) as again:
        assert again.events.store.session("s") is not None
    with pytest.raises(NotStored, match="stopping"):
        asyncio.run(server.events.ingest.take(Block(body=gpufl_files.shutdown())))
    with pytest.raises(EventsOff, match="stopping"):
        asyncio.run(server.events.ask(lambda store: store.session("s")))


def test_a_question_that_takes_too_long_does_not_hold_up_the_end(tmp_path: Path) -> None:
    service = EventService(EventsSettings(), str(tmp_path / "events"))
    begun, go_on = threading.Event(), threading.Event()

    def question(store: Any) -> None:
        begun.set()
        go_on.wait(60)

    asking = threading.Thread(target=lambda: asyncio.run(service.ask(question)))
    asking.start()
    assert begun.wait(60)
    assert service.stop(0.2) is False
    go_on.set()
    asking.join()
    assert service.stop(30) is True


def test_the_section_of_the_settings() -> None:
    from gpuflight.cli.plugin_settings import effective, make_events
    from gpuflight.errors import ConfigError
    from gpuflight.settings import Settings

    made = make_events(Settings(events={"retention": {"max_age_days": 7}, "workers_count": 3}))
    assert made.retention.max_age_days == 7 and made.workers_count == 3 and made.enabled
    login = {
        "security_protocol": "sasl_ssl",
        "sasl_mechanism": "PLAIN",
        "sasl_username": "me",
        "sasl_password": "secret",
    }
    shown = effective(Settings(events={"kafka": {"brokers": ["k:9092"], **login}}))["events"]
    assert shown["kafka"]["brokers"] == ["k:9092"] and "secret" not in json.dumps(shown)
    wrong: dict[str, Any]
    for wrong, where in (
        ({"retention": {"max_age_day": 7}}, "events.retention.max_age_day"),
        ({"max_body_bytes": 1}, "events.max_body_bytes"),
        ({"kafka": {}}, "events.kafka.brokers"),
        ({"kafka": {"brokers": ["k"], "client": {"group.protocol": "x"}}}, "events.kafka.client"),
    ):
        with pytest.raises(ConfigError, match=where.replace(".", r"\.")):
            make_events(Settings(events=wrong))
