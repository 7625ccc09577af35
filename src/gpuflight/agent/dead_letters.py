"""What could not be delivered, and why: kept in a folder to be looked at and sent by hand."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Iterable

from gpuflight.subscribers.atomic import append_whole, sync_folder, write_atomic

log = logging.getLogger(__name__)

KEPT_BYTES = 1 << 30
"""Payloads are kept up to so many bytes in all; beyond, only what and why is noted."""

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


class DeadLetters:
    """``FOLDER/SESSION/NAME`` is a window, ``NAME.json`` why; ``CHANNEL.lines`` holds single lines with their reasons,
    one JSON object each. Thread-safe. Raises nothing: what cannot be kept is logged."""

    def __init__(self, folder: str, kept_bytes: int = KEPT_BYTES) -> None:
        self.folder = folder
        self.count = 0
        """Windows and lines since the start."""
        self._kept_bytes = kept_bytes
        self._lock = threading.Lock()

    def window(self, session_id: str, path: str, reason: str) -> None:
        """A window that was given up. Linked where that is possible, which takes no room while the window lies there,
        else copied."""
        with self._lock:
            self.count += 1
            folder = self._of(session_id)
            name = os.path.basename(path)
            about = {"path": path, "session_id": session_id, "reason": reason, "time_ns": time.time_ns()}
            try:
                os.makedirs(folder, mode=0o700, exist_ok=True)
                about["kept"] = self._keep(path, os.path.join(folder, name))
                write_atomic(os.path.join(folder, f"{name}.json"), json.dumps(about).encode(), mode=0o600)
            except OSError as error:
                log.error("%s: cannot be kept as a dead letter: %s", path, error.strerror or error)

    def lines(self, session_id: str, channel: str, entries: Iterable[tuple[bytes, str]]) -> None:
        """Lines that were refused, each with the reason."""
        with self._lock:
            found = [
                json.dumps({"reason": reason, "line": line.decode("utf-8", "backslashreplace")}).encode() + b"\n"
                for line, reason in entries
            ]
            self.count += len(found)
            folder = self._of(session_id)
            path = os.path.join(folder, f"{channel}.lines")
            try:
                os.makedirs(folder, mode=0o700, exist_ok=True)
                if self._used_bytes() + sum(map(len, found)) > self._kept_bytes:
                    log.error("%s is full: %d refused lines are only counted", self.folder, len(found))
                    return
                append_whole(path, b"".join(found))
            except OSError as error:
                log.error("%s: refused lines cannot be kept: %s", path, error.strerror or error)

    def _of(self, session_id: str) -> str:
        return os.path.join(self.folder, _UNSAFE.sub("_", session_id).lstrip(".")[:200] or "_")

    def _keep(self, path: str, target: str) -> bool:
        if os.path.exists(target):
            if os.path.samefile(path, target):
                return True
            os.unlink(target)  # of an earlier try; the window is another one now
        try:
            os.link(path, target, follow_symlinks=False)
        except OSError:
            if self._used_bytes() + os.stat(path).st_size > self._kept_bytes:
                log.error("%s is full: %s is only noted", self.folder, path)
                return False
            shutil.copyfile(path, f"{target}.part")
            os.replace(f"{target}.part", target)
        sync_folder(os.path.dirname(target))
        return True

    def _used_bytes(self) -> int:
        total = 0
        for folder, _, names in os.walk(self.folder):
            for name in names:
                try:
                    status = os.stat(os.path.join(folder, name))
                except OSError:
                    continue
                total += status.st_size if status.st_nlink == 1 else 0
        return total
