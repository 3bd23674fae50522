"""A GPU that was named by its number stays the GPU of a model, whatever the driver calls it after
the next boot."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from gateway.cli.demo.checkpoint import make_model
from tests.e2e.scripted import GPU_ENGINE, engines, gpu_gateway
from tests.support.makers import machine


def test_a_model_keeps_its_gpu_when_the_numbers_change(tmp_path: Path) -> None:
    hardware, snapshot = machine("2x3090"), tmp_path / "machine.json"
    first, second = hardware.gpus
    make_model(tmp_path / "demo")
    with contextlib.closing(gpu_gateway(tmp_path, hardware)) as gateway:
        gateway.start()
        outcome = gateway.cli(
            "add", "m", str(tmp_path / "demo"), "--engine", GPU_ENGINE, "--gpu", "1", "--wait"
        )
        assert outcome.returncode == 0, outcome.stderr + gateway.log.read_text()[-3000:]
        view = gateway.show("m")
        assert (view["wish"]["gpus"], view["plan"]["gpus"]) == ([second.uuid], [second.uuid])
        result = gateway.cli("show", "m").stdout
        assert f"may use GPU 1 ({second.uuid})" in result
        assert f"planned on GPU 1 ({second.uuid})" in result

        gateway.kill()
        for pid in (pid for pids in engines(gateway).values() for pid in pids):
            os.kill(pid, signal.SIGKILL)
        renumbered_hardware = hardware.evolve(gpus=(second.evolve(index=0), first.evolve(index=1)))
        snapshot.write_text(renumbered_hardware.model_dump_json())
        gateway.start()
        assert gateway.until("m", "ready")["plan"]["gpus"] == [second.uuid]
        assert f"may use GPU 0 ({second.uuid})" in gateway.cli("show", "m").stdout
        # The numbers of a snapshot are its own, and a missing number is refused.
        unknown_result = gateway.cli("set", "m", "--gpu", "7")
        assert (
            unknown_result.returncode != 0,
            "This machine has no GPU 7" in unknown_result.stderr,
        ) == (
            True,
            True,
        ), unknown_result.stderr
