"""Budgets of keys, and a ledger of their usage."""

from __future__ import annotations

from pathlib import Path

from gateway.keys import UsageRow
from gateway.proxy.access.budget_book import BudgetBook
from gateway.proxy.access.ledger import Ledger
from gateway.proxy.access.prices import Prices
from gateway.store.store import Store


def budget_book(store: Store, data: Path, prices: Prices | None = None) -> BudgetBook:
    """The budgets of a gateway with this store and data folder."""

    def stored_usage(first: int, last: int) -> list[UsageRow]:
        return store.usage.sums(first, last, ("day", "key", "model"), None, None)

    return BudgetBook(Ledger(data), prices or Prices(), stored_usage)
