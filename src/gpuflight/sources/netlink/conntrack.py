"""/proc/net/nf_conntrack: which addresses the host's NAT puts in place of which."""

from __future__ import annotations

from typing import NamedTuple

from gpuflight.sources.netlink.records import endpoint

MAX_ENTRIES = 50_000
"""Above this the table is not read: it is text, about 2 µs an entry here and more in the kernel."""


class Flow(NamedTuple):
    """One end's view of a connection."""

    protocol: str
    local: str
    remote: str


def parse_translations(data: bytes) -> dict[Flow, Flow]:
    """Each end's view of a translated connection → the other end's view. Connections without NAT are left out.

    An entry holds the addresses of the original direction, as the end that opened it sees them, and of the reply, as
    the end that answers sends it.
    """
    found: dict[Flow, Flow] = {}
    for line in data.splitlines():
        parts = line.decode("ascii", "replace").split()
        if len(parts) < 5 or parts[2] not in ("tcp", "udp", "udplite"):
            continue
        values: dict[str, list[str]] = {}
        for part in parts:
            name, equals, value = part.partition("=")
            if equals and name in ("src", "dst", "sport", "dport"):
                values.setdefault(name, []).append(value)
        try:
            (source, answerer), (target, asker) = values["src"], values["dst"]
            (source_port, answerer_port), (target_port, asker_port) = values["sport"], values["dport"]
            if (source, source_port, target, target_port) == (asker, asker_port, answerer, answerer_port):
                continue
            opener = Flow(parts[2], endpoint(source, int(source_port)), endpoint(target, int(target_port)))
            server = Flow(parts[2], endpoint(answerer, int(answerer_port)), endpoint(asker, int(asker_port)))
        except (KeyError, ValueError):
            continue
        found[opener] = server
        found[server] = opener
    return found
