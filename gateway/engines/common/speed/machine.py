"""Speed of a GPU and its links, and the share of it that engines reach. Pure.

build_machine(gpus, links, speed_knowledge, measured, direct=...) -> Machine

Shares were fitted to the peaks of data sheets. A measurement on this machine replaces a peak,
scaled to the share that the reference card reached (`ReferenceFigures`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from gateway.domain import Gpu, Link, Value
from gateway.domain.base import Field
from gateway.domain.hardware import Network
from gateway.domain.record import FrozenRecord
from gateway.domain.release import release
from gateway.engines.common.kernels.cards import Card, CardTable
from gateway.engines.common.span import NodeSpan
from gateway.engines.common.speed.gpu_measurements import (
    AllReduceFit,
    MachineMeasurements,
    link_class,
)


class RankLink(FrozenRecord, frozen=True):
    """The connection between the ranks of a plan.

    bytes_s: one direction of the slowest GPU.
    latency_s: the latency between two ranks.
    per_rank_s: added by each further rank, if messages pass from rank to rank.
    """

    bytes_s: float
    latency_s: float
    per_rank_s: float = 0.0

    def all_reduce_s(self, ranks: int, size: float) -> float:
        """Seconds until `ranks` have the sum of their parts of `size` bytes."""
        return (
            self.latency_s
            + self.per_rank_s * (ranks - 2)
            + 2 * (ranks - 1) / ranks * size / self.bytes_s
        )


class Machine(FrozenRecord, frozen=True):
    """One GPU of a group of equal ones.

    memory: bytes/s.
    flops: FLOP/s by format, without sparsity.
    source: origin of the figures.
    launch: the CPU's time to launch a kernel, relative to the reference machine.
    between_nodes: the connection of the nodes, if the engine spans several.
    crossings: borders of stages that lie between nodes.
    """

    memory: float
    flops: Mapping[str, float]
    wire: RankLink | None
    source: str
    launch: float = 1.0
    between_nodes: RankLink | None = None
    crossings: int = 0


class PeakShare(Value):
    """The part of a peak that a kernel reaches: of memory in small batches, of FLOP/s in large
    ones."""

    memory: float = Field(gt=0, le=1)
    flops: float = Field(gt=0, le=1)
    least_s: float = Field(0.0, ge=0, description="no layer takes less, however small")
    launch_s: float = Field(
        0.0, ge=0, description="seconds of the CPU for a whole layer of experts without CUDA graphs"
    )


class Graphs(NamedTuple):
    """The largest batches that run as CUDA graphs, in tokens: of steps that only decode, and of
    those that compute prompts."""

    steps: float = math.inf
    prompts: float = math.inf


class LinkEfficiency(Value):
    """Efficiency of an all-reduce over a kind of link: the share of its bytes/s, and the fixed cost
    between two GPUs."""

    part: float = Field(gt=0, le=1)
    latency_s: float = Field(gt=0)
    per_rank_s: float = Field(0.0, ge=0, description="seconds for each further GPU", alias="more_s")


class ReferenceFigures(Value):
    """Results of `fitserve calibrate` on the reference machine.

    memory, flops by format, nvlink: share of the data sheet. launch_s: of one operation.
    """

    source: str
    memory: float = Field(gt=0, le=1)
    flops: dict[str, float]
    nvlink: LinkEfficiency | None = None
    launch_s: float = Field(gt=0)

    def part(self, name: str) -> float | None:
        return (
            self.memory
            if name == "memory"
            else self.flops.get("bfloat16" if name == "float16" else name)
        )


class KernelNames(NamedTuple):
    """Groups of kernels by name; a name in no group has the common speed. experts: for products of
    experts."""

    dense: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()

    def group(self, kernel: str, *, has_experts: bool) -> str:
        """The first of them that stands in the kernel's own name; "": none does."""
        return next(
            (name for name in (self.experts if has_experts else self.dense) if name in kernel), ""
        )


NO_NAMES = KernelNames()


