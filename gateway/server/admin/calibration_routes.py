"""The admin API of calibration: POST /admin/calibrate."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request

from gateway.errors import Conflict, HostError, StoreError
from gateway.measuring.calibration.calibrator import CalibrationResult
from gateway.proxy.api.error_bodies import errors
from gateway.server.gateway_parts import gateway_of

router = APIRouter(prefix="/admin", tags=["admin"])


@router.post("/calibrate", responses=errors(Conflict, HostError, StoreError))
async def calibrate(request: Request) -> CalibrationResult:
    """Measure all unused GPUs and store the results as facts. The measurement takes ten seconds or
    more, and no engine starts on these GPUs meanwhile."""
    gateway = gateway_of(request)
    plan_preview = gateway.loop.plan_preview
    owner_commands = gateway.loop.owner_commands
    store = gateway.store
    calibrator = gateway.calibrator
    store.changeable()
    hardware = await plan_preview.hardware()
    with owner_commands.reserve_gpus([gpu.uuid for gpu in hardware.gpus]) as holders:
        calibrated = await calibrator.measure(hardware, holders)
        await asyncio.to_thread(store.store_measurements, calibrated.facts)
    return calibrated
