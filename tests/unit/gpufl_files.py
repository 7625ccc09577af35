"""Log files of the format for tests: where the fixtures are, lines by hand, and a reader too simple to be wrong."""

from __future__ import annotations

import gzip
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from gpuflight.events.batch import Batch
from gpuflight.events.files import SessionReader, find_sessions
from gpuflight.events.format.decoder import Decoder
from gpuflight.events.ledger import Ledger, Place

DATA = Path(__file__).parents[1] / "data" / "gpufl"
GEN = DATA / "gen"
CLEAN = GEN / "v1.3.0rc1-clean" / "11111111-1111-4111-8111-111111111111"
START_NS = 1_790_000_000_000_000_000
COLUMNS = ["dt_ns", "kernel_id", "stream_id", "duration_ns", "corr_id"]


def line(wire_type: str, session: str = "s", /, **fields: Any) -> bytes:
    event = {"version": 1, "type": wire_type, "session_id": session, **fields}
    return json.dumps(event, separators=(",", ":")).encode() + b"\n"


def kernels(
    rows: list[list[Any]], *, number: int | None = 1, base: int = START_NS, session: str = "s", **more: Any
) -> bytes:
    envelope = {} if number is None else {"batch_id": number}
    return line(
        "kernel_event_batch", session, **envelope, base_time_ns=base, **{"columns": COLUMNS, "rows": rows, **more}
    )


def detail(corr_id: int, session: str = "s", **more: Any) -> bytes:
    return line(
        "kernel_detail", session, pid=1, app="a", corr_id=corr_id, **{"grid": "(1,2,3)", "block": "(4,5,6)", **more}
    )


def start(session: str = "s", ts_ns: int = START_NS) -> bytes:
    return line("job_start", session, pid=1, app="a", ts_ns=ts_ns)


def shutdown(session: str = "s") -> bytes:
    return line("shutdown", session, ts_ns=START_NS + 10**9)


def decode(data: bytes, channel: str = "device", *, session: str = "") -> tuple[list[Batch], Ledger]:
    decoder = Decoder(session)
    return decoder.feed(data, Place("f", channel, 1, 0)), decoder.ledger


def rows(batches: list[Batch], table: str) -> list[dict[str, Any]]:
    return [row for batch in batches if batch.table == table for row in batch.rows()]


def read(folder: Path, *, live: bool | None = False) -> tuple[list[Batch], Ledger]:
    """All sessions of a folder; without a lock, files that a checkout has just made would look alive."""
    ledger = Ledger()
    sessions = find_sessions(str(folder))
    return [batch for found in sessions for batch in SessionReader(found, ledger, live=live)], ledger


def counts(batches: list[Batch]) -> Counter[str]:
    total: Counter[str] = Counter()
    for batch in batches:
        total[batch.table] += batch.count
    return total


def losses(ledger: Ledger) -> dict[str, int]:
    """What was lost or kept with a flaw; not what was seen twice."""
    found: Counter[str] = Counter()
    for entry in ledger:
        if entry.effect != "repeat":
            found[entry.reason] += entry.count
    return dict(found)


def naive(folder: Path) -> list[dict[str, Any]]:
    """Every event in every file of a folder, by the standard library, copies included, in no order."""
    events = []
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or ".log" not in path.name or path.name.endswith(".part"):
            continue
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.name.endswith(".gz") else data).decode("utf-8", "replace")
        for written in text.splitlines():
            try:
                event = json.loads(written)
            except ValueError:
                continue
            if isinstance(event, dict) and "type" in event:
                events.append(event)
    return events


def copy_clean(target: Path) -> Path:
    """The clean session of the newest generation, to be damaged."""
    session = target / CLEAN.name
    shutil.copytree(CLEAN, session)
    return session


def session_folder(target: Path, windows: dict[str, bytes], session: str = "s") -> Path:
    """A session's folder with these files; names that end in .gz are compressed, ``.tmp/`` is made."""
    folder = target / session
    folder.mkdir(parents=True)
    for name, data in windows.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(data) if name.endswith((".gz", ".part")) else data)
    return folder
