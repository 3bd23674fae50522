"""Nodes, ranks and networks of plans in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.domain import Network, NodeLink, Plan
from gateway.planner.comparison import layout_of

_KINDS = {"roce": "RoCE", "infiniband": "InfiniBand", "none": "TCP"}


def network_words(network: Network) -> str:
    """`200 Gbit/s, 2 us, RoCE`; a figure without measurement is called unknown."""
    rates = []
    if network.bytes_s is not None:
        rates.append(f"{network.bytes_s * 8 / 1e9:,g} Gbit/s")
    if network.tcp_bytes_s is not None:
        rates.append(f"{network.tcp_bytes_s * 8 / 1e9:,g} Gbit/s of TCP measured")
    bandwidth = ", ".join(rates) or "bandwidth unknown"
    latency = "latency unknown" if network.latency_s is None else f"{network.latency_s * 1e6:,g} us"
    kind = "RDMA unknown" if network.rdma is None else _KINDS[network.rdma]
    return f"{bandwidth}, {latency}, {kind}"


def link_words(link: NodeLink) -> str:
    """The network between two nodes, or that it was not measured."""
    if link.bytes_s is None and link.tcp_bytes_s is None:
        kind = "" if link.rdma is None else f", {_KINDS[link.rdma]}"
        return f"not measured{kind}"
    return network_words(link)


def node_reason(plans: Sequence[Plan], network: Network) -> str:
    """Why the first plan has this number of nodes for a copy; "": there is no plan."""
    if not plans:
        return ""
    best_plan = plans[0]
    text = network_words(network)
    if best_plan.span == 1:
        nodes = len({node_ranks.node for node_ranks in best_plan.nodes})
        place_words = "one node" if nodes == 1 else f"{nodes} nodes, each copy on one"
        return f"{place_words}: {_speed_figures(best_plan)}{_span_figures(plans)}"
    single_plan = next((plan for plan in plans if plan.span == 1), None)
    reason = (
        "no single node can hold it"
        if single_plan is None
        else f"one node gives {_speed_figures(single_plan)}"
    )
    unknown_words = (
        "" if best_plan.speed else "; the network is not known, and neither is the speed"
    )
    if not best_plan.speed and best_plan.pipeline_parallel.value > 1:
        unknown_words = "; without a known network, stages are taken, which send least"
    return (
        f"{best_plan.span} nodes by {layout_of(best_plan)} over {text}:"
        f" {_speed_figures(best_plan)}; {reason}{unknown_words}"
    )


def _span_figures(plans: Sequence[Plan]) -> str:
    span_plan = next((plan for plan in plans if plan.span > 1), None)
    return (
        f"; {span_plan.span} nodes by {layout_of(span_plan)} give {_speed_figures(span_plan)}"
        if span_plan
        else ""
    )


def _speed_figures(plan: Plan) -> str:
    context = f"{plan.max_model_len.value:,} tokens of context"
    if plan.speed is None:
        return f"speed unknown, {context}"
    stream = plan.speed.stream.value
    total = plan.speed.total.value
    return f"{stream:,g} tokens/s alone, {total:,g} in all, {context}"


def node_rows(plan: Plan) -> list[tuple[str, ...]]:
    """The node of every rank: copy, node, ranks, GPUs, ports."""
    return [
        (
            str(node_ranks.copy_number + 1),
            node_ranks.node,
            _range_text(node_ranks.ranks),
            _first_gpu(node_ranks.gpus),
            ", ".join(f"{use} {port}" for use, port in node_ranks.ports.items()),
        )
        for node_ranks in plan.nodes
    ]


def _first_gpu(gpus: tuple[str, ...]) -> str:
    suffix = f" and {len(gpus) - 1} more" if len(gpus) > 1 else ""
    return f"{gpus[0]}{suffix}" if gpus else "CPU"


def _range_text(ranks: tuple[int, ...]) -> str:
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
