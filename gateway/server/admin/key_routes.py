"""The admin API of keys: make, list, revoke. A key is in the answer that makes it, and nowhere
after."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field

from gateway.domain import Value
from gateway.domain.grant import Grant
from gateway.errors import Conflict, NotFound, StoreError
from gateway.keys import FROM_SETTINGS, Scope
from gateway.proxy.access.auth import Keys
from gateway.proxy.access.keyring import Keyring
from gateway.proxy.api.error_bodies import errors

router = APIRouter(prefix="/admin/keys", tags=["keys"])


class KeyView(Grant):
    """`created_at` is None for a key of the settings."""

    created_at: float | None = None


class KeyList(Value):
    data: tuple[KeyView, ...]


class KeyMade(KeyView):
    key: str = Field(description="shown now and never again")


@router.post("", status_code=201, responses=errors(Conflict, StoreError))
async def make_key(request: Request, body: Grant) -> KeyMade:
    """Make a key. It is good at once."""
    keyring: Keyring = request.app.state.keyring
    key = await asyncio.to_thread(keyring.add, body)
    made = next(one for one in keyring.kept if one.grant.name == body.name)
    return KeyMade.model_validate(body.model_dump() | {"created_at": made.created_at, "key": key})


@router.get("")
async def list_keys(request: Request) -> KeyList:
    """All keys, those of the settings first."""
    keyring: Keyring = request.app.state.keyring
    keys: Keys = request.app.state.keys
    scopes: dict[str, tuple[Scope, ...]] = {"admin": ("admin",), "api": ("inference",)}
    fixed = [
        KeyView(name=name, scopes=scopes[name])
        for name in FROM_SETTINGS
        if name in keys.fixed_names
    ]
    made = [
        KeyView.model_validate(one.grant.model_dump() | {"created_at": one.created_at})
        for one in keyring.kept
    ]
    return KeyList(data=(*fixed, *made))


@router.delete("/{name}", responses=errors(NotFound, Conflict, StoreError))
async def remove_key(request: Request, name: str) -> dict[str, Any]:
    """Revoke one. It is good for nothing from now on; what it asked for until now is finished.
    `durable`: whether a restart knows that too; where
    the disk does not take it, that is tried again until it does."""
    keyring: Keyring = request.app.state.keyring
    return {
        "name": name,
        "state": "removed",
        "durable": await asyncio.to_thread(keyring.remove, name),
    }
