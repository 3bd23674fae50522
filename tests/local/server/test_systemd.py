"""The gateway as a service of systemd: the port that systemd opened, and the word that it is
ready."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.paths import ROOT
from tests.support.patience import hang_s

UNITS = ("fitserve.service", "fitserve.socket")


def start(
    listener: socket.socket, data: Path, notified: Path, **settings: str
) -> subprocess.Popen[bytes]:
    """`fitserve serve` as systemd starts it: the listener is its file 3."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith("FITSERVE_")}
    environment = {
        "FITSERVE_DATA_DIR": str(data),
        "FITSERVE_HOST_KIND": "process",
        "FITSERVE_PORT": "1",
        **settings,
    }
    environment |= {"LISTEN_FDS": "1", "NOTIFY_SOCKET": str(notified)}
    command = (
        f'exec 3<&{listener.fileno()}; LISTEN_PID=$$ exec "{sys.executable}" -m gateway.__main__'
        " serve"
    )
    return subprocess.Popen(
        ["bash", "-c", command],
        cwd=ROOT,
        env={**keep, **environment},
        pass_fds=[listener.fileno()],
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize("workers", ["1", "2"])
def test_early_clients_are_answered_and_systemd_hears_of_readiness(
    tmp_path: Path, workers: str
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
    ):
        manager.bind(str(tmp_path / "notified"))
        manager.settimeout(hang_s())
        with socket.create_connection(listener.getsockname(), timeout=hang_s()) as early:
            early.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            with start(
                listener, tmp_path / "data", tmp_path / "notified", FITSERVE_WORKERS=workers
            ) as process:
                try:
                    assert early.recv(4096).startswith(b"HTTP/1.1 200")
                    ready = manager.recv(4096)
                    resident = re.search(
                        r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text()
                    )
                    # The memory that an idle gateway may take from its engines' machine.
                    assert resident is not None
                    assert int(resident[1]) < 85 * 1024
                    assert ready == f"MAINPID={process.pid}\nREADY=1".encode()
                    process.terminate()
                    assert manager.recv(4096) == b"STOPPING=1"
                    assert process.wait(hang_s()) == 0
                finally:
                    process.kill()


def test_a_port_that_others_reach_is_refused_without_a_key(tmp_path: Path) -> None:
    with (
        socket.create_server(("0.0.0.0", 0)) as listener,
        start(listener, tmp_path, tmp_path / "nobody") as process,
    ):
        assert process.wait(hang_s()) == 2
        assert process.stderr is not None
        assert b"Refusing to serve the socket at 0.0.0.0 without a key" in process.stderr.read()
        with pytest.raises(httpx.TimeoutException):
            httpx.get(
                f"http://127.0.0.1:{listener.getsockname()[1]}/healthz",
                timeout=0.2,
                trust_env=False,
            )


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="this machine has no systemd")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for name in UNITS:
        text = (ROOT / "docker" / name).read_text()
        # The program and the user are those of the machine that it is for.
        text = text.replace("/opt/fitserve/bin/fitserve", sys.executable).replace(
            "User=fitserve", "User=root"
        )
        (tmp_path / name).write_text(text)
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / name) for name in UNITS)],
        capture_output=True,
        text=True,
        timeout=hang_s(),
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
