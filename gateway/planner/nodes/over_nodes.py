"""The planner for a cluster: copies on alike nodes, and engines over several nodes. Pure.

decide_over_nodes(inputs, cluster, engines, rules) -> Decision

Each kind of node is planned once, by the planner of one machine. An engine over several nodes is
planned the same way, on those nodes as one machine. The best of all plans wins, and names the node
of every rank. A plan holds for all of its nodes, or not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from gateway.domain import (
    Cluster,
    Decision,
    Engine,
    EngineRef,
    Hardware,
    Network,
    Node,
    Plan,
    RejectedPlan,
    Wish,
)
from gateway.domain.units import gib
from gateway.engines.common.candidate import EngineRules
from gateway.engines.common.planning_input import PlanningInput, available_bytes
from gateway.errors import BadRequest
from gateway.planner.comparison import gpu_comparison
from gateway.planner.decide import decide, engine_order, rank_plans
from gateway.planner.nodes.kinds import NodeKind, node_kinds
from gateway.planner.nodes.measured_networks import MeasuredNetworks
from gateway.planner.nodes.placement import place_on_groups, place_on_nodes
from gateway.planner.nodes.repeats import best_of_layouts, distinct_refusals
from gateway.planner.nodes.spans import Networks, NodeGroups, node_groups
from gateway.planner.nodes.words import node_reason
from gateway.planner.parallel import drop_engines

_MAX_NAMES = 4


def decide_over_nodes(
    inputs: PlanningInput,
    cluster: Cluster,
    engines: Sequence[Engine],
    rules: Mapping[str, EngineRules] | None = None,
) -> Decision:
    """All plans for a cluster, best first; with one node those of its machine.

    inputs: the planning input of any node; each node's own machine replaces its machine. Raises as
        `decide`.
    """
    nodes = _wished_nodes(cluster.nodes, inputs.wish)
    wish = inputs.wish.evolve(gpus="all") if isinstance(inputs.wish.gpus, tuple) else inputs.wish
    inputs = inputs.replace_fields(wish=wish)
    if len(cluster.nodes) == 1:
        return decide(inputs.replace_fields(hardware=nodes[0].hardware), engines, rules)
    decision = _decide_over_nodes(inputs, cluster, nodes, engines, rules)
    if decision.plans or not inputs.promised_bytes:
        return decision
    empty = tuple(
        node.evolve(hardware=drop_engines(node.hardware, inputs.promised_bytes)) for node in nodes
    )
    later_decision = _decide_over_nodes(
        inputs.replace_fields(promised_bytes={}), cluster, empty, engines, rules
    )
    if not later_decision.plans:
        return decision
    return decision.evolve(
        wait_reason=_shortage_words(later_decision.plans[0], nodes, inputs.promised_bytes)
    )


def _decide_over_nodes(
    inputs: PlanningInput,
    cluster: Cluster,
    nodes: Sequence[Node],
    engines: Sequence[Engine],
    rules: Mapping[str, EngineRules] | None,
) -> Decision:
    """The best plans on single nodes and over several, with the refusals of all."""
    measured_networks = MeasuredNetworks(inputs.facts.select_kind("network_speed"))
    networks = Networks(
        cluster, inputs.speed_knowledge.table if inputs.speed_knowledge else None, measured_networks
    )
    ports_in_use = {node.name: frozenset(node.ports) for node in nodes}
    plans: list[Plan] = []
    decisions: list[Decision] = []
    networks_used: list[tuple[Plan, Network]] = []
    kinds = node_kinds(nodes, inputs.promised_bytes, inputs.spec.versioned_source)
    for kind in kinds:
        kind_input = inputs.replace_fields(
            hardware=kind.hardware, promised_bytes=kind.promised_bytes, alike_nodes=len(kind.nodes)
        )
        decisions.append(decide(kind_input, _able(engines, kind), rules))
        plans += [place_on_nodes(plan, kind) for plan in decisions[-1].plans]
        for decision, placed_plans, network in _plan_spans(
            inputs, kind, networks, engines, rules=rules, ports_in_use=ports_in_use
        ):
            decisions.append(decision)
            plans += placed_plans
            networks_used += [(plan, network) for plan in placed_plans]
    whole_input = inputs.replace_fields(hardware=_all_gpus(nodes), alike_nodes=1)
    best_plans = best_of_layouts(rank_plans(whole_input, plans, engine_order(engines)))
    rejections = tuple(
        distinct_refusals(rejection for decision in decisions for rejection in decision.rejected)
    )
    rejections += tuple(_unlike_nodes_refusals(kinds, engines))
    return Decision(
        model=inputs.spec.source,
        hardware=inputs.hardware_name,
        plans=tuple(plan.evolve(rank=number) for number, plan in enumerate(best_plans, start=1)),
        why_gpus=gpu_comparison(best_plans, rejections),
        why_nodes=node_reason(best_plans, _best_network(best_plans, networks_used, cluster)),
        rejected=rejections,
        gaps=tuple(dict.fromkeys(gap for decision in decisions for gap in decision.gaps)),
    )


def _plan_spans(
    inputs: PlanningInput,
    kind: NodeKind,
    networks: Networks,
    engines: Sequence[Engine],
    rules: Mapping[str, EngineRules] | None,
    ports_in_use: Mapping[str, Collection[int]],
) -> Iterator[tuple[Decision, list[Plan], Network]]:
    """Each decision for groups of alike nodes, its plans on these nodes, and their network."""
    for groups in node_groups(kind, networks, inputs):
        decision = _decide_span(inputs, groups, engines, rules)
        plans = [place_on_groups(plan, groups, ports_in_use) for plan in decision.plans]
        if networks.is_unknown(groups):
            plans = _low_traffic_plans(plans, groups)
        yield decision, plans, groups.span.network


def _best_network(
    best_plans: Sequence[Plan], networks_used: Sequence[tuple[Plan, Network]], cluster: Cluster
) -> Network:
    """The network of the best plan; that of the cluster where it has one node."""
    return next(
        (network for plan, network in networks_used if best_plans and plan is best_plans[0]),
        cluster.network,
    )


def _low_traffic_plans(plans: list[Plan], groups: NodeGroups) -> list[Plan]:
    """The plans with pipeline stages between nodes, or all plans if none has stages.

    Stages need the least from an unmeasured network.
    """
    size = groups.span.gpus_each
    stages = [
        plan
        for plan in plans
        if plan.tensor_parallel.value <= size and plan.data_parallel.value == 1
    ]
    return stages or plans


def _decide_span(
    inputs: PlanningInput,
    groups: NodeGroups,
    engines: Sequence[Engine],
    rules: Mapping[str, EngineRules] | None,
) -> Decision:
    span_input = inputs.replace_fields(
        hardware=groups.machine,
        promised_bytes=groups.promised_bytes,
        span=groups.span,
        alike_nodes=len(groups.groups),
    )
    able = [engine for engine in engines if engine.device == "cuda"]
    return decide(span_input, able, rules)


def _able(engines: Sequence[Engine], kind: NodeKind) -> list[Engine]:
    """The engines for this kind of node: those for GPUs where it has some."""
    device = "cuda" if kind.hardware.gpus else "cpu"
    return [engine for engine in engines if engine.device == device]


def _unlike_nodes_refusals(
    kinds: Sequence[NodeKind], engines: Sequence[Engine]
) -> Iterator[RejectedPlan]:
    """Why no engine is planned over nodes of several kinds; nothing where all are alike."""
    names = [kind.nodes[0].name for kind in kinds if kind.hardware.gpus]
    if len(names) < 2:
        return
    suffix = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    reason = (
        f"one engine over unlike nodes ({', '.join(names[:_MAX_NAMES])}{suffix}) is not planned, as"
        " their GPUs or free memory differ; copies may have unlike nodes"
    )
    gpus = sum(len(kind.hardware.gpus) * len(kind.nodes) for kind in kinds)
    for engine in engines:
        if engine.device == "cuda":
            yield RejectedPlan(
                engine=EngineRef(kind=engine.kind, version=engine.version, image=engine.image),
                tensor_parallel=gpus,
                verdict="no_device",
                reasons=(reason,),
                source="planner",
            )


def _all_gpus(nodes: Sequence[Node]) -> Hardware:
    """A machine with the GPUs of all nodes, of which only the number counts."""
    gpus = tuple(gpu for node in nodes for gpu in node.hardware.gpus)
    return nodes[0].hardware.evolve(gpus=gpus, links=())


def _wished_nodes(nodes: tuple[Node, ...], wish: Wish) -> tuple[Node, ...]:
    """The nodes with the GPUs that the wish names, by UUID or `node/index`. Raises BadRequest."""
    if not isinstance(wish.gpus, tuple):
        return nodes
    names: dict[str, str] = {}
    for node in nodes:
        for gpu in node.hardware.gpus:
            names |= dict.fromkeys((gpu.uuid, f"{node.name}/{gpu.index}"), gpu.uuid)
    if missing_names := [name for name in wish.gpus if name not in names]:
        raise BadRequest(
            f"There is no GPU {missing_names[0][:100]} in the cluster.",
            hint="Name GPUs as NODE/NUMBER or by UUID.",
            param="gpus",
        )
    uuids = {names[name] for name in wish.gpus}
    chosen_nodes = (
        node.evolve(hardware=node.hardware.select_gpus(lambda gpu: gpu.uuid in uuids))
        for node in nodes
    )
    return tuple(node for node in chosen_nodes if node.hardware.gpus)


def _shortage_words(plan: Plan, nodes: Sequence[Node], promised_bytes: Mapping[str, int]) -> str:
    """The GPUs with too little free memory for this plan, in words."""
    bytes_per_gpu = plan.memory.promised_bytes
    shortages = []
    gpu_by_uuid = {gpu.uuid: (node, gpu) for node in nodes for gpu in node.hardware.gpus}
    used_uuids = {uuid for node_ranks in plan.nodes for uuid in node_ranks.gpus}
    for uuid, (node, gpu) in gpu_by_uuid.items():
        if uuid not in used_uuids:
            continue
        free_bytes = available_bytes(gpu, promised_bytes)
        if free_bytes < bytes_per_gpu:
            shortages.append(f"GPU {gpu.index} of {node.name} has {gib(free_bytes)}")
    names = list(dict.fromkeys(node_ranks.node for node_ranks in plan.nodes))
    suffix = f" and {len(shortages) - _MAX_NAMES} more" if len(shortages) > _MAX_NAMES else ""
    return (
        f"A plan over {', '.join(names[:_MAX_NAMES])} needs {gib(bytes_per_gpu)} of each GPU at"
        f" the same time; {', '.join(shortages[:_MAX_NAMES])}{suffix}. It starts when other engines"
        " have left."
    )
