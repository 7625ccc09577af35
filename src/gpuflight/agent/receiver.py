"""An HTTP receiver of GPU Flight events: the requests of gpufl-agent, and what an answer to them means."""

from __future__ import annotations

import os
import ssl
from enum import Enum
from typing import Any

import msgspec

from gpuflight import __version__
from gpuflight.agent.secrets import read_secret
from gpuflight.agent.settings import Publisher
from gpuflight.errors import DeliveryError, MissingExtra
from gpuflight.events.files.sidecars import Sidecar
from gpuflight.subscribers.http_client import Answer, Client
from gpuflight.subscribers.http_post import retry_after_s
from gpuflight.subscribers.netguard import ANYTHING, Refused, split_url

_REJECTED_KEPT = 1000
_ANSWER_MAX_BYTES = 4 << 20
"""An answer lists the lines that were rejected."""


class Verdict(Enum):
    """What an answer means."""

    DELIVERED = "delivered"
    RETRY = "retry"
    """This request may succeed later; others may succeed now."""
    WAIT = "wait"
    """The receiver takes nothing now."""
    REFUSED = "refused"
    """This request will not succeed."""
    TOO_LARGE = "too large"


class Rejected(msgspec.Struct):
    """A line that the receiver did not take. ``line`` counts from 1."""

    line: int = 0
    type: str = ""
    reason: str = ""


class Outcome(msgspec.Struct):
    """``acknowledged``: the receiver says that it has the window for good. ``damaged``: that it could not read all."""

    verdict: Verdict
    text: str = ""
    status: int = 0
    acknowledged: bool = False
    damaged: bool = False
    rejected: int = 0
    lines: list[Rejected] = []
    retry_after_s: float | None = None


class Receiver:
    """One connection to it; used by one thread at a time. Raises ConfigError, MissingExtra."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._target = split_url(publisher.hostUrl or "")
        self._events = publisher.events_path
        context: ssl.SSLContext | None = None
        if self._target.scheme == "https":
            try:
                context = ssl.create_default_context(cafile=publisher.tlsCaFile)
            except (OSError, ssl.SSLError) as error:
                raise DeliveryError(f"{publisher.tlsCaFile}: {error}", retryable=False) from error
        try:
            self._client = Client(
                self._target,
                ANYTHING,
                context,
                connect_timeout_s=publisher.timeoutSeconds,
                answer_max_bytes=_ANSWER_MAX_BYTES,
            )
        except ImportError as error:
            raise MissingExtra(error.name or "httpcore", "server", "the agent's http") from error
        default_port = 443 if self._target.scheme == "https" else 80
        host = f"[{self._target.host}]" if ":" in self._target.host else self._target.host
        self._host = host if self._target.port == default_port else f"{host}:{self._target.port}"
        self._hostname = os.uname().nodename
        self._address = ""

    def window(self, session_id: str, body: bytes, sidecar: Sidecar | None, *, gzip: bool = True) -> Outcome:
        """A finished window as the file it is; ``sidecar`` is its identity. Or lines, in gzip."""
        headers = {
            "Content-Type": "application/x-ndjson",
            "X-GpuFlight-Session-Id": session_id,
            "X-GpuFlight-Hostname": self._hostname,
        }
        if gzip:
            headers["Content-Encoding"] = "gzip"
        if sidecar is not None:
            headers["X-GpuFlight-Window-Id"] = sidecar.window_id
            headers["X-GpuFlight-Window-Channel"] = sidecar.channel
            headers["X-GpuFlight-Window-Sequence"] = str(sidecar.window_sequence)
            headers["X-GpuFlight-Window-CRC32"] = str(sidecar.payload_crc32)
        return self._post("/stream", headers, body)

    def event(self, event_type: str, line: bytes, channel: str, time_ms: int) -> Outcome:
        """One line, as gpufl-agent's mode "legacy" sends it."""
        event = {
            "agentSendingTime": time_ms,
            "data": line.decode("utf-8", "replace"),
            "type": event_type,
            "hostname": self._hostname,
            "ipAddr": self._own_address(),
        }
        headers = {
            "Content-Type": "application/json",
            "X-Topic": self._publisher.topicPrefix,
            "X-Key": channel,
        }
        return self._post(f"/{event_type}", headers, msgspec.json.encode(event))

    def complete(self, session_id: str) -> Outcome:
        """All of a session was sent."""
        return self._post("/session-complete", {"X-GpuFlight-Session-Id": session_id}, b"")

    def close(self) -> None:
        self._client.close()

    def _post(self, path: str, headers: dict[str, str], body: bytes) -> Outcome:
        import httpcore

        path = self._events + path
        where = f"{self._target.scheme}://{self._host}{path}"
        token = read_secret(self._publisher.authToken, self._publisher.authTokenFile)
        lines = {"Host": self._host, "User-Agent": f"gpuflight/{__version__}", "Content-Length": str(len(body))}
        if token is not None:
            lines["Authorization"] = f"Bearer {token}"
        lines |= headers
        encoded = [(name.encode(), _printable(value).encode()) for name, value in lines.items()]
        deadline_s = self._publisher.deadlineSeconds
        try:
            answer = self._client.request("POST", path, encoded, body, deadline_s)
        except Refused as error:
            return Outcome(Verdict.WAIT, str(error))
        except (httpcore.TimeoutException, TimeoutError):
            return Outcome(Verdict.WAIT, f"{where}: no answer in time ({deadline_s:g} s)")
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.ProxyError, OSError) as error:
            return Outcome(Verdict.WAIT, f"{where}: {error or type(error).__name__}")
        outcome = judge(answer, token or "")
        outcome.status = answer.status
        words = f": {outcome.text}" if outcome.text else ""
        outcome.text = f"{where}: status {answer.status}{words}"
        return outcome

    def _own_address(self) -> str:
        """This host's address as the receiver would see it."""
        if not self._address:
            import socket

            try:
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                    probe.connect((self._target.host, self._target.port))  # sends nothing
                    self._address = str(probe.getsockname()[0])
            except OSError:
                self._address = "127.0.0.1"
        return self._address


