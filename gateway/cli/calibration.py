"""GPU measurements for `fitserve calibrate`: by the running gateway, or by this process without
one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from typing import Any

from gateway.cli.client import call
from gateway.cli.engine_inquiry import inquiry_host
from gateway.engines.common.speed.gpu_measurements import SECONDS
from gateway.errors import NotReady, SettingsError
from gateway.machine.gpu_watch import allowed_devices
from gateway.machine.probe import probe
from gateway.measuring.calibration.calibrator import CalibrationResult, Calibrator
from gateway.profiles.profiles import Profiles
from gateway.settings import Settings, load_settings
from gateway.store.data_folder import lock
from gateway.store.recovery import open_store


def run_calibration() -> dict[str, Any]:
    """The result in the form of the admin API. Raises FitserveError."""
    try:
        result: dict[str, Any] = call("POST", "/admin/calibrate")
    except NotReady:
        if "FITSERVE_URL" in os.environ:
            raise
        result = _measure_without_gateway(load_settings()).model_dump(mode="json")
    return result


def _measure_without_gateway(settings: Settings) -> CalibrationResult:
    """Measure here, with the data folder locked against a gateway. Engines of an earlier gateway
    count as processes on their GPUs."""
    try:
        lock_fd = lock(settings.data)
    except SettingsError as error:
        raise NotReady(
            f"{error.message} It does not answer, and may start engines on these GPUs.",
            hint="Set FITSERVE_URL and FITSERVE_KEY for that gateway.",
        ) from None
    try:
        store = open_store(settings.data / "fitserve.db")
        try:
            store.changeable()
            profiles = Profiles(settings.profiles_dir, data=settings.data)
            calibrator = Calibrator(inquiry_host(settings), profiles, settings.data / "asking")
            hardware = allowed_devices(settings.data, settings).mark(probe(settings.data))
            result = asyncio.run(calibrator.measure(hardware, {}))
            store.store_measurements(result.facts)
        finally:
            store.close()
    finally:
        os.close(lock_fd)
    return result


def fact_rows(facts: Iterable[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Rows of GPU, measured quantity, value and source."""
    rows = []
    for fact in facts:
        scope = fact["scope"]
        label = " ".join(
            [
                scope.get("what", "broken P2P"),
                *([f"of {int(scope['bytes']):,} bytes"] if "bytes" in scope else []),
            ]
        )
        rows.append(
            (scope["gpus"], label, value_text(scope.get("what", ""), fact["value"]), fact["source"])
        )
    return rows


def value_text(quantity: str, value: int | None) -> str:
    """The value with its unit."""
    if value is None or quantity == "peer_access":
        return "yes" if value else "no"
    if quantity in SECONDS:
        return f"{value / 1000:,.1f} us"
    return (
        f"{value / 1e9:,.1f} GB/s"
        if quantity in ("memory", "peer")
        else f"{value / 1e12:,.1f} TFLOP/s"
    )
