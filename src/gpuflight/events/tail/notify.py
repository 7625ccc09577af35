"""The kernel's word on what has changed (watchfiles, extra ``events``)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

log = logging.getLogger(__name__)

_STEP_MS = 50
_GROUP_MS = 100
_MAX_PATHS = 50_000


class Notifier:
    """Gathers changed paths in a thread. ``reason``: why there is no notification, empty if there is.

    Where it ends (watch limit reached, folder gone), ``reason`` says so from then on and the caller looks for itself.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self.reason = ""
        self.changed = threading.Event()
        self._paths: dict[str, bool] = {}
        self._overflow = False
        self._guard = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            from watchfiles._rust_notify import RustNotify
        except ImportError:
            self.reason = "the package watchfiles is not installed: pip install 'gpuflight[events]'"
            return
        try:
            self._watcher = RustNotify(list(folders), False, False, 300, True, True)
        except (OSError, RuntimeError) as error:
            self.reason = f"{error} (fs.inotify.max_user_watches)" if "limit" in str(error) else str(error)
            return
        self._thread = threading.Thread(target=self._watch, name="gpuflight-tail-watch", daemon=True)
        self._thread.start()

    def take(self) -> dict[str, bool] | None:
        """Paths that changed since the last call, and whether they came or went; None: too many to tell."""
        with self._guard:
            self.changed.clear()
            paths, self._paths = self._paths, {}
            overflow, self._overflow = self._overflow, False
        return None if overflow else paths

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._watcher.close()

    def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                found = self._watcher.watch(_GROUP_MS, _STEP_MS, 1000, self._stop)
            except (RuntimeError, OSError) as error:
                self.reason = str(error) or type(error).__name__
                log.warning("kernel notification has ended, files are looked at instead: %s", self.reason)
                self.changed.set()
                return
            if not isinstance(found, set):
                continue
            with self._guard:
                for kind, path in found:
                    self._paths[path] = self._paths.get(path, False) or kind != 2
                if len(self._paths) > _MAX_PATHS:
                    self._paths.clear()
                    self._overflow = True
            self.changed.set()
