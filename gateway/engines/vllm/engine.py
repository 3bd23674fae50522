"""vLLM's rules for a candidate: attention by layer, a paged KV cache, a share of each GPU. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

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
from gateway.domain.units import GIB, MIB, gib
from gateway.engines.common.candidate import (
    Budget,
    Candidate,
    Default,
    Footprint,
    expert_split_refusal,
)
from gateway.engines.common.kernels.expert_kernels import MoeRules
from gateway.engines.common.kernels.linear import LinearRules
from gateway.engines.common.memory.states import replace_matrix_dtype
from gateway.engines.common.planning_input import available_ram
from gateway.engines.common.refusal import RefusalError
from gateway.engines.common.rules.variable_effects import (
    names_of,
    rule_variables,
    unruled_names,
)
from gateway.engines.common.speculative.speculative_rules import Speculation, SpeculativeRules
from gateway.engines.common.variant import Variant
from gateway.engines.vllm import memory as vllm_memory
from gateway.engines.vllm.attention import layer_attention
from gateway.engines.vllm.attention_buffers import AttentionBuffers, attention_buffers
from gateway.engines.vllm.attention_rules import AttentionRules
from gateway.engines.vllm.compressed_cache import compressed_layout
from gateway.engines.vllm.encoder_profile import (
    PROFILED_ENCODERS,
    EncoderRun,
    encoder_run,
    leaves_towers,
)
from gateway.engines.vllm.kind import VllmCpuKind, VllmKind
from gateway.engines.vllm.kv_cache import (
    CacheLayout,
    batches_in_flight,
    blocks_set_aside,
    plan_cache_layout,
    stored_dtype,
)
from gateway.engines.vllm.kv_dtype import AUTO, adopted_dtype, dtype_refusal, prefers_flag
from gateway.errors import BadFlag
from gateway.models.drafter import Drafter
from gateway.models.rank import Rank

# The part of its share that a conservative plan leaves free, because the plan that failed may have
# lacked it.
_CONSERVATIVE_SPARE_SHARE = 0.05
# The extra share for a model without a KV cache: its activations are an estimate.
_ENCODER_SPARE = 4
# The largest share of a GPU that is taken, where all of the GPU is free.
_MAX_UTILIZATION = 0.97
# KV caches in RAM are rounded to this step.
_RAM_STEP_BYTES = GIB // 4
_MIN_KV_BYTES = 16 * MIB
# The free memory is compared with the share once (request_memory, vllm/v1/worker/utils.py:425 of
# 0.26.0, :716 of 0.33.0), then these bytes are taken (vllm/v1/worker/gpu_worker.py:462 of 0.26.0,
# :656 of 0.33.0). The engine's own switch for that, VLLM_ENABLE_STARTUP_PLAN, keeps the bytes by a
# fingerprint without the share of the GPU and without the number of requests
# (vllm/v1/worker/startup_plan.py and CacheConfig.compute_hash of 0.26.0 and 0.33.0). So it would
# give a smaller share the cache of a larger one, and it stays off.
CACHE_BYTES = "kv-cache-memory-bytes"
# A trait of engine versions: CUDA graphs are counted within the memory budget, not captured in
# addition to it.
GRAPHS_IN_BUDGET = "graphs_in_budget"
# Traits of engine versions: 16384 tokens in a batch on GPUs of 160 GiB and more, since 0.28.0; the
# defaults of small GPUs on GB10, since 0.33.0.
LARGE_BATCHES = "large_batches"
SMALL_GB10_BATCHES = "small_gb10_batches"
# Variables of the engine that decide its memory.
GRAPHS_VARIABLE = "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
ASYNC_SCHEDULING_FLAG = "async-scheduling"
# Methods of drafting whose batches the first runner schedules one after the other.
_SERIAL_METHODS = frozenset({"custom_class", "medusa", "mlp_speculator", "ngram", "suffix"})
# The ends of architectures that name the same model with another head, from
# _SUFFIX_TO_DEFAULTS in vllm/config/model.py.
_ENDS = (
    "ForCausalLM",
    "ForConditionalGeneration",
    "ChatModel",
    "LMHeadModel",
    "ForTextEncoding",
    "EmbeddingModel",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForAudioClassification",
    "ForImageClassification",
    "ForVideoClassification",
    "ClassificationModel",
    "ForRewardModeling",
    "RewardModel",
    "Model",
)
# Variables that a method or a condition of the rules follows by name.
_FOLLOWED_VARIABLES = frozenset(
    {
        GRAPHS_VARIABLE,
        RUNNER_VARIABLE,
        VllmKind.disabled_kernels_env,
        "VLLM_TEST_FORCE_FP8_MARLIN",
        "VLLM_USE_FLASHINFER_MOE_INT4",
    }
)
_ENCODER_BUDGET = "vllm/v1/core/encoder_cache_manager.py compute_mm_encoder_budget"
_DEFAULTS = "vllm/engine/arg_utils.py get_batch_defaults"


@dataclass(frozen=True, eq=False)  # compared by identity: answers are remembered for each
class VllmRules(VllmKind):
    """The files of profiles/engines/vllm/VERSION/. Without a file its decisions are unknown.

    Without any file an engine is sized by these methods too: a version with a user's profile, and
    no rules.
    """

    FILES: ClassVar[Mapping[str, type[Value]]] = {
        "linear": LinearRules,
        "moe": MoeRules,
        "attention": AttentionRules,
        "speculative": SpeculativeRules,
    }

    linear: LinearRules | None = None
    moe: MoeRules | None = None
    attention: AttentionRules | None = None
    speculative: SpeculativeRules | None = None

    @property
    def has_rules(self) -> bool:
        return any((self.linear, self.moe, self.attention, self.speculative))

    @property
    def kv_dtypes(self) -> Collection[str] | None:
        return self.attention.kv_dtypes if self.attention else None

    @property
    def attention_repairs(self) -> tuple[str, ...]:
        """None: it tries one backend after the other by itself."""
        return ()

    def adopted_kv_dtype(self, spec: ModelSpec, engine: Engine, capability: str | None) -> str:
        return adopted_dtype(spec, engine, capability)

    def prefers_kv_flag(self, quant: Quant | None, engine: Engine) -> bool:
        return prefers_flag(quant, engine)

    def kv_refusal(self, quant: Quant | None, engine: Engine, dtype: str) -> str:
        return dtype_refusal(quant, engine, dtype)

    def builds(self, architecture: str, engine: Engine) -> bool:
        """_normalize_arch of vllm/model_executor/models/registry.py: a class with another end."""
        end = next((end for end in _ENDS if architecture.endswith(end)), "")
        stem = architecture.removesuffix(end)
        return architecture in engine.architectures or bool(
            end and any(f"{stem}{ending}" in engine.architectures for ending in _ENDS)
        )

    def takes_media(self, spec: ModelSpec) -> bool:
        return False

    def leaves_towers(self, spec: ModelSpec, args: Mapping[str, Scalar]) -> bool:
        return leaves_towers(spec, args)

    def unfollowed_variables(self, names: Collection[str]) -> list[str]:
        """The variables among these that may change kernels or memory, and that no rule follows."""
        effects = [
            effect for rules in (self.linear, self.moe) if rules for effect in rules.variables
        ]
        return unruled_names(names, names_of(effects) | _FOLLOWED_VARIABLES)

    # --- attention ---

    def layer_attention(
        self,
        groups: tuple[AttentionGroup, ...],
        rank: Rank,
        spec: ModelSpec,
        args: Mapping[str, Scalar],
        gpu_bytes: int,
    ) -> tuple[LayerAttention, ...]:
        if self.attention is None:
            return ()
        forced_backend = args.get("attention-backend")
        return layer_attention(
            groups,
            self.attention,
            rank,
            block_size=_block_size(args),
            forced_name=None if forced_backend is None else str(forced_backend),
            architecture=spec.architecture,
            config=spec.config,
        )

    def drafter_attention(
        self,
        groups: tuple[AttentionGroup, ...],
        rank: Rank,
        spec: ModelSpec,
        drafter: Drafter | None,
        args: Mapping[str, Scalar],
    ) -> tuple[LayerAttention, ...]:
        """A drafter takes no backend over from its target."""
        if self.attention is None:
            return ()
        return layer_attention(
            groups,
            self.attention,
            rank,
            block_size=_block_size(args),
            is_drafter=True,
            architecture=drafter.architecture if drafter else spec.architecture,
            config=None if drafter else spec.config,
        )

    # --- KV cache ---

    def cache(self, candidate: Candidate) -> CacheLayout:
        """The cache of all layers. Raises RefusalError for layers that one cache cannot hold."""
        prefixes = candidate.args.get("enable-prefix-caching")
        attention_layers = candidate.evidence.attention
        latent = next(
            (
                layer_attention.backend
                for layer_attention in attention_layers
                if layer_attention.kind == "mla" and layer_attention.backend
            ),
            "",
        )
        # The user's block, or the least that the engine and every backend take:
        # update_block_size_for_backend in vllm/platforms/interface.py.
        block = (
            _block_size(candidate.args)
            or max((layer_attention.block or 0 for layer_attention in attention_layers), default=0)
            or candidate.engine.block_size
        )
        attention = (*candidate.stage.attention, *candidate.speculation.groups)
        rank = candidate.rank._replace(kv_dtype=stored_dtype(candidate.variant.kv_dtype, latent))
        traits = frozenset(candidate.engine.traits)
        compressed = compressed_layout(
            candidate.inputs.spec.config,
            candidate.stage.attention,
            rank.kv_dtype,
            batches_in_flight(rank, traits, is_overlapped=self._overlaps_batches(candidate)),
            drafts=bool(candidate.speculation.groups),
            reserved_blocks=blocks_set_aside(traits),
        )
        if compressed is not None:
            return compressed
        block_tables = plan_cache_layout(
            _replace_state_dtypes(attention, candidate.args),
            rank,
            block,
            traits,
            caches_prefixes=None if prefixes is None else bool(prefixes),
            drafts=candidate.speculation.draft_tokens,
            is_overlapped=self._overlaps_batches(candidate),
        )
        if block_tables.refusal:
            raise RefusalError(
                "no_backend",
                f"one KV cache cannot hold its layers: {block_tables.refusal}",
                candidate.source,
            )
        return block_tables

    # --- batch: the engine's own defaults, which its authors measured ---

    def default_seqs(self, candidate: Candidate) -> Default:
        if _is_big(candidate, 70):
            return 1024, f"{ENGINE_DEFAULT} for GPUs of 70 GiB and more", _DEFAULTS
        return candidate.engine.default_seqs, ENGINE_DEFAULT, candidate.source

    def default_tokens(self, candidate: Candidate) -> Default:
        """Tokens of a batch by the engine's own default, with reason and source."""
        engine = candidate.engine
        inputs = candidate.inputs
        if all(group.kind in ("encoder", "vision") for group in candidate.built_model.attention):
            longest_context = max(
                engine.default_batched_tokens, inputs.wish.most_context or inputs.spec.max_position
            )
            return (
                longest_context,
                "an encoder reads a whole input in one step",
                "vllm/config/scheduler.py",
            )
        usual_tokens: Default = engine.default_batched_tokens, ENGINE_DEFAULT, candidate.source
        large_batches = ((160, 16384),) if LARGE_BATCHES in engine.traits else ()
        for least_gib, tokens in (*large_batches, (70, 8192)):
            if _is_big(candidate, least_gib):
                reason = f"{ENGINE_DEFAULT} for GPUs of {least_gib} GiB and more"
                usual_tokens = tokens, reason, _DEFAULTS
                break
        frames = inputs.spec.config.get("max_source_positions")
        if type(frames) is int and frames > usual_tokens[0]:
            # A speech encoder reads a whole recording in one step.
            return frames, "one whole recording (max_source_positions)", _ENCODER_BUDGET
        return usual_tokens

    def graph_flags(self, candidate: Candidate, seqs: int) -> Mapping[str, Scalar]:
        """None: vLLM's graphs follow max_num_seqs."""
        return {}

    def grouped_refusal(self, spec: ModelSpec, engine: Engine, ranks: int = 1) -> str:
        """Dense models run as many engines then, which copies do better: `needs_dp_coordinator` in
        vllm/config/vllm.py of 0.33.0."""
        has_flags = {"data-parallel-size", "enable-expert-parallel"} <= engine.flags.keys()
        if not has_flags:
            return f"{engine.ref} has no data parallelism"
        return expert_split_refusal(spec, ranks)

    def layout_flags(self, variant: Variant, engine: Engine) -> dict[str, Scalar]:
        return {"data-parallel-size": variant.dp} if variant.dp > 1 else {}

    def speculation_flags(self, speculation: Speculation) -> dict[str, Scalar]:
        config = speculation.config
        return {"speculative-config": json.dumps(config)} if config else {}

    @property
    def counts_groups(self) -> bool:
        """Each group has a scheduler of its own: DPEngineCoreProc in vllm/v1/engine/core.py."""
        return False

    @property
    def caps_requests(self) -> bool:
        """resolve_cudagraph_mode_and_sizes in vllm/config/compilation.py (0.26.0)."""
        return False

    def runner(self, candidate: Candidate) -> int:
        # The second runner cannot do ngram (_get_v2_model_runner_unsupported_features,
        # vllm/config/vllm.py).
        if candidate.speculation.method.value == "ngram":
            return 1
        # use_v2_model_runner (vllm/config/vllm.py:733 of 0.33.0).
        traits = candidate.engine.traits
        second = _is_switched_on(candidate, RUNNER_VARIABLE)
        if second is not None and vllm_memory.SECOND_RUNNERS & {*traits}:
            return 2 if second else 1
        return vllm_memory.runner_bytes(
            candidate.inputs.spec, candidate.built_model, candidate.engine.traits
        )

    def _overlaps_batches(self, candidate: Candidate) -> bool:
        """Whether the engine schedules a batch while another one runs. VllmConfig.__post_init__ and
        max_concurrent_batches in vllm/config/vllm.py (0.33.0:1650 and 588)."""
        is_second = self.runner(candidate) == 2
        if not is_second and candidate.variant.pp > 1:
            return False
        if (flag := candidate.args.get(ASYNC_SCHEDULING_FLAG)) is not None:
            return bool(flag)
        is_serial = candidate.speculation.method.value in _SERIAL_METHODS and not is_second
        return candidate.inputs.spec.generates and not is_serial

    # --- memory ---

    def budget(self, footprint: Footprint, context: int) -> Budget:
        """The memory of a GPU that the engine may use, and its flags. Raises RefusalError."""
        candidate = footprint.candidate
        if candidate.engine.device == "cpu":
            return self._ram_budget(footprint, context)
        seen_bytes = candidate.devices.visible_bytes
        if CACHE_BYTES in candidate.args:
            return self._cache_budget(footprint, int(candidate.args[CACHE_BYTES]))
        if "gpu-memory-utilization" in candidate.args:
            share = float(candidate.args["gpu-memory-utilization"])
            result = (
                (candidate.inputs.available[gpu.uuid], gpu.total_bytes or seen_bytes)
                for gpu in candidate.gpus
            )
            free_bytes, total = min(result, key=lambda pair: pair[0] - pair[1] * share)
            if total * share > free_bytes:  # the engine would compare the same, and end
                reason = (
                    f"--gpu-memory-utilization={share:g} was set, which is"
                    f" {gib(round(total * share))} of a GPU that has {gib(free_bytes)} free"
                )
                raise RefusalError("no_memory", reason, "your flag")
            return Budget(
                round(seen_bytes * share), {}, f"utilization {share:.2f}, set by the user"
            )
        spared_share = _CONSERVATIVE_SPARE_SHARE if candidate.variant.conservative else 0
        share = self._share(footprint, candidate.engine.default_utilization - spared_share)
        if not footprint.cache.bytes_for(1, footprint.load.batched_tokens):
            # The memory of an encoder does not grow. A larger share would only be kept from other
            # engines.
            used_bytes = self.used_bytes(footprint, self.divide_budget(footprint, 0))
            share = min(
                share,
                math.ceil((used_bytes + used_bytes // _ENCODER_SPARE) * 100 / max(1, seen_bytes))
                / 100,
            )
        return self.budget_of_share(footprint, share)

    def _cache_budget(self, footprint: Footprint, kv_bytes: int) -> Budget:
        """The budget with a cache of the user's size. The engine compares its share with the free
        memory before that, so it gets a share that fits."""
        candidate = footprint.candidate
        needed_bytes = self.used_bytes(footprint, self.divide_budget(footprint, 0)) + kv_bytes
        free_bytes = min(candidate.inputs.available[gpu.uuid] for gpu in candidate.gpus)
        capacity = free_bytes - _unshared_bytes(footprint)
        if needed_bytes > capacity:
            reason = (
                f"--{CACHE_BYTES}={kv_bytes} was set, which is {gib(needed_bytes)} with what the"
                " engine"
                f"  needs besides its KV cache,  and {gib(capacity)} are available"
            )
            raise RefusalError("no_memory", reason, "your flag")
        flags: dict[str, Scalar] = {}
        if "gpu-memory-utilization" not in candidate.args:
            share = math.ceil(needed_bytes * 100 / max(1, candidate.devices.visible_bytes))
            flags = {"gpu-memory-utilization": min(share, math.floor(_MAX_UTILIZATION * 100)) / 100}
        return Budget(needed_bytes, flags, f"{gib(kv_bytes)} of KV cache, set by the user")

    def largest_budget(self, footprint: Footprint, usual_budget: Budget) -> Budget | None:
        """The budget of a GPU without room for other models; None: it is no larger."""
        candidate = footprint.candidate
        if (
            CACHE_BYTES in candidate.args
            or not candidate.devices.is_measured
            or not usual_budget.flags
            or not candidate.gpus
            or candidate.variant.conservative
        ):
            return None
        usual_share = usual_budget.flags["gpu-memory-utilization"]
        share = self._share(footprint, _MAX_UTILIZATION)
        if share <= float(usual_share):
            return None
        warning = (
            f"It takes {share:.2f} of each GPU, not {usual_share:.2f}: otherwise only a short"
            " context fits. Other models find no room on these GPUs."
        )
        flags: dict[str, Scalar] = {"gpu-memory-utilization": share}
        return Budget(
            round(candidate.devices.visible_bytes * share),
            flags,
            f"utilization {share:.2f}",
            warning,
        )

    def budget_of_share(self, footprint: Footprint, share: float) -> Budget:
        seen_bytes = footprint.candidate.devices.visible_bytes
        return Budget(
            round(seen_bytes * share), {"gpu-memory-utilization": share}, f"utilization {share:.2f}"
        )

    def narrow_budget(
        self,
        footprint: Footprint,
        budget: Budget,
        count: int,
        *,
        round_count: Callable[[float], int] = math.ceil,
    ) -> Budget:
        steps = count * 100 / max(1, footprint.candidate.devices.visible_bytes)
        return self.budget_of_share(
            footprint, min(float(budget.flags["gpu-memory-utilization"]), round_count(steps) / 100)
        )

    def _share(self, footprint: Footprint, limit: float) -> float:
        """The part of each GPU that is free next to the engine's memory outside its share, in
        hundredths; `limit` at most."""
        candidate = footprint.candidate
        unshared_bytes = _unshared_bytes(footprint)
        capacity = min(
            (free_bytes - unshared_bytes) * 100 // total
            for free_bytes, total in candidate.devices.usable_and_total
        )
        spared_percent = math.ceil(
            _spare_bytes(candidate) * 100 / max(1, candidate.devices.visible_bytes)
        )
        return max(0.0, (min(math.floor(limit * 100), capacity) - spared_percent) / 100)

    def divide_budget(self, footprint: Footprint, budget_bytes: int) -> Memory:
        candidate = footprint.candidate
        return vllm_memory.rank_memory(
            candidate.inputs.spec,
            candidate.stage,
            footprint.cache,
            footprint.load,
            weights_bytes=footprint.weights_bytes,
            device_bytes=candidate.devices.least_bytes,
            budget_bytes=budget_bytes,
            unshared_bytes=_unshared_bytes(footprint) if candidate.engine.device == "cuda" else 0,
            graphs_in_budget=_counts_graphs(footprint),
            attention_bytes=_attention_buffers(footprint).counted_bytes,
            encoder=_encoder_run(footprint),
        )

    def used_bytes(self, footprint: Footprint, memory: Memory) -> int:
        total = memory.weights_bytes + memory.activation_bytes + memory.overhead_bytes
        return total + (memory.graph_bytes if _counts_graphs(footprint) else 0)

    def cache_flags(self, candidate: Candidate, memory: Memory) -> dict[str, Scalar]:
        """The bytes on a CPU, and where GPU and host share their memory.

        Without a size the engine takes nearly all RAM of a CPU, even for a model without a cache.
        In shared memory it would count every page that the host takes or frees meanwhile
        (MemorySnapshot.measure in vllm/utils/mem_utils.py, since 0.19: psutil's `available`).
        """
        if candidate.engine.device == "cpu":
            return {CACHE_BYTES: max(memory.kv_bytes, _MIN_KV_BYTES)}
        has_flag = CACHE_BYTES in candidate.engine.flags and memory.kv_bytes_per_token > 0
        if (
            not candidate.has_unified_memory
            or not has_flag
            or "gpu-memory-utilization" in candidate.args
        ):
            return {}
        return {CACHE_BYTES: max(memory.kv_bytes, _MIN_KV_BYTES)}

    def _ram_budget(self, footprint: Footprint, context: int) -> Budget:
        """Budget in RAM: weights, activations, and a KV cache for four requests of the wanted
        length within half of the RAM for engines, or for one within all that other engines
        leave."""
        candidate = footprint.candidate
        hardware = candidate.inputs.hardware
        free_bytes = available_ram(hardware, candidate.inputs.promised_bytes)
        used_bytes = self.used_bytes(footprint, self.divide_budget(footprint, 0))
        cache_words = _cache_of_user(candidate)
        if cache_words is not None:
            kv, reason = cache_words
            if used_bytes + kv > free_bytes:
                text = (
                    f"{reason}; together with {gib(used_bytes)} for everything else, that is more"
                    f" than the {gib(free_bytes)} of RAM that is available"
                )
                raise RefusalError("no_memory", text, "your flag")
            return Budget(used_bytes + kv, {}, f"{gib(kv)} of KV cache")
        context_bytes = footprint.cache.bytes_for(context, footprint.load.batched_tokens)
        if used_bytes > free_bytes:
            return Budget(max(0, free_bytes), {}, "the RAM that other engines leave")
        half = available_ram(hardware, {}) // 2 - used_bytes
        least_bytes = -(-context_bytes // _RAM_STEP_BYTES) * _RAM_STEP_BYTES
        kv = _round_down(
            min(max(least_bytes, min(4 * context_bytes, half)), free_bytes - used_bytes)
        )
        return Budget(used_bytes + kv, {}, f"{gib(kv)} of KV cache")


class VllmCpuRules(VllmCpuKind, VllmRules):
    """vLLM built for CPUs, which keeps its KV cache in the dtype of the model."""

    def adopted_kv_dtype(self, spec: ModelSpec, engine: Engine, capability: str | None) -> str:
        return AUTO


def _replace_state_dtypes(
    attention: tuple[AttentionGroup, ...], args: Mapping[str, Scalar]
) -> tuple[AttentionGroup, ...]:
    """The groups, with the user's dtype of recurrent matrices. _mamba_state_dtype in
    vllm/model_executor/layers/mamba/mamba_utils.py."""
    dtype = str(args.get("mamba-ssm-cache-dtype", "auto"))
    return attention if dtype == "auto" else replace_matrix_dtype(attention, dtype)


def _cache_of_user(candidate: Candidate) -> tuple[int, str] | None:
    """Bytes of KV cache that the user set for a CPU, and how. Raises BadFlag."""
    if "kv-cache-memory-bytes" in candidate.args:
        cache_bytes = int(candidate.args["kv-cache-memory-bytes"])
        return cache_bytes, f"--kv-cache-memory-bytes={cache_bytes} was set"
    if space := candidate.inputs.wish.env.get("VLLM_CPU_KVCACHE_SPACE"):
        if not space.isdecimal():
            raise BadFlag(
                f"VLLM_CPU_KVCACHE_SPACE is {space[:40]!r}; it must be a whole number of GiB.",
                hint="Set it to a number such as 4, or leave it out to let fitserve choose.",
                param="env",
            )
        return int(space[:6]) * GIB, f"VLLM_CPU_KVCACHE_SPACE={space[:6]} was set"
    return None


def _block_size(args: Mapping[str, Scalar]) -> int | None:
    return int(args["block-size"]) if "block-size" in args else None


def _is_big(candidate: Candidate, least_gib: int) -> bool:
    if not candidate.gpus:
        return False
    name = candidate.gpus[0].name.lower()
    return (
        (candidate.gpus[0].total_bytes or 0) >= least_gib * GIB
        and "a100" not in name
        and not ("gb10" in name and SMALL_GB10_BATCHES in candidate.engine.traits)
    )


@lru_cache(maxsize=16)  # asked for each budget that is tried
def _unshared_bytes(footprint: Footprint) -> int:
    """Bytes of the engine on each GPU outside its share, corrected by starts of this version on
    this kind of GPU."""
    candidate = footprint.candidate
    outside_bytes = vllm_memory.unshared_bytes(
        candidate.inputs.spec,
        candidate.stage,
        footprint.load,
        graphs_in_budget=_counts_graphs(footprint),
        copies_through_host=candidate.copies_through_host,
    )
    outside_bytes += _attention_buffers(footprint).outside_bytes
    # Each of these facts is the lack that was left with those before it.
    return outside_bytes + sum(
        fact.value or 0 for fact in candidate.inputs.facts.holding("beside_memory", candidate.scope)
    )


@lru_cache(maxsize=16)  # asked for each budget that is tried
def _attention_buffers(footprint: Footprint) -> AttentionBuffers:
    """Buffers of the attention backends of this candidate."""
    candidate = footprint.candidate
    rules = candidate.rules
    return attention_buffers(
        rules.attention if isinstance(rules, VllmRules) else None,
        candidate.built_model.attention,
        candidate.evidence.attention,
        footprint.load,
        graphs_in_budget=_counts_graphs(footprint),
    )


def _counts_graphs(footprint: Footprint) -> bool:
    """vllm/v1/worker/gpu_worker.py:722 of 0.33.0; the variable wins over the version's default."""
    candidate = footprint.candidate
    traits = candidate.engine.traits
    switch = _is_switched_on(candidate, GRAPHS_VARIABLE)
    if footprint.load.runner == 2 and vllm_memory.COUNTED_SECOND_GRAPHS not in traits:
        return False
    return GRAPHS_IN_BUDGET in traits if switch is None else switch


@lru_cache(maxsize=16)  # asked for each budget that is tried
def _encoder_run(footprint: Footprint) -> EncoderRun | None:
    """The encoder's part of this version's profile run; None: it runs none."""
    candidate = footprint.candidate
    load = footprint.load
    is_later_stage = candidate.undivided is not None and candidate.stage_number > 0
    if load.runner == 2 and (PROFILED_ENCODERS not in candidate.engine.traits or is_later_stage):
        return None
    return encoder_run(candidate.inputs.spec, candidate.args, load)


def _is_switched_on(candidate: Candidate, name: str) -> bool | None:
    """Whether a variable of the engine is on; None: it is not set."""
    items = rule_variables({name: candidate.inputs.wish.env.get(name, "unset")})
    if f"{name}=1" in items:
        return True
    return False if f"{name}=0" in items else None


def _spare_bytes(candidate: Candidate) -> int:
    """Bytes that an engine turned out to need outside its share, when it ran out of memory while it
    served."""
    facts = candidate.inputs.facts.holding("spare_memory", candidate.scope)
    return max((fact.value or 0 for fact in facts), default=0)


def _round_down(count: int) -> int:
    """Down to whole steps: a machine's RAM reads a little different after each boot, and facts must
    go on to hold."""
    return max(0, count // _RAM_STEP_BYTES) * _RAM_STEP_BYTES
