"""`python -m tests.support.shared_gpus_gateway SNAPSHOT FOLDER [ungated]`: `fitserve serve` on the
machine of a hardware snapshot, whose GPUs
are pretended ones that engines share (pretended_gpus.py). ungated: engines start at any time, so
that a test sees the cost of that.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

from gateway.__main__ import serve
from gateway.controller.steps.start_gate import StartGate
from gateway.domain import GpuProcess, Hardware
from tests.support.pretended_gpus import PretendedGpu


async def at_once(*_: object) -> None: ...


def main() -> None:
    snapshot, folder, *options = sys.argv[1:]
    machine = Hardware.model_validate_json(Path(snapshot).read_bytes())

    def probe(*_: object, **__: object) -> Hardware:
        gpus = []
        for gpu in machine.gpus:
            gpu_state = PretendedGpu(Path(folder), gpu.uuid, gpu.total_bytes or 0)
            bytes_by_gpu = gpu_state.used_bytes()
            processes = tuple(
                GpuProcess(pid=pid, used_bytes=count) for pid, count in bytes_by_gpu.items()
            )
            gpus.append(
                gpu.evolve(
                    free_bytes=gpu_state.total - sum(bytes_by_gpu.values()), processes=processes
                )
            )
        return machine.evolve(gpus=tuple(gpus))

    with mock.patch("gateway.machine.gpu_watch.probe", probe):
        if not options:
            serve()
            return
        with (
            mock.patch.object(StartGate, "wait_for_turn", at_once),
            mock.patch.object(StartGate, "disturbance", return_value=""),
        ):
            serve()


if __name__ == "__main__":
    main()
