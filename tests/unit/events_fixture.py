"""A server with GPU sessions, in a folder of the test's own."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.unit.gpufl_files import CLEAN
from tests.unit.server_fixture import Served

from gpuflight.server.events.service import EventService
from gpuflight.server.events.settings import EventsSettings

SESSION = "11111111-1111-4111-8111-111111111111"
STREAM = "/api/v1/events/stream"
NDJSON = "application/x-ndjson"


class EventServer(Served):
    """``Served`` with an event store under ``folder``; changes of the settings by name."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.events = EventService(EventsSettings(**settings), str(folder / "events"))
        super().__init__(events=self.events)

    def post(self, path: str, body: bytes | str, status: int = 200, **headers: str) -> Any:
        """POST of a body as it is; the answer's JSON."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = self.client.post(path, content=body, headers={"content-type": NDJSON, **sent})
        assert answer.status_code == status, answer.text[:1000]
        return answer.json()

    def window(self, channel: str, number: int, status: int = 200, **headers: str) -> Any:
        """Send a window of the clean session, as an agent does."""
        payload, window = window_of(CLEAN, channel, number)
        return self.post(STREAM, payload, status, **{**window, **headers})

    def rows(self, table: str, session: str = SESSION) -> list[dict[str, Any]]:
        """Rows of a table of a session, as they are stored."""
        store = self.events.store
        found = store.session(session)
        return store.rows(f"SELECT * FROM {store.relation(table, [found]).sql}") if found is not None else []

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        assert self.events.stop(10)
        super().__exit__(kind, error, trace)


def window_of(folder: Path, channel: str, number: int) -> tuple[bytes, dict[str, str]]:
    """A window's bytes, and the headers that the original's agent sends with them."""
    payload = (folder / f"{channel}.{number}.log.gz").read_bytes()
    sidecar = json.loads((folder / f".gpufl-window.{channel}.{number}.json").read_bytes())
    assert sidecar["payload_crc32"] == zlib.crc32(payload)
    return payload, {
        "Content-Encoding": "gzip",
        "User-Agent": "Java-http-client/25.0.3",
        "X-GpuFlight-Hostname": "vm",
        "X-GpuFlight-Session-Id": sidecar["session_id"],
        "X-GpuFlight-Window-Channel": channel,
        "X-GpuFlight-Window-CRC32": str(sidecar["payload_crc32"]),
        "X-GpuFlight-Window-Id": sidecar["window_id"],
        "X-GpuFlight-Window-Sequence": str(number),
    }


def lines_of_window(folder: Path, channel: str, number: int) -> bytes:
    """What a window holds."""
    return gzip.decompress((folder / f"{channel}.{number}.log.gz").read_bytes())
