"""Input of the planner for all engine versions. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

from gateway.diagnosis.facts.known_facts import KnownFacts
from gateway.domain import (
    Adapter,
    EngineAnswer,
    Gpu,
    Hardware,
    Link,
    ModelRef,
    ModelSpec,
    Question,
    Sharing,
    Wish,
)
from gateway.domain.plan import RAM
from gateway.domain.record import FrozenRecord, field
from gateway.domain.sharing import NO_SHARING
from gateway.domain.units import GIB, MIB
from gateway.engines.common.chat.inputs import inputs
from gateway.engines.common.chat.parsers import ModelDialect, ParserTable
from gateway.engines.common.chat.template import ChosenTemplate, choose_template
from gateway.engines.common.kernels.gpus import GpuTable
from gateway.engines.common.resources import reserved_ram_bytes
from gateway.engines.common.span import NodeSpan
from gateway.engines.common.speed.correction import Corrections
from gateway.engines.common.speed.gpu_measurements import MachineMeasurements
from gateway.engines.common.speed.machine import SpeedKnowledge
from gateway.models.drafter import Drafter
from gateway.models.parameters import parameter_count
from gateway.variables import env_line

# Memory that the driver keeps: 615 MiB of an H200. CUDA's total is NVML's total less this; the
# engine's share refers to CUDA's total.
_DRIVER = 640 * MIB
_DRIVER_SHARE = 50
# Free bytes left unused on each GPU, for other processes and the driver between our look and the
# start.
HEADROOM = 256 * MIB
# Memory that GPU and host share has no wall between them: an engine that takes too much hangs the
# host instead of failing (github.com/vllm-project/vllm/issues/46307: about 64 GiB more than its
# weights while it profiled; github.com/NVIDIA/dgx-spark-playbooks/issues/97). Owners of GB10 leave
# 17 to 45 % to the host, and stop an engine when less than 8 GiB are available
# (huggingface.co/nvidia/GLM-5.3-Flash-FP4-Local/discussions/7). The host's part has the engine's
# own processes, compilers, the desktop, and pages of files that are being read.
_HOST_SHARE = 8
_SMALL_SHARE = 4
_MIN_HOST_BYTES = 4 * GIB


class GroupMemory(NamedTuple):
    """Memory of a group of GPUs, in bytes.

    least_bytes: memory of the smallest GPU; on a CPU the RAM.
    visible_bytes: CUDA's total of the smallest GPU, which is below NVML's.
    usable_and_total: usable and total bytes of each; equal GPUs are listed once.
    is_measured: the free bytes were measured, on dedicated memory.
    """

    least_bytes: int
    visible_bytes: int
    usable_and_total: set[tuple[int, int]]
    is_measured: bool


class PlanningInput(FrozenRecord, frozen=True, eq=False, dict=True):
    """The input of `planner.decide`, which all engine versions and their variants share.

    hardware_name: the name of the machine in the decision.
    facts: learned on this machine, or shipped with the profiles.
    promised_bytes: bytes promised to other engines, by GPU UUID, and those of RAM.
    drafter: the model that drafts tokens, by the wish.
    answers: the answers of engine versions about this model; an answer overrules the rules.
    gpus: formats that GPUs multiply.
    speed_knowledge: speeds of GPUs and engines.
    parsers: dialects of tool calls and reasoning.
    global_env: environment variables that the settings give to all engines; the part of one engine
        is in its `wish` (`replace_env`).
    sharing: the limits that the model accepts for other models.
    adapters: LoRA adapters of the wish.
    alike_nodes: nodes of a cluster that equal the machine, which may have copies too.
    span: the machine is several nodes of a cluster, for one engine over all of them.
    key_classes: how many classes of priority the keys of callers have.
    """

    spec: ModelSpec
    hardware: Hardware
    wish: Wish
    facts: KnownFacts = KnownFacts()
    promised_bytes: Mapping[str, int] = {}
    gpus: GpuTable | None = None
    answers: Mapping[Question, EngineAnswer] = {}
    speed_knowledge: SpeedKnowledge | None = None
    parsers: ParserTable | None = None
    global_env: Mapping[str, str] = {}
    sharing: Sharing = NO_SHARING
    adapters: tuple[Adapter, ...] = ()
    drafter: Drafter | None = None
    hardware_name: str = "this machine"
    alike_nodes: int = 1
    span: NodeSpan | None = None
    key_classes: int = 1
    # Clocks of planner/copies.py, by work and GPUs.
    clocks: dict[Hashable, Any] = field(default_factory=dict)
    _groups: dict[tuple[int, ...], GroupMemory] = field(default_factory=dict)
    _links: dict[tuple[int, ...], list[tuple[Gpu, Gpu, Link | None]]] = field(default_factory=dict)
    _unlinked_pair: dict[tuple[int, ...], tuple[int, int] | None] = field(default_factory=dict)

    def replace_fields(self, **fields: Any) -> PlanningInput:
        """A copy with other fields, without the values that were computed from the old ones."""
        return self.evolve(**fields, clocks={}, _groups={}, _links={}, _unlinked_pair={})

    def replace_spec(self, spec: ModelSpec) -> PlanningInput:
        """A copy about another reading of the model."""
        return self if spec is self.spec else self.evolve(spec=spec)

    def replace_env(self, env: Mapping[str, str]) -> PlanningInput:
        """A copy for an engine with these variables, the gateway's among them."""
        facts = self.facts.select_env(env_line(env))
        if facts is self.facts and env == self.wish.env:
            return self
        return self.evolve(wish=self.wish.evolve(env=dict(env)), facts=facts)

    @cached_property
    def links(self) -> Mapping[frozenset[int], Link]:
        """How two GPUs reach each other, by their indices."""
        return {frozenset((link.a, link.b)): link for link in self.hardware.links}

    @cached_property
    def available(self) -> Mapping[str, int]:
        """The `available_bytes` of each GPU, by UUID."""
        return {gpu.uuid: available_bytes(gpu, self.promised_bytes) for gpu in self.hardware.gpus}

    def memory_of(self, gpus: tuple[Gpu, ...]) -> GroupMemory:
        """Memory of these GPUs, looked up once for all engine versions."""
        key = tuple([gpu.index for gpu in gpus])
        if key not in self._groups:
            least_bytes = min(
                (gpu.total_bytes or 0 for gpu in gpus), default=self.hardware.ram_total_bytes
            )
            seen_bytes = min(
                (size - driver_bytes(gpu) for gpu in gpus if (size := gpu.total_bytes)), default=0
            )
            memory_pairs = {
                (self.available[gpu.uuid] - host_reserve_bytes(gpu), gpu.total_bytes or least_bytes)
                for gpu in gpus
            }
            is_measured = all(
                gpu.free_bytes is not None and gpu.memory_kind == "dedicated" for gpu in gpus
            )
            self._groups[key] = GroupMemory(least_bytes, seen_bytes, memory_pairs, is_measured)
        return self._groups[key]

    def links_between(self, gpus: tuple[Gpu, ...]) -> list[tuple[Gpu, Gpu, Link | None]]:
        """How each two of these GPUs reach each other, looked up once for all engine versions;
        None: not read."""
        key = tuple([gpu.index for gpu in gpus])
        if key not in self._links:
            links = self.links
            self._links[key] = [
                (a, b, links.get(frozenset((a.index, b.index)))) for a, b in combinations(gpus, 2)
            ]
        return self._links[key]

    def unlinked_pair(self, gpus: tuple[Gpu, ...]) -> tuple[int, int] | None:
        """The first two of these GPUs for which neither NVLink nor working peer-to-peer access was
        read, by their indices."""
        key = tuple([gpu.index for gpu in gpus])
        if key not in self._unlinked_pair:
            result = (
                (a.index, b.index)
                for a, b, link in self.links_between(gpus)
                if link is None or not (link.nvlinks or link.p2p)
            )
            self._unlinked_pair[key] = next(result, None)
        return self._unlinked_pair[key]

    @cached_property
    def model(self) -> ModelRef:
        """The model's name in plans."""
        spec = self.spec
        chat = self.template.text is not None
        return ModelRef(
            source=spec.source,
            revision=spec.revision,
            task=spec.task,
            vocab=spec.vocab,
            has_chat=chat,
            inputs=inputs(spec),
            family=spec.model_type,
            parameters=parameter_count(spec),
        )

    @cached_property
    def writing(self) -> ModelDialect | None:
        """How the model writes tool calls and thoughts; None: no table of dialects is at hand."""
        return (
            self.parsers.writing(self.spec.evolve(chat_template=self.template.text))
            if self.parsers
            else None
        )

    @cached_property
    def template(self) -> ChosenTemplate:
        """The chat template that the model is served with."""
        return choose_template(
            self.spec, self.wish.chat_template, self.parsers.repairs if self.parsers else ()
        )

    @cached_property
    def corrections(self) -> Corrections:
        """Corrections of expected speeds, by measurements."""
        return Corrections(self.facts.select_kind("speed_ratio"))

    @cached_property
    def measurements(self) -> MachineMeasurements:
        """Measurements of this machine's GPUs."""
        return MachineMeasurements(self.facts.select_kind("machine_speed"))