class SpeedTable(Value):
    """Shares of the peaks of GPUs that engines reach (profiles/speed.yaml), fitted to measurements.

    kernels: shares by a part of the kernel's name; the first match counts.
    experts: the same for products of experts.
    layer_s: cost of one layer with CUDA graphs, without its products.
    eager_layer_s: time of a layer without graphs and without experts.
    graph_tokens_by_kind: tokens up to which kinds of engines have graphs for all batches, at most
        twice the requests of a step.
    prompt_graphs_since: first versions with graphs of prompts.
    step_s, request_s: time of the engine's own programs for each step, and for each request of the
        batch.
    step_s_by_kind: step_s of kinds with another value.
    separate_prefill_kinds: kinds with steps of only prompts or only decoding.
    request_overhead_s: time of a request before its prompt is computed.
    admission_s: time for each of several requests that begin together.
    eight_bit_cache: shares for attention on an 8-bit KV cache.
    narrow_head_share: share of FLOP/s with heads of 64 elements or fewer.
    rdma, sockets: all-reduces between nodes, with RDMA and without. None: no speed of an engine
    over nodes is known.
    stage_s: time of a message to the next stage.
    stage_wait: slowdown of stages that work together.
    band: relative error of the figures; docs/speed-model.md has the distribution.
    reference: the figures of a good GPU. Without them, measurements of a GPU are not comparable.
    """

    source: str
    dense: PeakShare
    kernels: dict[str, PeakShare] = Field({})
    experts: PeakShare
    expert_kernels: dict[str, PeakShare] = Field({})
    attention: PeakShare
    narrow_head_share: float = Field(1.0, gt=0, le=1, alias="narrow")
    eight_bit_cache: PeakShare = Field(alias="small_cache")
    layer_s: float
    eager_layer_s: float
    graph_tokens_by_kind: dict[str, int] = Field({}, alias="graph_tokens_of")
    prompt_graphs_since: dict[str, str] = Field({})
    step_s: float
    step_s_by_kind: dict[str, float] = Field({}, alias="step_of")
    request_s: float
    has_separate_prefill: bool = Field(False, alias="separate")
    separate_prefill_kinds: tuple[str, ...] = Field((), alias="separate_of")
    request_overhead_s: float = Field(alias="first_s")
    admission_s: float = Field(alias="admit_s")
    nvlink: LinkEfficiency
    p2p: LinkEfficiency
    host: LinkEfficiency
    rdma: LinkEfficiency | None = None
    sockets: LinkEfficiency | None = None
    stage_s: float
    stage_wait: float = Field(ge=0)
    band: float
    reference: ReferenceFigures | None = None

    def kind_table(self, kind: str) -> SpeedTable:
        """The table of this machine for a kind of engine."""
        return self.evolve(
            step_s=self.step_s_by_kind.get(kind, self.step_s),
            has_separate_prefill=kind in self.separate_prefill_kinds,
        )

    def graphs(self, kind: str, version: str, seqs: int, *, is_eager: bool) -> Graphs:
        """seqs: the most requests of a step.
        is_eager: whether CUDA graphs were switched off.
        """
        if is_eager:
            return Graphs(0, 0)
        if kind in self.graph_tokens_by_kind:
            limit = min(self.graph_tokens_by_kind[kind], 2 * seqs)
            return Graphs(limit, limit)
        first_version = self.prompt_graphs_since.get(kind)
        return Graphs(
            prompts=math.inf if first_version and release(version) >= release(first_version) else 0
        )

    @property
    def names(self) -> KernelNames:
        return KernelNames(tuple(self.kernels), tuple(self.expert_kernels))

    def part(self, name: str, *, has_experts: bool) -> PeakShare:
        """name: the form of the name in `names`."""
        known_parts, other_part = (
            (self.expert_kernels, self.experts) if has_experts else (self.kernels, self.dense)
        )
        return known_parts.get(name, other_part)


class SpeedKnowledge(FrozenRecord, frozen=True, eq=False):
    """Knowledge of the speed of GPUs and engines."""

    cards: CardTable
    table: SpeedTable


NO_MEASUREMENTS = MachineMeasurements()


