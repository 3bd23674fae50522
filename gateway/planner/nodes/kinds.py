"""Nodes of a cluster that equal each other, which are planned once. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from gateway.domain import Gpu, Hardware, Node
from gateway.domain.record import FrozenRecord
from gateway.engines.common.planning_input import available_bytes

# Free memory counts as equal within this part of a GPU, and below two parts as none: full GPUs have
# so much left.
_STEPS = 64
_FIRST_STEP = 2


class NodeKind(FrozenRecord, frozen=True):
    """Nodes with equal machines, those to prefer first.

    hardware, promised_bytes: the values of the first node, with the least free memory of all nodes.
    """

    nodes: tuple[Node, ...]
    hardware: Hardware
    promised_bytes: Mapping[str, int]


def node_kinds(
    nodes: Sequence[Node], promised_bytes: Mapping[str, int], source: str
) -> list[NodeKind]:
    """The kinds of these nodes. Nodes that have the weights of the model `source` come first.

    promised_bytes: bytes of each GPU, by UUID, that are promised to other engines.
    """
    ordered_nodes = sorted(nodes, key=lambda node: source not in node.weights)
    kinds: dict[Hashable, list[Node]] = {}
    for node in ordered_nodes:
        ordered_node = _order_gpus(node, promised_bytes)
        identity = _node_identity(ordered_node.hardware, promised_bytes)
        kinds.setdefault(identity, []).append(ordered_node)
    return [_node_kind(group, promised_bytes) for group in kinds.values()]


def _order_gpus(node: Node, promised_bytes: Mapping[str, int]) -> Node:
    """The node with its GPUs by their free memory, where GPUs and links are alike.

    So nodes with as many free GPUs are alike, whichever these are. The numbers stay in order.
    """
    machine = node.hardware
    kinds = {_kind_of_gpu(gpu) for gpu in machine.gpus}
    links = {(link.nvlinks, link.p2p) for link in machine.links}
    pairs = len(machine.gpus) * (len(machine.gpus) - 1) // 2
    if len(kinds) > 1 or len(links) > 1 or len(machine.links) not in (0, pairs):
        return node
    ordered_gpus = sorted(machine.gpus, key=lambda gpu: -(_memory_step(gpu, promised_bytes) or 0))
    if ordered_gpus == list(machine.gpus):
        return node
    gpus = tuple(
        gpu.evolve(index=replaced_gpu.index)
        for gpu, replaced_gpu in zip(ordered_gpus, machine.gpus, strict=True)
    )
    return node.evolve(hardware=machine.evolve(gpus=gpus))


def _node_identity(machine: Hardware, promised_bytes: Mapping[str, int]) -> Hashable:
    gpus = tuple(
        (gpu.index, _kind_of_gpu(gpu), _memory_step(gpu, promised_bytes)) for gpu in machine.gpus
    )
    links = tuple((link.a, link.b, link.nvlinks, link.p2p) for link in machine.links)
    ram = machine.ram_total_bytes if not gpus else 0
    return machine.arch, machine.driver, machine.cpu_features, gpus, links, ram


def _kind_of_gpu(gpu: Gpu) -> Hashable:
    return (
        gpu.name,
        gpu.capability,
        gpu.total_bytes,
        gpu.memory_kind,
        gpu.mig,
        gpu.host_bytes,
        gpu.loss_reason is None and gpu.reservation_reason is None,
    )


def _memory_step(gpu: Gpu, promised_bytes: Mapping[str, int]) -> int | None:
    if not gpu.total_bytes:
        return None
    step = available_bytes(gpu, promised_bytes) * _STEPS // gpu.total_bytes
    return step if step >= _FIRST_STEP else 0


def _node_kind(nodes: Sequence[Node], promised_bytes: Mapping[str, int]) -> NodeKind:
    first = nodes[0].hardware
    if len(nodes) == 1:
        return NodeKind((nodes[0],), first, promised_bytes)
    columns = list(zip(*(node.hardware.gpus for node in nodes), strict=True))
    gpus = tuple(
        column[0].evolve(free_bytes=min(free_bytes))
        if (free_bytes := _known_free_bytes(column))
        else column[0]
        for column in columns
    )
    max_promised = {
        column[0].uuid: max(promised_bytes.get(gpu.uuid, 0) for gpu in column) for column in columns
    }
    return NodeKind(tuple(nodes), first.evolve(gpus=gpus), max_promised)


def _known_free_bytes(gpus: Sequence[Gpu]) -> list[int]:
    return [gpu.free_bytes for gpu in gpus if gpu.free_bytes is not None]
