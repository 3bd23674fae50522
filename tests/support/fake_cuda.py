"""NVIDIA's driver without a GPU: a real shared library, loaded by its real name, that works on the
memory of the host (fake_cuda.c)."""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def fake_cuda(folder: Path, devices: int, fault: str = "") -> Path:
    """A folder for LD_LIBRARY_PATH. fault: WRONG, CRASH or STUCK, as the source has it."""
    folder.mkdir()
    definitions = [
        f"-DDEVICES={devices}",
        *(
            f"-D{fault_name}={int(fault_name == fault)}"
            for fault_name in ("WRONG", "CRASH", "STUCK")
        ),
    ]
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", *definitions, "-o", folder / "libcuda.so.1", SOURCE],
        check=True,
    )
    return folder
