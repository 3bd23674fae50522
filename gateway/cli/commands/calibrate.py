"""`fitserve calibrate`: the running gateway measures, which knows what its engines use; without one
this process does."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from typing import Any

from gateway.cli.client import call
from gateway.cli.engine_inquiry import host_of
from gateway.engines.common.speed.measured import SECONDS
from gateway.errors import NotReady, SettingsError
from gateway.machine.gpu_watch import kept_here
from gateway.machine.probe import probe
from gateway.measuring.calibration.calibrator import Calibrated, Calibrator
from gateway.profiles.profiles import Profiles
from gateway.settings import Settings, load_settings
from gateway.store.data_folder import lock
from gateway.store.recovery import open_store


def asked() -> dict[str, Any]:
    """What was measured, as the admin API says it. Raises FitserveError."""
    try:
        found: dict[str, Any] = call("POST", "/admin/calibrate")
    except NotReady:
        if "FITSERVE_URL" in os.environ:
            raise
        found = _without_gateway(load_settings()).model_dump(mode="json")
    return found


def _without_gateway(settings: Settings) -> Calibrated:
    """Meanwhile no gateway begins on this data folder. What an earlier one left running shows as a
    process on its GPUs."""
    try:
        held = lock(settings.data)
    except SettingsError as error:
        raise NotReady(
            f"{error.message} It starts engines on these GPUs, and does not answer here.",
            hint="Set FITSERVE_URL (and FITSERVE_KEY) to it.",
        ) from None
    try:
        store = open_store(settings.data / "fitserve.db")
        try:
            store.changeable()
            profiles = Profiles(settings.profiles_dir, learned=settings.data / "learned")
            calibrator = Calibrator(host_of(settings), profiles, settings.data / "asking")
            hardware = kept_here(settings.data, settings.gpus, settings.ram_bytes).mark(
                probe(settings.data)
            )
            found = asyncio.run(calibrator.measure(hardware, {}))
            store.keep_measured(found.facts)
        finally:
            store.close()
    finally:
        os.close(held)
    return found


def rows(facts: Iterable[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """GPU, what, how much, by whom."""
    found = []
    for fact in facts:
        about = fact["scope"]
        what = " ".join(
            [
                about.get("what", "broken P2P"),
                *([f"of {int(about['bytes']):,} bytes"] if "bytes" in about else []),
            ]
        )
        found.append(
            (about["gpus"], what, said(about.get("what", ""), fact["value"]), fact["source"])
        )
    return found


def said(what: str, value: int | None) -> str:
    """In the unit that people use."""
    if value is None or what == "peer_access":
        return "yes" if value else "no"
    if what in SECONDS:
        return f"{value / 1000:,.1f} us"
    return (
        f"{value / 1e9:,.1f} GB/s" if what in ("memory", "peer") else f"{value / 1e12:,.1f} TFLOP/s"
    )
