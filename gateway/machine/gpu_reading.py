"""What a GPU does now, as NVML tells: use, memory, temperature, power, and why its clocks are lower
than they could be. What is not told is None."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from pydantic import Field

from gateway.domain import Value
from gateway.machine.nvml import Nvml, text_of

# What a card that is too hot or badly fed does; source: nvml.h, nvmlClocksEventReasons. A power
# limit that is reached (0x4) is what a busy card does, and no trouble.
_THROTTLES = {0x8: "hardware", 0x20: "temperature", 0x40: "temperature", 0x80: "power supply"}


class GpuReading(Value):
    index: int
    name: str = ""
    use: float | None = Field(None, description="of the last moment the part in which a kernel ran")
    used_bytes: int | None = None
    total_bytes: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    throttled: tuple[str, ...] = Field(
        (), description="why its clocks are lowered: temperature, power supply, hardware"
    )


def read(nvml: Nvml, handle: Any, index: int, name: str | None) -> GpuReading:
    """name: where it is known already."""
    import pynvml

    told: dict[str, Any] = {"index": index, "name": name or ""}
    refused = suppress(pynvml.NVMLError)
    if name is None:
        with refused:
            told["name"] = text_of(nvml.nvmlDeviceGetName(handle))
    with refused:
        told["use"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    with refused:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        told["total_bytes"], told["used_bytes"] = memory.total, memory.used
    with refused:
        told["temperature_c"] = float(
            nvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
        )
    with refused:
        told["power_w"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
    with refused:
        told["power_limit_w"] = nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
    with refused:
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        told["throttled"] = tuple(sorted({why for bit, why in _THROTTLES.items() if reasons & bit}))
    return GpuReading(**told)
