"""SGLang's rules for a candidate: one attention backend, pools of tokens, a static share of each
GPU. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

from gateway.domain import (
    AttentionGroup,
    Engine,
    LayerAttention,
    Memory,
    ModelSpec,
    Quant,
    Scalar,
    Value,
)
from gateway.domain.choice import ENGINE_DEFAULT
from gateway.domain.units import MIB
from gateway.engines.common.candidate import (
    Budget,
    Candidate,
    Default,
    Footprint,
    expert_split_refusal,
)
from gateway.engines.common.kernels.expert_kernels import MoeRules
from gateway.engines.common.kernels.linear import LinearRules
from gateway.engines.common.memory.kv_cache import ITEM_BYTES
from gateway.engines.common.memory.loaded_memory import position_values, segment_bytes
from gateway.engines.common.planning_input import host_reserve_bytes
from gateway.engines.common.refusal import RefusalError
from gateway.engines.common.rules.variable_effects import unruled_names
from gateway.engines.common.speculative.speculative_rules import Speculation, SpeculativeRules
from gateway.engines.common.speed.objective import concurrency
from gateway.engines.common.variant import Variant
from gateway.engines.sglang.attention import describe_model as subject_of
from gateway.engines.sglang.attention import server_attention
from gateway.engines.sglang.attention_rules import BackendRules
from gateway.engines.sglang.kind import SglangKind
from gateway.engines.sglang.kv_cache import TokenPool, drop_windows, read_traits
from gateway.engines.sglang.kv_dtype import adopted_dtype
from gateway.engines.sglang.memory import (
    MemoryRules,
    StaticMemory,
    fraction_within,
    graph_batch,
    has_towers,
    process_bytes,
    static_memory,
)
from gateway.engines.sglang.sparse_index import stored_groups
from gateway.models.drafter import Drafter
from gateway.models.rank import Rank

# Tables of positions are float32 on CUDA: srt/layers/rotary_embedding/base.py:119 (0.5.23).
_POSITION_BYTES = 4
# The class that serves an architecture under another name: EmbeddingGemma's checkpoints name the
# language model (get_model_architecture in srt/model_loader/utils.py:202, 0.5.23).
_CLASS_OF = {"Gemma3TextModel": "EmbeddingGemmaModel"}
_STATES_SHARE = "mamba-full-memory-ratio"
_STATE_DTYPE = "mamba-ssm-dtype"
_POOL_LIMIT = "max-total-tokens"
_STRATEGIES = ("mamba-radix-cache-strategy", "mamba-scheduler-strategy")
# The algorithm of layers in the checkpoint that draft (multi-token prediction).
_ALGORITHM = "NEXTN"
# The largest batch of decoding that gets a CUDA graph, as versions name it.
_GRAPH_FLAGS = ("cuda-graph-max-bs-decode", "cuda-graph-max-bs")
# Flags by which users choose the graphs of decoding themselves.
_GRAPH_CHOICES = {
    *_GRAPH_FLAGS,
    "cuda-graph-bs",
    "cuda-graph-bs-decode",
    "cuda-graph-backend-decode",
    "disable-decode-cuda-graph",
}


class _MemoryParts(NamedTuple):
    """Bytes of a GPU: those of the processes, those free before the load, those reserved."""

    process_bytes: int
    free_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, eq=False)  # compared by identity: answers are remembered for each
class SglangRules(SglangKind):
    """The files of profiles/engines/sglang/VERSION/. Without a file its decisions are unknown."""

    FILES: ClassVar[Mapping[str, type[Value]]] = {
        "linear": LinearRules,
        "moe": MoeRules,
        "attention_backends": BackendRules,
        "speculative": SpeculativeRules,
        "memory": MemoryRules,
    }

    linear: LinearRules | None = None
    moe: MoeRules | None = None
    attention_backends: BackendRules | None = None
    speculative: SpeculativeRules | None = None
    memory: MemoryRules | None = None

    @property
    def has_rules(self) -> bool:
        return any((self.linear, self.moe, self.attention_backends, self.speculative, self.memory))

    @property
    def kv_dtypes(self) -> Collection[str] | None:
        return self.attention_backends.kv_dtypes if self.attention_backends else None

    @property
    def attention_repairs(self) -> tuple[str, ...]:
        return self.attention_backends.repairs if self.attention_backends else ()

    def adopted_kv_dtype(self, spec: ModelSpec, engine: Engine, capability: str | None) -> str:
        return adopted_dtype(spec, engine, capability)

    def prefers_kv_flag(self, quant: Quant | None, engine: Engine) -> bool:
        return True

    def kv_refusal(self, quant: Quant | None, engine: Engine, dtype: str) -> str:
        return ""

    def builds(self, architecture: str, engine: Engine) -> bool:
        names = (architecture, _CLASS_OF.get(architecture))
        return any(name in engine.architectures for name in names)

    def takes_media(self, spec: ModelSpec) -> bool:
        return self.memory is not None and has_towers(self.memory, read_traits(spec))

    def leaves_towers(self, spec: ModelSpec, args: Mapping[str, Scalar]) -> bool:
        return False

    def unfollowed_variables(self, names: Collection[str]) -> list[str]:
        return unruled_names(names, ())

    # --- attention ---

    def layer_attention(
        self,
        groups: tuple[AttentionGroup, ...],
        rank: Rank,
        spec: ModelSpec,
        args: Mapping[str, Scalar],
        gpu_bytes: int,
    ) -> tuple[LayerAttention, ...]:
        if self.attention_backends is None:
            return ()
        return server_attention(
            groups=groups,
            rules=self.attention_backends,
            rank=rank,
            architecture=spec.architecture,
            config=spec.config,
            gpu_bytes=gpu_bytes,
            args=args,
        )

    def drafter_attention(
        self,
        groups: tuple[AttentionGroup, ...],
        rank: Rank,
        spec: ModelSpec,
        drafter: Drafter | None,
        args: Mapping[str, Scalar],
    ) -> tuple[LayerAttention, ...]:
        """Not known here."""
        return ()

    # --- KV cache ---

    def cache(self, candidate: Candidate) -> TokenPool:
        """The pool of tokens and states. Raises RefusalError for layers whose states the rules do
        not know."""
        rules = self._memory_rules(candidate)
        args = candidate.args
        if _STATES_SHARE in args:
            rules = rules.evolve(mamba_ratio=float(args[_STATES_SHARE]))
        item_bytes = (
            1 if candidate.variant.kv_dtype.startswith("fp8") else ITEM_BYTES[candidate.dtype.value]
        )
        windows = candidate.inputs.spec.architecture in rules.hybrid_swa and not args.get(
            "disable-hybrid-swa-memory"
        )
        attention = (
            candidate.stage.attention if windows else drop_windows(candidate.stage.attention)
        )
        page = max(
            (layer_attention.block or 1 for layer_attention in candidate.evidence.attention),
            default=1,
        )
        drafts = candidate.speculation.draft_tokens
        pool = TokenPool(
            rules,
            _pool_groups(rules, candidate, (*attention, *candidate.speculation.groups)),
            candidate.variant.tp,
            item_bytes,
            page,
            *_states_of(candidate, rules),
            matrices=str(args[_STATE_DTYPE]) if _STATE_DTYPE in args else None,
            most_tokens=int(args[_POOL_LIMIT]) if _POOL_LIMIT in args else None,
            verified_tokens=drafts + 1 if drafts else 0,
            most_requests=int(args.get("max-num-seqs", self.default_seqs(candidate)[0])),
        )
        if not pool.bytes_per_token and any(
            group.kind not in ("encoder", "vision") for group in pool.attention
        ):
            reason = "how this engine keeps the state of such layers is not known here"
            raise RefusalError("unknown_memory", reason, candidate.source)
        return pool

    # --- batch ---

    def default_seqs(self, candidate: Candidate) -> Default:
        rules = self.speculative
        if candidate.speculation.config and rules is not None and rules.default_requests:
            return rules.default_requests, f"{ENGINE_DEFAULT} with drafts", rules.mtp.source
        return candidate.engine.default_seqs, ENGINE_DEFAULT, candidate.source

    def default_tokens(self, candidate: Candidate) -> Default:
        model = read_traits(candidate.inputs.spec)
        gpu_mib = candidate.devices.least_bytes / MIB
        chosen_memory = static_memory(
            self._memory_rules(candidate), gpu_mib, model, tp=_world_size(candidate.rank)
        )
        return (
            max(1, chosen_memory.chunked_prefill // candidate.variant.dp),
            f"{ENGINE_DEFAULT} for GPUs of this size",
            candidate.source,
        )

    def graph_flags(self, candidate: Candidate, seqs: int) -> Mapping[str, Scalar]:
        """SGLang sizes the graphs of decoding only by the memory of the GPU."""
        flag = next((name for name in _GRAPH_FLAGS if name in candidate.engine.flags), None)
        planned_requests = min(seqs, concurrency(candidate.inputs.wish))
        if flag is None or self.memory is None or candidate.args.keys() & _GRAPH_CHOICES:
            return {}
        usual_batch = graph_batch(
            self.memory,
            candidate.devices.least_bytes / MIB,
            tp=_world_size(candidate.rank),
            seqs=seqs,
        )
        return {flag: planned_requests} if planned_requests > usual_batch else {}

    def grouped_refusal(self, spec: ModelSpec, engine: Engine, ranks: int = 1) -> str:
        """Each rank has as many experts: srt/layers/moe/fused_moe_triton/layer.py:200
        (0.5.10.post1)."""
        if refusal := expert_split_refusal(spec, ranks):
            return refusal
        if spec.experts and spec.experts.count % ranks:
            return f"{spec.experts.count} experts cannot be shared evenly by {ranks} GPUs"
        if not {"dp-size", "attn-dp-size"} & engine.flags.keys():
            return f"{engine.ref} has no data parallelism"
        flags_known = self.memory.attention_dp if self.memory is not None else ()
        if spec.architecture not in flags_known:
            return f"{engine.ref} is not known to compute {spec.architecture} with data parallelism"
        return ""

    def layout_flags(self, variant: Variant, engine: Engine) -> dict[str, Scalar]:
        """SGLang's tensor parallel size is the number of all ranks. Up to 0.5.20 the number of
        groups is that of replicas, with a switch."""
        if variant.dp == 1:
            return {}
        flags: dict[str, Scalar] = {"tensor-parallel-size": variant.tp * variant.dp}
        if "attn-dp-size" in engine.flags:
            return flags | {"data-parallel-size": variant.dp}
        name = engine.flags["dp-size"].same_as or "dp-size"
        return flags | {name: variant.dp, "enable-dp-attention": True}

    def speculation_flags(self, speculation: Speculation) -> dict[str, Scalar]:
        """A chain of drafted tokens, of which the last step verifies one more:
        _handle_eagle_family in srt/arg_groups/speculative_hook.py (0.5.23)."""
        if not speculation.config:
            return {}
        return {
            "speculative-algorithm": _ALGORITHM,
            "speculative-num-steps": speculation.draft_tokens,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": speculation.draft_tokens + 1,
        }

    @property
    def counts_groups(self) -> bool:
        """max_num_reqs // attn_dp_size in srt/mem_cache/kv_cache_configurator.py:3128, and
        handle_data_parallelism in srt/arg_groups/parallel_hook.py:259 (0.5.23);
        srt/server_args.py:2641 (0.5.10.post1)."""
        return True

    @property
    def caps_requests(self) -> bool:
        """resolve_max_num_reqs in srt/mem_cache/kv_cache_configurator.py (0.5.23)."""
        return True

    def runner(self, candidate: Candidate) -> int:
        return 1

    # --- memory: a share for weights and pools; the reserve covers everything else ---

    def budget(self, footprint: Footprint, context: int) -> Budget:
        candidate = footprint.candidate
        if "gpu-memory-utilization" in candidate.args:
            return self.budget_of_share(footprint, float(candidate.args["gpu-memory-utilization"]))
        begins, free_bytes, reserved = self._memory_parts(footprint)
        capacity = max(1, candidate.usable_bytes - begins)
        share = fraction_within(self._static_memory(footprint), capacity)
        # Where the host has a part of the memory, the engine takes its share of that part too.
        share_within = math.floor(max(0, capacity - reserved) * 1000 / free_bytes) / 1000
        return self.budget_of_share(
            footprint, min(share, share_within) if candidate.has_unified_memory else share
        )

    def largest_budget(self, footprint: Footprint, usual_budget: Budget) -> Budget | None:
        """None: the share follows from the reserve, which the engine may need."""
        return None

    def budget_of_share(self, footprint: Footprint, share: float) -> Budget:
        begins, free_bytes, reserved = self._memory_parts(footprint)
        return Budget(
            begins + int(free_bytes * share) + reserved,
            {"gpu-memory-utilization": share},
            f"static fraction {share:.3f}",
        )

    def narrow_budget(
        self,
        footprint: Footprint,
        budget: Budget,
        count: int,
        *,
        round_count: Callable[[float], int] = math.ceil,
    ) -> Budget:
        begins, free_bytes, reserved = self._memory_parts(footprint)
        steps = max(0, count - begins - reserved) * 1000 / free_bytes
        return self.budget_of_share(
            footprint, min(float(budget.flags["gpu-memory-utilization"]), round_count(steps) / 1000)
        )

    def _memory_parts(self, footprint: Footprint) -> _MemoryParts:
        """The parts of a GPU's memory as the engine counts them before it loads the weights."""
        begins = _process_bytes(footprint)
        candidate = footprint.candidate
        host_bytes = max((host_reserve_bytes(gpu) for gpu in candidate.gpus), default=0)
        seen_bytes = candidate.usable_bytes + (host_bytes if candidate.has_unified_memory else 0)
        free_bytes = max(1, seen_bytes - begins)
        reserved_bytes = round(self._static_memory(footprint).reserved_mib * MIB)
        return _MemoryParts(begins, free_bytes, reserved_bytes)

    def divide_budget(self, footprint: Footprint, budget_bytes: int) -> Memory:
        """The parts of a budget: weights, reserve, KV cache and overhead."""
        reserved = round(self._static_memory(footprint).reserved_mib * MIB)
        weights_bytes = footprint.weights_bytes
        per_token = footprint.cache.bytes_per_token
        residual_bytes = _residual_bytes(footprint)
        overhead = _process_bytes(footprint) + residual_bytes
        kv = max(0, budget_bytes - reserved - overhead - weights_bytes)
        pool_limit = footprint.candidate.args.get(_POOL_LIMIT)
        if pool_limit is not None and not footprint.cache.states_per_request:
            kv = min(kv, int(pool_limit) * per_token)
        return Memory(
            gpu_bytes=footprint.candidate.devices.least_bytes,
            budget_bytes=budget_bytes,
            weights_bytes=weights_bytes,
            loaded_bytes=weights_bytes + residual_bytes,
            activation_bytes=reserved,
            graph_bytes=0,
            overhead_bytes=overhead,
            kv_bytes=kv,
            kv_bytes_per_token=per_token,
            kv_tokens=kv // per_token if per_token else 0,
            low=weights_bytes + reserved // 2,
            high=weights_bytes + weights_bytes // 50 + reserved + overhead,
        )

    def used_bytes(self, footprint: Footprint, memory: Memory) -> int:
        return memory.weights_bytes + memory.activation_bytes + memory.overhead_bytes

    def cache_flags(self, candidate: Candidate, memory: Memory) -> dict[str, Scalar]:
        """The tokens of the cache, where GPU and host share their memory.

        A share of the free memory would change with each page that the host takes or frees.
        """
        has_flag = _POOL_LIMIT in candidate.engine.flags and memory.kv_tokens > 0
        return {_POOL_LIMIT: memory.kv_tokens} if candidate.has_unified_memory and has_flag else {}

    # Asked for each budget that is tried. Rules live as long as the process.
    @lru_cache(maxsize=16)  # noqa: B019
    def _static_memory(self, footprint: Footprint) -> StaticMemory:
        """SGLang's own choice on these GPUs, or its answer about it."""
        candidate = footprint.candidate
        load = footprint.load
        forecast = static_memory(
            self._memory_rules(candidate),
            candidate.devices.least_bytes / MIB,
            read_traits(candidate.inputs.spec),
            tp=_world_size(load.rank),
            pp=load.rank.pp,
            dp=load.rank.dp,
            seqs=load.seqs * load.rank.dp,
            chunked_prefill=load.batched_tokens * load.rank.dp,
            graphs=self._graphs(candidate, load.seqs),
            is_eager=not load.graphs,
        )
        answer = candidate.evidence.answer
        static_fraction = (
            answer.resolved_settings.static_fraction
            if answer and answer.resolved_settings
            else None
        )
        return forecast if static_fraction is None else forecast.evolve(fraction=static_fraction)

    def _graphs(self, candidate: Candidate, seqs: int) -> int | None:
        """The largest batch of decoding with graphs that the flags name; None: the engine's own."""
        flags = {**self.graph_flags(candidate, seqs), **candidate.args}
        return next((int(flags[name]) for name in _GRAPH_FLAGS if name in flags), None)

    def _memory_rules(self, candidate: Candidate) -> MemoryRules:
        if self.memory is None:
            raise RefusalError(
                "unknown_memory",
                f"how {candidate.engine.ref} divides a GPU is not known here",
                candidate.source,
            )
        return self.memory


