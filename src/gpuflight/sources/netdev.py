"""Tables of /proc/net about interfaces: counters, and which local address lies on which of them. Pure parsers."""

from __future__ import annotations

import ipaddress
import re
import struct
from typing import NamedTuple

from msgspec import Struct


class NetCounters(Struct, gc=False):
    """Totals of one interface since it came up (a driver may reset them): bytes, packets, errors, drops."""

    rx_bytes: int
    rx_packets: int
    rx_errors: int
    rx_drops: int
    tx_bytes: int
    tx_packets: int
    tx_errors: int
    tx_drops: int


def parse_net_dev(data: bytes) -> dict[str, NetCounters]:
    """/proc/net/dev by interface name. Its drops include packets missed for lack of buffers (net/core/net-procfs.c)."""
    found: dict[str, NetCounters] = {}
    for line in data.decode("utf-8", "replace").splitlines()[2:]:
        name, colon, rest = line.rpartition(":")
        fields = rest.split()
        if not colon or len(fields) < 16:
            continue
        try:
            value = [int(field) for field in fields]
        except ValueError:
            continue
        found[name.strip()] = NetCounters(*value[0:4], *value[8:12])
    return found


class _Route(NamedTuple):
    network: int
    mask: int
    interface: str


def local_addresses(fib_trie: bytes, route: bytes, if_inet6: bytes) -> dict[str, list[str]]:
    """Addresses by interface, IPv4 first.

    /proc lists local IPv4 addresses without their interface; each is given to the interface whose connected route holds
    it, the longest prefix winning. One that no route holds (a /32 on its own) is left out rather than guessed.
    """
    found: dict[str, list[str]] = {}
    routes = _connected_routes(route)
    for address in _local_ipv4(fib_trie):
        number = int(ipaddress.IPv4Address(address))
        if number >> 24 == 127:
            found.setdefault("lo", []).append(address)
            continue
        holders = [known for known in routes if number & known.mask == known.network]
        if holders:
            best = max(holders, key=lambda known: known.mask)
            found.setdefault(best.interface, []).append(address)
    for line in if_inet6.decode("ascii", "replace").splitlines():
        fields = line.split()
        if len(fields) >= 6:
            try:
                text = str(ipaddress.IPv6Address(int(fields[0], 16)))
            except ValueError:
                continue
            found.setdefault(fields[5], []).append(text)
    return found


def _local_ipv4(fib_trie: bytes) -> list[str]:
    """Host routes of type LOCAL: ``|-- 10.0.0.5`` followed by ``/32 host LOCAL``; once each, in order."""
    addresses = re.findall(r"\|-- (\d+\.\d+\.\d+\.\d+)\n\s+/32 host LOCAL", fib_trie.decode("ascii", "replace"))
    return list(dict.fromkeys(addresses))


def _connected_routes(route: bytes) -> list[_Route]:
    """Routes without a gateway of /proc/net/route; its numbers are in the byte order of the host, shown as hex."""
    found = []
    for line in route.decode("utf-8", "replace").splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8:
            continue
        try:
            network, gateway, mask = (
                struct.unpack(">I", struct.pack("=I", int(fields[column], 16)))[0] for column in (1, 2, 7)
            )
        except (ValueError, struct.error):
            continue
        if not gateway and mask:
            found.append(_Route(network, mask, fields[0]))
    return found
