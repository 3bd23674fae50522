"""The hosts that engines may fetch media from."""

from __future__ import annotations

import asyncio
import ipaddress
import threading

import pytest

from gateway.errors import BadRequest, Busy
from gateway.proxy.access import media_hosts
from gateway.proxy.access.media_hosts import MediaHosts, is_public

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.0.1",
        "169.254.169.254",
        "0.0.0.0",
        "100.64.0.1",
        "198.18.0.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1",
        "fc00::1",
        "fd00:ec2::254",
        "ff02::1",
        "fec0::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "168.63.129.16",
        "::ffff:168.63.129.16",
    ],
)
def test_no_inner_address_is_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))
    assert MediaHosts(["public"]).verdict(address, 0.0) is False


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:2800:220:1::1", "::ffff:8.8.8.8"])
def test_public_addresses_are_allowed(address: str) -> None:
    assert MediaHosts(["public"]).verdict(address, 0.0) is True


@pytest.mark.parametrize(
    "host",
    ["localhost", "engine", "127.1", "2130706433", "0x7f.0.0.1", "a_b", "-a.example", "a..b"],
)
def test_names_without_a_domain_and_numbers_are_refused_unasked(host: str) -> None:
    assert MediaHosts(["public"]).verdict(host, 0.0) is False


def test_a_host_that_the_operator_names_is_allowed_wherever_it_is() -> None:
    hosts = MediaHosts(["media.internal", "*.cdn.example", "10.0.0.7"])
    for host in ("media.internal", "MEDIA.internal.", "a.cdn.example", "10.0.0.7"):
        assert hosts.verdict(host, 0.0) is True
    for host in ("cdn.example", "10.0.0.8", "8.8.8.8", "other.example"):
        assert hosts.verdict(host, 0.0) is False


async def test_a_name_is_resolved_once_and_every_address_has_to_be_public(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: list[str] = []
    table = {
        "good.example": ["8.8.8.8", "2606:2800:220:1::1"],
        "bad.example": ["8.8.8.8", "127.0.0.1"],
        "none.example": [],
    }

    def addresses_of(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
        names.append(host)
        if host not in table:
            raise OSError("no such name")
        return [ipaddress.ip_address(address) for address in table[host]]

    monkeypatch.setattr(media_hosts, "resolve_addresses", addresses_of)
    hosts = MediaHosts(["public"])
    await asyncio.gather(*(hosts.check(["good.example"]) for _ in range(5)))
    assert names == ["good.example"]
    assert hosts.verdict("good.example", asyncio.get_running_loop().time()) is True
    for name in ("bad.example", "none.example", "unknown.example"):
        with pytest.raises(BadRequest, match="are not fetched"):
            await hosts.check([name])


async def test_names_that_hang_are_bounded_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(media_hosts, "resolve_addresses", lambda _: release.wait() and [])
    monkeypatch.setattr(media_hosts, "_MAX_LOOKUPS", 3)
    hosts = MediaHosts(["public"])
    waiting = [asyncio.create_task(hosts.check([f"h{n}.example"])) for n in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Busy):
        await hosts.check(["h9.example"])
    release.set()
    for task in waiting:
        with pytest.raises(BadRequest):
            await task


async def test_the_number_of_kept_names_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        media_hosts, "resolve_addresses", lambda _: [ipaddress.ip_address("8.8.8.8")]
    )
    monkeypatch.setattr(media_hosts, "_MAX_VERDICTS", 4)
    hosts = MediaHosts(["public"])
    for number in range(10):
        await hosts.check([f"h{number}.example"])
    verdicts = [hosts.verdict(f"h{number}.example", 0.0) for number in range(10)]
    assert verdicts == [None] * 6 + [True] * 4
