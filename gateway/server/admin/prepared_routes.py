"""The admin API of processes that have imported an engine, and fork the next ones."""

from __future__ import annotations

from fastapi import APIRouter, Request

from gateway.domain import PreparedView, Value
from gateway.errors import HostError
from gateway.proxy.api.error_bodies import errors
from gateway.server.gateway_parts import gateway_of

router = APIRouter(prefix="/admin/prepared", tags=["admin"])


class PreparedList(Value):
    data: tuple[PreparedView, ...]


@router.get("", responses=errors(HostError))
async def list_prepared_processes(request: Request) -> PreparedList:
    """The prepared processes with their memory. Engines in containers have none."""
    return PreparedList(data=await gateway_of(request).host.prepared_views())
