"""The admin API of the machines of a cluster."""

from __future__ import annotations

from fastapi import APIRouter, Request

from gateway.domain import MachineView, Value
from gateway.errors import HostError
from gateway.proxy.api.error_bodies import errors
from gateway.server.gateway_parts import gateway_of

router = APIRouter(prefix="/admin/machines", tags=["admin"])


class MachineList(Value):
    data: tuple[MachineView, ...]


@router.get("", responses=errors(HostError))
async def list_machines(request: Request) -> MachineList:
    """The machines of the cluster with their states and engines. Without a cluster there is
    none."""
    machines = gateway_of(request).host.machines
    return MachineList(data=() if machines is None else tuple(await machines.machine_views()))
