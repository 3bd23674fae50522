"""Plans over the nodes of a cluster: one node as ever, no GPU twice, and the network decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.diagnosis.facts.known_facts import KnownFacts
from gateway.domain import Cluster, Decision, Hardware, Network, NodeLink, Plan
from gateway.engines.common.planning_input import PlanningInput
from gateway.engines.common.speed.objective import gpu_discount, plan_outcome, score
from gateway.planner.decide import decide
from gateway.planner.nodes.measured_networks import network_facts
from gateway.planner.nodes.over_nodes import decide_over_nodes
from gateway.planner.sizes import needed_tokens
from gateway.profiles.cluster_forms import build_cluster
from gateway.profiles.profiles import Profiles
from tests.support.examples import quicker
from tests.support.makers import wish
from tests.support.published import config, model_from_config
from tests.support.versions import VLLM_REF

PROFILES = Profiles()
ENGINES = [PROFILES.engine(VLLM_REF)]
RULES = PROFILES.rules(ENGINES)
FAST = Network(bytes_s=25e9, latency_s=2e-6, rdma="roce")
SLOW = Network(bytes_s=125e6, rdma="none")
MODELS = ("glm-4.5-air", "llama-3.1-8b", "qwen3-30b-a3b")
MACHINES = ("gb10", "3090", "2x3090", "8xh100", "3090+4090", "4xl4")
GOALS = ("latency", "balanced", "context", "throughput")


def inputs_of(model: str, machine: Hardware, **fields: Any) -> PlanningInput:
    spec = model_from_config(config(model))
    promised_bytes = fields.pop("promised_bytes", {})
    return PlanningInput(
        spec,
        machine,
        wish(**fields),
        promised_bytes=promised_bytes,
        gpus=PROFILES.gpus,
        speed_knowledge=PROFILES.speed_knowledge,
        parsers=PROFILES.parsers,
    )


def decide_over(
    model: str, machines: Sequence[str], network: Network = FAST, **fields: Any
) -> tuple[Decision, Cluster]:
    cluster = build_cluster([PROFILES.hardware(name) for name in machines], network)
    inputs = inputs_of(model, cluster.nodes[0].hardware, **fields)
    return decide_over_nodes(inputs, cluster, ENGINES, RULES), cluster


def decide_by_measurement(
    model: str, machines: Sequence[str], rates: Mapping[frozenset[int], float], **fields: Any
) -> tuple[Decision, PlanningInput]:
    """The decision with measured networks. rates: bytes/s by the positions of two nodes."""
    cluster = build_cluster([PROFILES.hardware(name) for name in machines], Network())
    nodes = tuple(
        node.evolve(address=f"10.0.0.{number}") for number, node in enumerate(cluster.nodes)
    )
    facts = [
        fact
        for (a, b), rate in ((sorted(pair), rate) for pair, rate in rates.items())
        for fact in network_facts(
            nodes[a], nodes[b], Network(tcp_bytes_s=rate, latency_s=1e-5), 0.0
        )
    ]
    inputs = inputs_of(model, nodes[0].hardware, **fields)
    inputs = inputs.replace_fields(facts=KnownFacts(facts))
    return decide_over_nodes(inputs, cluster.evolve(nodes=nodes), ENGINES, RULES), inputs


def layout(plan: Plan) -> tuple[int, int, int]:
    return (
        plan.span,
        plan.tensor_parallel.value,
        plan.pipeline_parallel.value,
    )


@pytest.mark.parametrize(
    ("network", "expected"),
    [(FAST, (2, 2, 1)), (SLOW, (2, 1, 2)), (Network(), (2, 1, 2))],
    ids=["roce", "gigabit", "unknown"],
)
def test_the_network_decides_how_two_nodes_share_a_model(
    network: Network, expected: tuple[int, int, int]
) -> None:
    decision, _ = decide_over("glm-4.5-air", ["gb10", "gb10"], network)
    assert layout(decision.plans[0]) == expected
    assert "no single node can hold it" in decision.why_nodes
    assert (decision.plans[0].speed is None) == (network == Network())


@pytest.mark.parametrize(
    ("rate", "expected"), [(12e9, (2, 2, 1)), (1.2e8, (2, 1, 2))], ids=["fast", "gigabit"]
)
def test_a_measured_network_decides_like_a_stated_one(
    rate: float, expected: tuple[int, int, int]
) -> None:
    decision, _ = decide_by_measurement("glm-4.5-air", ["gb10", "gb10"], {frozenset((0, 1)): rate})
    assert layout(decision.plans[0]) == expected
    assert decision.plans[0].speed is not None
    assert decision.plans[0].speed.source.endswith("network as measured")
    assert "Gbit/s of TCP measured" in decision.why_nodes


def test_the_pair_with_a_measurement_is_taken() -> None:
    decision, _ = decide_by_measurement("glm-4.5-air", ["gb10"] * 3, {frozenset((1, 2)): 12e9})
    best_plan = next(plan for plan in decision.plans if plan.span == 2)
    assert [row.node for row in best_plan.nodes] == ["node-2", "node-3"]
    assert layout(best_plan) == (2, 2, 1)


def test_an_engine_over_a_pair_without_a_measurement_has_stages() -> None:
    decision, _ = decide_by_measurement("glm-4.5-air", ["gb10"] * 3, {frozenset((1, 2)): 12e9})
    wide_plans = [plan for plan in decision.plans if plan.span == 3]
    assert wide_plans
    assert {(layout(plan), plan.speed) for plan in wide_plans} == {((3, 1, 3), None)}


def test_a_stated_link_counts_more_than_that_of_all_nodes() -> None:
    cluster = build_cluster([PROFILES.hardware("gb10")] * 2, SLOW)
    link = NodeLink(a="node-2", b="node-1", **FAST.model_dump())
    inputs = inputs_of("glm-4.5-air", cluster.nodes[0].hardware)
    decision = decide_over_nodes(inputs, cluster.evolve(links=(link,)), ENGINES, RULES)
    assert layout(decision.plans[0]) == (2, 2, 1)


@settings(max_examples=quicker(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    model=st.sampled_from(MODELS),
    machine=st.sampled_from(("gb10", "3090", "4xl4")),
    rates=st.lists(st.sampled_from([1.2e8, 1.2e9, 4e9, 1.2e10]), min_size=3, max_size=3),
    faster=st.sampled_from([1.2e9, 1.2e10, 4e10]),
    goal=st.sampled_from(GOALS),
)
def test_a_faster_network_makes_no_plan_worse(
    model: str, machine: str, rates: list[float], faster: float, goal: str
) -> None:
    """The best worth of all plans never falls when one of three networks becomes faster."""
    pairs = [frozenset(pair) for pair in combinations(range(3), 2)]
    slow = dict(zip(pairs, rates, strict=True))
    fast = {**slow, pairs[0]: max(faster, rates[0])}
    best = []
    for networks in (slow, fast):
        decision, inputs = decide_by_measurement(model, [machine] * 3, networks, goal=goal)
        best.append(max((worth(plan, inputs) for plan in decision.plans), default=0))
    assert best[1] >= best[0]


def test_two_nodes_write_about_twice_as_fast_as_one() -> None:
    """Reported for two GB10 over RoCE: 2.09 times (github.com/unslothai/unsloth pull 10280)."""
    single_decision, _ = decide_over("llama-3.1-8b", ["gb10"], goal="latency")
    two, _ = decide_over("llama-3.1-8b", ["gb10", "gb10"], goal="latency")
    assert single_decision.plans[0].speed is not None
    assert two.plans[0].speed is not None
    assert layout(two.plans[0]) == (2, 2, 1)
    assert 1.7 < two.plans[0].speed.stream.value / single_decision.plans[0].speed.stream.value < 2.3


def test_nodes_that_have_the_weights_come_first() -> None:
    _, cluster = decide_over("llama-3.1-8b", ["3090"] * 3)
    first, second, third = cluster.nodes
    nodes = (first, second, third.evolve(weights=("m",)))
    inputs = inputs_of("llama-3.1-8b", first.hardware, replicas=1)
    decision = decide_over_nodes(inputs, cluster.evolve(nodes=nodes), ENGINES, RULES)
    single = next(plan for plan in decision.plans if plan.span == 1)
    assert [row.node for row in single.nodes] == ["node-3"]


def test_a_plan_waits_for_all_of_its_nodes() -> None:
    _, cluster = decide_over("glm-4.5-air", ["gb10", "gb10"])
    gpu = cluster.nodes[1].hardware.gpus[0]
    assert gpu.total_bytes is not None
    inputs = inputs_of(
        "glm-4.5-air",
        cluster.nodes[0].hardware,
        promised_bytes={gpu.uuid: gpu.total_bytes * 9 // 10},
    )
    decision = decide_over_nodes(inputs, cluster, ENGINES, RULES)
    assert not decision.plans
    assert "GPU 0 of node-2 has" in decision.wait_reason
    assert "node-1 has" not in decision.wait_reason


@settings(max_examples=quicker(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    model=st.sampled_from(MODELS),
    machines=st.lists(st.sampled_from(MACHINES), min_size=1, max_size=5),
    network=st.sampled_from([FAST, SLOW, Network()]),
    goal=st.sampled_from(GOALS),
)
def test_ranks_take_each_gpu_of_a_node_once(
    model: str, machines: list[str], network: Network, goal: str
) -> None:
    decision, cluster = decide_over(model, sorted(machines), network, goal=goal)
    uuids_by_node = {node.name: {gpu.uuid for gpu in node.hardware.gpus} for node in cluster.nodes}
    for plan in decision.plans if len(machines) > 1 else ():
        uuids = [uuid for row in plan.nodes for uuid in row.gpus]
        assert len(uuids) == len(set(uuids)) == len(plan.gpus) * plan.replicas.value
        assert plan.nodes[0].gpus == plan.gpus[: len(plan.nodes[0].gpus)]
        for row in plan.nodes:
            assert {*row.gpus} <= uuids_by_node[row.node]
            assert len(row.ranks) == len(row.gpus)
        for copy in range(plan.replicas.value):
            ranks = [rank for row in plan.nodes if row.copy_number == copy for rank in row.ranks]
            assert ranks == list(range(len(plan.gpus)))


@settings(max_examples=quicker(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    model=st.sampled_from(MODELS), machine=st.sampled_from(MACHINES), goal=st.sampled_from(GOALS)
)
def test_one_node_has_the_plans_of_its_machine(model: str, machine: str, goal: str) -> None:
    decision, cluster = decide_over(model, [machine], goal=goal)
    inputs = inputs_of(model, cluster.nodes[0].hardware, goal=goal)
    assert decision.model_dump_json() == decide(inputs, ENGINES, RULES).model_dump_json()


def worth(plan: Plan, inputs: PlanningInput) -> float:
    outcome = plan_outcome(
        plan.memory,
        plan.speed,
        plan.max_model_len.value,
        len(plan.gpus),
        plan.replicas.value,
        needed_tokens(inputs.wish, inputs.spec),
        plan.data_parallel.value,
    )
    return score(outcome, inputs.wish.goal, gpu_discount(inputs.wish))


@settings(max_examples=quicker(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    model=st.sampled_from(MODELS),
    machines=st.lists(st.sampled_from(MACHINES), min_size=1, max_size=4),
    more=st.sampled_from(MACHINES),
    network=st.sampled_from([FAST, SLOW]),
    goal=st.sampled_from(GOALS),
)
def test_another_node_removes_no_plan(
    model: str, machines: list[str], more: str, network: Network, goal: str
) -> None:
    """The best worth of all plans never falls. That of the first plan falls only where the weights
    need no quantization any more, which comes before speed."""
    small_decision, cluster = decide_over(model, machines, network, goal=goal)
    large_decision, _ = decide_over(model, [*machines, more], network, goal=goal)
    inputs = inputs_of(model, cluster.nodes[0].hardware, goal=goal)
    decisions = small_decision, large_decision
    best = [
        max((worth(plan, inputs) for plan in decision.plans), default=0) for decision in decisions
    ]
    assert best[1] >= best[0]
    first = [
        max(
            ((not plan.quantizes_weights, worth(plan, inputs)) for plan in decision.plans[:1]),
            default=(False, 0.0),
        )
        for decision in decisions
    ]
    assert first[1] >= first[0]


@settings(max_examples=quicker(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    models=st.lists(st.sampled_from(MODELS), min_size=2, max_size=4),
    machines=st.lists(st.sampled_from(MACHINES), min_size=2, max_size=3),
    network=st.sampled_from([FAST, SLOW, Network()]),
    goal=st.sampled_from(GOALS),
)
def test_models_that_are_planned_one_after_the_other_promise_no_byte_twice(
    models: list[str], machines: list[str], network: Network, goal: str
) -> None:
    sizes = {
        gpu.uuid: gpu.total_bytes or 0
        for node in decide_over(models[0], machines, network)[1].nodes
        for gpu in node.hardware.gpus
    }
    promised_bytes: Counter[str] = Counter()
    for model in models:
        decision, _ = decide_over(
            model, machines, network, goal=goal, promised_bytes=dict(promised_bytes)
        )
        for plan in decision.plans[:1]:
            for row in plan.nodes:
                promised_bytes.update(dict.fromkeys(row.gpus, plan.memory.promised_bytes))
    assert all(0 < size <= sizes[uuid] for uuid, size in promised_bytes.items())
