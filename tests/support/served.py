"""The gateway as a user starts it, a process of its own, in front of engines that a test runs
itself.

with serve_models(tmp_path, {"m": ["http://127.0.0.1:9/v1"]}) as gateway: gateway.url
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.contract.process_harness import free_port
from tests.support.paths import ROOT
from tests.support.patience import hang_s


@dataclass(frozen=True)
class Served:
    """A running gateway. `log` is its output so far."""

    port: int
    process: subprocess.Popen[bytes]
    log_file: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def resident_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def serve_command(ulimit: str) -> list[str]:
    """The command of a gateway with limits, such as `-n 40`."""
    program = [sys.executable, "-m", "gateway.__main__", "serve"]
    return ["bash", "-c", f'ulimit {ulimit}; exec "$@"', "bash", *program]


@contextlib.contextmanager
def serve_models(
    folder: Path,
    models: Mapping[str, list[str]],
    admin_key: str | None = None,
    ulimit: str = "-c 0",
    **settings: str,
) -> Iterator[Served]:
    """A gateway whose models are engines that run elsewhere, by base URL; it is ended after, and
    must end well.

    ulimit: flags of the shell's command, the limits of the gateway. settings: of its environment.
    """
    port = free_port()
    keep = {name: value for name, value in os.environ.items() if not name.startswith("FITSERVE_")}
    environment = {
        "FITSERVE_PORT": str(port),
        "FITSERVE_DATA_DIR": str(folder / "data"),
        "FITSERVE_HOST_KIND": "process",
    }
    environment |= {"FITSERVE_ADMIN_KEY": admin_key} if admin_key else {}
    log_file = folder / "gateway.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            serve_command(ulimit),
            env={**keep, **environment, **settings},
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    gateway = Served(port, process, log_file)
    headers = {"authorization": f"Bearer {admin_key}"} if admin_key else {}
    try:
        with httpx.Client(
            base_url=gateway.url,
            headers=headers,
            trust_env=False,
            verify=False,
            timeout=hang_s(),
        ) as client:
            _until(gateway, lambda: client.get("/healthz").status_code == 200)
            for name, endpoints in models.items():
                response = client.post("/admin/models", json={"name": name, "endpoints": endpoints})
                assert response.status_code < 300, response.text
            for name in models:
                _until(
                    gateway,
                    lambda name=name: (  # type: ignore[misc]
                        client.get(f"/v1/models/{name}").json().get("state") == "ready"
                    ),
                )
        yield gateway
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(hang_s())
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def worker_pids(data: Path) -> list[int]:
    """The workers on this data folder, in no order; those of a gateway that is gone among them."""
    pids = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            arguments = (
                (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            )
            if arguments[1:4] == [b"-m", b"gateway.proxy.workers.worker", os.fsencode(data)]:
                pids.append(int(entry.name))
    return pids


def _until(gateway: Served, check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + hang_s()
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if check():
                return
        assert gateway.process.poll() is None, f"the gateway ended:\n{gateway.log}"
        assert time.monotonic() < deadline, f"it hangs:\n{gateway.log}"
        time.sleep(0.05)
