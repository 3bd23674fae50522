"""Start-up time and memory of the gateway and of `fitserve plan`.

    python benchmarks/startup.py [--rounds 7]

One line for each figure: median, best, and target. The times are from process start to the first
good /healthz; memory is resident memory at rest, of a worker too. Wall time, so run it on an idle
machine. The first round compiles all modules and does not count.
"""

from __future__ import annotations

import argparse
import http.client
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gateway.cli.demo.checkpoint import make_model


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def environment(folder: Path) -> dict[str, str]:
    """With the bytecode in the folder, also where this shell wants none to be written."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        **kept,
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
        "FITSERVE_DATA_DIR": str(folder / "data"),
    }


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def serve_once(folder: Path, rest_s: float, workers: int = 1) -> tuple[float, float, list[float]]:
    """(seconds to /healthz, MiB resident after `rest_s` seconds of rest, those of each worker)"""
    port = free_port()
    settings = {**environment(folder), "FITSERVE_PORT": str(port), "FITSERVE_WORKERS": str(workers)}
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway.__main__", "serve"], env=settings, stderr=subprocess.DEVNULL
    )
    try:
        while not healthy(port):
            if process.poll() is not None:
                raise SystemExit(f"the gateway ended with {process.returncode}")
            time.sleep(0.005)
        took = time.perf_counter() - began
        time.sleep(rest_s)
        resident = resident_mib(process.pid)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        of_workers = [resident_mib(int(child)) for child in children]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    return took, resident, of_workers


def healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def plan_once(folder: Path) -> float:
    began = time.perf_counter()
    command = [sys.executable, "-m", "gateway.__main__", "plan", str(folder / "model")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment(folder))
    return time.perf_counter() - began


def line(name: str, figures: list[float], unit: str, reach: float) -> None:
    median = statistics.median(figures)
    verdict = "reached" if median <= reach else "MISSED"
    print(
        f"{name:<42} median {median:7.2f} {unit}  best {min(figures):7.2f}  to reach {reach:g} "
        f" {verdict}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        served = [serve_once(folder, rest_s=3) for _ in range(rounds + 1)][1:]
        plans = [plan_once(folder) for _ in range(rounds + 1)][1:]
        _, _, workers = serve_once(folder, rest_s=3, workers=2)
    line("process start to /healthz", [took for took, _, _ in served], "s", 1.0)
    line("idle resident memory", [resident for _, resident, _ in served], "MiB", 85)
    line("... of a worker (FITSERVE_WORKERS=2)", workers, "MiB", 40)
    line("`fitserve plan` of a local folder", plans, "s", 0.6)


if __name__ == "__main__":
    main()
