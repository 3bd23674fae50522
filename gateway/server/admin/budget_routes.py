"""The admin API of budgets: those of keys, and groups of keys with theirs."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field

from gateway.domain import Value
from gateway.domain.grant import Allowance, GroupName
from gateway.errors import BadRequest, Conflict, NotFound, StoreError
from gateway.proxy.access.budget_book import BudgetUse
from gateway.proxy.access.budgets import MEASURES, PERIODS, BudgetLimit, period_end
from gateway.proxy.api.error_bodies import errors
from gateway.server.gateway_parts import gateway_of

router = APIRouter(prefix="/admin", tags=["keys"])


class LimitUse(Value):
    """The usage of one limit."""

    measure: str = Field(description="requests, tokens, gpu_seconds or money")
    period: str = Field(description="day or month, of UTC")
    used: float
    limit: float
    ends_at: datetime = Field(description="when the next day or month begins")


class GroupView(Value):
    """A group of keys. used: of each limit of its budget."""

    name: GroupName
    budget: Allowance
    keys: tuple[str, ...]
    used: tuple[LimitUse, ...]


class GroupList(Value):
    data: tuple[GroupView, ...]
    currency: str = Field(description="currency of amounts of money; empty: not named")


@router.put("/keys/{name}/budget", responses=errors(NotFound, BadRequest, StoreError))
async def set_key_budget(request: Request, name: str, body: Allowance) -> dict[str, Any]:
    """Replace the budget of a key immediately. Its usage stays."""
    keyring = gateway_of(request).keyring
    await asyncio.to_thread(keyring.set_budget, name, None if body == Allowance() else body)
    return {"name": name, "budget": body}


@router.get("/key-groups")
async def list_groups(request: Request) -> GroupList:
    """The groups of keys, with the usage of their budgets."""
    gateway = gateway_of(request)
    keyring = gateway.keyring
    uses = uses_by_owner(await asyncio.to_thread(keyring.budget_uses))
    views = [
        GroupView(
            name=name,
            budget=budget,
            keys=tuple(key.grant.name for key in keyring.stored_keys if key.grant.group == name),
            used=uses.get(f"group {name}", ()),
        )
        for name, budget in sorted(keyring.groups.items())
    ]
    return GroupList(data=tuple(views), currency=gateway.serving.prices.currency)


@router.put("/key-groups/{name}", responses=errors(BadRequest, StoreError))
async def set_group(request: Request, name: GroupName, body: Allowance) -> dict[str, Any]:
    """Add a group, or replace the budget of one. The usage stays."""
    await asyncio.to_thread(gateway_of(request).keyring.set_group, name, body)
    return {"name": name, "budget": body}


@router.delete("/key-groups/{name}", responses=errors(NotFound, Conflict, StoreError))
async def remove_group(request: Request, name: str) -> dict[str, Any]:
    """Remove a group without keys."""
    await asyncio.to_thread(gateway_of(request).keyring.remove_group, name)
    return {"name": name, "state": "removed"}


def uses_by_owner(uses: list[BudgetUse]) -> dict[str, tuple[LimitUse, ...]]:
    """The usage of each limit, by `key NAME` or `group NAME`."""
    return {
        use.budget.owner: tuple(_limit_use(use, limit) for limit in use.budget.limits)
        for use in uses
    }


def _limit_use(use: BudgetUse, limit: BudgetLimit) -> LimitUse:
    return LimitUse(
        measure=MEASURES[limit.measure],
        period=PERIODS[limit.period],
        used=limit.quantity(limit.amount_in(use.usage)),
        limit=limit.quantity(limit.amount),
        ends_at=datetime.fromtimestamp(period_end(limit), UTC),
    )