def available_bytes(gpu: Gpu, promised_bytes: Mapping[str, int]) -> int:
    """Bytes that a new engine may use: free bytes, less the unused promises to other engines."""
    total = gpu.total_bytes or 0
    free_bytes = total if gpu.free_bytes is None else gpu.free_bytes
    promised_count = promised_bytes.get(gpu.uuid, 0)
    return max(
        0, min(free_bytes, total - promised_count - (driver_bytes(gpu) if promised_count else 0))
    )


def available_ram(machine: Hardware, promised_bytes: Mapping[str, int]) -> int:
    """Bytes of RAM that a new engine on the CPU may use. Promises to other engines count in full,
    used or not."""
    return (
        machine.ram_total_bytes
        - reserved_ram_bytes(machine.ram_total_bytes)
        - promised_bytes.get(RAM, 0)
    )


def free_bytes_of(gpu: Gpu, promised_bytes: Mapping[str, int]) -> int:
    """Bytes that an engine may use on the GPUs."""
    return available_bytes(gpu, promised_bytes) - host_reserve_bytes(gpu)


def host_reserve_bytes(gpu: Gpu) -> int:
    """Free bytes of a GPU that no engine takes: the host's reserve of memory that both share."""
    if gpu.memory_kind == "dedicated":
        return HEADROOM
    if gpu.host_bytes is not None:
        return max(HEADROOM, gpu.host_bytes)
    total = gpu.total_bytes or 0
    return max(total // _HOST_SHARE, min(_MIN_HOST_BYTES, total // _SMALL_SHARE))


def driver_bytes(gpu: Gpu) -> int:
    """Memory that the driver keeps of a card, by NVML; a bound if the card is not idle."""
    total = gpu.total_bytes or 0
    limit = min(_DRIVER, total // _DRIVER_SHARE)
    if gpu.memory_kind != "dedicated":
        return 0
    if gpu.processes == () and gpu.free_bytes is not None:
        return min(max(0, total - gpu.free_bytes), total // _DRIVER_SHARE)
    return limit
