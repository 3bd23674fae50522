"""An export over several nodes fits the published schema, and its pods meet.

leader_worker_set.json.gz: openAPIV3Schema of config/crd/bases/
leaderworkerset.x-k8s.io_leaderworkersets.yaml of kubernetes-sigs/lws 0.9.0 (Apache License 2.0),
without its descriptions.
"""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from gateway.domain import Plan
from gateway.engines.registry import engine_kind
from gateway.planner.flags import LaunchInputs, launch_spec
from gateway.planner.nodes.pod_group import pod_plan
from gateway.wishes.export.engine_start import engine_start
from gateway.wishes.export.leader_worker_set import LEADER, PLACE, leader_worker_set
from tests.support.node_plans import PROFILES, decide_over, spans
from tests.support.versions import SGLANG_REF, VLLM_REF

SCHEMA = Path(__file__).parent / "leader_worker_set.json.gz"


@cache
def schema() -> Any:
    """The schema, which refuses fields that it does not know: the server would drop them."""

    def close_object(part: Any) -> Any:
        if isinstance(part, list):
            return [close_object(part_of_list) for part_of_list in part]
        if not isinstance(part, dict):
            return part
        definitions = {name: close_object(definition) for name, definition in part.items()}
        has_properties = isinstance(part.get("properties"), dict) and part.get("type") == "object"
        if has_properties and not part.get("x-kubernetes-preserve-unknown-fields"):
            definitions.setdefault("additionalProperties", False)
        return definitions

    return close_object(json.loads(gzip.decompress(SCHEMA.read_bytes())))


def export(plan: Plan) -> list[dict[str, Any]]:
    engine = PROFILES.engine(str(plan.engine))
    spec = launch_spec(
        pod_plan(plan, LEADER, PLACE),
        engine,
        LaunchInputs("/models/m"),
        name="m",
        model="Org/M",
        attempt=1,
        port=8000,
    )
    leader, worker = (
        engine_start(spec.evolve(argv=row.argv, env=row.env, gpus=row.gpus), is_in_container=True)
        for row in spec.nodes[:2]
    )
    address = engine_kind(engine.kind).address_env
    return leader_worker_set(leader, worker, address, plan.span, plan.replicas.value)


def plans(ref: str) -> list[Plan]:
    node_plans = [
        plan
        for machines in (["2x3090"] * 2, ["2x3090"] * 4)
        for plan in spans(decide_over(PROFILES.engine(ref), machines)[0])
    ]
    assert {plan.span for plan in node_plans} >= {2, 4}
    return node_plans


def pods(group: dict[str, Any]) -> list[dict[str, Any]]:
    """The container of each pod of a group, first the leader."""
    template = group["spec"]["leaderWorkerTemplate"]
    (leader,) = template["leaderTemplate"]["spec"]["containers"]
    (worker,) = template["workerTemplate"]["spec"]["containers"]
    return [leader, *[worker] * (template["size"] - 1)]


def container_command(container: dict[str, Any], place: int) -> list[str]:
    """The command as the kubelet and a shell make it of the container at that place."""
    values = {"LWS_LEADER_ADDRESS": "m-0.m.default", "LWS_WORKER_INDEX": str(place)}
    for variable in container["env"]:
        values[variable["name"]] = variable.get("value", f"10.1.0.{place}")

    def expand_variables(word: str) -> str:
        pattern = r"\$\$|\$\((\w+)\)"
        return re.sub(
            pattern, lambda match: values.get(match[1], match[0]) if match[1] else "$", word
        )

    words = [expand_variables(word) for word in container["command"]]
    if words[0] != "/bin/sh":
        return words
    text = words[2].replace("exec", "printf '%s\\n'")
    answer = subprocess.run(
        ["/bin/sh", "-c", text, *words[3:]],
        env=values,
        capture_output=True,
        text=True,
        check=True,
    )
    return answer.stdout.splitlines()


@pytest.mark.parametrize("ref", [VLLM_REF, SGLANG_REF])
def test_an_export_fits_the_published_schema(ref: str) -> None:
    validator = jsonschema_rs.validator_for(schema())
    for plan in plans(ref):
        group, _ = export(plan)
        assert [str(error) for error in validator.iter_errors(group)] == []
        assert group["spec"]["leaderWorkerTemplate"]["size"] == plan.span
        for container in pods(group):
            gpus_per_node = len(plan.gpus) // plan.span
            assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus_per_node
    group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["container"] = []
    assert not validator.is_valid(group)


@pytest.mark.parametrize("ref", [VLLM_REF, SGLANG_REF])
def test_pods_get_the_flags_of_the_plan(ref: str) -> None:
    for plan in plans(ref):
        kind = engine_kind(plan.engine.kind)
        rows = [row for row in plan.nodes if row.copy_number == 0]
        for place, container in enumerate(pods(export(plan)[0])):
            words = container_command(container, place)
            leader = "10.1.0.0" if place == 0 else "m-0.m.default"
            flags = {item.replace("10.0.0.1", leader) for item in rows[place].argv}
            assert flags <= {*words}
            assert not [word for word in words if "LWS_" in word or kind.address_env in word]


def test_only_the_first_pod_answers_requests() -> None:
    group, service = export(plans(VLLM_REF)[0])
    leader, worker = pods(group)[:2]
    assert leader["readinessProbe"]["httpGet"]["path"] == "/health"
    assert not {"readinessProbe", "startupProbe", "ports"} & worker.keys()
    name = group["metadata"]["name"]
    assert service["spec"]["selector"] == {
        "leaderworkerset.sigs.k8s.io/name": name,
        "leaderworkerset.sigs.k8s.io/worker-index": "0",
    }
    volumes = {
        volume["name"]: volume
        for volume in group["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["volumes"]
    }
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
