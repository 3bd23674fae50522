"""The CUDA compiler of an engine process, with its option to optimize one file on many cores.

FlashInfer compiles kernels when an engine first needs them, a module of a few files at a time. The
largest file decides: sampling took 80 s on one core of an H200 machine with FlashInfer 0.6.14. Its
variable for more options is part of each build, so starts with another value would build again.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

VARIABLE = "FLASHINFER_EXTRA_CUDAFLAGS"
OPTION = "--split-compile"
"""Option of nvcc. Its value is the number of threads; 0: one for each core."""
_DEFAULT_FOLDER = Path("/usr/local/cuda")
_HELP_S = 10.0


def build_variables(env: Mapping[str, str]) -> dict[str, str]:
    """The variable that lets kernels be compiled on all cores, for an engine with this environment.

    Empty: its compiler is missing or lacks the option, or the variable has a value.
    """
    compiler = find_compiler(env)
    if compiler is None or VARIABLE in env:
        return {}
    try:
        changed_ns = compiler.stat().st_mtime_ns
    except OSError:
        return {}
    return {VARIABLE: f"{OPTION}=0"} if _has_option(compiler, changed_ns) else {}


def find_compiler(env: Mapping[str, str]) -> Path | None:
    """The compiler that FlashInfer takes: get_cuda_path in flashinfer/jit/cpp_ext.py (0.6.14)."""
    folder = env.get("CUDA_HOME") or env.get("CUDA_PATH")
    if folder is None and (command := shutil.which("nvcc", path=env.get("PATH", ""))) is not None:
        return Path(command)
    compiler = Path(folder or _DEFAULT_FOLDER) / "bin/nvcc"
    return compiler if compiler.is_file() else None


@lru_cache
def _has_option(compiler: Path, _changed_ns: int) -> bool:
    """Whether the compiler's help names the option."""
    try:
        answer = subprocess.run(
            [compiler, "--help"], capture_output=True, text=True, timeout=_HELP_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return f"{OPTION} " in answer.stdout
