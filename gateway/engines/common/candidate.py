"""A variant that passed the gates, and the contract of the rules that size it. Pure.

Candidate -> Footprint (its bytes and its batch) -> Budget -> Memory
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import ClassVar, NamedTuple, Protocol

from gateway.domain import (
    AskedCache,
    AttentionGroup,
    Choice,
    Engine,
    Gpu,
    LayerAttention,
    Memory,
    ModelSpec,
    Quant,
    Scalar,
    Value,
)
from gateway.domain.record import FrozenRecord
from gateway.engines.common.kernels.expert_kernels import MoeRules
from gateway.engines.common.kernels.linear import LinearRules
from gateway.engines.common.kind import EngineKind
from gateway.engines.common.layers.built_model import BuiltModel
from gateway.engines.common.layers.stages import (
    heaviest_stage,
    parts_of_every_stage,
    split_layers,
    stage_model,
)
from gateway.engines.common.layers.weights import (
    KEPT_SCALES,
    kept_scale_bytes,
    spread_scale_bytes,
    weights_bytes,
)
from gateway.engines.common.lora.adapter_memory import bytes_on_rank
from gateway.engines.common.memory.asked_cache import CountedCache
from gateway.engines.common.memory.kv_cache import KvCache
from gateway.engines.common.planning_input import GroupMemory, PlanningInput
from gateway.engines.common.refusal import RefusalError, VariantEvidence
from gateway.engines.common.speculative.speculative_rules import Speculation, SpeculativeRules
from gateway.engines.common.variant import Variant
from gateway.models.drafter import Drafter
from gateway.models.rank import Rank
from gateway.models.scheme import Scheme, describe
from gateway.models.workload import Workload
from gateway.variables import env_line

# Marlin for FP8 weights, as dense layers of vLLM 0.18.0 and of later versions, experts of vLLM, and
# dense layers of SGLang name it.
_SPREADING_KERNELS = frozenset(
    {"Marlin", "MarlinFP8ScaledMMLinearKernel", "MARLIN", "apply_fp8_marlin_linear"}
)


class Candidate(FrozenRecord, frozen=True, dict=True):
    """A variant on its GPUs, before it is sized.

    args: the user's flags by canonical names.
    evidence: kernels and backends of the layers.
    stage_number: the number of this stage of `undivided`, if different GPUs are sized one by one.
    """

    inputs: PlanningInput
    engine: Engine
    rules: EngineRules
    built_model: BuiltModel
    variant: Variant
    gpus: tuple[Gpu, ...]
    dtype: Choice[str]
    args: Mapping[str, Scalar]
    speculation: Speculation
    evidence: VariantEvidence
    stage_number: int = 0
    undivided: Candidate | None = None

    @property
    def source(self) -> str:
        return f"profile {self.engine.ref}"

    @cached_property
    def rank(self) -> Rank:
        return self.variant.rank(self.dtype.value, self.gpus[0].capability if self.gpus else None)

    @cached_property
    def devices(self) -> GroupMemory:
        """Memory of the group's GPUs."""
        return self.inputs.memory_of(self.gpus)

    @property
    def has_unified_memory(self) -> bool:
        """Whether the GPUs share their memory with the host."""
        return any(gpu.memory_kind == "unified" for gpu in self.gpus)

    @property
    def counted_groups(self) -> int:
        """Groups of ranks to which the engine's sizes apply."""
        return self.variant.dp if self.rules.counts_groups else 1

    @property
    def usable_bytes(self) -> int:
        """Bytes that the engine may use on each GPU."""
        return min(free_bytes for free_bytes, _ in self.devices.usable_and_total)

    @cached_property
    def copies_through_host(self) -> bool:
        """Whether no two of its GPUs reach each other but through the host's memory."""
        if self.undivided is not None:
            return self.undivided.copies_through_host
        pairs = self.inputs.links_between(self.gpus)
        return bool(pairs) and all(
            link is not None and link.p2p is False and not link.nvlinks for _, _, link in pairs
        )

    @cached_property
    def stage(self) -> BuiltModel:
        """The layers of one rank's stage; all layers without pipeline parallelism."""
        if self.variant.pp == 1:
            return self.built_model
        layers = self.variant.layers or split_layers(self.built_model, self.rules, self.variant.pp)
        repeated_parts = parts_of_every_stage(self.engine, self.inputs.spec.architecture)
        return (
            heaviest_stage(self.built_model, layers, repeated_parts)
            if self.undivided is None
            else stage_model(self.built_model, layers, self.stage_number, repeated_parts)
        )

    @cached_property
    def stage_candidates(self) -> tuple[Candidate, ...]:
        """The stages of the plan one by one, each on its GPU, where these are unlike; none
        elsewhere."""
        if (
            self.undivided is not None
            or self.variant.tp * self.variant.dp > 1
            or len({(gpu.name, gpu.total_bytes) for gpu in self.gpus}) < 2
        ):
            return ()
        return tuple(
            self.evolve(gpus=(gpu,), stage_number=number, undivided=self)
            for number, gpu in enumerate(self.gpus)
        )

    @cached_property
    def adapter_bytes(self) -> int:
        """Bytes that one rank reserves for LoRA adapters."""
        inputs = self.inputs
        return bytes_on_rank(
            engine=self.engine,
            kind=self.rules,
            adapters=inputs.adapters,
            stage=self.stage,
            spec=inputs.spec,
            tp=self.rank.tp,
        )

    @cached_property
    def cache(self) -> KvCache:
        """The KV cache of one rank, as the engine counted it, or by the rules. Raises
        RefusalError."""
        answer = self.evidence.answer
        if answer is None or self.undivided is not None:
            return self.rules.cache(self)
        return CountedCache(answer.kv or AskedCache(block_bytes=1, needed=()))

    @cached_property
    def scope(self) -> dict[str, str]:
        """The subject of facts about its sizes, without the budget."""
        if self.undivided is not None:
            return self.undivided.scope
        spec = self.inputs.spec
        variant = self.variant
        gpus = self.gpus
        scope = {
            "engine": self.engine.ref,
            "model": spec.versioned_source,
            "device": (
                f"{gpus[0].name} sm_{gpus[0].capability}"
                if gpus
                else f"cpu {self.inputs.hardware.arch}"
            ),
            "tensor_parallel": str(variant.tp),
            "pipeline_parallel": str(variant.pp),
            "dtype": self.dtype.value,
            "kv_cache_dtype": variant.kv_dtype,
            "quantization": variant.quantization or "as stored",
        }
        scope |= {"capability": gpus[0].capability} if gpus and gpus[0].capability else {}
        scope |= {"data_parallel": str(variant.dp)} if variant.dp > 1 else {}
        # A fact about one split of the layers does not hold for another split.
        scope |= (
            {"layers": ",".join(map(str, variant.layers)) or "as dealt by the engine"}
            if variant.pp > 1
            else {}
        )
        return scope | ({"env": env_line(env)} if (env := self.inputs.wish.env) else {})

    def weights_bytes(self) -> int:
        """Bytes of weights on one rank, padded as the chosen kernels pad, or as the engine said.

        Raises RefusalError if the division or a scheme is not known.
        """
        answer = self.evidence.answer
        # The engine's size of weights that are quantized while they load is that before.
        shrunk = bool(self.variant.quantization) and self.inputs.spec.quant is None
        # The engine counted for stages with equal numbers of layers.
        answer = answer if self.undivided is None else None
        if answer is not None and not shrunk:
            return answer.weights + self.speculation.weights_bytes
        rows = {
            (layer_kernel.layer, layer_kernel.scheme): layer_kernel.padded_to
            for layer_kernel in self.evidence.kernels
            if layer_kernel.padded_to
        }
        padded_sizes = {
            layer: rows[key]
            for layer in (self.stage.linears if rows else ())
            if isinstance(layer.scheme, Scheme)
            and (key := (layer.name, describe(layer.scheme))) in rows
        }
        stored_bytes = weights_bytes(
            self.stage, self.rank, frozenset(self.engine.traits), padded_sizes
        )
        if stored_bytes is None and answer is not None:
            return answer.weights + self.speculation.weights_bytes
        if stored_bytes is None:
            raise RefusalError(
                "unsupported_quantization",
                "the size of its quantized weights is not known",
                self.source,
            )
        return stored_bytes + self.speculation.weights_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of weights on one rank that the chosen kernels add while they prepare them: scales
        that stay though a kernel reads a copy, and scales that a kernel spreads."""
        kernels = self.evidence.kernels
        spread = {kernel.layer for kernel in kernels if kernel.kernel in _SPREADING_KERNELS}
        total = spread_scale_bytes(self.stage, self.rank, spread) if spread else 0
        if KEPT_SCALES in self.engine.traits:
            names = {kernel.layer for kernel in kernels if kernel.kernel == "TRITON"}
            total += kept_scale_bytes(self.stage, self.rank, names)
        return total


def expert_split_refusal(spec: ModelSpec, ranks: int) -> str:
    """Why this many ranks cannot have whole experts each; "": they can."""
    if spec.experts is None:
        return "the model has no experts that ranks could share"
    if spec.experts.count < ranks:
        return f"{spec.experts.count} experts cannot be shared by {ranks} GPUs"
    return ""


# Compared by identity: results are cached for each object.
class Footprint(FrozenRecord, frozen=True, eq=False):
    """A candidate with all that one rank of it holds, keeps and computes: the source of its
    memory."""

    candidate: Candidate
    weights_bytes: int
    cache: KvCache
    load: Workload


class Budget(NamedTuple):
    """Bytes per device, the flags that say so, and the same in `limit_text`, a scope of facts."""

    bytes: int
    flags: dict[str, Scalar]
    limit_text: str
    warning: str = ""


# A number that an engine takes by itself, the reason, and where that stands.
Default = tuple[int, str, str]


class EngineRules(EngineKind, Protocol):
    """Contract of an engine kind's rules. Each engine version has one object, made of its rule
    files.

    The planner uses a kind through this contract only; registry.py lists the kinds. Methods raise
    RefusalError for a case that the rules do not cover.
    """

    def __hash__(self) -> int:
        """The hash of the identity: answers are remembered for each."""

    @property
    def has_rules(self) -> bool:
        """Whether there are rules of this version at all. Without them no kernel is predicted, and
        quantized weights are refused."""

    @property
    def linear(self) -> LinearRules | None:
        """Kernels of linear layers; None: not known."""

    @property
    def moe(self) -> MoeRules | None:
        """Kernels of experts; None: not known."""

    @property
    def speculative(self) -> SpeculativeRules | None:
        """Methods that draft tokens; None: not known."""

    @property
    def kv_dtypes(self) -> Collection[str] | None:
        """KV cache dtypes that the rules of attention describe; None: there are no such rules."""

    @property
    def attention_repairs(self) -> tuple[str, ...]:
        """Values of --attention-backend to try where the engine's own choice fails."""

    def adopted_kv_dtype(self, spec: ModelSpec, engine: Engine, capability: str | None) -> str:
        """The KV cache dtype that the engine takes over from the checkpoint, or has for such a
        model on such a GPU; "auto": none."""

    def prefers_kv_flag(self, quant: Quant | None, engine: Engine) -> bool:
        """Whether the engine's flag overrides the KV cache dtype of the checkpoint."""

    def kv_refusal(self, quant: Quant | None, engine: Engine, dtype: str) -> str:
        """Why the engine refuses a KV cache in this dtype for the checkpoint; "": it takes it."""

    def builds(self, architecture: str, engine: Engine) -> bool:
        """Whether the version has a class for the architecture, or converts one of its classes."""

    def takes_media(self, spec: ModelSpec) -> bool:
        """Whether the engine treats the model as multimodal although its config names no media."""

    def leaves_towers(self, spec: ModelSpec, args: Mapping[str, Scalar]) -> bool:
        """Whether flags of the user make it build no encoder of media."""

    def unfollowed_variables(self, names: Collection[str]) -> list[str]:
        """The variables among these that may change kernels or memory, and that no rule follows."""

    def layer_attention(
        self,
        groups: tuple[AttentionGroup, ...],
        rank: Rank,
        spec: ModelSpec,
        args: Mapping[str, Scalar],
        gpu_bytes: int,
    ) -> tuple[LayerAttention, ...]:
        """The attention backend of each group; empty: not known. `args`: flags by canonical
        names."""

    def drafter_attention(
        self,
        groups: tuple[AttentionGroup, ...],
        rank: Rank,
        spec: ModelSpec,
        drafter: Drafter | None,
        args: Mapping[str, Scalar],
    ) -> tuple[LayerAttention, ...]:
        """Attention of layers that draft: the drafter's, or (None) the model's own."""

    def cache(self, candidate: Candidate) -> KvCache:
        """The KV cache of one rank."""

    def default_seqs(self, candidate: Candidate) -> Default:
        """Sequences that the engine computes concurrently."""

    def default_tokens(self, candidate: Candidate) -> Default:
        """Tokens of one batch."""

    def graph_flags(self, candidate: Candidate, seqs: int) -> Mapping[str, Scalar]:
        """Flags that give decoding CUDA graphs for the planned concurrent requests, of at most
        `seqs`; empty where the engine's own choice is enough, or the user's."""

    def grouped_refusal(self, spec: ModelSpec, engine: Engine, ranks: int = 1) -> str:
        """Why groups of ranks with requests of their own cannot share the experts of this model in
        this version; "": they can. ranks: of all groups."""

    def layout_flags(self, variant: Variant, engine: Engine) -> dict[str, Scalar]:
        """The flags of groups of ranks, by canonical names; {}: there is one group."""

    def speculation_flags(self, speculation: Speculation) -> dict[str, Scalar]:
        """The flags of drafting; {}: nothing is drafted."""

    @property
    def counts_groups(self) -> bool:
        """Whether the engine's sizes (ranks of tensor parallelism, requests and tokens of a step)
        are those of all groups together."""

    @property
    def caps_requests(self) -> bool:
        """Whether the engine computes fewer concurrent requests than its flag says where its cache
        has too few states, instead of ending or losing its CUDA graphs."""

    def runner(self, candidate: Candidate) -> int:
        """Number of the engine's model runner for this model."""

    def budget(self, footprint: Footprint, context: int) -> Budget:
        """The engine's budget on each device.

        context: a sufficient number of tokens, if nothing else limits the KV cache (on a CPU).
        """

    def largest_budget(self, footprint: Footprint, usual_budget: Budget) -> Budget | None:
        """The largest possible budget: all free memory. None: the sum is not larger, or free memory
        is unknown."""

    def budget_of_share(self, footprint: Footprint, share: float) -> Budget:
        """The budget for a given share of a GPU. Not for CPUs."""

    def narrow_budget(
        self,
        footprint: Footprint,
        budget: Budget,
        count: int,
        *,
        round_count: Callable[[float], int] = math.ceil,
    ) -> Budget:
        """The budget with `count` bytes instead of all of its own, in the engine's steps:
        `round_count` up, down, or to the next one."""

    def divide_budget(self, footprint: Footprint, budget_bytes: int) -> Memory:
        """How one rank divides its budget."""

    def used_bytes(self, footprint: Footprint, memory: Memory) -> int:
        """Bytes of this memory other than the KV cache, within the budget."""

    def cache_flags(self, candidate: Candidate, memory: Memory) -> dict[str, Scalar]:
        """The flags that give the engine its KV cache by size, where its share is not enough."""


class RulesOfFiles(EngineRules, Protocol):
    """Rules read from the YAML files of an engine version.

    FILES maps a file's name, which is also an argument of `__init__`, to the type of its content.
    """

    FILES: ClassVar[Mapping[str, type[Value]]]
