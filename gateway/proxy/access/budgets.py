"""Budgets of keys and groups: requests, tokens, GPU seconds and money, of a day and of a month.

A request is counted, with the estimated tokens of its prompt, before an engine is asked. So each
answer that a client has is counted, also after a kill. Tokens that the answer reports, GPU seconds
and money follow at its end. A spent budget refuses further requests. A request in time may exceed
it, as its answer's length is not known.

GPU seconds are the seconds at an engine, times its GPUs, by the number of requests there.
"""

from __future__ import annotations

import calendar
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from gateway.errors import FitserveError, Forbidden, QuotaExhausted
from gateway.proxy.access.ledger import (
    GPU_UNITS,
    MONEY_UNITS,
    NO_AMOUNTS,
    Amounts,
    Calendar,
    Ledger,
    Usage,
)
from gateway.proxy.access.prices import Prices, money

log = logging.getLogger("fitserve.budgets")

# The order is that of `Amounts`; the units are those of the ledger.
MEASURES = ("requests", "tokens", "gpu_seconds", "money")
UNITS = (1, 1, GPU_UNITS, MONEY_UNITS)
PERIODS = ("day", "month")
# Begin of the owner of a person's budget.
PERSON_OWNER = "user "
WARNING_HEADER = b"x-fitserve-budget-warning"
_MONEY = MEASURES.index("money")
# Units of the headers that OpenAI's clients read.
_COMMON_UNITS = ("requests", "tokens")
_DAY_S = 86_400
# Parts of a unit of money in headers.
_PARTS = 10**4


@dataclass(frozen=True, slots=True)
class BudgetLimit:
    """The most of one measure in one period. amount: in units of the ledger.

    measure, period: places in MEASURES and PERIODS.
    """

    measure: int
    period: int
    amount: int

    @property
    def name(self) -> str:
        """Such as `tokens-day`."""
        return f"{MEASURES[self.measure].replace('_', '-')}-{PERIODS[self.period]}"

    @property
    def warning_bit(self) -> int:
        return 1 << (8 * self.period + self.measure)

    @property
    def exhaustion_bit(self) -> int:
        return self.warning_bit << len(MEASURES)

    def amount_in(self, usage: Usage) -> int:
        return (usage.day, usage.month)[self.period][self.measure]

    def number(self, amount: int) -> bytes:
        """An amount of the measure for programs, rounded down."""
        if (unit := UNITS[self.measure]) == 1:
            return b"%d" % amount
        return f"{amount * _PARTS // unit / _PARTS:.4f}".rstrip("0").rstrip(".").encode()

    def quantity(self, amount: int) -> float:
        """An amount in the measure's own unit."""
        unit = UNITS[self.measure]
        return amount if unit == 1 else amount / unit

    def usage_text(self, usage: Usage) -> str:
        """The used part, such as `80 of 100 tokens of this day`."""
        used_text, limit_text = map(self.describe, (self.amount_in(usage), self.amount))
        return f"{used_text} of {limit_text} {_measure(self)} of this {PERIODS[self.period]}"

    def describe(self, amount: int) -> str:
        """An amount of the measure for people."""
        unit = UNITS[self.measure]
        return f"{amount:,}" if unit == 1 else f"{amount / unit:,.2f}".removesuffix(".00")


@dataclass(frozen=True, slots=True)
class KeyBudget:
    """A budget that a key's requests count for.

    owner: the text for people, such as `key app`.
    row: the row of the ledger.
    is_soft: a spent budget refuses nothing.
    is_lost: its limits are not known any more.
    """

    owner: str
    row: int
    limits: tuple[BudgetLimit, ...]
    warn_percent: int = 80
    is_soft: bool = False
    is_lost: bool = False

    def is_warned(self, limit: BudgetLimit, usage: Usage) -> bool:
        """Whether the usage has reached the part of the limit that warns."""
        return 100 * limit.amount_in(usage) >= self.warn_percent * limit.amount


