"""The admin API of knowledge bundles: profiles of engines, failures and cards without a release."""

from __future__ import annotations

from fastapi import APIRouter, Request

from gateway.errors import BadRequest, Conflict, Forbidden, NotReady, SettingsError, StoreError
from gateway.proxy.api.error_bodies import errors
from gateway.server.gateway_parts import gateway_of
from gateway.server.knowledge_keeper import KnowledgeView

router = APIRouter(prefix="/admin/knowledge", tags=["knowledge"])
_ARCHIVE = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


@router.get("")
async def show_knowledge(request: Request) -> KnowledgeView:
    """The knowledge bundle in use, the one before it, and the trusted keys."""
    return await gateway_of(request).knowledge.view()


@router.post(
    "",
    responses=errors(BadRequest, Forbidden, Conflict, SettingsError, StoreError, NotReady),
    openapi_extra=_ARCHIVE,
)
async def update_knowledge(request: Request) -> KnowledgeView:
    """Take a signed bundle, whose profiles are used from now on. Engines keep running."""
    gateway = gateway_of(request)
    gateway.store.changeable()
    return await gateway.knowledge.update(await request.body())


@router.post("/rollback", responses=errors(Conflict, StoreError))
async def roll_knowledge_back(request: Request) -> KnowledgeView:
    """Return to the bundle before this one, or to the shipped profiles."""
    gateway = gateway_of(request)
    gateway.store.changeable()
    return await gateway.knowledge.roll_back()
