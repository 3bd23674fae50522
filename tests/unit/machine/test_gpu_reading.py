"""The present work of a GPU, as a scripted NVML tells it."""

from __future__ import annotations

import pytest

from gateway.machine.gpu_reading import GpuReading, read
from tests.support.fake_nvml import MIB, FakeNvml, gb10, two_3090


def read_card(nvml: FakeNvml, number: int = 0) -> GpuReading:
    nvml.nvmlInit()
    return read(nvml, nvml.nvmlDeviceGetHandleByIndex(number), number, None)


def test_a_card_tells_all_in_the_units_of_its_names() -> None:
    nvml = two_3090()
    nvml.cards[1].use, nvml.cards[1].temperature, nvml.cards[1].power = 87, 71, 342_500
    assert read_card(nvml, 1) == GpuReading(
        index=1,
        name="NVIDIA GeForce RTX 3090",
        use=0.87,
        used_bytes=319 * MIB,
        total_bytes=24576 * MIB,
        temperature_c=71,
        power_w=342.5,
        power_limit_w=350,
    )


def test_a_reading_that_a_card_lacks_is_unknown() -> None:
    gpu_reading = read_card(gb10())
    assert (gpu_reading.used_bytes, gpu_reading.total_bytes, gpu_reading.use) == (None, None, 0.0)
    nvml = two_3090()
    nvml.cards[0].use = nvml.cards[0].temperature = nvml.cards[0].power = nvml.cards[
        0
    ].power_limit = None
    gpu_reading = read_card(nvml)
    assert (
        gpu_reading.use,
        gpu_reading.temperature_c,
        gpu_reading.power_w,
        gpu_reading.power_limit_w,
    ) == (
        None,
        None,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [
        (0x0, ()),
        (0x1, ()),  # idle
        (0x4, ()),  # the power limit, which a busy card reaches
        (0x20 | 0x4, ("temperature",)),
        (0x40 | 0x8, ("hardware", "temperature")),
        (0x80, ("power supply",)),
    ],
)
def test_lowered_clocks_say_why(bits: int, reasons: tuple[str, ...]) -> None:
    nvml = two_3090()
    nvml.cards[0].throttles = bits
    assert read_card(nvml).throttled == reasons
