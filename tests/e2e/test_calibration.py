"""A real engine's torch measures: the lines that measure GPUs, on this machine's CPU, which stands
for three of them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from gateway.domain import EngineRef
from gateway.hosts.process.host import ProcessHost
from gateway.measuring.calibration.gpu_set import GpuSet, gpu_sets
from gateway.measuring.calibration.measurement import Measurement, document, read_measurement
from tests.e2e.conftest import ENGINE
from tests.support.makers import machine
from tests.support.patience import HANG_S, hang_s

pytestmark = pytest.mark.engine
SMALL: dict[str, object] = {
    "device": "cpu",
    "gpus": None,
    "copy_bytes": 1 << 18,
    "matmul": 64,
    "reduce_bytes": [1024, 65536],
    "sample_s": 0.0005,
}
SMALL |= {"part_s": HANG_S, "limit_s": HANG_S}


def test_torch_measures_each_gpu_alone_and_all_together(engines: Path, tmp_path: Path) -> None:
    (tmp_path / "engines").symlink_to(engines)
    kind, _, version = ENGINE.partition("==")
    hardware = machine("8xh100")
    (three,) = gpu_sets(hardware.gpus[:3], hardware.links)

    async def stored_measurement(gpu_set: GpuSet) -> Measurement:
        data = json.dumps(json.loads(document(gpu_set, "torch")) | SMALL).encode()
        async with asyncio.timeout(hang_s()):
            lines = [
                line
                async for line in ProcessHost(tmp_path).run_inquiry(
                    EngineRef(kind=kind, version=version), data
                )
            ]
        return read_measurement(lines, len(gpu_set.gpus))

    measurement = asyncio.run(stored_measurement(three))
    assert measurement.problems == ()
    assert (measurement.software or "").startswith("torch 2.")
    assert all(number.value > 0 for number in measurement.numbers)
    kinds = ["memory", "launch", "bfloat16", "int8"]
    two = ["peer_access", "peer_latency", "peer"]
    assert Counter(
        (number.quantity, number.gpus, number.bytes) for number in measurement.numbers
    ) == Counter(
        [(measure, (rank,), 0) for measure in kinds for rank in range(3)]
        + [(measure, (0, 1), 0) for measure in two]
        + [("all_reduce", group, size) for group in ((0, 1), (0, 1, 2)) for size in (1024, 65536)]
    )
