"""The admin API of the machines of a cluster."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import Field

from gateway.domain import MachineView, NodeLink, Value
from gateway.errors import HostError
from gateway.proxy.api.error_bodies import errors
from gateway.server.gateway_parts import gateway_of

router = APIRouter(prefix="/admin/machines", tags=["admin"])


class MachineList(Value):
    data: tuple[MachineView, ...]
    links: tuple[NodeLink, ...] = Field(
        (), description="networks between machines that one engine could span"
    )


@router.get("", responses=errors(HostError))
async def list_machines(request: Request) -> MachineList:
    """The machines of the cluster with their states and engines, and the networks between them.
    Without a cluster there is none."""
    gateway = gateway_of(request)
    machines = gateway.host.machines
    networks = gateway.networks
    if machines is None or networks is None:
        return MachineList(data=())
    return MachineList(data=tuple(await machines.machine_views()), links=tuple(networks.links))
