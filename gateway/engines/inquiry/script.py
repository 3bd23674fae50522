"""An inquiry as one command for any Python from 3.9 on, with the code on standard input.

Nothing is mounted or copied, so containers, processes and a gateway in a container ask alike.
Standard input stays open as long as the caller lives. The end of standard input ends the inquiry,
so a killed gateway leaves none behind.
"""

from __future__ import annotations

import io
import zipfile
from functools import cache
from pathlib import Path

_GATEWAY = Path(__file__).parents[2]
_INSIDE = ("engines/inside", "engines/*/inside", "measuring/inside")

MAX_MEMORY = 8 << 30
"""Bytes: a model without weights takes 2 GiB, mostly for the engine's import.

A process gets twice as much, since its limit counts reserved memory too, such as the stack of a
thread for each core.
"""
MAX_INQUIRY_S = 600
"""An inquiry ends itself after these seconds, even if its caller is gone."""

# Reads `inside`, then the document of questions, then runs. Where memory is short, Linux ends an
# inquiry before any engine that serves.
_BEGIN = f"""
import io, os, resource, runpy, signal, sys, threading
try:
    with open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
except OSError:
    pass
signal.alarm({MAX_INQUIRY_S})
os.nice(10)
limits = {{
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_FSIZE: 1 << 28,
    resource.RLIMIT_DATA: {2 * MAX_MEMORY},
}}
for limited, most in limits.items():
    resource.setrlimit(limited, (most, most))
given = sys.stdin.buffer
inside = os.memfd_create("inside")
with open(inside, "wb", closefd=False) as file:
    file.write(given.read(int(given.readline())))
sys.stdin = io.TextIOWrapper(io.BytesIO(given.read(int(given.readline()))), "utf-8")
def end_with_parent():
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)
    os._exit(1)
threading.Thread(target=end_with_parent, daemon=True).start()
sys.path.insert(0, "/proc/self/fd/%d" % inside)
runpy.run_module("inside.engines.inside", run_name="__main__", alter_sys=True)
"""


def command(python: str) -> tuple[str, ...]:
    """The command that a host runs, without a shell, in its own session. Standard input gets
    `input_bytes`, and stays open."""
    return (python, "-c", _BEGIN)


def input_bytes(document: bytes) -> bytes:
    """The code and the document of questions, each after its length."""
    return pack() + b"%d\n" % len(document) + document


@cache
def pack() -> bytes:
    """The length of the code on its own line, then that many bytes of a zip file that Python
    imports from."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(inside().items()):
            archive.writestr(zipfile.ZipInfo(f"inside/{name}"), content, zipfile.ZIP_DEFLATED)
    return b"%d\n" % buffer.tell() + buffer.getvalue()


def inside() -> dict[str, bytes]:
    """The files that run inside an engine, by their paths below the package. The packages above
    them are empty."""
    files = {
        path.relative_to(_GATEWAY): path.read_bytes()
        for folder in _INSIDE
        for path in _GATEWAY.glob(f"{folder}/*.py")
    }
    packages = {folder / "__init__.py": b"" for path in files for folder in path.parent.parents}
    return {str(path): content for path, content in (packages | files).items()}
