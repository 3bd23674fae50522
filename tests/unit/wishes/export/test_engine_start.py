"""A start written for other programs is that of the gateway's own container."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.domain import EngineRef, LaunchSpec, Mount
from gateway.errors import NotReady
from gateway.wishes.export.command_line import command_line, text
from gateway.wishes.export.compose import compose
from gateway.wishes.export.engine_start import engine_start
from gateway.wishes.export.kubernetes import kubernetes
from gateway.wishes.export.yaml_text import yaml_text

SPEC = LaunchSpec(
    name="m-r0-a1",
    model="Org/Model:8b",
    attempt=1,
    fingerprint="f",
    engine=EngineRef(kind="vllm", version="1", image="vllm/vllm-openai:v1"),
    argv=("python3", "-m", "engine", '--json={"a": "$HOME $(X)"}', "--port=8000"),
    env={"NCCL_DEBUG": "INFO $X"},
    gpus=("GPU-1", "GPU-2"),
    mounts=(
        Mount(source="/models", target="/models"),
        Mount(source="cache", target="/cache", is_read_only=False),
    ),
    shm_bytes=1 << 30,
    port=8000,
    memory_bytes=8 << 30,
    pids=100,
    scratch=("/tmp",),
    key_env="VLLM_API_KEY",
)
START = engine_start(SPEC, is_in_container=True)


def test_a_command_line_has_every_part_of_the_start_and_no_key() -> None:
    words = shlex.split(text(START))
    assert words == command_line(START)
    assert words[:2] == ["docker", "run"]
    assert words[-5:] == ["vllm/vllm-openai:v1", *SPEC.argv[1:]]
    for option_words in (
        ["--gpus", '"device=GPU-1,GPU-2"'],
        ["--entrypoint", "python3"],
        ["--mount", "type=bind,source=/models,target=/models,readonly"],
        ["--mount", "type=volume,source=cache,target=/cache"],
        ["--env", "NCCL_DEBUG=INFO $X"],
        ["--env", "CUDA_DEVICE_ORDER=PCI_BUS_ID"],
        ["--memory", str(8 << 30)],
        ["--name", "org-model-8b"],
    ):
        at = (
            words.index(option_words[0])
            if option_words[0] not in ("--mount", "--env")
            else words.index(option_words[1]) - 1
        )
        assert words[at : at + 2] == option_words
    assert "KEY" not in text(START)
    line = command_line(engine_start(SPEC, is_in_container=False))
    assert line == [
        "env",
        "NCCL_DEBUG=INFO $X",
        "CUDA_DEVICE_ORDER=PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES=GPU-1,GPU-2",
        *SPEC.argv,
    ]


def test_an_engine_without_an_image_has_no_container() -> None:
    with pytest.raises(NotReady, match="has no container image"):
        engine_start(SPEC.evolve(engine=EngineRef(kind="own", version="1")), is_in_container=True)


def test_a_compose_file_has_every_part_of_the_start(tmp_path: Path) -> None:
    document = compose(START)
    service = document["services"]["org-model-8b"]
    assert service["entrypoint"] + service["command"] == [
        word.replace("$", "$$") for word in SPEC.argv
    ]
    assert service["environment"]["NCCL_DEBUG"] == "INFO $$X"
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] == [
        "GPU-1",
        "GPU-2",
    ]
    assert document["volumes"] == {"cache": {"external": True}}
    assert yaml.safe_load(yaml.safe_dump(document, sort_keys=False)) == document
    if (
        shutil.which("docker")
        and subprocess.run(
            ["docker", "compose", "version"], capture_output=True, check=False
        ).returncode
        == 0
    ):
        (file := tmp_path / "compose.yaml").write_text(yaml.safe_dump(document))
        read = subprocess.run(
            ["docker", "compose", "-f", str(file), "config", "--format", "json"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(read.stdout)["services"]["org-model-8b"]["command"] == list(SPEC.argv[1:])


def test_a_deployment_and_its_service_fit_together() -> None:
    deployment, service = kubernetes(START)
    template = deployment["spec"]["template"]
    assert (
        deployment["spec"]["selector"]["matchLabels"].items()
        <= template["metadata"]["labels"].items()
    )
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    (container,) = template["spec"]["containers"]
    assert container["command"] == [word.replace("$(", "$$(") for word in SPEC.argv]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2, "memory": str(8 << 30)}
    assert service["spec"]["ports"][0]["targetPort"] in {
        port["name"] for port in container["ports"]
    }
    volumes = {volume["name"] for volume in template["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert {"/models", "/cache", "/dev/shm", "/tmp"} == {
        mount["mountPath"] for mount in container["volumeMounts"]
    }
    assert {
        resource["apiVersion"] + " " + resource["kind"] for resource in (deployment, service)
    } == {
        "apps/v1 Deployment",
        "v1 Service",
    }
    for name in names(deployment) | names(service):
        assert len(name) < 64
        assert name == name.lower()


def test_probes_wait_for_an_engine_that_generates_a_token_for_its_health() -> None:
    pod = kubernetes(START)[0]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["timeoutSeconds"] > 20  # SGLang's own limit


@pytest.mark.parametrize("write", [kubernetes, lambda start: [compose(start)]])
def test_an_engine_is_never_the_first_process_of_its_container(write: Any) -> None:
    (first, *_) = write(START)
    pod = first["spec"]["template"]["spec"] if "spec" in first else first["services"][START.name]
    assert pod.get("shareProcessNamespace") or pod.get("init")
    assert "--init" in command_line(START)


@pytest.mark.parametrize("write", [kubernetes, lambda start: [compose(start)]])
def test_the_yaml_has_no_anchors(write: Any) -> None:
    documents = write(START)
    text = yaml_text(documents)
    assert list(yaml.safe_load_all(text)) == documents
    tokens = yaml.scan(text)
    assert not any(isinstance(token, (yaml.AnchorToken, yaml.AliasToken)) for token in tokens)


def names(value: Any) -> set[str]:
    """Every `name` that Kubernetes wants in small letters; variables have their own rules."""
    if isinstance(value, dict):
        own_names = (
            {value["name"]}
            if isinstance(value.get("name"), str) and "value" not in value
            else set()
        )
        return own_names.union(*(names(part) for part in value.values()))
    return set().union(*(names(part) for part in value)) if isinstance(value, list) else set()