class Quota(NamedTuple):
    """A limit of requests or tokens, for headers.

    unit: requests or tokens.
    full_s: seconds until all of it is there.
    """

    unit: str
    size: int
    remaining: int
    full_s: float


class TokenCount(NamedTuple):
    """Tokens of a request. cached: those of the prompt that came from a cache."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    @property
    def total(self) -> int:
        return self.prompt + self.completion


class Charge:
    """The cost of one request to its budgets, from its start to its end."""

    __slots__ = (
        "_admission",
        "_asked_at",
        "_gpu_time",
        "_in_flight",
        "_reserved_on",
        "budgets",
        "model",
        "reservation",
    )

    def __init__(
        self,
        admission: BudgetAdmission,
        budgets: Sequence[KeyBudget],
        model: str,
        reservation: Amounts,
    ) -> None:
        """reservation: amounts that were added to the budgets already."""
        self._admission = admission
        self._reserved_on = Calendar.today()
        self.budgets = budgets
        self.model = model
        self.reservation = reservation
        self._gpu_time = 0
        self._asked_at = 0.0
        self._in_flight = 1

    def record_engine_request(self, in_flight: int, now: float) -> None:
        """Note that an engine is asked. in_flight: requests at the engine, this one included."""
        self._asked_at = now
        self._in_flight = in_flight

    def leave(self, gpus: int, in_flight: int, now: float) -> None:
        """Count the time at an engine with that many GPUs."""
        sharers = max(1.0, (self._in_flight + in_flight) / 2)
        self._gpu_time += round((now - self._asked_at) * GPU_UNITS * gpus / sharers)

    def settle(self, count: TokenCount, *, has_reached_engine: bool) -> None:
        """Replace the reservation cost by the real one, which is nothing without an engine."""
        price = self._admission.prices.find(self.model)
        cost = NO_AMOUNTS
        if has_reached_engine:
            cost = Amounts(
                1,
                count.total,
                self._gpu_time,
                0 if price is None else money(price, *count, self._gpu_time),
            )
        self._admission.add(self.budgets, cost, self.reservation, self._reserved_on)

    def headers(self) -> Iterator[tuple[bytes, bytes, bytes, float]]:
        """Each limit: its name, amount and remaining amount, and the seconds until it is full."""
        today = Calendar.today()
        now = time.time()
        for budget in self.budgets:
            usage = self._admission.ledger.read(budget.row, today)
            prefix = "" if budget.owner.startswith("key ") else "group-"
            for limit in budget.limits:
                remaining = max(0, limit.amount - limit.amount_in(usage))
                amounts = limit.number(limit.amount), limit.number(remaining)
                name = f"{prefix}{limit.name}".encode()
                yield name, *amounts, period_end(limit) - now

    def quotas(self) -> Iterator[Quota]:
        """The limits of requests and tokens that refuse a request once they are spent."""
        today = Calendar.today()
        now = time.time()
        for budget in self.budgets:
            if budget.is_soft:
                continue
            usage = self._admission.ledger.read(budget.row, today)
            for limit in budget.limits:
                unit = MEASURES[limit.measure]
                if unit in _COMMON_UNITS:
                    remaining = max(0, limit.amount - limit.amount_in(usage))
                    yield Quota(unit, limit.amount, remaining, period_end(limit) - now)

    def warning(self) -> str:
        """The limits that are used up to the part that warns; "": none."""
        today = Calendar.today()
        return "; ".join(
            f"{budget.owner} has used {limit.usage_text(usage)}"
            for budget in self.budgets
            for usage in (self._admission.ledger.read(budget.row, today),)
            for limit in budget.limits
            if budget.is_warned(limit, usage)
        )


class BudgetAdmission:
    """Admits requests to budgets. Only the event loop that serves requests calls it."""

    def __init__(self, ledger: Ledger, prices: Prices | None = None) -> None:
        self.ledger = ledger
        self.prices = prices or Prices()

    def admit(self, budgets: Sequence[KeyBudget], model: str, prompt_tokens: int) -> Charge:
        """A request of a key, counted. prompt_tokens: estimated. Raises QuotaExhausted, Forbidden,
        StoreError."""
        price = self.prices.find(model)
        if price is None and any(
            limit.measure == _MONEY for budget in budgets for limit in budget.limits
        ):
            raise no_price_error(model)
        cost = Amounts(1, prompt_tokens)
        if price is not None:
            cost = cost._replace(money=money(price, prompt_tokens, 0, 0, 0))
        charged_budgets: list[KeyBudget] = []
        try:
            for budget in budgets:
                self._admit(budget, cost)
                charged_budgets.append(budget)
        except FitserveError:
            self.add(charged_budgets, NO_AMOUNTS, cost, Calendar.today())
            raise
        return Charge(self, budgets, model, cost)

    def add(
        self,
        budgets: Sequence[KeyBudget],
        cost: Amounts,
        reservation: Amounts,
        reserved_on: Calendar,
    ) -> None:
        """Replace a reservation in budgets whose requests are under way, which no error may end.

        reserved_on: the day of the reservation, which a new day or month does not contain.
        """
        today = Calendar.today()
        difference = cost.minus(reservation)
        day_cost = difference if today.day == reserved_on.day else cost
        month_cost = difference if today.month == reserved_on.month else cost
        for budget in budgets:
            try:
                self.ledger.add(budget.row, today, day_cost, month_cost)
            except FitserveError as error:
                log.error("%s: %s", budget.owner, error)  # noqa: TRY400

    def _admit(self, budget: KeyBudget, cost: Amounts) -> None:
        if budget.is_lost:
            raise lost_budget_error(budget)
        today = Calendar.today()
        with self.ledger.lock(budget.row):
            usage = self.ledger.read(budget.row, today)
            if not budget.is_soft:
                for limit in budget.limits:
                    if limit.amount_in(usage) >= limit.amount:
                        raise exhaustion_error(budget, limit)
            self.ledger.write(
                budget.row,
                today,
                usage._replace(day=usage.day.plus(cost), month=usage.month.plus(cost)),
            )


def period_end(limit: BudgetLimit) -> float:
    """Unix time of the end of the present day or month of UTC."""
    now = time.time()
    if PERIODS[limit.period] == "day":
        return (int(now) // _DAY_S + 1) * _DAY_S
    date = time.gmtime(now)
    days = calendar.monthrange(date.tm_year, date.tm_mon)[1]
    return datetime(date.tm_year, date.tm_mon, days, tzinfo=UTC).timestamp() + _DAY_S


def _measure(limit: BudgetLimit) -> str:
    return MEASURES[limit.measure].replace("gpu_", "GPU ")


def _budget_setting(budget: KeyBudget) -> str:
    """The command or setting of a budget."""
    is_of_person = budget.owner.startswith(PERSON_OWNER)
    return "FITSERVE_PERSON_BUDGET" if is_of_person else "`fitserve keys budget`"


def exhaustion_error(budget: KeyBudget, limit: BudgetLimit) -> QuotaExhausted:
    end = datetime.fromtimestamp(period_end(limit), UTC).strftime("%Y-%m-%d %H:%M UTC")
    period = PERIODS[limit.period]
    return QuotaExhausted(
        f"The {budget.owner} has used its {limit.describe(limit.amount)} {_measure(limit)} of this"
        f" {period}.",
        hint=f"The next {period} begins at {end}. The operator raises the budget with"
        f" {_budget_setting(budget)}.",
    )


def no_price_error(model: str) -> Forbidden:
    return Forbidden(
        f"The model '{model}' has no price, and the key has a budget of money.",
        hint="The operator adds the model to the file of FITSERVE_PRICES.",
    )


def lost_budget_error(budget: KeyBudget) -> Forbidden:
    return Forbidden(
        f"The budget of the {budget.owner} is not known any more.",
        hint=f"The operator sets it with {_budget_setting(budget)}.",
    )
