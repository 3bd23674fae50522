"""CUDA that has begun is told from NVML, which opens the same devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

DRIVER = """
static int begun;
int cuInit(unsigned flags) { begun = 1; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return begun ? 0 : 3; }
"""
PROGRAM = """
import ctypes, sys
from gateway.hosts.process.prepared.inside.import_watch import begins_cuda, unforkable
print(begins_cuda(), unforkable())
driver = ctypes.CDLL(sys.argv[1])
print(begins_cuda(), unforkable())
driver.cuInit(0)
print(begins_cuda(), unforkable())
"""


def test_a_driver_that_is_only_loaded_survives_forks(tmp_path: Path) -> None:
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text(DRIVER)
    named = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["cc", *named, "-o", str(library), str(source)], check=True)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(library)],
        env=os.environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["False None", "False None", "True begins CUDA"]
