"""How often an address may bring a wrong token."""

from __future__ import annotations

import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable


class LoginLimit:
    """A token bucket of failures per address: ``burst`` at once, then one per ``refill_s`` seconds.

    A right token forgives nothing: it must not buy guesses at others. IPv6 addresses count by their /64, which one
    host has whole. Remembers ``max_addresses``, the least recently failed are forgotten first. Not thread-safe: belongs
    to the event loop of the server.
    """

    def __init__(
        self,
        burst: int = 10,
        refill_s: float = 6.0,
        max_addresses: int = 10_000,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.burst = burst
        self.refill_s = refill_s
        self.max_addresses = max_addresses
        self.failures_count = 0
        self.refused_count = 0
        self._now_s = now_s
        self._full_at_s: OrderedDict[str, float] = OrderedDict()
        """When the last failure of an address is forgotten: one step of ``refill_s`` further per failure."""

    def wait_s(self, address: str) -> int:
        """0 if a login may be tried, else the whole seconds until then (counts as refused)."""
        key = _key(address)
        full_at_s = self._full_at_s.get(key)
        if full_at_s is None:
            return 0
        left_s = full_at_s - self._now_s()
        if left_s <= 0:
            del self._full_at_s[key]
            return 0
        over_s = left_s - (self.burst - 1) * self.refill_s
        if over_s <= 0:
            return 0
        self.refused_count += 1
        return math.ceil(over_s)

    def failed(self, address: str) -> None:
        """A wrong token came from here."""
        self.failures_count += 1
        key = _key(address)
        now_s = self._now_s()
        self._full_at_s[key] = max(self._full_at_s.get(key, now_s), now_s) + self.refill_s
        self._full_at_s.move_to_end(key)
        while len(self._full_at_s) > self.max_addresses:
            self._full_at_s.popitem(last=False)


def _key(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.IPv6Network((int(parsed) >> 64 << 64, 64)))
    return address
