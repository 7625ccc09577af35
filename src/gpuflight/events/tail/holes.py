"""Windows whose number is missing: waited for, then told and passed over."""

from __future__ import annotations

from gpuflight.events.files import names
from gpuflight.events.files.folder import SessionFolder
from gpuflight.events.files.sidecars import Companions, read_companions
from gpuflight.events.ledger import Place
from gpuflight.events.tail.shared import Shared


class Holes:
    """Of one channel whose numbers ascend.

    ``accounted``: all windows up to this number were there, or are known to be missing. ``first``: the first one that
    is waited for; what comes after it is not read meanwhile.
    """

    def __init__(self, shared: Shared, folder: str, base: str, channel: str) -> None:
        self.accounted = 0
        self.first: int | None = None
        self._shared = shared
        self._folder = folder
        self._base = base
        self._channel = channel
        self._since_s: dict[int, float] = {}
        self._told: set[int] = set()

    def fills(self, number: int | None) -> bool:
        """Whether a window comes that had been given up."""
        if number not in self._told:
            return False
        self._told.discard(number)
        return True

    def holds_up(self, number: int | None) -> bool:
        """Whether a window has to wait for one that is missing before it. None: the one being written."""
        return self.first is not None and (number is None or number > self.first)

    def look(self, have: set[int], now_s: float) -> float | None:
        """``have``: numbers that are or were there. When to look again, if something is waited for."""
        self.first = None
        self._account(have)
        if not have or max(have) <= self.accounted:
            return None
        wait_s = self._shared.settings.hole_wait_s
        again_s: float | None = None
        beside = self._beside()
        marked = {loss.window for loss in beside.losses if loss.channel.removeprefix("agent-") == self._channel}
        for number in self._missing(have, beside):
            acknowledged = (self._channel, number) in beside.acknowledged
            since_s = self._since_s.setdefault(number, now_s)
            if acknowledged or number in marked or now_s - since_s >= wait_s:
                self._tell(
                    "acked_window" if acknowledged else "marked_loss" if number in marked else "missing_window", number
                )
            elif number < max(have):
                self.first = number if self.first is None else min(self.first, number)
                again_s = min(since_s + wait_s, again_s or float("inf"))
        self._account(have)
        return again_s

    def _missing(self, have: set[int], beside: Companions) -> list[int]:
        known = sorted(have | set(range(1, self.accounted + 1)))
        windows = {self._channel: [names.Window("", self._channel, number) for number in known]}
        folder = SessionFolder(self._folder, "", self._base, windows, beside, "oldest_first")
        return [n for n in folder.missing(self._channel) if n > self.accounted and n not in self._told]

    def _beside(self) -> Companions:
        try:
            entries = self._shared.disk.entries(self._folder)
        except OSError:
            return Companions()
        return read_companions(self._folder, [entry.name for entry in entries])

    def _tell(self, reason: str, number: int) -> None:
        self._shared.ledger.add(reason, Place(self._folder, self._channel, number), subject=self._channel)
        self._shared.warn(self._folder, reason, f"{self._channel} {number}")
        self._told.add(number)

    def _account(self, have: set[int]) -> None:
        while self.accounted + 1 in have or self.accounted + 1 in self._told:
            self.accounted += 1
        self._since_s = {number: since_s for number, since_s in self._since_s.items() if number > self.accounted}
