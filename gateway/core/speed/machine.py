"""What a GPU and its links do in a second, and how much of that engines get: the inputs of a step's time. Pure.

machine_of(group, links, pace, direct=...) -> Machine
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from pydantic import Field

from gateway.core.kernels.cards import Card, CardTable
from gateway.domain import Gpu, Link, Value


@dataclass(frozen=True)
class Wire:
    """How the ranks of a plan reach each other. bytes_s: one direction of the slowest GPU. latency_s: of two ranks. ring: messages go from rank
    to rank, so that each rank more costs as much again; else each reads all others at once."""

    bytes_s: float
    latency_s: float
    ring: bool = False

    def all_reduce_s(self, ranks: int, size: float) -> float:
        """Seconds until `ranks` have the sum of what each has `size` bytes of."""
        steps = ranks - 1 if self.ring else 1
        return self.latency_s * steps + 2 * (ranks - 1) / ranks * size / self.bytes_s


@dataclass(frozen=True)
class Machine:
    """One GPU of a group of alike ones. memory: bytes/s. flops: FLOP/s by format, without sparsity. source: where these stand."""

    memory: float
    flops: Mapping[str, float]
    wire: Wire | None
    source: str


class Part(Value):
    """The part of a peak that a kernel reaches: of memory in small batches, of FLOP/s in large ones."""

    memory: float = Field(gt=0, le=1)
    flops: float = Field(gt=0, le=1)
    least_s: float = Field(0.0, ge=0, description="no layer takes less, however small")


class WirePart(Value):
    """What an all-reduce gets of a kind of link: the part of its bytes/s, and what it costs of two GPUs even where there is little to send."""

    part: float = Field(gt=0, le=1)
    latency_s: float = Field(gt=0)


class SpeedTable(Value):
    """What engines reach of the peaks of GPUs (profiles/speed.yaml), fitted to measurements.

    kernels: by a part of the kernel's name; the first that matches counts. experts: of products of experts, by the same. layer_s: what
    one layer costs beside its products with CUDA graphs, eager_layer_s without. step_s, request_s: of the engine's own programs for each step, for
    each request in the batch. first_s: of a request before its prompt is computed. stage_s: of a message to the next stage. stage_wait: the part
    by which stages that work at once are slower than each alone. band: the part by which a number
    and a measurement may differ; docs/speed.md says how many do by less.
    """

    source: str
    dense: Part
    kernels: dict[str, Part] = Field({})
    experts: Part
    expert_kernels: dict[str, Part] = Field({})
    attention: Part
    layer_s: float
    eager_layer_s: float
    step_s: float
    request_s: float
    first_s: float
    nvlink: WirePart
    p2p: WirePart
    host: WirePart
    stage_s: float
    stage_wait: float = Field(ge=0)
    band: float

    def part(self, kernel: str, *, experts: bool) -> Part:
        named = self.expert_kernels if experts else self.kernels
        found = next((part for name, part in named.items() if name in kernel), None)
        return found or (self.experts if experts else self.dense)


@dataclass(frozen=True, eq=False)
class Pace:
    """What is known of how fast GPUs and engines are."""

    cards: CardTable
    table: SpeedTable


def machine_of(group: Sequence[Gpu], links: Mapping[frozenset[int], Link], pace: Pace, *, direct: bool) -> Machine | None:
    """The slowest of the GPUs: ranks wait for each other. direct: they read each other's memory. None: one of them nobody has written down."""
    cards = [pace.cards.card(gpu.name, gpu.total_bytes) for gpu in group]
    known = [card for card in cards if card is not None]
    if len(known) < max(1, len(cards)):
        return None
    slowest = min(known, key=lambda card: card.memory_gb_s)
    peaks = {
        "bfloat16": slowest.bf16_tflops or slowest.fp16_tflops,
        "float16": slowest.fp16_tflops,
        "fp8": slowest.fp8_tflops,
        "fp4": slowest.fp4_tflops,
        "mxfp8": slowest.fp8_tflops,
        "int8": slowest.int8_tops,
    }
    flops = {name: peak * 1e12 for name, peak in peaks.items() if peak}
    return Machine(
        slowest.memory_gb_s * 1e9, flops, _wire(group, links, pace.table, slowest, direct=direct), f"profiles: {slowest.name}"
    )


def _wire(
    group: Sequence[Gpu], links: Mapping[frozenset[int], Link], table: SpeedTable, card: Card, *, direct: bool
) -> Wire | None:
    if len(group) == 1:
        return None
    between = [links.get(frozenset((a.index, b.index))) for a, b in combinations(group, 2)]
    if card.nvlink_gb_s and all(link is not None and link.nvlinks for link in between):
        return Wire(card.nvlink_gb_s * 1e9 * table.nvlink.part, table.nvlink.latency_s)
    part = table.p2p if direct else table.host
    # Over the host's memory NCCL sends in a ring.
    return Wire(min(_pcie_bytes_s(gpu, card) for gpu in group) * part.part, part.latency_s, ring=not direct)


def _pcie_bytes_s(gpu: Gpu, card: Card) -> float:
    """Of one direction: a lane of generation 3 has 8 GT/s of which 128 of 130 bits are data, each generation has twice as much."""
    generation = gpu.pcie.max_generation or card.pcie_generation or 3
    lanes = gpu.pcie.max_width or card.pcie_lanes or 8
    return lanes * 8e9 / 8 * 128 / 130 * 2.0 ** (generation - 3)
