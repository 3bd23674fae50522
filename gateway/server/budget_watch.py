"""Events of budgets that are nearly spent, or spent: one for each limit, day and month."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from gateway.controller.events.event_log import EventLog
from gateway.domain.facts import Event
from gateway.errors import StoreError
from gateway.logging import Logger
from gateway.proxy.access.budget_book import BudgetUse
from gateway.proxy.access.budgets import MEASURES, PERIODS, BudgetLimit
from gateway.proxy.access.keyring import Keyring
from gateway.supervision import SupervisedTask

log = Logger("fitserve.budgets")

_LOOK_S = 2.0


class BudgetWatch:
    """Looks at the budgets of all keys and groups. A gateway without budgets reads nothing."""

    def __init__(self, keyring: Keyring, events: EventLog) -> None:
        self._keyring = keyring
        self._events = events
        self._watching = SupervisedTask(self._look_at_budgets, "watching budgets")

    async def close(self) -> None:
        await self._watching.close()

    async def _look_at_budgets(self) -> float:
        if self._keyring.has_budgets:
            self._events.append(await asyncio.to_thread(self._report))
        return _LOOK_S

    def _report(self) -> list[Event]:
        """The events that are due, which are marked as sent."""
        events: list[Event] = []
        for use in self._keyring.budget_uses():
            due_events = list(_due_events(use))
            if not due_events:
                continue
            try:
                self._keyring.record_warnings(use.budget, sum(bit for bit, _ in due_events))
            except StoreError as error:
                log.warning("a warning of a budget could not be noted", error=str(error))
                continue
            events += [event for _, event in due_events]
        return events


def _due_events(use: BudgetUse) -> Iterator[tuple[int, Event]]:
    """The events of a budget, with the bits that mark them as sent."""
    budget, usage = use
    for limit in budget.limits:
        amount = limit.amount_in(usage)
        if amount >= limit.amount and not usage.warnings & limit.exhaustion_bit:
            bits = limit.exhaustion_bit | (limit.warning_bit & ~usage.warnings)
            yield bits, _event("budget.exhausted", use, limit)
        elif budget.is_warned(limit, usage) and not usage.warnings & (
            limit.warning_bit | limit.exhaustion_bit
        ):
            yield limit.warning_bit, _event("budget.warning", use, limit)


def _event(kind: str, use: BudgetUse, limit: BudgetLimit) -> Event:
    owner, name = use.budget.owner.split(" ", 1)
    return Event.model_validate(
        {
            "at": time.time(),
            "kind": kind,
            "words": f"The {owner} {name} has used {limit.usage_text(use.usage)}.",
            "data": {
                owner: name,
                "measure": MEASURES[limit.measure],
                "period": PERIODS[limit.period],
                "used": limit.quantity(limit.amount_in(use.usage)),
                "limit": limit.quantity(limit.amount),
            },
        }
    )
