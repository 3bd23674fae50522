"""Measurements over real sockets: between network namespaces with shaped networks, and of callers
without the key."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import Network
from gateway.hosts.cluster.networks import ends
from gateway.hosts.cluster.networks.ends import Listener, measure
from tests.support.cluster_nodes import network_namespace, obstacle
from tests.support.patience import hang_s


@contextmanager
def open_listener(address: str) -> Iterator[Listener]:
    """A listener that answers one measurement, in a thread."""
    listener = Listener(address)

    def serve() -> None:
        with suppress(OSError):
            listener.serve()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener
    finally:
        listener.close()
        thread.join(hang_s())
        assert not thread.is_alive()


def test_a_measurement_has_bandwidth_and_latency() -> None:
    with open_listener("127.0.0.1") as listener:
        network = measure("127.0.0.1", listener.port, listener.key)
    assert network.tcp_bytes_s is not None
    assert network.tcp_bytes_s > 0
    assert network.latency_s is not None
    assert network.latency_s > 0
    assert network.bytes_s is None


def test_a_caller_without_the_key_is_left_out() -> None:
    with open_listener("127.0.0.1") as listener:
        place = "127.0.0.1", listener.port
        with closing(socket.create_connection(place, hang_s())) as stranger:
            stranger.sendall(bytes(ends.KEY_BYTES) + b"c" + b"p")
            with pytest.raises(ConnectionError):
                # Nothing comes back before the listener closes the connection.
                if not stranger.recv(1):
                    raise ConnectionError
        with pytest.raises(ConnectionError):
            measure(*place, "0" * 2 * ends.KEY_BYTES)
        # The right caller is measured nevertheless.
        assert measure(*place, listener.key).tcp_bytes_s


def test_a_listener_without_a_caller_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "_SILENCE_S", 0.05)
    with closing(Listener("127.0.0.1")) as listener, pytest.raises(TimeoutError):
        listener.serve()


class ShapedPair:
    """Two network namespaces, and a network of this rate between them."""

    def __init__(self, number: int, rate: str) -> None:
        self._names = tuple(f"fsn{os.getpid()}-{number}{end}" for end in "ab")
        self.addresses = tuple(f"10.214.{number}.{end}" for end in (1, 2))
        for name in self._names:
            _run("ip", "netns", "add", name)
        first, second = self._names
        _run(
            "ip",
            "-n",
            first,
            "link",
            "add",
            "eth0",
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            second,
        )
        for name, address in zip(self._names, self.addresses, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            shaper = ("tbf", "rate", rate, "burst", "32kb", "latency", "100ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *shaper)

    def measure(self) -> Network:
        with network_namespace(Path("/run/netns", self._names[0])):
            listener = Listener(self.addresses[0])
        thread = threading.Thread(target=listener.serve)
        thread.start()
        try:
            with network_namespace(Path("/run/netns", self._names[1])):
                return measure(self.addresses[0], listener.port, listener.key)
        finally:
            listener.close()
            thread.join(hang_s())

    def close(self) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def shaped_pair(number: int, rate: str) -> Iterator[ShapedPair]:
    """Skips the test where the kernel shapes no traffic."""
    if reason := obstacle(needs_ray=False):
        pytest.skip(reason)
    pair: Any = None
    try:
        pair = ShapedPair(number, rate)
        yield pair
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the kernel shapes no traffic: {error.stderr!r}")
    finally:
        if pair is not None:
            pair.close()


def test_shaped_networks_are_told_apart() -> None:
    """A busy machine carries less than the shaper lets through, and never more."""
    with shaped_pair(1, "8mbit") as slow, shaped_pair(2, "200mbit") as fast:
        slow_rate, fast_rate = slow.measure().tcp_bytes_s, fast.measure().tcp_bytes_s
    assert slow_rate is not None
    assert fast_rate is not None
    assert slow_rate < 1.3e6
    assert 2 * slow_rate < fast_rate < 32e6
