"""A small session for the examples of the OpenAPI document: what the examples of ``/events`` send."""

from __future__ import annotations

import json

SESSION = "11111111-1111-4111-8111-111111111111"
OTHER_SESSION = "22222222-2222-4222-8222-222222222222"
START_NS = 1_790_000_000_000_000_000

_KERNEL_COLUMNS = ["dt_ns", "kernel_id", "stream_id", "duration_ns", "corr_id"]


def _line(kind: str, session: str, **fields: object) -> str:
    return json.dumps({"version": 1, "type": kind, "session_id": session, **fields}, separators=(",", ":"))


def lines_of(session: str) -> str:
    """Lines of a session with two kernels."""
    return "\n".join(
        (
            _line("job_start", session, pid=4242, app="train", ts_ns=START_NS, hostname="n1", ip_addr="10.0.0.5"),
            _line("dictionary_update", session, kernel_dict={"1": "vectorAdd(float*)"}),
            _line(
                "kernel_event_batch",
                session,
                batch_id=1,
                base_time_ns=START_NS,
                columns=_KERNEL_COLUMNS,
                rows=[[0, 1, 7, 1500, 1], [9000, 1, 7, 1700, 2]],
            ),
        )
    )


LINES = lines_of(SESSION)

EVENT = {
    "type": "kernel_event",
    "session_id": SESSION,
    "name": "vectorAdd(float*)",
    "device_id": "0",
    "stream_id": "7",
    "start_ns": START_NS + 20_000,
    "end_ns": START_NS + 21_600,
    "corr_id": 3,
}