def build_machine(
    gpus: Sequence[Gpu],
    links: Mapping[frozenset[int], Link],
    speed_knowledge: SpeedKnowledge,
    measured_rates: MachineMeasurements = NO_MEASUREMENTS,
    *,
    has_direct_links: bool,
) -> Machine | None:
    """The slowest of the GPUs, as ranks wait for each other; None: the speed of one is unknown.

    has_direct_links: they read each other's memory.
    """
    # Cards of one model count as equal unless each card was measured.
    kinds: dict[tuple[str, int | None], Gpu] = {}
    for gpu in gpus:
        kinds.setdefault((gpu.name, gpu.total_bytes), gpu)
    peaks = [
        _read_peaks(gpu, speed_knowledge, measured_rates)
        for gpu in (gpus if measured_rates else kinds.values())
    ]
    known_peaks = [peak for peak in peaks if peak is not None]
    if len(known_peaks) < max(1, len(peaks)):
        return None
    slowest = min(known_peaks, key=lambda peak: peak.memory)
    is_joined = all(
        link is not None and link.nvlinks
        for link in (links.get(_ends(*pair)) for pair in combinations(gpus, 2))
    )
    reference = speed_knowledge.table.reference
    reduce = measured_rates.all_reduce(gpus, links) if len(gpus) > 1 else None
    if reduce is not None and (
        not (reference and reference.nvlink)
        if is_joined
        else not has_direct_links and "P2P" in link_class(gpus, links)
    ):
        # not on the scale of the parts; or measured with P2P, and these ranks must do without
        reduce = None
    wire = (
        _wire(
            gpus,
            speed_knowledge.table,
            reduce,
            slowest.card,
            is_joined=is_joined,
            has_direct_links=has_direct_links,
        )
        if len(gpus) > 1
        else None
    )
    launch = measured_rates.number(gpus[0], "launch")
    slower = launch.value / reference.launch_s if launch and reference else 1.0
    days = {**slowest.measured, **({"all-reduce": reduce.day} if reduce else {})}
    return Machine(slowest.memory, slowest.flops, wire, _source(slowest, days, wire), slower)


def node_wire(network: Network, table: SpeedTable) -> RankLink | None:
    """The connection between nodes; None: its bandwidth is not known.

    Without a word about RDMA, messages pass through sockets. The table's latency is that of the
    engine's part, to which a measured one is added. A measured rate of TCP is reached by engines
    too, and RDMA carries no less.
    """
    has_rdma = network.rdma in ("infiniband", "roce")
    wire_part = table.rdma if has_rdma else table.sockets
    if wire_part is None:
        return None
    rates = [network.tcp_bytes_s] if network.tcp_bytes_s is not None else []
    if network.bytes_s is not None and (has_rdma or not rates):
        rates.append(network.bytes_s * wire_part.part)
    if not rates:
        return None
    latency_s = wire_part.latency_s + (network.latency_s or 0.0)
    return RankLink(max(rates), latency_s, wire_part.per_rank_s)


def machine_of_span(
    machine: Machine, span: NodeSpan, tp: int, pp: int, table: SpeedTable
) -> Machine | None:
    """The machine of a group of ranks as a part of several nodes.

    machine: the machine of one group of ranks. None: the network, on which the speed depends, is
        unknown.
    """
    wire = node_wire(span.network, table)
    if wire is None:
        return None
    crosses = tp > span.gpus_each
    return machine.evolve(
        wire=wire if crosses else machine.wire,
        between_nodes=wire,
        crossings=span.crossings(tp, pp),
        source=f"{machine.source}; network {_network_source(span.network)}",
    )


def _network_source(network: Network) -> str:
    return "as stated" if network.tcp_bytes_s is None else "as measured"


def _ends(a: Gpu, b: Gpu) -> frozenset[int]:
    return frozenset((a.index, b.index))


class _Peaks(FrozenRecord, frozen=True):
    """The peaks of one GPU, as on a data sheet.

    card: None where there is none.
    measured: the figures that were measured, and the day.
    """

    memory: float
    flops: Mapping[str, float]
    card: Card | None
    measured: Mapping[str, str]


# Measured formats, and the formats that are multiplied equally fast.
_FORMATS: Mapping[str, tuple[str, ...]] = {
    "memory": (),
    "bfloat16": ("bfloat16", "float16"),
    "float16": ("bfloat16", "float16"),
    "fp8": ("fp8", "mxfp8"),
    "int8": ("int8",),
}


