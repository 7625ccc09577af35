"""What a subscriber that somebody created from afar may touch: receivers by host, files by folder.

A URL is checked twice: its host by name when the subscriber is made, and the addresses that the name resolves to each
time a connection is made; then the connection goes to the address that was checked, so a name that changes its mind in
between gains nothing. Link-local addresses and those under which clouds hand out credentials are refused always, for
everybody. Redirects are not followed.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from msgspec import Struct

from gpuflight.errors import InputError
from gpuflight.subscribers.base import Outside

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in (
        "169.254.169.254",  # AWS, Azure, GCP, OpenStack
        "169.254.170.2",  # AWS ECS task roles
        "fd00:ec2::254",  # AWS over IPv6
        "fd20:ce::254",  # GCP over IPv6
        "100.100.100.200",  # Alibaba Cloud
        "168.63.129.16",  # Azure host
        "192.0.0.192",  # Oracle Cloud
    )
)
_CARRIES_V4 = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("::/96"))


# Schemes that a subscriber can name in ``outside``, with their ports.
_PORTS = {"http": 80, "https": 443, "kafka": 9092}
HTTP = ("http", "https")
"""Schemes of what can be posted to."""


class Refused(InputError):
    """Something that may not be touched; the message says what and why."""


class Rules(Struct, frozen=True, kw_only=True):
    """What may be touched.

    ``url_hosts``: ``name``, ``*.domain``, an address, a network like ``10.0.0.0/8``, each with ``:port`` for one port
    only ([…]:port for IPv6); ``*`` is every host that is not loopback. Loopback needs ``loopback`` or to be named.
    ``folders``: files in and below them. None is no limit; empty is nothing at all.
    """

    url_hosts: tuple[str, ...] | None = ()
    folders: tuple[str, ...] | None = ()
    loopback: bool = False


ANYTHING = Rules(url_hosts=None, folders=None, loopback=True)
"""For what the operator's own configuration says. Link-local and metadata addresses are refused all the same."""


class Target(Struct, frozen=True):
    """A URL, taken apart. ``host`` is in lower case, without brackets."""

    scheme: str
    host: str
    port: int
    path: str


