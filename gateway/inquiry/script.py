"""The inquiry as one command for any Python of 3.9 or later: what runs inside the engine comes in on standard input.

Nothing is mounted or copied, so a container, a process and a gateway that is itself in a container ask alike.
"""

from __future__ import annotations

import io
import zipfile
from functools import cache
from pathlib import Path

_INSIDE = Path(__file__).parent / "inside"

# Reads `packed`, then runs it. Limits: a model that is built without weights needs neither memory nor files; whoever asked may be gone. Engines
# that serve go before it.
_BEGIN = """
import os, resource, runpy, signal, sys, tempfile
if len(sys.argv) > 1:
    os.dup2(os.open(sys.argv[1], os.O_RDONLY), 0)
signal.alarm(600)
os.nice(10)
for what, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 1 << 28), (resource.RLIMIT_DATA, 24 << 30)):
    resource.setrlimit(what, (most, most))
size = int(sys.stdin.buffer.readline())
folder = tempfile.mkdtemp()
path = os.path.join(folder, "inside.zip")
with open(path, "wb") as file:
    file.write(sys.stdin.buffer.read(size))
sys.path.insert(0, path)
runpy.run_module("inside", run_name="__main__", alter_sys=True)
"""


def command(python: str, *file: str) -> tuple[str, ...]:
    """What a host runs, without a shell. `packed`, then the document of questions, then the end: on its standard input, or in `file`."""
    return (python, "-c", _BEGIN, *file)


@cache
def packed() -> bytes:
    """The length of what runs inside on a line of its own, then that many bytes: a zip file, from which Python imports."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(_INSIDE.glob("*.py")):
            archive.writestr(zipfile.ZipInfo(f"inside/{path.name}"), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return b"%d\n" % buffer.tell() + buffer.getvalue()
