"""Changes that a gateway acknowledged, compared with the state that it and its machine show."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Literal, NamedTuple

Entry = tuple[Literal["models", "keys"], str]


class ModelOrder(NamedTuple):
    """The acknowledged wish for a model. max_context: tokens."""

    max_context: int | None = None
    stopped: bool = False


class KeyOrder(NamedTuple):
    """A key that exists."""


Order = ModelOrder | KeyOrder


class Ledger:
    """Orders of writers by entry. Each entry belongs to one writer; None: the entry is absent."""

    def __init__(self) -> None:
        self._acknowledged: dict[Entry, Order | None] = {}
        self._unanswered: dict[Entry, Order | None] = {}
        self._changes: dict[Entry, int] = {}
        self._asked_at: dict[Entry, float] = {}
        self.count = 0
        """Acknowledged changes."""
        self.denials: list[str] = []
        """Refusals that contradict an acknowledged change."""

    def order(self, entry: Entry) -> Order | None:
        return self._acknowledged.get(entry)

    def is_unsure(self, entry: Entry) -> bool:
        """Whether a change has no answer yet, or never got one."""
        return entry in self._unanswered

    def changes(self, entry: Entry) -> int:
        """The number of changes that were asked for."""
        return self._changes.get(entry, 0)

    def asked_at(self, entry: Entry) -> float:
        """Unix time of the last change that was asked for."""
        return self._asked_at.get(entry, 0.0)

    def begin(self, entry: Entry, order: Order | None) -> None:
        """A change was asked for."""
        self._asked_at[entry] = time.time()
        self._unanswered[entry] = order
        self._changes[entry] = self.changes(entry) + 1

    def acknowledge(self, entry: Entry) -> None:
        self._acknowledged[entry] = self._unanswered.pop(entry)
        self.count += 1

    def refuse(self, entry: Entry, denial: str = "") -> None:
        """Nothing was changed. denial: the words of a refusal that an acknowledged change rules
        out."""
        del self._unanswered[entry]
        if denial:
            self.denials.append(f"{entry[1]}: {denial}")

    def losses(self, shown_orders: Mapping[Entry, Collection[Order]]) -> list[str]:
        """The acknowledged changes that are not shown.

        shown_orders: the orders that the state of each existing entry agrees with. An entry whose
        change got no answer may be in either state.
        """
        losses_of_entry = []
        for entry in sorted({*self._acknowledged, *self._unanswered, *shown_orders}):
            acknowledged = self._acknowledged.get(entry)
            allowed = {acknowledged, self._unanswered.get(entry, acknowledged)}
            orders: Collection[Order | None] = shown_orders.get(entry, (None,))
            if not allowed.intersection(orders):
                losses_of_entry.append(
                    f"{entry[1]}: acknowledged {acknowledged}, shown {sorted(orders, key=str)}"
                )
        return losses_of_entry

    def settle(self, shown_orders: Mapping[Entry, Collection[Order]]) -> None:
        """Take the shown state for true where no answer told it: no change is under way."""
        for entry in {*self._acknowledged, *self._unanswered, *shown_orders}:
            orders: Collection[Order | None] = shown_orders.get(entry, (None,))
            order = self._unanswered.pop(entry, self._acknowledged.get(entry))
            if order not in orders:
                order = next(iter(orders))
            self._acknowledged[entry] = order


class LiveModel(NamedTuple):
    """Instances of a model whose attempts have not ended, and how many may run at once."""

    instances: frozenset[str]
    copies: int


class Strays(NamedTuple):
    """Engines that run and should not."""

    orphans: frozenset[str]
    twins: frozenset[str]


def strays(running: Mapping[str, Collection[int]], models: Iterable[LiveModel]) -> Strays:
    """Engines of no live attempt, and engines of which more run than may.

    running: first processes by instance. A second first process of an instance is a twin.
    """
    live = [*models]
    instances = frozenset[str]().union(*(model.instances for model in live))
    twins = {name for name, pids in running.items() if len(pids) > 1}
    for model in live:
        up = model.instances & running.keys()
        if len(up) > model.copies:
            twins |= up
    return Strays(frozenset(running) - instances, frozenset(twins))