def split_url(url: str, schemes: Sequence[str] = HTTP) -> Target:
    """A URL with all that a request needs. Raises Refused for what is not plain, or of another scheme."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise Refused(f"{url!r} is not a URL: {error}") from None
    if parts.scheme not in schemes:
        raise Refused(f"{url!r}: only {' and '.join(f'{scheme}://' for scheme in schemes)} are possible")
    if not parts.hostname:
        raise Refused(f"{url!r} has no host")
    if parts.username is not None or parts.password is not None:
        raise Refused("a URL with a user or password in it; use a header instead")
    if any(ord(char) <= 32 or ord(char) == 127 for char in url):
        raise Refused("a URL with white space or control characters in it")
    try:
        url.encode("ascii")
        host = parts.hostname.rstrip(".").lower()
    except UnicodeError:
        raise Refused(f"{url!r}: write it in ASCII (IDNA, percent signs)") from None
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme, host, port if port is not None else _PORTS[parts.scheme], path)


def is_address(host: str) -> bool:
    """Whether a host is an address, so that nothing has to be looked up."""
    return _address(host) is not None


def check_url(url: str, rules: Rules) -> Target:
    """The URL taken apart, if its host may be called by its name. Raises Refused. Does not resolve it."""
    target = split_url(url, tuple(_PORTS))
    address = _address(target.host)
    if address is not None:
        check_address(address, target, rules)
    elif rules.url_hosts is not None and not _listed(target, None, rules) and not _may_resolve_into(target, rules):
        raise Refused(f"{target.host}:{target.port} is not among the hosts that may be called ({_allowed(rules)})")
    return target


def check_address(address: Address, target: Target, rules: Rules) -> None:
    """Raises Refused unless ``target`` may be called at this address."""
    plain = _unwrapped(address)
    if plain.is_link_local or plain in _METADATA:
        raise Refused(f"{target.host} is {address}: a link-local or metadata address is never called")
    if plain.is_multicast or plain.is_unspecified or (plain.is_reserved and not plain.is_loopback):
        raise Refused(f"{target.host} is {address}: not the address of one host")
    if plain.is_loopback and not rules.loopback and not _listed_loopback(target, plain, rules):
        raise Refused(f"{target.host} is {address}: loopback may not be called")
    if rules.url_hosts is not None and not _listed(target, plain, rules):
        if plain.is_loopback and rules.loopback:
            return
        raise Refused(f"{target.host} ({address}) is not among the hosts that may be called ({_allowed(rules)})")


def resolve(target: Target, rules: Rules) -> list[str]:
    """The addresses of a target, each of which may be called. Raises Refused if one may not, OSError without any."""
    found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
    for text in addresses:  # one bad address spoils the name: which one is used is not ours to choose
        address = _address(text)
        if address is None:
            raise Refused(f"{target.host} resolves to {text!r}, which is not an address")
        check_address(address, target, rules)
    return addresses


def check_path(path: str, rules: Rules) -> str:
    """The real path of a file, if it lies in a folder that may be written. Raises Refused."""
    if rules.folders is None:
        return path
    if "\0" in path:
        raise Refused("a path with a null byte in it")
    if not os.path.isabs(path):
        raise Refused(f"{path}: must be an absolute path")
    real = os.path.realpath(path)
    for folder in rules.folders:
        root = os.path.realpath(folder)
        if real != root and os.path.commonpath((real, root)) == root:
            return real
    allowed = ", ".join(rules.folders) or "none is configured"
    raise Refused(f"{path} is not in a folder that may be written ({allowed})")


def check(outside: Outside | None, rules: Rules) -> None:
    """Raises Refused unless all that a subscriber touches may be touched."""
    if outside is None:
        raise Refused("this type does not say what it touches, so only the configuration can set it up")
    for path in outside.paths:
        check_path(path, rules)
    for url in outside.urls:
        check_url(url, rules)


def _address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def _unwrapped(address: Address) -> Address:
    """An IPv4 address that hides in an IPv6 one: mapped, NAT64, 6to4."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if any(address in network for network in _CARRIES_V4) and int(address) > 1:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return address


def _listed(target: Target, address: Address | None, rules: Rules) -> bool:
    if any(_host_and_port(pattern, target.port) == "*" for pattern in rules.url_hosts or ()):
        return True
    return _listed_by_name(target, address, rules)


def _listed_loopback(target: Target, address: Address, rules: Rules) -> bool:
    """Named as what it is; a name elsewhere that leads here is not enough."""
    where = Target(target.scheme, "localhost" if target.host == "localhost" else "", target.port, target.path)
    return _listed_by_name(where, address, rules)


def _listed_by_name(target: Target, address: Address | None, rules: Rules) -> bool:
    for pattern in rules.url_hosts or ():
        host = _host_and_port(pattern, target.port)
        if host is None or host == "*":
            continue
        if host == target.host or (host.startswith("*.") and target.host.endswith(host[1:])):
            return True
        if address is not None:
            try:
                if address in ipaddress.ip_network(host, strict=False):
                    return True
            except ValueError:
                continue
    return False


def _host_and_port(pattern: str, port: int) -> str | None:
    """The host of a pattern, if its port fits."""
    text = pattern.strip().lower()
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        wanted = rest.removeprefix(":")
    elif text.count(":") == 1:
        host, _, wanted = text.partition(":")
    else:
        host, wanted = text, ""
    return host if not wanted or wanted == str(port) else None


def _may_resolve_into(target: Target, rules: Rules) -> bool:
    """Whether a name that is not listed itself may lead to an address that is."""
    return (rules.loopback and target.host == "localhost") or any("/" in pattern for pattern in rules.url_hosts or ())


def _allowed(rules: Rules) -> str:
    return ", ".join(rules.url_hosts or ()) or "none is configured"
