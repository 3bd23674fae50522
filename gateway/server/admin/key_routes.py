"""The admin API of keys: create, list, revoke. Only the answer to a creation contains the key."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field

from gateway.domain import Value
from gateway.domain.grant import Grant
from gateway.errors import BadRequest, Conflict, NotFound, StoreError
from gateway.keys import SETTINGS_KEYS, Scope
from gateway.proxy.api.error_bodies import errors
from gateway.server.admin.budget_routes import LimitUse, uses_by_owner
from gateway.server.gateway_parts import gateway_of

router = APIRouter(prefix="/admin/keys", tags=["keys"])


class KeyView(Grant):
    """A key without its secret. `created_at` is None for a key of the settings."""

    created_at: float | None = None
    used: tuple[LimitUse, ...] = Field(
        (), exclude_if=lambda rows: not rows, description="usage of each limit of its budget"
    )


class KeyList(Value):
    data: tuple[KeyView, ...]


class NewKey(KeyView):
    key: str = Field(description="shown only in this answer")


@router.post("", status_code=201, responses=errors(BadRequest, Conflict, StoreError))
async def make_key(request: Request, body: Grant) -> NewKey:
    """Create a key, which is valid immediately."""
    gateway = gateway_of(request)
    if body.is_recorded and gateway.serving.transcripts is None:
        raise BadRequest(
            "The key cannot be recorded: the gateway has no key that encrypts transcripts.",
            hint="Set FITSERVE_TRANSCRIPT_KEY_FILE and restart: docs/transcripts.md has the steps.",
            param="is_recorded",
        )
    keyring = gateway.keyring
    key = await asyncio.to_thread(keyring.add, body)
    created_key = next(
        stored_key for stored_key in keyring.stored_keys if stored_key.grant.name == body.name
    )
    return NewKey.model_validate(
        body.model_dump() | {"created_at": created_key.created_at, "key": key.reveal()}
    )


@router.get("")
async def list_keys(request: Request) -> KeyList:
    """All keys, those of the settings first."""
    gateway = gateway_of(request)
    keyring = gateway.keyring
    keys = gateway.serving.keys
    scopes: dict[str, tuple[Scope, ...]] = {"admin": ("admin",), "api": ("inference",)}
    fixed_keys = [
        KeyView(name=name, scopes=scopes[name])
        for name in SETTINGS_KEYS
        if name in keys.fixed_names
    ]
    uses = uses_by_owner(await asyncio.to_thread(keyring.budget_uses))
    created_keys = [
        KeyView.model_validate(
            key.grant.model_dump()
            | {"created_at": key.created_at, "used": uses.get(f"key {key.grant.name}", ())}
        )
        for key in keyring.stored_keys
    ]
    return KeyList(data=(*fixed_keys, *created_keys))


@router.delete("/{name}", responses=errors(NotFound, Conflict, StoreError))
async def remove_key(request: Request, name: str) -> dict[str, Any]:
    """Revoke a key immediately; its current requests are finished. `durable`: a restart keeps the
    key revoked. A full disk makes it false until a retry succeeds."""
    keyring = gateway_of(request).keyring
    return {
        "name": name,
        "state": "removed",
        "durable": await asyncio.to_thread(keyring.remove, name),
    }
