"""The command of every node of an engine: the flags that its version has, and no other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gateway.domain import Engine, LaunchSpec, Plan
from gateway.engines.registry import engine_kind
from gateway.errors import BadFlag
from gateway.planner.command import check_command, check_environment
from gateway.planner.flags import LaunchInputs, launch_spec
from tests.support.node_plans import PROFILES, decide_on, decide_over, spans
from tests.support.versions import SGLANG, VLLM

VERSIONS = [
    *(f"vllm=={version}" for version in VLLM),
    *(f"sglang=={version}" for version in SGLANG),
]


def launch(plan: Plan, engine: Engine, **inputs: Any) -> LaunchSpec:
    return launch_spec(
        plan, engine, LaunchInputs("/models/m", **inputs), name="m", model="m", attempt=1, port=8000
    )


def value(argv: Sequence[str], flag: str) -> str:
    return next(item.partition("=")[2] for item in argv if item.startswith(f"--{flag}="))


@pytest.mark.parametrize("ref", VERSIONS)
def test_each_node_gets_flags_that_its_engine_version_has(ref: str) -> None:
    engine = PROFILES.engine(ref)
    decision, _ = decide_over(engine, ["2x3090", "2x3090"])
    plans = spans(decision)
    groups = {plan.data_parallel.value > 1 for plan in plans}
    assert groups == {False, True} if engine.kind == "vllm" else False in groups
    for plan in plans:
        ranks = plan.tensor_parallel.value * plan.pipeline_parallel.value * plan.data_parallel.value
        for row in plan.nodes:
            assert {item[2:].partition("=")[0] for item in row.argv} <= engine.flags.keys()
            assert len(row.ranks) * plan.span == ranks
            assert row.env["GLOO_SOCKET_IFNAME"] == "cx7"
            assert row.env["NCCL_SOCKET_IFNAME"] == "=cx7"
            address = engine_kind(engine.kind).address_env
            assert row.env[address] == f"10.0.0.{row.node[-1]}"
        meeting = [item for row in plan.nodes for item in row.argv if "10.0.0.1" in item]
        assert len(meeting) == 2  # Both nodes name the first.


@pytest.mark.parametrize("version", VLLM)
def test_only_the_first_node_of_vllm_answers_requests(version: str) -> None:
    engine = PROFILES.engine(f"vllm=={version}")
    for plan in spans(decide_over(engine, ["2x3090", "2x3090"])[0]):
        first, second = launch(plan, engine).nodes
        assert "--headless" not in first.argv
        assert "--headless" in second.argv
        assert first.argv[:3] == engine.container_command
        # The module of the first ignores --headless.
        assert second.argv[:4] == ("python3", "-m", "vllm.entrypoints.cli.main", "serve")
        if plan.data_parallel.value == 1:
            assert value(first.argv, "nnodes") == "2"
            assert [value(row.argv, "node-rank") for row in (first, second)] == ["0", "1"]
        else:
            rank_count = plan.data_parallel.value // 2
            assert value(second.argv, "data-parallel-start-rank") == str(rank_count)
            assert value(first.argv, "data-parallel-size-local") == str(rank_count)
            # The first node would serve only its own groups with it.
            assert not any(item.startswith("--data-parallel-start-rank") for item in first.argv)


@pytest.mark.parametrize("version", SGLANG)
def test_the_nodes_of_sglang_differ_only_in_their_rank(version: str) -> None:
    engine = PROFILES.engine(f"sglang=={version}")
    for plan in spans(decide_over(engine, ["2x3090", "2x3090"])[0]):
        first, second = launch(plan, engine).nodes
        assert (
            value(first.argv, "dist-init-addr") == f"10.0.0.1:{plan.nodes[0].ports['rendezvous']}"
        )
        differences = [
            pair for pair in zip(first.argv, second.argv, strict=True) if len({*pair}) > 1
        ]
        assert differences == [("--node-rank=0", "--node-rank=1")]


def test_ports_in_use_on_the_first_node_are_passed_over() -> None:
    engine = PROFILES.engine(VERSIONS[-1])
    decision, cluster = decide_over(engine, ["2x3090", "2x3090"])
    port = spans(decision)[0].nodes[0].ports["rendezvous"]
    busy = (cluster.nodes[0].evolve(ports=(port + 3,)), cluster.nodes[1])
    second_decision = decide_on(cluster.evolve(nodes=busy), engine, "qwen3-30b-a3b")
    assert spans(second_decision)[0].nodes[0].ports["rendezvous"] > port + 3


@pytest.mark.parametrize(("ref", "flag"), [(VERSIONS[0], "headless"), (VERSIONS[-1], "nnodes")])
def test_a_version_without_the_flags_is_refused_on_several_nodes(ref: str, flag: str) -> None:
    engine = PROFILES.engine(ref)
    flags = {name: flag_value for name, flag_value in engine.flags.items() if name != flag}
    decision, _ = decide_over(engine.evolve(flags=flags), ["2x3090", "2x3090"])
    assert not spans(decision)
    reasons = [reason for row in decision.rejected for reason in row.reasons]
    assert any(f"ranks on several nodes: it has no --{flag}" in reason for reason in reasons)


@pytest.mark.parametrize("ref", VERSIONS)
def test_the_reader_of_commands_knows_those_of_nodes(ref: str) -> None:
    engine = PROFILES.engine(ref)
    for plan in spans(decide_over(engine, ["2x3090", "2x3090"])[0]):
        for node in launch(plan, engine).nodes:

            def check(argv: tuple[str, ...], *peers: str) -> None:
                check_command(engine, argv, {}, model="m", port=8000, folder="/models", peers=peers)

            check(node.argv, "10.0.0.1")
            check_environment(engine, node.env)
            with pytest.raises(BadFlag, match="names no machine"):
                check(node.argv)
            with pytest.raises(BadFlag, match="names no machine"):
                check(node.argv, "10.0.0.11", "10.0.0.2")
            item = next(item for item in node.argv if "10.0.0.1" in item)
            with pytest.raises(BadFlag, match="are not those of a plan"):
                check(tuple(item_ for item_ in node.argv if item_ != item), "10.0.0.1")


def test_a_plan_for_one_node_keeps_its_command() -> None:
    engine = PROFILES.engine(VERSIONS[0])
    decision, _ = decide_over(engine, ["2x3090", "2x3090"])
    plan = next(plan for plan in decision.plans if plan.span == 1)
    spec = launch(plan, engine)
    assert spec.nodes == ()
    assert spec.argv == launch(plan.evolve(nodes=()), engine).argv


def test_each_copy_over_nodes_has_its_own_start() -> None:
    engine = PROFILES.engine(VERSIONS[0])
    decision, _ = decide_over(engine, ["gb10"] * 4, "glm-4.5-air", replicas=2)
    plan = next(plan for plan in spans(decision) if plan.replicas.value == 2)
    first, second = (launch(plan, engine, copy_number=number) for number in (0, 1))
    assert not {row.node for row in first.nodes} & {row.node for row in second.nodes}
    assert value(first.argv, "master-addr") != value(second.argv, "master-addr")
    assert (first.argv, first.gpus) == (first.nodes[0].argv, first.nodes[0].gpus)


def test_one_engine_over_unlike_nodes_is_refused_in_words() -> None:
    engine = PROFILES.engine(VERSIONS[0])
    decision, _ = decide_over(engine, ["3090", "4090"])
    assert not spans(decision)
    reasons = [reason for row in decision.rejected for reason in row.reasons]
    assert any("one engine over unlike nodes (node-1, node-2)" in reason for reason in reasons)


def test_copies_take_unlike_nodes_one_after_the_other() -> None:
    """Each replica of a model is planned with the memory that the others hold."""
    engine = PROFILES.engine(VERSIONS[0])
    decision, cluster = decide_over(engine, ["3090", "4090"], "llama-3.1-8b", replicas=1)
    first_plan = decision.plans[0]
    promised_bytes = dict.fromkeys(first_plan.gpus, first_plan.memory.promised_bytes)
    second = decide_on(
        cluster, engine, "llama-3.1-8b", replicas=1, promised_bytes=promised_bytes
    ).plans[0]
    assert {row.node for row in (*first_plan.nodes, *second.nodes)} == {"node-1", "node-2"}
