"""The present state of a GPU by NVML: use, memory, temperature, power and throttling."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from gateway.domain import Value
from gateway.domain.base import Field
from gateway.machine.nvml import Nvml, decode_text

# Reasons of lowered clocks that are trouble. Source: nvml.h, nvmlClocksEventReasons. A busy card
# reaches its power limit (0x4), which is not a problem.
_THROTTLES = {0x8: "hardware", 0x20: "temperature", 0x40: "temperature", 0x80: "power supply"}


class GpuReading(Value):
    """The readings of a GPU. None: not reported."""

    index: int
    name: str = ""
    use: float | None = Field(
        None, description="part of the last moment in which a kernel ran, from 0 to 1"
    )
    used_bytes: int | None = None
    total_bytes: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    throttled: tuple[str, ...] = Field(
        (), description="why its clocks are lowered: temperature, power supply, hardware"
    )


def read(nvml: Nvml, handle: Any, index: int, name: str | None) -> GpuReading:
    """The readings of a card. name: from an earlier reading, or None."""
    import pynvml

    values: dict[str, Any] = {"index": index, "name": name or ""}
    refusals = suppress(pynvml.NVMLError)
    if name is None:
        with refusals:
            values["name"] = decode_text(nvml.nvmlDeviceGetName(handle))
    with refusals:
        values["use"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    with refusals:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        values["total_bytes"], values["used_bytes"] = memory.total, memory.used
    with refusals:
        values["temperature_c"] = float(
            nvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
        )
    with refusals:
        values["power_w"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
    with refusals:
        values["power_limit_w"] = nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
    with refusals:
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        values["throttled"] = tuple(
            sorted({reason for bit, reason in _THROTTLES.items() if reasons & bit})
        )
    return GpuReading(**values)
