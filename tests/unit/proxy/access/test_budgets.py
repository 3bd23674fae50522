"""Budgets: the requests that they let in, the cost of a request, and headers for clients."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.domain.grant import Allowance, Grant
from gateway.errors import FitserveError, Forbidden, QuotaExhausted, StoreError
from gateway.keys import UsageRow
from gateway.proxy.access.auth import Key, build_key
from gateway.proxy.access.budget_book import BudgetBook
from gateway.proxy.access.budgets import BudgetAdmission, Charge, TokenCount
from gateway.proxy.access.ledger import Amounts, Calendar, Ledger
from gateway.proxy.access.prices import ModelPrice, Prices
from gateway.proxy.access.rate_limits import Permit, RateLimiter
from gateway.proxy.api.protocol import error_headers

PRICES = Prices({"m": ModelPrice(prompt=1.0, completion=4.0, cached=0.1, gpu_hour=36.0)}, "EUR")
NOON = 1_795_780_800.0  # 2026-11-27 12:00 UTC


@pytest.fixture(autouse=True)
def _stop_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: NOON)


class Desk:
    """A limiter, and keys with budgets."""

    def __init__(
        self, folder: Path, prices: Prices = PRICES, stored: tuple[UsageRow, ...] = ()
    ) -> None:
        self.book = BudgetBook(Ledger(folder), prices, lambda _first, _last: stored)
        self.limiter = RateLimiter(BudgetAdmission(Ledger(folder), prices))
        self.grants: list[Grant] = []

    def key(self, name: str = "app", group: str | None = None, **budget: Any) -> Key:
        grant = Grant(name=name, group=group, budget=Allowance(**budget) if budget else None)
        self.grants.append(grant)
        return build_key(grant, name.encode().ljust(32), self.book.budgets_of(grant, self.grants))

    def admit(
        self, key: Key, model: str = "m", asked_bytes: int = 0, context_tokens: int | None = None
    ) -> Permit:
        permit = self.limiter.admit(
            key, "openai", 0.0, model, asked_bytes=asked_bytes, context_tokens=context_tokens
        )
        assert permit is not None
        return permit

    def is_admitted(self, key: Key) -> bool:
        try:
            self.admit(key)
        except QuotaExhausted:
            return False
        return True

    def day_of(self, key: Key) -> Amounts:
        assert key.limit is not None
        (use,) = self.book.use_of(key.limit.budgets[:1])
        return use.usage.day


def test_exactly_the_requests_of_a_budget_are_admitted(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    key = desk.key(requests_per_day=3)
    assert [desk.is_admitted(key) for _ in range(5)] == [True, True, True, False, False]
    # Another process with the same folder, as after a kill.
    later_desk = Desk(tmp_path)
    assert not later_desk.is_admitted(later_desk.key(requests_per_day=3))


def test_a_request_that_no_engine_got_costs_nothing(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    key = desk.key(requests_per_day=1, tokens_per_day=100)
    desk.admit(key, asked_bytes=80).finish(TokenCount(), 0.0, has_reached_engine=False)
    assert desk.day_of(key) == Amounts()
    assert desk.is_admitted(key)


def test_the_prompt_counts_before_the_answer_and_the_report_after_it(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    key = desk.key(tokens_per_day=1_000)
    permit = desk.admit(key, asked_bytes=400)
    assert desk.day_of(key) == Amounts(1, 100, 0, 100_000)
    permit.finish(TokenCount(90, 30), 0.0)
    assert desk.day_of(key)[:2] == (1, 120)


def test_an_estimate_has_no_more_tokens_than_the_context_of_the_model(tmp_path: Path) -> None:
    """An image in a body is some megabytes, and far fewer tokens than their text."""
    desk = Desk(tmp_path)
    key = desk.key(tokens_per_day=1_000_000)
    permit = desk.admit(key, asked_bytes=20_000_000, context_tokens=32_768)
    assert desk.day_of(key).tokens == 32_768
    assert permit.estimate_limit == 32_768
    assert desk.admit(desk.key("other", requests_per_day=1)).estimate_limit == 2**20


def test_a_reservation_of_yesterday_takes_nothing_from_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(tmp_path)
    key = desk.key(tokens_per_day=1_000, tokens_per_month=1_000)
    permit = desk.admit(key, asked_bytes=400)
    monkeypatch.setattr(time, "time", lambda: NOON + 86_400)
    permit.finish(TokenCount(90, 30), 0.0)
    assert key.limit is not None
    (use,) = desk.book.use_of(key.limit.budgets)
    assert (use.usage.day.tokens, use.usage.month.tokens) == (120, 120)


def test_an_error_of_the_ledger_leaves_no_request_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(tmp_path)
    key = desk.key(requests_per_day=5)

    def fail(*_arguments: object) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", fail)
        with pytest.raises(StoreError, match="cannot be read: Input/output error"):
            desk.admit(key)
    permit = desk.admit(key)
    assert permit.account._active_requests == 1


def test_a_spent_budget_of_tokens_refuses_the_next_request(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    key = desk.key(tokens_per_month=100)
    desk.admit(key).finish(TokenCount(60, 60), 0.0)
    with pytest.raises(QuotaExhausted) as refusal:
        desk.admit(key)
    error = refusal.value
    assert str(error).startswith("The key app has used its 100 tokens of this month.")
    assert "2026-12-01 00:00 UTC" in str(error)
    assert error.envelope()["error"]["type"] == "insufficient_quota"
    headers = dict(error_headers(error))
    assert headers[b"x-should-retry"] == b"false"
    assert b"retry-after" not in headers
    assert headers[b"x-ratelimit-remaining-tokens-month"] == b"0"
    assert headers[b"x-ratelimit-reset-tokens-month"] == b"84h0m0s"


def test_keys_share_the_budget_of_their_group_and_get_refunds_of_refused_requests(
    tmp_path: Path,
) -> None:
    desk = Desk(tmp_path)
    desk.book.groups = {"team": Allowance(requests_per_day=3)}
    first = desk.key("first", "team", requests_per_day=1)
    second = desk.key("second", "team")
    assert [desk.is_admitted(first) for _ in range(3)] == [True, False, False]
    assert [desk.is_admitted(second) for _ in range(3)] == [True, True, False]
    third = desk.key("third", "team", requests_per_day=9)
    assert not desk.is_admitted(third)
    assert desk.day_of(third).requests == 0


def test_a_group_that_was_lost_lets_no_key_in(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    with pytest.raises(Forbidden, match="group team is not known"):
        desk.admit(desk.key(group="team"))


def test_a_soft_budget_warns_and_refuses_nothing(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    key = desk.key(requests_per_day=2, warn_percent=100, is_soft=True)
    lines = [dict(desk.admit(key).headers(0.0)) for _ in range(3)]
    assert [b"x-fitserve-budget-warning" in headers for headers in lines] == [False, True, True]
    assert lines[2][b"x-fitserve-budget-warning"] == b"key app has used 3 of 2 requests of this day"


def test_headers_say_how_much_is_left(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.book.groups = {"team": Allowance(money_per_month=10)}
    permit = desk.admit(desk.key(group="team", tokens_per_day=1_000), asked_bytes=40)
    assert dict(permit.headers(0.0)) == {
        b"x-ratelimit-limit-tokens": b"1000",
        b"x-ratelimit-remaining-tokens": b"990",
        b"x-ratelimit-reset-tokens": b"12h0m0s",
        b"x-ratelimit-limit-tokens-day": b"1000",
        b"x-ratelimit-remaining-tokens-day": b"990",
        b"x-ratelimit-reset-tokens-day": b"12h0m0s",
        b"x-ratelimit-limit-group-money-month": b"10",
        b"x-ratelimit-remaining-group-money-month": b"9.9999",
        b"x-ratelimit-reset-group-money-month": b"84h0m0s",
    }


def test_money_is_that_of_tokens_and_gpus(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    key = desk.key(money_per_day=1.0)
    permit = desk.admit(key)
    assert permit.charge is not None
    permit.charge.record_engine_request(1, 100.0)
    permit.charge.leave(2, 3, 110.0)  # ten seconds of two GPUs, shared by two requests
    permit.finish(TokenCount(prompt=1_000_000, completion=500_000, cached=400_000), 0.0)
    day = desk.day_of(key)
    assert day.gpu_time == 10_000_000
    # 0.6 M at 1, 0.4 M at 0.1, 0.5 M at 4, and 10 s at 36 an hour.
    assert day.money == round((0.6 + 0.04 + 2.0 + 0.1) * 10**9)


def test_a_budget_of_money_refuses_a_model_without_a_price(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    with pytest.raises(Forbidden, match="has no price"):
        desk.admit(desk.key(money_per_day=1.0), "other")
    desk.admit(desk.key("free", tokens_per_day=1), "other")


def test_a_new_budget_begins_with_the_stored_usage_of_its_key(tmp_path: Path) -> None:
    today = Calendar.today().day
    stored = (
        UsageRow(today, "app", "m", 2, 10, 5, 0, 0, 0),
        UsageRow(today - 1, "app", "m", 4, 100, 50, 0, 1, 7),
        UsageRow(today, "other", "m", 9, 9, 9, 9, 9, 9),
    )
    desk = Desk(tmp_path, stored=stored)
    key = desk.key(requests_per_month=6)
    assert not desk.is_admitted(key)
    assert desk.day_of(key)[:2] == (2, 15)


def test_a_key_without_budgets_counts_for_none(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    assert desk.key().limit is None
    desk.book.groups = {"team": Allowance()}
    assert desk.key("member", "team").limit is None
    # A list of models asks no engine.
    permit = desk.limiter.admit(desk.key("lister", requests_per_day=1), "openai", 0.0)
    assert permit is not None
    assert permit.charge is None


def test_an_error_of_the_ledger_ends_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(tmp_path)
    permit = desk.admit(desk.key(requests_per_day=9))

    def fail(*_: object) -> None:
        raise FitserveError("the disk is full")

    monkeypatch.setattr(Ledger, "add", fail)
    permit.finish(TokenCount(1, 1), 0.0)
    assert isinstance(permit.charge, Charge)


def test_a_budget_that_is_removed_and_set_again_has_counted_meanwhile(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    for count, limit in enumerate((3, None, None), 1):
        key = desk.key(requests_per_day=limit)
        assert desk.is_admitted(key)
        assert desk.day_of(key).requests == count
    assert not desk.is_admitted(desk.key(requests_per_day=3))


def test_a_key_that_never_had_a_budget_counts_in_no_row(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.key(name="other", requests_per_day=3)
    assert desk.key().limit is None