def _pool_groups(
    rules: MemoryRules, candidate: Candidate, attention: tuple[AttentionGroup, ...]
) -> tuple[AttentionGroup, ...]:
    """The groups with the sizes that their pool keeps for them."""
    spec = candidate.inputs.spec
    model = subject_of(
        attention,
        spec.architecture,
        candidate.variant.kv_dtype,
        candidate.rank.capability,
        candidate.devices.least_bytes,
    )
    text = spec.config.get("text_config")
    return stored_groups(rules, attention, model, text if isinstance(text, dict) else spec.config)


def _states_of(candidate: Candidate, rules: MemoryRules) -> tuple[int, int | None]:
    """States for each running request, and how many there are by the user's flag.

    Without a radix cache the engine makes as many as requests, if the user names their number.
    _calculate_mamba_ratio and _handle_max_mamba_cache in srt/mem_cache/kv_cache_configurator.py.
    """
    args = candidate.args
    state_limit = args.get("max-mamba-cache-size")
    if args.get("disable-radix-cache"):
        state_limit = args.get("max-num-seqs") if state_limit is None else state_limit
        return (0, None) if state_limit is None else (1, int(state_limit))
    strategy = next((str(args[flag]) for flag in _STRATEGIES if flag in args), "auto")
    is_buffered = candidate.inputs.spec.architecture in rules.buffered_states
    is_buffered = strategy.startswith("extra_buffer") if strategy != "auto" else is_buffered
    slots = rules.state_slots + (rules.buffered_slots if is_buffered else 0)
    return slots, None if state_limit is None else int(state_limit)


def _residual_bytes(footprint: Footprint) -> int:
    """Bytes other than the weights that the engine finds taken after loading, and its pools leave
    out."""
    candidate = footprint.candidate
    table_bytes = _POSITION_BYTES * position_values(candidate.inputs.spec, candidate.stage)
    return segment_bytes(candidate.stage, candidate.rank.computing, table_bytes)


def _process_bytes(footprint: Footprint) -> int:
    ranks = _world_size(footprint.load.rank) * footprint.load.rank.pp
    capability = footprint.load.rank.capability
    return process_bytes(
        ranks, capability, copies_through_host=footprint.candidate.copies_through_host
    )


def _world_size(rank: Rank) -> int:
    """SGLang's tensor parallel size, which counts the ranks of all groups."""
    return rank.tp * rank.dp
