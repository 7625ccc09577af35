"""Requests made of our own OpenAPI document, as it allows them and as it does not: no defect, and every answer is as it
says: status, media type, headers, shape.

10,000 requests, the same ones each time; ``FUZZ_REQUESTS=100000`` makes more of them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import CHECKS
from tests.unit.server_fixture import LOST, ONE, TWO, Served, small

from gpuflight.server.events.samples import SESSION, lines_of
from gpuflight.server.events.service import EventService
from gpuflight.server.events.settings import EventsSettings

REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "10000"))
VARIANTS = 8
"""Requests made of each generated case: generating costs much more than asking."""

_LEFT_OUT = {
    "GET /api/v1/stream": "does not end by itself",
    "POST /api/v1/tokens": "closes the door for all that follows",
    "POST /api/v1/control/trigger": "may wait as long as it is told to",
    "POST /control/trigger": "may wait for a round",
    "POST /api/v1/api-keys": "as that of tokens",
    "POST /api/v1/auth/api-keys": "as that of tokens",
    "POST /api/v1/auth/login": "too many wrong passwords, and nobody is let in any more",
}
_CHECKED = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance",
)  # fmt: skip
_KNOWN = (
    "recent", "process_tree", ONE.id, TWO.id, LOST.id, f"Own({ONE.id}->{TWO.id})", "gpu:0", "pid:1", "1", "2",
    "Process", "html", "json", "text", "default", "-1", "cpu_pct>=1", "name=init", "collectors", "1,2", "0",
    "x", "\x00", SESSION,
)  # fmt: skip
_HEADERS = (
    {}, {"Accept": "application/msgpack"}, {"Accept": "application/x-ndjson"}, {"Accept": "text/plain"},
    {"Accept": "image/png"}, {"Accept": ";;,"}, {"Accept-Encoding": "zstd;q=0.1,gzip"}, {"Accept-Encoding": "x"},
    {"If-None-Match": "*"}, {"If-None-Match": 'W/"x'}, {"Range": "bytes=0-1"}, {"Expect": "100-continue"},
    {"Origin": "http://127.0.0.1"}, {"Transfer-Encoding": "x"}, {"X-HTTP-Method-Override": "DELETE"},
    {"Content-Type": "text/xml"}, {"X-GpuFlight-Session-Id": "s"}, {"X-GpuFlight-Window-CRC32": "1"},
    {"Content-Encoding": "gzip"}, {"Last-Event-ID": "1-x"}, {"Content-Length": "x"},
)  # fmt: skip


def _from_loopback(served: Served) -> Any:
    """The application as one on loopback asks it; schemathesis does not let say so."""
    app: Any = served.client.app

    async def asked(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            headers = [pair for pair in scope["headers"] if pair[0] != b"host"]
            scope = {**scope, "client": ("127.0.0.1", 1), "headers": [*headers, (b"host", b"127.0.0.1")]}
        await app(scope, receive, send)

    return asked


@schemathesis.serializer("application/x-ndjson")
def _lines(_: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


@contextlib.contextmanager
def _with_events(folder: Path) -> Iterator[Served]:
    events = EventService(EventsSettings(), str(folder))
    with small(events) as served:
        served.client.post("/api/v1/events/stream", content=lines_of(SESSION))
        yield served
    assert events.stop(10)


class Fuzzer:
    """Asks, and holds each answer against the document."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.checks = CHECKS.get_by_names(_CHECKED)
        self.count = 0
        self.statuses: Counter[int] = Counter()
        self.found: dict[str, str] = {}

    def ask(self, case: Any, **more: Any) -> None:
        """One request."""
        served = self.served
        if served.controller.latest is None:  # after clear
            served.round()
        if not served.subscribers.status():  # after delete
            served.subscribers.create({"type": "memory", "name": "recent"})
        if served.state.events.store.session(SESSION) is None:  # after delete
            served.client.post("/api/v1/events/stream", content=lines_of(SESSION))
        while served.controller.references_count > 1:
            served.controller.stop()
        self.count += 1
        answer = case.call(**more)
        self.statuses[answer.status_code] += 1
        try:
            case.validate_response(answer, checks=self.checks)
        except (AssertionError, schemathesis.errors.SchemathesisError, BaseExceptionGroup) as error:
            text = str(error)
            self.found.setdefault(f"{case.operation.label} {answer.status_code} {text[:120]}", text[:2000])


def _varied(case: Any, known: list[str], form: bool) -> None:
    """Put what is there in the place of what was made up."""
    taken = itertools.cycle(known)
    for group in (case.path_parameters, case.query):
        for name, value in list((group or {}).items()):
            group[name] = [next(taken) for _ in value] if isinstance(value, list) else next(taken)
    if form and isinstance(case.body, dict):
        case.body |= {"type": "memory", "name": known[0]}


def _fuzz(fuzzer: Fuzzer, operation: Any, mode: Any, examples: int) -> None:
    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        case=operation.as_strategy(generation_mode=mode),
        known=st.lists(st.sampled_from(_KNOWN), min_size=VARIANTS, max_size=VARIANTS),
        headers=st.lists(st.sampled_from(_HEADERS), min_size=VARIANTS, max_size=VARIANTS),
        form=st.booleans(),
    )
    def asked(case: Any, known: list[str], headers: list[dict[str, str]], form: bool) -> None:
        fuzzer.ask(case)
        fuzzer.ask(case, headers=headers[1])
        for number in range(2, VARIANTS):
            _varied(case, known[number - 2 :], form)
            fuzzer.ask(case, headers=headers[number])

    asked()


def test_every_answer_is_as_the_document_says(tmp_path: Path) -> None:
    with _with_events(tmp_path) as served:
        schema = schemathesis.openapi.from_asgi("/api/v1/openapi.json", _from_loopback(served))
        fuzzer = Fuzzer(served)
        operations = [found.ok() for found in schema.get_all_operations()]
        assert set(_LEFT_OUT) <= {operation.label for operation in operations}
        asked = [operation for operation in operations if operation.label not in _LEFT_OUT]
        # What takes no parameters has one way to be asked.
        rich = [operation for operation in asked if list(operation.iter_parameters()) or operation.body]
        modes = schemathesis.GenerationMode
        for operation in asked:
            if operation not in rich:
                _fuzz(fuzzer, operation, modes.POSITIVE, 1)
        # What breaks the document is slow to make, and mostly 422: a tenth.
        per_operation = -(-REQUESTS // (VARIANTS * len(rich)))
        for operation in rich:
            if operation.query or operation.body:  # any text is a path
                with contextlib.suppress(Unsatisfiable):
                    _fuzz(fuzzer, operation, modes.NEGATIVE, max(1, per_operation // 10))
        turn = 0
        while fuzzer.count < REQUESTS:
            left = -(-(REQUESTS - fuzzer.count) // (VARIANTS * len(rich)))
            before = fuzzer.count
            for operation in rich:
                _fuzz(fuzzer, operation, modes.POSITIVE, left)
            turn += 1
            assert fuzzer.count > before and turn < 20
        assert not fuzzer.found, "\n\n".join(fuzzer.found.values())
        assert fuzzer.count >= REQUESTS
        # It came through to the routes, not only to what refuses a request.
        assert fuzzer.statuses[200] > REQUESTS / 20, fuzzer.statuses
        assert served.controller.run_round().number > 2