def _read_peaks(
    gpu: Gpu, speed_knowledge: SpeedKnowledge, measured_rates: MachineMeasurements
) -> _Peaks | None:
    card = speed_knowledge.cards.card(gpu.name, gpu.total_bytes)
    reference = speed_knowledge.table.reference
    default_part = 1.0 if card is None else None
    flops = _peak_rates(card) if card else {}
    days: dict[str, str] = {}

    memory = card.memory_gb_s * 1e9 if card else None
    for product, formats in _FORMATS.items():
        # A measurement is better than nothing for a card without a data sheet, though it is a
        # little below the peak.
        number = measured_rates.number(gpu, product)
        part = reference.part(product) if reference else default_part
        if number is None or part is None:
            continue
        days[product] = number.day
        if formats:
            flops |= dict.fromkeys(formats, number.value / part)
        else:
            memory = number.value / part
    return _Peaks(memory, flops, card, days) if memory is not None and "float16" in flops else None


def _peak_rates(card: Card) -> dict[str, float]:
    peaks = {
        "bfloat16": card.bf16_tflops or card.fp16_tflops,
        "float16": card.fp16_tflops,
        "fp8": card.fp8_tflops,
        "fp4": card.fp4_tflops,
        "mxfp8": card.fp8_tflops,
        "int8": card.int8_tops,
    }
    return {name: peak * 1e12 for name, peak in peaks.items() if peak}


def _source(peaks: _Peaks, days: Mapping[str, str], wire: RankLink | None) -> str:
    """The origin of the figures in words: date of the measurement, and sources of the rest."""
    sheet = f"data sheet of {peaks.card.name}" if peaks.card else ""
    if not days:
        return sheet
    parts_used = {*days, *(name for quantity in days for name in _FORMATS.get(quantity, ()))}
    parts_needed = {"memory", *peaks.flops, *(["all-reduce"] if wire else [])}
    sheet_note = f"; else {sheet}" if sheet and parts_needed - parts_used else ""
    return f"{', '.join(days)} measured here on {max(days.values())}{sheet_note}"


def _wire(
    gpus: Sequence[Gpu],
    table: SpeedTable,
    reduce: AllReduceFit | None,
    card: Card | None,
    *,
    is_joined: bool,
    has_direct_links: bool,
) -> RankLink:
    """The link between the GPUs of a group. is_joined: by NVLink."""
    wire_part = table.reference.nvlink if table.reference else None
    if reduce is not None and is_joined and wire_part is not None:
        return RankLink(
            reduce.bytes_s / wire_part.part * table.nvlink.part,
            reduce.latency_s / wire_part.latency_s * table.nvlink.latency_s,
        )
    if reduce is not None:  # there engines have NCCL's all-reduce, as in the measurement
        # The measurement is of the whole group. Fewer ranks reach less, as elsewhere over the
        # host's memory.
        host_factor = 0.0 if has_direct_links else table.host.per_rank_s / table.host.latency_s
        latency = reduce.latency_s / (1 + host_factor * (len(gpus) - 2))
        return RankLink(reduce.bytes_s, latency, host_factor * latency)
    if is_joined and card is not None and card.nvlink_gb_s:
        return RankLink(
            card.nvlink_gb_s * 1e9 * table.nvlink.part,
            table.nvlink.latency_s,
            table.nvlink.per_rank_s,
        )
    part = table.p2p if has_direct_links else table.host
    return RankLink(
        min(_pcie_bytes_s(gpu, card) for gpu in gpus) * part.part, part.latency_s, part.per_rank_s
    )


def _pcie_bytes_s(gpu: Gpu, card: Card | None) -> float:
    """The bytes/s of one direction: a lane of generation 3 has 8 GT/s of which 128 of 130 bits are
    data, each generation has twice as much."""
    generation = gpu.pcie.max_generation or (card and card.pcie_generation) or 3
    lanes = gpu.pcie.max_width or (card and card.pcie_lanes) or 8
    return _lanes_bytes_s(generation, lanes)


def read_pcie_bytes_s(gpu: Gpu) -> float | None:
    """Bytes per second that the driver reports of a GPU's PCIe link; None: it reports none."""
    generation = gpu.pcie.max_generation
    lanes = gpu.pcie.max_width
    return _lanes_bytes_s(generation, lanes) if generation and lanes else None


def _lanes_bytes_s(generation: int, lanes: int) -> float:
    return lanes * 8e9 / 8 * 128 / 130 * 2.0 ** (generation - 3)
