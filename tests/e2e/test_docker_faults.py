"""A Docker Engine that is restarted, or hangs, under engines that serve. It is a second one beside
that of the machine.

Only with REQUIRE_OWN_DOCKERD=1, on a machine that nobody else uses: a second dockerd removes the
bridge docker0 of the first one when it starts or ends, which is put back at the end; until then
nothing new starts on that bridge.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.docker_harness import BASE_IMAGE, PROGRAM, docker_harness
from tests.e2e.conftest import Gateway, wait_for
from tests.support.makers import engine
from tests.support.patience import HANG_S, hang_s
from tests.support.running import model_folder

pytestmark = [
    pytest.mark.docker,
    pytest.mark.skipif(
        not os.environ.get("REQUIRE_OWN_DOCKERD"),
        reason="it takes docker0 from the machine's own Docker Engine",
    ),
]

# How long Docker stands still.
STILL_S = 30
TOKENS = 4000
ENGINE = ("python3", "-S")
IMAGE = "fitserve-faults-engine:1"
BRIDGE, BRIDGE_ADDRESS = "fitserve-faults", "10.223.7.1/24"
log = logging.getLogger(__name__)


class Daemon:
    """dockerd with folders, socket and addresses of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"unix://{folder}/sock"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, live_restore: bool) -> None:
        arguments = ["--data-root", "data", "--exec-root", "exec", "--pidfile", "pid"]
        command = [
            "dockerd",
            "-H",
            self.url,
            *(str(self.folder / item) if item[0] != "-" else item for item in arguments),
        ]
        command += [
            f"--bridge={BRIDGE}",
            "--iptables=false",
            "--ip6tables=false",
            "--default-address-pool=base=10.222.0.0/16,size=24",
        ]
        command += ["--live-restore"] if live_restore else []
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        wait_for("dockerd", lambda: self.docker("version", check=False))

    def stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        self.process.wait(hang_s())

    def docker(self, *arguments: str, check: bool = True) -> str:
        result = subprocess.run(
            ["docker", "-H", self.url, *arguments],
            capture_output=True,
            text=True,
            check=check,
            timeout=hang_s(),
        )
        return result.stdout.strip() if result.returncode == 0 else ""

    def containers(self) -> list[str]:
        return self.docker("ps", "-q", "--no-trunc").split()


