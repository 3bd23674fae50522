"""The admin API of measuring: POST /admin/calibrate."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from gateway.controller.orders import Orders
from gateway.controller.plan_preview import PlanPreview
from gateway.errors import Conflict, HostError, StoreError
from gateway.measuring.calibration.calibrator import Calibrated, Calibrator
from gateway.proxy.api.error_bodies import errors
from gateway.store.store import Store

router = APIRouter(prefix="/admin", tags=["admin"])


@router.post("/calibrate", responses=errors(Conflict, HostError, StoreError))
async def calibrate(request: Request) -> Calibrated:
    """Measure the GPUs that nobody uses; what was found is kept as facts. Takes ten seconds and
    more, and nothing is started on them meanwhile."""
    plan_preview: PlanPreview = request.app.state.plan_preview
    orders: Orders = request.app.state.orders
    store: Store = request.app.state.store
    calibrator: Calibrator = request.app.state.calibrator
    store.changeable()
    hardware = await plan_preview.hardware()
    with orders.set_apart([gpu.uuid for gpu in hardware.gpus]) as holders:
        found = await calibrator.measure(hardware, holders)
        await asyncio.to_thread(store.keep_measured, found.facts)
    return found
