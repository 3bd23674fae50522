"""Instructions of a request and of a chunk in user mode, under callgrind.

    python benchmarks/proxies/counts.py [--only nginx,fitserve] [--before TREE]

Counts do not depend on other work of the machine. valgrind comes from the system's packages. The
time of a request is this and the kernel's part: 2 reads and 2 writes for both (`strace -c -f`). A
chunk comes alone, 20 streams side by side. The 102 events of a stream share its start.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

import parts
import processes
import targets
from run import running_engine

REQUESTS, STREAMS, CHUNKS, PACE_MS = 1000, 20, 100, 100


class Counted(targets.Where):
    """Starts its target under callgrind, which counts nothing until it is told to."""

    def launch(self, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
        valgrind = [
            "valgrind",
            "--tool=callgrind",
            "--instr-atstart=no",
            f"--callgrind-out-file={self.folder}/counted.%p",
        ]
        alone = ["-g", "master_process off;"] if Path(command[0]).name == "nginx" else []
        return super().launch([*valgrind, *command, *alone], **environment)


def instructions_each(subject: parts.Subject, folder: Path, *load: str) -> float:
    """Instructions of a load, by its requests or chunks."""
    pid = subject.process.pid
    subprocess.run(["callgrind_control", "-i", "on", str(pid)], check=True, capture_output=True)
    document = subject.load(*load)
    subprocess.run(["callgrind_control", "-i", "off", str(pid)], check=True, capture_output=True)
    subprocess.run(["callgrind_control", "-d", str(pid)], check=True, capture_output=True)
    time.sleep(1)  # the process writes the file when it comes to it
    newest = max(folder.glob(f"counted.{pid}.*"), key=lambda path: int(path.suffix[1:]))
    totals = re.search(r"^totals: (\d+)", newest.read_text(), re.MULTILINE)
    assert totals is not None
    units: int = document["chunks"] or document["good"]
    return int(totals[1]) / units


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="nginx,fitserve", help="targets, comma separated")
    parser.add_argument(
        "--before",
        type=Path,
        metavar="TREE",
        help="another checkout of fitserve, counted as `before`",
    )
    options = parser.parse_args()
    if options.before:
        targets.STARTERS["before"] = partial(targets.fitserve, tree=options.before.resolve())
    for name in options.only.split(",") + ["before"] * bool(options.before):
        with (
            running_engine() as (engine, _),
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as path,
        ):
            folder = Path(path)
            started = targets.STARTERS[name](Counted(engine, processes.free_port(), folder))
            try:
                subject = parts.Subject(name, started.url, started.process, engine)
                subject.load("plain", "--connections", "8", "--count", "300", "--seconds", "600")
                request = instructions_each(
                    subject,
                    folder,
                    "plain",
                    "--connections",
                    "8",
                    "--count",
                    str(REQUESTS),
                    "--seconds",
                    "600",
                )
                subject.pace(CHUNKS, PACE_MS)
                chunk = instructions_each(
                    subject,
                    folder,
                    "stream",
                    "--streams",
                    str(STREAMS),
                    "--chunks",
                    str(CHUNKS),
                    "--deadline",
                    "600",
                )
            finally:
                processes.stop(started.process)
        print(
            f"{name}: {request:,.0f} instructions per request, {chunk:,.0f} per chunk", flush=True
        )


if __name__ == "__main__":
    main()
