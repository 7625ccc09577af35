"""What all files of a tailer share: limits on open files and inflaters, and saying each thing once."""

from __future__ import annotations

import errno
import logging
from collections import OrderedDict
from collections.abc import Callable

from gpuflight.events.ledger import Ledger, Place
from gpuflight.events.tail.disk import Disk
from gpuflight.events.tail.settings import TailSettings
from gpuflight.events.tail.window import Window

log = logging.getLogger(__name__)

_MAX_TOLD = 10_000


class Shared:
    """``urgent``: something was learnt that a crash must not lose before more is handed out."""

    def __init__(
        self,
        disk: Disk,
        settings: TailSettings,
        ledger: Ledger,
        monotonic_s: Callable[[], float],
        wall_s: Callable[[], float],
    ) -> None:
        self.disk = disk
        self.settings = settings
        self.ledger = ledger
        self.monotonic_s = monotonic_s
        self.wall_s = wall_s
        self.urgent = False
        self.spent_bytes = 0
        """Read in the present call without handing anything out."""
        self._open: OrderedDict[Window, None] = OrderedDict()
        self._inflating: dict[Window, None] = {}
        self._told: dict[tuple[str, str], None] = {}

    def tell(self, reason: str, window: Window, *, size_bytes: int = 0, text: str = "", offset: int = -1) -> None:
        """Count a loss or oddity; warn once per file and reason."""
        number = -1 if window.number is None else window.number
        place = Place(window.path, window.stream.channel, number, offset)
        self.ledger.add(reason, place, size_bytes=size_bytes, subject=window.stream.channel)
        self.warn(window.path, reason, text)

    def warn(self, path: str, reason: str, text: str = "", level: int = logging.WARNING) -> None:
        if (path, reason) in self._told:
            return
        if len(self._told) >= _MAX_TOLD:
            self._told.pop(next(iter(self._told)))
        self._told[path, reason] = None
        log.log(level, "%s: %s%s", path, reason.replace("_", " "), f" ({text})" if text else "")

    # --- descriptors -----------------------------------------------------------------------------------------------

    def open(self, window: Window, path: str) -> int:
        """A descriptor for a window's plain file; the one longest unused is closed where there are too many."""
        while len(self._open) >= self.settings.max_open_files and self._close_one():
            pass
        while True:
            try:
                descriptor = self.disk.open(path)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._close_one():
                    continue
                raise
            window.descriptor = descriptor
            self._open[window] = None
            return descriptor

    def used(self, window: Window) -> None:
        self._open.move_to_end(window)

    def hand_over(self, old: Window, new: Window) -> None:
        """The descriptor belongs to another window now."""
        if old.descriptor >= 0:
            new.descriptor, old.descriptor = old.descriptor, -1
            self._open.pop(old, None)
            self._open[new] = None

    def close(self, window: Window) -> None:
        """Give back whatever is open for a window."""
        self._open.pop(window, None)
        if window.descriptor >= 0:
            descriptor, window.descriptor = window.descriptor, -1
            self.disk.close(descriptor)
        self.stop_inflating(window)

    def close_all(self) -> None:
        for window in [*self._open, *self._inflating]:
            self.close(window)

    def _close_one(self) -> bool:
        """Whether one could be closed: not one whose file is gone from its folder, or still has to be read."""
        for window in self._open:
            if not window.dirty and window.raw is not None:
                self.close(window)
                return True
        return False

    # --- inflaters -------------------------------------------------------------------------------------------------

    def may_inflate(self, window: Window) -> bool:
        """Whether one more compressed file may be begun. One of a channel that waits for commits makes room."""
        if len(self._inflating) >= self.settings.max_inflating:
            for other in self._inflating:
                if other.stream.waits:
                    self.stop_inflating(other)
                    break
            else:
                return False
        self._inflating[window] = None
        return True

    def stop_inflating(self, window: Window) -> None:
        self._inflating.pop(window, None)
        if window.reader is not None:
            window.reader.close()
            window.reader = None
