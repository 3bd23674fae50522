"""`fitserve export`: the printed command starts the engine, without the gateway."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml

from tests.contract.process_harness import free_port
from tests.support import fake_engine
from tests.support.commands import fitserve
from tests.support.paths import ROOT
from tests.support.patience import hang_s
from tests.support.process_engines import running_processes
from tests.support.running import model_folder

pytestmark = pytest.mark.anyio

ANSWER = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


async def test_the_command_line_starts_the_engine_by_itself(tmp_path: Path) -> None:
    program = [sys.executable, str(Path(fake_engine.__file__))]
    async with running_processes(tmp_path, program) as gateway:
        folder = model_folder(tmp_path / "model")
        await gateway.add("m", folder, env={"OMP_NUM_THREADS": "3"})
        await gateway.until("m", "ready")
        port = free_port()

        async def export(*arguments: str) -> str:
            result = await asyncio.to_thread(
                fitserve, "export", "m", *arguments, "--port", str(port), FITSERVE_URL=gateway.url
            )
            assert result.returncode == 0, result.stderr
            return result.stdout

        command = await export()
        assert "OMP_NUM_THREADS=3" in command
        words = json.loads(await export("--json"))
        assert [word for word in words if word.startswith("--model")] == [f"--model={folder}"]
        (service,) = yaml.safe_load(await export("--format", "compose"))["services"].values()
        assert service["command"][-1] == f"--port={port}"
        deployment, _ = yaml.safe_load_all(await export("--format", "kubernetes"))
        assert deployment["kind"] == "Deployment"
        assert not any(key in command or key in str(words) for key in keys(tmp_path))
    await asyncio.to_thread(check_command, command, port)


def keys(folder: Path) -> list[str]:
    """Of the engines that run."""
    keys_of_engines = [
        json.loads(record.read_bytes())["key"]
        for record in (folder / "data/instances").glob("*.json")
    ]
    assert keys_of_engines
    return keys_of_engines


def check_command(command: str, port: int) -> None:
    """A shell runs the command, and the engine answers."""
    keep = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    with subprocess.Popen(
        ["/bin/sh", "-c", f"exec {command}"], env=keep, stdout=subprocess.DEVNULL
    ) as engine:
        try:
            began = time.monotonic()
            while True:
                assert engine.poll() is None
                try:
                    answer = httpx.post(
                        f"http://127.0.0.1:{port}/v1/chat/completions",
                        json=ANSWER,
                        trust_env=False,
                        timeout=hang_s(),
                    )
                    break
                except httpx.ConnectError:
                    assert time.monotonic() - began < hang_s()
                    time.sleep(0.05)
            assert answer.json()["choices"][0]["message"]["content"]
        finally:
            engine.terminate()


def machines(folder: Path, hardware: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "config.json").write_text((ROOT / "tests/models/glm-4.5-air.json").read_text())
    return fitserve(
        "export", str(folder), "--format", "kubernetes", "--hardware", hardware, *options
    )


def test_a_plan_over_machines_is_a_group_of_pods_without_a_gateway(tmp_path: Path) -> None:
    result = machines(tmp_path, "2xgb10", "--network", "200gbit,2us,roce")
    assert result.returncode == 0, result.stderr
    group, service = yaml.safe_load_all(result.stdout)
    assert (group["kind"], service["kind"]) == ("LeaderWorkerSet", "Service")
    template = group["spec"]["leaderWorkerTemplate"]
    (worker,) = template["workerTemplate"]["spec"]["containers"]
    assert template["size"] == 2
    assert "--master-addr=$(LWS_LEADER_ADDRESS)" in worker["command"]
    assert worker["command"][1] == "serve"


def test_a_plan_on_each_machine_is_a_deployment_with_copies(tmp_path: Path) -> None:
    result = machines(tmp_path, "2x(8xh100)", "--engine", "vllm", "--json")
    assert result.returncode == 0, result.stderr
    kinds = {document["kind"]: document for document in json.loads(result.stdout)}
    replicas = kinds["Deployment"]["spec"]["replicas"]
    (container,) = kinds["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["command"][:3] == ["vllm", "serve", str(tmp_path)]
    assert kinds.keys() == {"Deployment", "Service"}
    assert replicas > 1


def test_machines_are_for_kubernetes_and_several(tmp_path: Path) -> None:
    result = machines(tmp_path, "3090")
    assert result.returncode == 2
    assert "several machines" in result.stderr
    argv = fitserve("export", str(tmp_path), "--hardware", "2xgb10")
    assert argv.returncode == 2
    assert "--format kubernetes" in argv.stderr
