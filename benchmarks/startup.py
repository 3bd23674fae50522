"""Start-up and memory: process start to the first good /healthz, resident memory at rest, `fitserve plan` as a process.

    python benchmarks/startup.py [--rounds 7]

Prints one line a figure: median, best, and the figure to reach. Wall time, so run it on a quiet machine.
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

from gateway.demo.checkpoint import make_model


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def serve_once(data: Path, rest_s: float) -> tuple[float, float]:
    """(seconds to /healthz, MiB resident after `rest_s` seconds of rest)"""
    port = free_port()
    environment = {**os.environ, "FITSERVE_PORT": str(port), "FITSERVE_DATA_DIR": str(data)}
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "gateway.__main__", "serve"], env=environment, stderr=subprocess.DEVNULL)
    try:
        while not healthy(port):
            if process.poll() is not None:
                raise SystemExit(f"the gateway ended with {process.returncode}")
            time.sleep(0.005)
        took = time.perf_counter() - began
        time.sleep(rest_s)
        status = Path(f"/proc/{process.pid}/status").read_text()
        resident = int(status.partition("VmRSS:")[2].split()[0]) / 1024
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    return took, resident


def healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def plan_once(model: Path) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "gateway.__main__", "plan", str(model)], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def line(name: str, figures: list[float], unit: str, reach: float) -> None:
    median = statistics.median(figures)
    verdict = "reached" if median <= reach else "MISSED"
    print(f"{name:<42} median {median:7.2f} {unit}  best {min(figures):7.2f}  to reach {reach:g}  {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model")
        served = [serve_once(Path(folder) / "data", rest_s=3) for _ in range(rounds)]
        plans = [plan_once(Path(folder) / "model") for _ in range(rounds)]
    line("process start to /healthz", [took for took, _ in served], "s", 1.0)
    line("idle resident memory", [resident for _, resident in served], "MiB", 95)
    line("`fitserve plan` of a local folder", plans, "s", 0.6)


if __name__ == "__main__":
    main()
