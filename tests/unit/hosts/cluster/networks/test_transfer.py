"""The rate of bytes that arrive over several connections."""

from __future__ import annotations

import pytest

from gateway.hosts.cluster.networks.transfer import Receipt, received_rate


def test_a_rate_needs_bytes_at_two_times() -> None:
    assert received_rate([]) is None
    assert received_rate([Receipt(5.0, 1000)]) is None


def test_a_slow_begin_and_a_first_burst_do_not_count() -> None:
    slow_begin = [Receipt(0.0, 1), Receipt(0.4, 1), *(Receipt(0.5 + n / 10, 100) for n in range(6))]
    assert received_rate(slow_begin) == pytest.approx(1000)
    burst = [Receipt(0.0, 10**9), *(Receipt(0.5 + n / 10, 100) for n in range(6))]
    assert received_rate(burst) == pytest.approx(1000)


def test_connections_add_up() -> None:
    connection = [Receipt(n / 10, 100) for n in range(11)]
    assert received_rate([*connection, *connection]) == pytest.approx(2000)
