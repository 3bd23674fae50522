"""The budgets of created keys and their groups, in the control process.

A budget counts under the name of its key or group. So a new key of the same name goes on with the
usage of the former one. A budget without a row in the ledger begins with the stored usage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import date
from typing import NamedTuple

from gateway.domain.grant import Allowance, Grant
from gateway.keys import PERSON_PREFIX, UsageRow
from gateway.proxy.access.budgets import (
    MEASURES,
    PERIODS,
    PERSON_OWNER,
    UNITS,
    BudgetLimit,
    KeyBudget,
)
from gateway.proxy.access.ledger import Amounts, Calendar, Ledger, LedgerRows, Usage
from gateway.proxy.access.prices import Prices, money

StoredUsage = Callable[[int, int], Iterable[UsageRow]]
"""The usage from a first to a last day, by key and model."""
_MONTHS = 12


class BudgetUse(NamedTuple):
    """A budget with its usage."""

    budget: KeyBudget
    usage: Usage


class BudgetBook:
    """Gives keys their budgets. Only the keyring calls it, under its lock.

    groups: budgets by the name of the group.
    """

    def __init__(
        self,
        ledger: Ledger,
        prices: Prices,
        stored_usage: StoredUsage,
        person_allowance: Allowance | None = None,
    ) -> None:
        """person_allowance: the budget of each person; None: people have none."""
        self.person_allowance = person_allowance
        self.groups: Mapping[str, Allowance] = {}
        self.prices = prices
        self._ledger = ledger
        self._rows = LedgerRows(ledger)
        self._stored_usage = stored_usage

    def budgets_of(self, grant: Grant, grants: Collection[Grant]) -> tuple[KeyBudget, ...]:
        """The budgets that the requests of a key count for. grants: of all keys. Raises
        StoreError."""
        budgets = self._budgets(f"key {grant.name}", {grant.name}, grant.budget)
        if grant.group is not None:
            budgets += self.group_budget(grant.group, grants)
        return tuple(budgets)

    def person_budgets(
        self, name: str, groups: Collection[str], grants: Collection[Grant]
    ) -> tuple[KeyBudget, ...]:
        """The budgets that the requests of a person count for: of the person alone, and of each
        group of keys that has the name of a group of the identity. Raises StoreError.

        name: that of the person in lists.
        """
        owner = f"{PERSON_OWNER}{name.removeprefix(PERSON_PREFIX)}"
        budgets = self._budgets(owner, {name}, self.person_allowance)
        for group in sorted(self.groups.keys() & set(groups)):
            budgets += self.group_budget(group, grants)
        return tuple(budgets)

    def group_budget(self, name: str, grants: Iterable[Grant]) -> list[KeyBudget]:
        """The budget of a group. Raises StoreError."""
        owner = f"group {name}"
        budget = self.groups.get(name)
        if budget is None:
            return [KeyBudget(owner, 0, (), is_lost=True)]
        members = {grant.name for grant in grants if grant.group == name}
        return self._budgets(owner, members, budget)

    def use_of(self, budgets: Iterable[KeyBudget]) -> Iterator[BudgetUse]:
        """The budgets with their usage."""
        today = Calendar.today()
        for budget in budgets:
            if not budget.is_lost:
                yield BudgetUse(budget, self._ledger.read(budget.row, today))

    def record_warnings(self, budget: KeyBudget, bits: int) -> None:
        """Mark warnings as given, besides those from before. 0: none is given. Raises
        StoreError."""
        with self._ledger.lock(budget.row):
            today = Calendar.today()
            usage = self._ledger.read(budget.row, today)
            warnings = usage.warnings | bits if bits else 0
            self._ledger.write(budget.row, today, usage._replace(warnings=warnings))

    def set_rows_in_use(self, rows_in_use: Callable[[], Collection[int]]) -> None:
        """Keep these rows for their owners. rows_in_use: gives those that keys count in."""
        self._rows.rows_in_use = rows_in_use

    def _budgets(
        self, owner: str, keys: Collection[str], budget: Allowance | None
    ) -> list[KeyBudget]:
        """The budget of an owner. One without limits counts on where this month was counted: its
        limits may come back.

        keys: the names in the stored usage.
        """
        if budget is not None and (limits := build_limits(budget)):
            row = self._rows.row_of(owner, lambda today: self._seed(keys, today))
            return [KeyBudget(owner, row, limits, budget.warn_percent, budget.is_soft)]
        former_row = self._rows.find(owner)
        return [] if former_row is None else [KeyBudget(owner, former_row, ())]

    def _seed(self, keys: Collection[str], today: Calendar) -> Usage:
        """The stored usage of these keys in the present day and month."""
        day = Amounts()
        month = Amounts()
        for row in self._stored_usage(first_day(today), today.day):
            if row.key in keys:
                month = month.plus(cost := self._cost(row))
                day = day.plus(cost) if row.day == today.day else day
        return Usage(day, month)

    def _cost(self, row: UsageRow) -> Amounts:
        tokens = row.prompt_tokens + row.completion_tokens + row.estimated_tokens
        price = self.prices.find(row.model)
        counts = row.prompt_tokens + row.estimated_tokens, row.completion_tokens, row.cached_tokens
        return Amounts(row.requests, tokens, 0, money(price, *counts, 0) if price else 0)


def first_day(today: Calendar) -> int:
    """The first day of the month, counted like `today`."""
    year, month = divmod(today.month, _MONTHS)
    return (date(year, month + 1, 1) - date(1970, 1, 1)).days


def build_limits(budget: Allowance) -> tuple[BudgetLimit, ...]:
    """The limits of a budget in the ledger's units."""
    return tuple(
        BudgetLimit(measure, period, round(amount * UNITS[measure]))
        for period, period_name in enumerate(PERIODS)
        for measure, name in enumerate(MEASURES)
        if (amount := getattr(budget, f"{name}_per_{period_name}")) is not None
    )
