"""Times that are translated once, whatever becomes of the wall clock."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest

from gateway.controller.steady_times import MonotonicTimes

DAY_S = 86400.0


@contextlib.contextmanager
def clocks(monotonic: float, wall: float) -> Iterator[None]:
    with (
        mock.patch("time.monotonic", return_value=monotonic),
        mock.patch("time.time", return_value=wall),
    ):
        yield


NAMES = ("m", "other")


@pytest.mark.parametrize("step_s", [DAY_S, -DAY_S])
def test_a_clock_that_is_set_moves_no_time_that_was_seen_before(step_s: float) -> None:
    times = MonotonicTimes()
    with clocks(100.0, 5000.0):
        assert times.start_pass(NAMES) == (100.0, 5000.0)
        assert times.convert_time("m", 4990.0) == 90.0
    set_at = 5000.0 + step_s
    with clocks(103.0, set_at + 3):
        times.start_pass(NAMES)
        assert times.convert_time("m", 4990.0) == 90.0
        # The times that the new clock noted.
        assert times.convert_time("m", set_at + 1) == 101.0


def test_a_time_in_the_future_is_now_from_then_on() -> None:
    times = MonotonicTimes()
    with clocks(100.0, 5000.0):
        times.start_pass(NAMES)
        assert times.convert_time("m", 9000.0) == 100.0
    with clocks(107.0, 5007.0):
        times.start_pass(NAMES)
        assert times.convert_time("m", 9000.0) == 100.0
        assert times.convert_time("other", 9000.0) == 107.0


def test_times_that_are_asked_no_more_are_forgotten() -> None:
    times = MonotonicTimes()
    for number in range(1000):
        times.start_pass(NAMES)
        times.convert_time("m", float(number))
    assert times._times == {"m": {999.0: times.convert_time("m", 999.0)}}
    times.start_pass(())
    assert not times._times


def test_a_model_at_rest_keeps_its_times() -> None:
    times = MonotonicTimes()
    with clocks(100.0, 5000.0):
        times.start_pass(NAMES)
        assert times.convert_time("m", 4990.0) == 90.0
    for _ in range(3):
        times.start_pass(NAMES)
    with clocks(200.0, 9000.0):
        times.start_pass(NAMES)
        assert times.convert_time("m", 4990.0) == 90.0
