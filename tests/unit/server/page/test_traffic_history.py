"""The history of traffic behind the graphs of the page, and its percentiles."""

from __future__ import annotations

import pytest

from gateway.proxy.metrics.counters import FIRST_BYTES, Sample
from gateway.server.page.traffic_history import MAX_GAP_S, MAX_POINTS, TrafficHistory, percentile


def make_samples(requests: float, tokens: float, fast: float = 0, slow: float = 0) -> list[Sample]:
    """fast: answers that began within 5 ms; slow: within 10 s."""
    bounds = [*map(repr, FIRST_BYTES), "+Inf"]
    sums = [fast if limit != "+Inf" and float(limit) < 10 else fast + slow for limit in bounds]
    buckets = [
        ("fitserve_first_byte_seconds_bucket", ("m", "chat", limit), value)
        for limit, value in zip(bounds, sums, strict=True)
    ]
    return [
        ("fitserve_requests_total", ("m", "chat", "answered", "2xx"), requests),
        ("fitserve_requests_total", ("m", "chat", "refused", "4xx"), 1.0),
        ("fitserve_requests_total", ("", "chat", "refused", "4xx"), 7.0),
        ("fitserve_tokens_total", ("m", "completion"), tokens),
        ("fitserve_loop_age_seconds", (), 0.1),
        *buckets,
    ]


def test_a_point_counts_events_since_the_previous_one() -> None:
    traffic = TrafficHistory()
    assert traffic.add(make_samples(10, 1000), 100.0) is None
    point = traffic.add(make_samples(20, 1500, fast=10), 105.0)
    assert point is not None
    assert point["models"].keys() == {"m"}
    flow = point["models"]["m"]
    assert (flow["requests"], flow["completion_tokens"], flow["refused"]) == (2.0, 100.0, 0.0)
    assert flow["first_p50_s"] == pytest.approx(FIRST_BYTES[0] / 2)


def test_lost_counts_never_give_a_negative_rate() -> None:
    traffic = TrafficHistory()
    traffic.add(make_samples(10, 1000, fast=5), 1.0)
    point = traffic.add(make_samples(4, 100), 2.0)
    assert point is not None
    assert point["models"]["m"]["requests"] == 0
    assert point["models"]["m"]["first_p95_s"] is None


def test_a_time_without_counts_is_in_no_point() -> None:
    traffic = TrafficHistory()
    traffic.add(make_samples(1, 1), 1.0)
    assert traffic.add(make_samples(100, 100), 1.5 + MAX_GAP_S) is None
    assert traffic.add(make_samples(100, 100), 0.5) is None, "the clock was set back"
    for second in range(2 * MAX_POINTS):
        traffic.add(make_samples(100, 100), 501.0 + second)
    assert len(traffic.points) == MAX_POINTS


def test_a_model_without_traffic_costs_no_room_in_a_point() -> None:
    traffic = TrafficHistory()
    traffic.add(make_samples(10, 1000, fast=5), 1.0)
    point = traffic.add(make_samples(10, 1000, fast=5), 6.0)
    assert point == {"at": 6.0, "models": {}}
    point = traffic.add(make_samples(10, 1001, fast=5), 11.0)
    assert point is not None
    assert point["models"].keys() == {"m"}


def test_times_of_points_grow_when_the_clock_is_set_back() -> None:
    traffic = TrafficHistory()
    for at in (100.0, 105.0, 110.0, 115.0, 104.0, 109.0, 114.0):
        traffic.add(make_samples(at, at), at)
    assert [point["at"] for point in traffic.points] == [105.0, 109.0, 114.0]


def test_a_percentile_lies_between_the_bounds_of_its_bucket() -> None:
    sums = [0.0] * (len(FIRST_BYTES) + 1)
    assert percentile(sums, 0.5) is None
    slow = [*([9.0] * (len(FIRST_BYTES) - 1)), 10.0, 10.0]
    late = percentile(slow, 0.95)
    assert late is not None
    assert FIRST_BYTES[-2] < late <= FIRST_BYTES[-1]
    # Beyond the last bound nothing is known but that bound.
    assert percentile([*([0.0] * len(FIRST_BYTES)), 4.0], 0.5) == FIRST_BYTES[-1]