def docker0() -> str:
    """The address of the bridge of the machine's own Docker Engine, as 172.17.0.1/16."""
    result = subprocess.run(
        ["ip", "-o", "-4", "addr", "show", "docker0"], capture_output=True, text=True, check=False
    ).stdout.split()
    return result[3] if len(result) > 3 else ""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    docker_harness().docker.close()
    daemon = Daemon(tmp_path_factory.mktemp("dockerd"))
    address_of_host = docker0()
    subprocess.run(["ip", "link", "delete", BRIDGE], check=False, capture_output=True)
    for command in (
        f"link add {BRIDGE} type bridge",
        f"addr add {BRIDGE_ADDRESS} dev {BRIDGE}",
        f"link set {BRIDGE} up",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    daemon.start(live_restore=False)
    load = f"docker save {shlex.quote(BASE_IMAGE)} | docker -H {shlex.quote(daemon.url)} load"
    subprocess.run(["bash", "-c", load], check=True, capture_output=True)
    program = tmp_path_factory.mktemp("engine")
    for file in PROGRAM:
        shutil.copy(file, program)
    program.chmod(0o755)
    container = daemon.docker("create", "--network=none", BASE_IMAGE)
    daemon.docker("cp", str(program), f"{container}:/engine")
    daemon.docker("commit", container, IMAGE)
    daemon.docker("rm", container)
    daemon.stop()
    yield daemon
    subprocess.run(["ip", "link", "delete", BRIDGE], check=False)
    if address_of_host and not docker0():
        for command in (
            "link add docker0 type bridge",
            f"addr add {address_of_host} dev docker0",
            "link set docker0 up",
        ):
            subprocess.run(["ip", *command.split()], check=True)
    # dockerd mounts its folder onto itself; in there is half a gigabyte of layers.
    subprocess.run(["umount", "-l", str(daemon.folder / "data")], check=False, capture_output=True)
    shutil.rmtree(daemon.folder, ignore_errors=True)


@pytest.fixture
def gateway(daemon: Daemon, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Gateway]:
    """A gateway with one ready model, on a Docker Engine with or without live restore (the
    fixture's parameter)."""
    daemon.start(live_restore=request.param)
    source = model_folder(tmp_path / "model")
    for folder in (source, *source.parents[:3]):
        folder.chmod(0o755)
    new_engine = engine(
        "cpu",
        "99.0.0",
        image=IMAGE,
        container_command=(*ENGINE, f"/engine/{PROGRAM[0].name}", "--tokens-per-second", "10"),
    )
    profile = tmp_path / "profiles" / "engines" / new_engine.kind / f"{new_engine.version}.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text(new_engine.model_dump_json())
    settings = {
        "FITSERVE_HOST_KIND": "docker",
        "DOCKER_HOST": daemon.url,
        "FITSERVE_BACKOFF_S": "1",
    }
    settings |= {
        "FITSERVE_PROFILES_DIR": str(tmp_path / "profiles"),
        "FITSERVE_DOCKER_NETWORK": "fitserve-faults",
    }
    gateway = Gateway(tmp_path / "data", tmp_path / "gateway.log", **settings)
    gateway.start()
    try:
        body = {"name": "m", "source": str(source), "engines": [new_engine.ref]}
        answer = gateway.client.post("/admin/models", json=body)
        assert answer.status_code == 202, answer.text
        gateway.until("m", "ready")
        yield gateway
    finally:
        gateway.close()
        daemon.docker("network", "rm", "fitserve-faults", check=False)
        daemon.stop()


class Stream(threading.Thread):
    """A client that reads a long answer while things happen: the chunks, and their times."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__()
        self.text, self.times = "", list[float]()
        self._url = gateway.url
        self.start()

    def run(self) -> None:
        body = {"model": "m", "prompt": "hi", "max_tokens": TOKENS, "stream": True}
        with (
            httpx.Client(trust_env=False, timeout=2 * hang_s()) as client,
            client.stream("POST", f"{self._url}/v1/completions", json=body) as answer,
        ):
            for chunk in answer.iter_text():
                self.text += chunk
                self.times.append(time.monotonic())


def problems(gateway: Gateway) -> list[str]:
    problem_list: list[str] = gateway.client.get("/readyz").json()["problems"]
    return problem_list


def time_request(gateway: Gateway) -> float:
    """Seconds of one short request, which must succeed."""
    began = time.monotonic()
    answer = gateway.client.post(
        "/v1/completions", json={"model": "m", "prompt": "hi", "max_tokens": 3}
    )
    assert answer.status_code == 200, answer.text
    return time.monotonic() - began


def attempts(gateway: Gateway) -> list[dict[str, Any]]:
    attempt_list: list[dict[str, Any]] = gateway.show("m")["attempts"]
    return attempt_list


@pytest.mark.parametrize("gateway", [True], indirect=True)
def test_a_restart_of_docker_with_live_restore_breaks_no_stream(
    daemon: Daemon, gateway: Gateway
) -> None:
    containers_before = daemon.containers()
    stream = Stream(gateway)
    wait_for("tokens", lambda: stream.times)
    daemon.stop()
    wait_for("not ready", lambda: problems(gateway) == ["host"])
    time_request(gateway)
    assert stream.is_alive()
    daemon.start(live_restore=True)
    began = time.monotonic()
    wait_for("ready again", lambda: not problems(gateway))
    recovery_s = time.monotonic() - began
    assert daemon.containers() == containers_before
    assert [attempt["state"] for attempt in attempts(gateway)] == ["ready"]
    assert stream.is_alive()
    assert '"error"' not in stream.text
    # All later events are seen: not only new ones, but the present state.
    daemon.docker("kill", containers_before[0])
    wait_for(
        "another engine",
        lambda: [attempt["state"] for attempt in attempts(gateway)] == ["failed", "ready"],
    )
    stream.join(hang_s())
    assert '"error"' in stream.text
    assert "[DONE]" not in stream.text
    log.info("figures: %s", {"back after s": round(recovery_s, 2)})


@pytest.mark.parametrize("gateway", [False], indirect=True)
def test_engines_without_live_restore_end_with_docker_and_are_started_again(
    daemon: Daemon, gateway: Gateway
) -> None:
    stream = Stream(gateway)
    wait_for("tokens", lambda: stream.times)
    daemon.stop()
    stream.join(hang_s())
    assert '"error"' in stream.text
    assert "[DONE]" not in stream.text
    answer = gateway.client.post("/v1/completions", json={"model": "m", "prompt": "hi"})
    assert answer.status_code in (502, 503)
    daemon.start(live_restore=False)
    began = time.monotonic()
    wait_for(
        "another engine",
        lambda: [attempt["state"] for attempt in attempts(gateway)] == ["failed", "ready"],
    )
    time_request(gateway)
    assert len(daemon.containers()) == 1
    log.info("figures: %s", {"serves again after s": round(time.monotonic() - began, 2)})


@pytest.mark.parametrize("gateway", [True], indirect=True)
def test_a_docker_that_hangs_stops_nothing(daemon: Daemon, gateway: Gateway) -> None:
    containers_before = daemon.containers()
    usual = max(time_request(gateway) for _ in range(20))
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    noticed, slowest = 0.0, 0.0
    while time.monotonic() - began < (STILL_S if noticed else HANG_S):
        slowest = max(slowest, time_request(gateway))
        if not noticed and problems(gateway) == ["host"]:
            noticed = time.monotonic() - began
        time.sleep(0.1)
    daemon.process.send_signal(signal.SIGCONT)
    assert noticed
    resumed = time.monotonic()
    wait_for("ready again", lambda: not problems(gateway))
    assert daemon.containers() == containers_before
    assert [attempt["state"] for attempt in attempts(gateway)] == ["ready"]
    figures = {
        "noticed after s": noticed,
        "slowest request s": slowest,
        "usual s": usual,
        "back after s": time.monotonic() - resumed,
    }
    log.info("figures: %s", {name: round(value, 3) for name, value in figures.items()})
