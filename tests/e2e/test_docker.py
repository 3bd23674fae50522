"""The main job with Docker: compose brings the gateway up, which starts real vLLM in a container through the socket."""

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

from gateway.demo.checkpoint import SENTENCE, make_model
from tests.contract.docker_harness import docker_harness
from tests.contract.process_harness import free_port
from tests.e2e.conftest import START_S, wait_for
from tests.support.paths import ROOT
from tests.support.patience import HANG_S

pytestmark = pytest.mark.docker

PROJECT = "fitserve-e2e"


def docker(*arguments: str, check: bool = True) -> str:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=check).stdout.strip()


def inspect(name: str) -> Any:
    return json.loads(docker("inspect", name))[0]


class Composed:
    """The stack of compose.yaml, under names of its own so that it cannot touch one that is in use."""

    def __init__(self, models: Path) -> None:
        self.port = free_port()
        self.models = models
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FITSERVE_")},
            "BASE_IMAGE": os.environ.get("BASE_IMAGE", "fitserve-base:bookworm"),
            "COMPOSE_PROJECT_NAME": PROJECT,
            "FITSERVE_PORT": str(self.port),
            "FITSERVE_MODELS": str(models),
            "FITSERVE_DATA_VOLUME": f"{PROJECT}-data",
            "FITSERVE_DOCKER_NETWORK": PROJECT,
        }
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", trust_env=False, timeout=HANG_S)

    def compose(self, *arguments: str) -> None:
        program = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
        done = subprocess.run(
            [*program, "--profile", "cpu", *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    @property
    def gateway(self) -> str:
        return docker(
            "ps",
            "-a",
            "-q",
            "--filter",
            f"label=com.docker.compose.project={PROJECT}",
            "--filter",
            "label=com.docker.compose.service=gateway-cpu",
        )

    def engines(self) -> list[str]:
        """Containers that this gateway started: those on its network."""
        return docker("ps", "-q", "--no-trunc", "--filter", f"network={PROJECT}").split()

    def healthy(self) -> bool:
        return self.client.get("/healthz").status_code == 200

    def show(self, name: str) -> Any:
        return self.client.get(f"/admin/models/{name}").json()

    def until(self, name: str, state: str, timeout_s: float = HANG_S) -> Any:
        try:
            return wait_for(f"{name} {state}", lambda: (view := self.show(name))["state"] == state and view, timeout_s)
        except AssertionError:
            raise AssertionError(
                f"{name}: {json.dumps(self.show(name)['attempts'], indent=1)}\n{docker('logs', '--tail', '50', self.gateway)}"
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
    composed.compose("build")
    composed.compose("up", "-d", "gateway-cpu")
    try:
        wait_for("healthz", composed.healthy)
        yield composed
    finally:
        for engine in composed.engines():
            docker("rm", "-f", engine, check=False)
        composed.compose("down", "-t", "5")
        docker("volume", "rm", f"{PROJECT}-data", check=False)
        docker("network", "rm", PROJECT, check=False)
        composed.client.close()


@pytest.fixture
def ready(stack: Composed) -> Composed:
    """With the model demo, whatever the test before has done to it."""
    if stack.client.get("/admin/models/demo").status_code == 404:
        added = stack.client.post("/admin/models", json={"name": "demo", "source": "/models/demo"})
        assert added.status_code == 202, added.text
    stack.until("demo", "ready", START_S)
    return stack


def test_one_admin_call_serves_an_openai_client(ready: Composed) -> None:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{ready.port}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "Hello"}], max_tokens=12, temperature=0, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert len(text) > 10
        assert SENTENCE.startswith(text)


def test_the_engines_container_has_no_privileges_and_no_open_port(ready: Composed) -> None:
    (engine,) = ready.engines()
    found = inspect(engine)
    host = found["HostConfig"]
    assert host["RestartPolicy"]["Name"] in ("no", "")
    assert host["CapDrop"] == ["ALL"]
    assert not host["Privileged"]
    assert "no-new-privileges" in str(host["SecurityOpt"])
    assert not host["PortBindings"]
    assert not any(found["NetworkSettings"]["Ports"].values())
    assert list(found["NetworkSettings"]["Networks"]) == [PROJECT]
    assert inspect(PROJECT)["Internal"] is True
    (mount,) = found["Mounts"]
    assert (mount["Destination"], mount["RW"]) == ("/models", False)
    assert not [item for item in found["Config"]["Env"] if item.startswith(("FITSERVE_", "HF_TOKEN"))]


def test_the_gateway_itself_is_not_root(ready: Composed) -> None:
    # A health check that is just starting is still on its way there, so only the server counts.
    servers = [
        line for line in docker("top", ready.gateway, "-eo", "uid,pid,args").splitlines() if line.endswith("fitserve serve")
    ]
    assert [line.split()[0] for line in servers] == ["65532"]


def test_a_killed_gateway_adopts_the_container(ready: Composed) -> None:
    before, attempts = ready.engines(), ready.show("demo")["attempts"]
    docker("kill", "-s", "KILL", ready.gateway)
    docker("start", ready.gateway)
    ready.until("demo", "ready")
    assert ready.engines() == before
    assert ready.show("demo")["attempts"] == attempts


def test_a_killed_engine_is_replaced_by_one_other(ready: Composed) -> None:
    (before,) = ready.engines()
    attempts = ready.show("demo")["attempts"]
    docker("kill", "-s", "KILL", before)
    wait_for("another attempt", lambda: len(ready.show("demo")["attempts"]) > len(attempts))
    view = ready.until("demo", "ready", START_S)
    assert [attempt["state"] for attempt in view["attempts"][len(attempts) - 1 :]] == ["failed", "ready"]
    assert view["attempts"][-2]["failure"]["kind"] == "killed"
    (after,) = ready.engines()
    assert after != before


def test_a_model_outside_the_shared_folder_is_refused_in_words(ready: Composed) -> None:
    refused = ready.client.post("/admin/models", json={"name": "other", "source": "/opt"})
    assert refused.status_code == 400
    assert "config.json" in refused.json()["error"]["message"]


def test_a_removed_model_leaves_no_container(ready: Composed) -> None:
    assert ready.client.delete("/admin/models/demo").status_code == 202
    wait_for("no engines", lambda: not ready.engines())
