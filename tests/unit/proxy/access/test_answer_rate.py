"""Callers get a burst, then a rate; none takes from another."""

from __future__ import annotations

import pytest

from gateway.errors import RateLimited
from gateway.proxy.access import answer_rate
from gateway.proxy.access.answer_rate import BURST, MAX_DELAY_S, PER_S, AnswerRate


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_burst_is_answered_at_once_and_more_waits_until_it_is_refused() -> None:
    clock = Clock()
    rate = AnswerRate(clock)
    assert [rate.wait_s("", "10.0.0.1") for _ in range(BURST)] == [0.0] * BURST
    waits = [rate.wait_s("", "10.0.0.1") for _ in range(int(MAX_DELAY_S * PER_S))]
    assert waits == pytest.approx([(number + 1) / PER_S for number in range(len(waits))])
    for _ in range(1000):
        with pytest.raises(RateLimited) as error:
            rate.wait_s("", "10.0.0.1")
    assert error.value.retry_after_s == MAX_DELAY_S + 1
    # A refusal costs nothing, so the caller that slows down is answered.
    clock.now += 1.0
    assert rate.wait_s("", "10.0.0.1") == pytest.approx(MAX_DELAY_S - 1.0 + 1 / PER_S)
    clock.now += 60.0
    assert rate.wait_s("", "10.0.0.1") == 0.0


def test_other_addresses_and_keys_have_rates_of_their_own() -> None:
    rate = AnswerRate(Clock())
    for _ in range(BURST):
        rate.wait_s("reader", "2001:db8::1")
    # Addresses of one network count together.
    assert rate.wait_s("reader", "2001:db8::ffff") > 0
    assert rate.wait_s("reader", "2001:db8:1::1") == 0.0
    assert rate.wait_s("other", "2001:db8::1") == 0.0
    assert rate.wait_s("", "2001:db8::1") == 0.0


def test_callers_are_counted_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_rate, "MAX_ADDRESSES", 100)
    rate = AnswerRate(Clock())
    for _ in range(BURST):
        rate.wait_s("", "10.9.9.9")
    for number in range(500):
        rate.wait_s("", f"10.0.{number // 250}.{number % 250}")
        assert rate.wait_s("", "10.9.9.9") >= number / PER_S
    assert len(rate._over_at) == 100