def judge(answer: Answer, secret: str = "") -> Outcome:
    """What an answer means. 2xx is proof, unless it is a page for people, as proxies and login portals give. 402 and
    409 are none (gpufl-agent takes them for success): only if the body says that the window is there. ``secret`` is in
    no text, though who answers may repeat it."""
    status = answer.status
    said = _said(answer)
    acknowledged = said.get("window_acknowledged") is True
    words = _words(answer, secret)
    if 200 <= status < 300:
        if "text/html" in answer.headers.get("content-type", ""):
            return Outcome(Verdict.WAIT, f"the answer is a web page, not a receiver's ({words[:80]})")
        count, lines = _rejected(said)
        damaged = said.get("window_acknowledged") is False or bool(said.get("damaged"))
        return Outcome(
            Verdict.DELIVERED, words, acknowledged=acknowledged, damaged=damaged, rejected=count, lines=lines
        )
    if status in (402, 409) and acknowledged:
        return Outcome(Verdict.DELIVERED, words, acknowledged=True)
    pause_s = retry_after_s(answer.headers.get("retry-after", ""))
    if 300 <= status < 400:
        return Outcome(Verdict.WAIT, "redirects are not followed; give the address it leads to")
    if status == 401 or status == 407:
        return Outcome(Verdict.WAIT, f"the token is not accepted {words}".strip(), retry_after_s=pause_s)
    if status == 403:
        return Outcome(Verdict.WAIT, f"no right to send here {words}".strip(), retry_after_s=pause_s)
    if status in (404, 405):
        return Outcome(Verdict.WAIT, "it does not know this address; an older backend takes --upload-mode=legacy")
    if status in (429, 502, 503, 504):
        return Outcome(Verdict.WAIT, words, retry_after_s=pause_s)
    if status == 413:
        return Outcome(Verdict.TOO_LARGE, words)
    if status in (402, 408, 425) or status >= 500:
        return Outcome(Verdict.RETRY, words, retry_after_s=pause_s)
    return Outcome(Verdict.REFUSED, words)


def _said(answer: Answer) -> dict[str, Any]:
    try:
        said = msgspec.json.decode(answer.body)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _rejected(said: dict[str, Any]) -> tuple[int, list[Rejected]]:
    listed = said.get("errors")
    lines: list[Rejected] = []
    for entry in listed[:_REJECTED_KEPT] if isinstance(listed, list) else []:
        if isinstance(entry, dict):
            line = entry.get("line")
            number = line if isinstance(line, int) else 0
            lines.append(Rejected(number, str(entry.get("type", ""))[:100], str(entry.get("reason", ""))[:300]))
    count = said.get("rejected")
    return max(count if isinstance(count, int) else 0, 0), lines


def _words(answer: Answer, secret: str) -> str:
    if answer.headers.get("content-encoding"):
        return ""
    text = answer.body[:_ANSWER_MAX_BYTES].decode(errors="replace")
    return _printable((text.replace(secret, "***") if secret else text)[:200])


def _printable(text: str) -> str:
    """One line of it. A session id is a folder's name, which may hold anything."""
    return " ".join(
        "".join(
            char if char.isprintable() and char.isascii() else "?" if char.isprintable() else " " for char in text
        ).split()
    )
