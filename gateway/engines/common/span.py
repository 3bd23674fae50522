"""Several alike nodes as the place of one engine. Pure.

GPU i * gpus_each to (i + 1) * gpus_each - 1 of the machine are those of node i, so ranks that
follow each other are on one node, as engines distribute them: `local_world_size` in
vllm/config/parallel.py:835 of 0.32.0.
"""

from __future__ import annotations

from typing import NamedTuple

from gateway.domain.hardware import Network


class SpanLayout(NamedTuple):
    """Ranks of tensor parallelism, stages, and groups of ranks with requests of their own."""

    tp: int
    pp: int
    dp: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp


class NodeSpan(NamedTuple):
    """Several alike nodes of one engine.

    nodes: how many.
    gpus_each: GPUs of each.
    network: the slowest between two of them.
    layouts: those to plan.
    """

    nodes: int
    gpus_each: int
    network: Network
    layouts: tuple[SpanLayout, ...]

    def crossings(self, tp: int, pp: int) -> int:
        """Borders between stages that are borders between nodes."""
        return self.nodes - 1 if pp > 1 and tp <= self.gpus_each else 0


class Rendezvous(NamedTuple):
    """The place where the nodes of one engine meet: an address and two ports of the first node.

    groups: the number of groups of ranks that serve separate requests, on all nodes together.
    """

    nodes: int
    groups: int
    address: str
    port: int
    groups_port: int
