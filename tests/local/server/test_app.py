"""The gateway as a process: when its loop ends, it ends with an error, so that whoever supervises
it starts another one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.contract.process_harness import free_port
from tests.support.paths import ROOT
from tests.support.patience import hang_s

# `fitserve serve` whose loop ends a moment after it was up.
PROGRAM = """
import asyncio
from pathlib import Path, PosixPath
from gateway.__main__ import serve
from gateway.controller.loop import Loop

async def ends(self):
    while not {ending!r}.exists():
        await asyncio.sleep(0.01)
    raise RuntimeError("the loop of a test ends")

Loop.run = ends
serve()
"""


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_end_of_the_loop_is_the_end_of_the_process_and_an_error(
    tmp_path: Path, workers: str
) -> None:
    ending, port = tmp_path / "end", free_port()
    keep = {name: value for name, value in os.environ.items() if not name.startswith("FITSERVE_")}
    environment = {
        "FITSERVE_PORT": str(port),
        "FITSERVE_DATA_DIR": str(tmp_path / "data"),
        "FITSERVE_HOST_KIND": "process",
    }
    environment |= {"FITSERVE_WORKERS": workers, "FITSERVE_STOP_GRACE_S": "1"}
    program = [sys.executable, "-c", PROGRAM.format(ending=ending)]
    with subprocess.Popen(
        program,
        env={**keep, **environment},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            up = False
            with httpx.Client(
                base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=hang_s()
            ) as client:
                while not up and process.poll() is None:
                    try:
                        up = client.get("/healthz").status_code == 200
                    except httpx.HTTPError:
                        up = False
            ending.touch()
            output, _ = process.communicate(timeout=hang_s())
        finally:
            process.kill()
    assert up, output
    assert process.returncode == 1, output
    assert b"the control loop has ended" in output
    assert b"the loop of a test ends" in output
    assert b"Traceback" in output
    # Nobody is left to take connections.
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/healthz", trust_env=False, timeout=hang_s())
