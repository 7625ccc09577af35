"""What a subscriber made from afar may touch."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from gpuflight.subscribers.base import Outside
from gpuflight.subscribers.netguard import (
    ANYTHING,
    Refused,
    Rules,
    check,
    check_address,
    check_path,
    check_url,
    resolve,
    split_url,
)

OPEN = Rules(url_hosts=("*",), loopback=True)


@pytest.mark.parametrize("rules", [ANYTHING, OPEN, Rules(url_hosts=("169.254.169.254", "169.254.0.0/16", "*"))])
@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "169.254.0.1",
        "169.254.170.2",
        "[fe80::1]",
        "[fe80::1%25eth0]",
        "[fd00:ec2::254]",
        "[::ffff:169.254.169.254]",
        "[64:ff9b::a9fe:a9fe]",
        "[2002:a9fe:a9fe::1]",
        "[::169.254.169.254]",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "0.0.0.0",
        "[::]",
        "224.0.0.1",
        "[ff02::1]",
        "255.255.255.255",
        "240.0.0.1",
    ],
)
def test_f22_some_addresses_are_never_called(rules: Rules, host: str) -> None:
    """Row F22."""
    with pytest.raises(Refused):
        resolve(check_url(f"http://{host}/", rules), rules)


@pytest.mark.parametrize(
    "host", ["2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "169.254.43518", "169.254.169.254."]
)
def test_other_spellings_of_an_address_are_refused_too(host: str) -> None:
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host.rstrip("."), 80)}
    except OSError:
        pytest.skip("this C library does not know that spelling")
    assert found == {"169.254.169.254"}
    with pytest.raises(Refused):
        resolve(check_url(f"http://{host}/", OPEN), OPEN)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "[::1]", "[::ffff:127.0.0.1]"])
def test_loopback_only_when_allowed_or_named(host: str) -> None:
    url = f"http://{host}:8080/"
    for rules in (Rules(), Rules(url_hosts=("*",)), Rules(url_hosts=("example.org",))):
        with pytest.raises(Refused):
            check_url(url, rules)
    for rules in (ANYTHING, OPEN, Rules(loopback=True), Rules(url_hosts=("127.0.0.0/8", "::1"))):
        check_url(url, rules)


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    def lookup(host: str, port: int, *args: Any, **more: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr("gpuflight.subscribers.netguard.socket.getaddrinfo", lookup)


def test_a_name_is_judged_by_every_address_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = Rules(url_hosts=("sink.example.org",))
    target = check_url("http://sink.example.org/", rules)
    resolving(monkeypatch, "198.51.100.7", "198.51.100.8")
    assert resolve(target, rules) == ["198.51.100.7", "198.51.100.8"]
    for bad in ("169.254.169.254", "127.0.0.1", "::ffff:169.254.169.254", "0.0.0.0"):
        resolving(monkeypatch, "198.51.100.7", bad)
        with pytest.raises(Refused):
            resolve(target, rules)


def test_a_star_does_not_let_a_name_lead_to_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = Rules(url_hosts=("*",))
    resolving(monkeypatch, "127.0.0.1")
    with pytest.raises(Refused, match="loopback"):
        resolve(check_url("http://innocent.example.org/", rules), rules)


@pytest.mark.parametrize(
    ("pattern", "url", "allowed"),
    [
        ("sink.example.org", "https://SINK.example.org./x", True),
        ("sink.example.org", "https://sink.example.org.evil.test/", False),
        ("sink.example.org", "https://evilsink.example.org/", False),
        ("*.example.org", "https://a.b.example.org/", True),
        ("*.example.org", "https://example.org/", False),
        ("*.example.org", "https://evilexample.org/", False),
        ("sink.example.org:443", "https://sink.example.org/", True),
        ("sink.example.org:443", "https://sink.example.org:8443/", False),
        ("10.0.0.0/8", "http://10.1.2.3/", True),
        ("10.0.0.0/8", "http://11.1.2.3/", False),
        ("10.0.0.5:80", "http://10.0.0.5/", True),
        ("10.0.0.5:80", "http://10.0.0.5:81/", False),
        ("[2001:db8::1]:80", "http://[2001:db8::1]/", True),
        ("[2001:db8::1]:80", "http://[2001:db8::1]:81/", False),
        ("2001:db8::/32", "http://[2001:db8::5]/", True),
        ("*", "https://anything.test/", True),
    ],
)
def test_patterns(pattern: str, url: str, allowed: bool) -> None:
    rules = Rules(url_hosts=(pattern,))
    if allowed:
        check_url(url, rules)
    else:
        with pytest.raises(Refused):
            check_url(url, rules)


def test_a_network_allows_names_that_resolve_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = Rules(url_hosts=("10.0.0.0/8",))
    target = check_url("http://sink.internal/", rules)
    resolving(monkeypatch, "10.1.2.3")
    assert resolve(target, rules) == ["10.1.2.3"]
    resolving(monkeypatch, "10.1.2.3", "192.0.2.1")
    with pytest.raises(Refused):
        resolve(target, rules)


@pytest.mark.parametrize(
    "url",
    [
        "", "x", "//h/", "file:///etc/passwd", "gopher://h/", "http:///x", "http://u@h/", "http://u:p@h/", "http://h:0x/",
        "http://h:70000/", "http://h/\n", "http://h/a b", "http://h\t/", "http://[::1/", "http://ü.test/", "http://h/ü",
    ],
)  # fmt: skip
def test_what_is_no_plain_url(url: str) -> None:
    with pytest.raises(Refused):
        split_url(url)


def test_urls_are_taken_apart() -> None:
    target = split_url("https://Example.ORG?a=b#fragment")
    assert (target.scheme, target.host, target.port, target.path) == ("https", "example.org", 443, "/?a=b")
    assert split_url("http://[::1]:81/x").host == "::1"


@given(st.ip_addresses())
def test_without_rules_for_it_no_address_passes(address: Any) -> None:
    host = f"[{address}]" if address.version == 6 else str(address)
    with pytest.raises(Refused):
        check_url(f"http://{host}/", Rules())


@given(st.ip_addresses(v=4))
def test_an_address_is_judged_the_same_however_it_is_wrapped(address: ipaddress.IPv4Address) -> None:
    def allowed(found: Any) -> bool:
        try:
            check_address(found, split_url("http://x.test/"), OPEN)
        except Refused:
            return False
        return True

    plain = allowed(address)
    number = int(address)
    for wrapped in (
        ipaddress.IPv6Address(0xFFFF_0000_0000 + number),
        ipaddress.IPv6Address((0x0064_FF9B << 96) + number),
        ipaddress.IPv6Address((0x2002 << 112) + (number << 80) + 1),
    ):
        assert allowed(wrapped) == plain


def test_paths_stay_in_their_folders(tmp_path: Path) -> None:
    good, other = tmp_path / "good", tmp_path / "goodness"
    good.mkdir()
    other.mkdir()
    rules = Rules(folders=(str(good),))
    assert check_path(str(good / "f"), rules) == str(good / "f")
    assert check_path(str(good / "new" / "f"), rules)
    (good / "out").symlink_to(other)
    (good / "link").symlink_to(other / "f")
    (good / "loop").symlink_to(good / "loop")
    for bad in (
        other / "f", good, good / ".." / "goodness" / "f", good / "out" / "f", good / "link", Path("/etc/passwd"), "f",
        f"{good}/\0", "",
    ):  # fmt: skip
        with pytest.raises(Refused):
            check_path(str(bad), rules)
    inside = tmp_path / "inside"
    inside.symlink_to(good)
    assert check_path(str(inside / "f"), rules) == str(good / "f"), "what counts is where it leads"
    assert check_path("anything", ANYTHING) == "anything"
    with pytest.raises(Refused, match="none is configured"):
        check_path(str(good / "f"), Rules())


def test_a_link_that_changes_later_gains_nothing(tmp_path: Path) -> None:
    from tests.unit.test_subscribers_sinks import ROUNDS

    from gpuflight.errors import DeliveryError
    from gpuflight.subscribers.file_json import FileJson, FileJsonSettings

    good, other = tmp_path / "good", tmp_path / "other"
    good.mkdir()
    other.mkdir()
    (good / "folder").mkdir()
    sink = FileJson(FileJsonSettings(path=str(good / "folder" / "f")))
    sink.rules = Rules(folders=(str(good),))
    sink.deliver(ROUNDS[0])
    os.rename(good / "folder", good / "old")
    (good / "folder").symlink_to(other)
    for call in (sink.deliver, sink.trial):
        with pytest.raises(DeliveryError, match="not in a folder") as caught:
            call(ROUNDS[1])
        assert not caught.value.retryable
    assert list(other.iterdir()) == []


def test_who_does_not_say_what_it_touches_is_refused() -> None:
    with pytest.raises(Refused, match="only the configuration"):
        check(None, OPEN)
    check(Outside(), Rules())
    with pytest.raises(Refused):
        check(Outside(urls=("http://10.0.0.1/",)), Rules())
    with pytest.raises(Refused):
        check(Outside(paths=("/etc/passwd",)), Rules())
