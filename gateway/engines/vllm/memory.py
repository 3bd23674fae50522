"""Memory on a GPU: weights per rank, KV cache, and the engine's other needs.

Weights and KV cache follow from shapes (engines/common/layers/weights.py,
engines/vllm/kv_cache.py). Activations, graphs and overhead are estimates, so a Memory has a band
(`low`, `high`) around everything but the KV cache.

The constants were read in 33 starts of vLLM 0.26.0 (CUDA 13.0, dummy weights) on H200 GPUs, driver
580.159.04, on 2026-11-21. tests/unit/engines/vllm/measured_memory.json has each start's own
figures, benchmarks/notebook/performance.md the comparison.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache

from gateway.domain import Memory, ModelSpec
from gateway.domain.units import GIB, MIB
from gateway.engines.common.layers.built_model import BuiltModel, is_in_tower, rank_shape
from gateway.engines.common.memory.kv_cache import ITEM_BYTES, KvCache
from gateway.engines.common.memory.loaded_memory import position_values
from gateway.engines.vllm.encoder_profile import EncoderRun
from gateway.engines.vllm.sparse_memory import sparse_buffers, table_factor
from gateway.models.families.layer_kinds import layers_without_mixing
from gateway.models.workload import Workload

# Non-torch memory by the engine's count: cuBLAS workspaces and kernels loaded during its profile
# run. With one rank 0.22 to 0.24 GiB; with two 0.07 to 0.10, as NCCL takes most of it before the
# count. Rounding of allocations adds 0.01 to 0.08 GiB to the weights.
_OVERHEAD = round(0.30 * GIB)
_OVERHEAD_OF_RANKS = round(0.18 * GIB)
# Memory taken before the engine begins to count, so outside its budget: the CUDA context (0.51
# GiB), and NCCL with its peers.
_CONTEXT = round(0.51 * GIB)
_NCCL = 2 * GIB
# If GPUs meet only in the host's memory, NCCL keeps its buffers there. Context and NCCL took about
# 0.4 GiB of each of eight 3090 (github.com/Sandermage/genesis-vllm-patches/issues/24), and 0.25 GiB
# of each of two 4090 (github.com/vllm-project/vllm/issues/13061).
_NCCL_THROUGH_HOST = GIB // 2
# Ranks that fuse an all-reduce with the next norm have FlashInfer's workspace for it:
# enable_allreduce_rms_fusion (vllm/config/vllm.py:131 of 0.26.0; unchanged from 0.18.0 to 0.33.0).
# Tensors may have up to FI_ALLREDUCE_FUSION_MAX_SIZE_MB by capability and ranks
# (vllm/compilation/passes/fusion/allreduce_rms_fusion.py:104). Llama 8B on two H200 had 1.04 GiB
# beyond torch, and 0.21 without the fusion (2026-11-22): 13.3 times the largest tensor. The 33
# starts had the fusion off.
_FUSED_MIB = {
    "9.0": {2: 64.0, 4: 2.0, 8: 0.5},
    "10.0": {2: 64.0, 4: 32.0, 8: 1.0},
    "10.3": {2: 64.0, 4: 64.0, 8: 2.0},
}
_FUSED_TIMES = 13.3
# Graphs of one layer, all batch sizes together. The engine's own estimate, if it makes one: 0.009
# to 0.024 GiB. Real captures: 0.009 to 0.044; of dense models in 16 bits 0.031, as 0.98 GiB of
# Llama 8B.
_GRAPH_BYTES_OF_LAYER = round(0.017 * GIB)
_CAPTURE_BYTES_OF_LAYER = round(0.031 * GIB)
_MAX_GRAPH_BYTES_OF_LAYER = round(0.045 * GIB)
# Batch sizes that get a graph: _set_cudagraph_sizes in vllm/config/vllm.py of 0.18.0 to 0.33.0.
# Graphs of 16 layers took 0.45 GiB with all sizes, and 0.15 with the 19 of 64 requests
# (benchmarks/speed/results/vllm-0.26.0-h200-twice.jsonl, --max-num-seqs=64). The first graph's
# shared memory counts as three more graphs.
_MAX_GRAPH_TOKENS = 512
_FIRST_GRAPHS = 3
_MAX_LAYERS = 1000  # a larger number in config.json is not a number of layers
# Bytes for each logit of the sampler's dummy run. The first runner samples with top-k and top-p:
# 3.7 copies in float32 (gpt-oss-20b). The second does neither (gemma-3-1b), and takes up to 27 in
# its warm-up, which its budget ignores.
_LOGIT_BYTES = {1: 14.8, 2: 2.2}
_WARMUP_LOGIT_BYTES = 27
# A drafter keeps hidden states and embeddings of a full batch. Its first layer reads both side by
# side while the model's hidden states stay: vllm/v1/spec_decode/llm_base_proposer.py and
# vllm/model_executor/models/qwen3_5_mtp.py of 0.26.0.
_DRAFT_BUFFERS = 2
_DRAFT_INPUTS = 3
# Observed in addition to everything else with DeepSeek-V2-Lite, for every batch.
_LATENT = round(0.15 * GIB)
# Only the tensors in the files are known of an unknown family. Engines may fuse, pad and cast them
# in other ways.
_UNKNOWN_FAMILY = 0.1
# MRotaryEmbedding (rotary_embedding/mrope.py) makes its table four times as long, for videos.
_MROPE_STRETCH = 4
# Traits of engine versions. The models that run on "model runner V2" (use_v2_model_runner in
# vllm/config/vllm.py): all since 0.29.0; before, all but mixtures of experts, hybrids and poolers
# since 0.25.0, and listed ones since 0.22.0. Until 0.28.0 it did not estimate its graphs.
SECOND_RUNNER = "second_runner"
DENSE_SECOND_RUNNER = "dense_second_runner"
COUNTED_SECOND_GRAPHS = "counted_second_graphs"
# DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES of 0.22.1, 0.23.0 and 0.24.0, the first two without
# quantization.
_QWEN3_RUNNER = frozenset({"Qwen3ForCausalLM"})
_LLAMA_RUNNER = _QWEN3_RUNNER | {"LlamaForCausalLM", "MistralForCausalLM"}
_LISTED_RUNNER = _LLAMA_RUNNER | {
    "DeepseekV2ForCausalLM",
    "GraniteMoeForCausalLM",
    "Qwen2MoeForCausalLM",
}
SECOND_RUNNERS = frozenset(
    {
        SECOND_RUNNER,
        DENSE_SECOND_RUNNER,
        "listed_second_runner",
        "llama_second_runner",
        "qwen3_second_runner",
    }
)
# DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES (vllm/config/vllm.py:68) of 0.26.0.
_SECOND_RUNNER = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "GraniteMoeForCausalLM",
        "InklingForCausalLM",
        "InklingForConditionalGeneration",
        "LongcatFlashNgramForCausalLM",
        "Qwen2MoeForCausalLM",
    }
)


def runner_bytes(spec: ModelSpec, built_model: BuiltModel, traits: Collection[str]) -> int:
    """Number of vLLM's model runner that serves this model by default."""
    if SECOND_RUNNER in traits:
        return 2
    if "listed_second_runner" in traits:
        return 2 if spec.architecture in _LISTED_RUNNER else 1
    if spec.quant is None and spec.architecture in _LLAMA_RUNNER:
        is_qwen = spec.architecture in _QWEN3_RUNNER and "qwen3_second_runner" in traits
        if is_qwen or "llama_second_runner" in traits:
            return 2
    if DENSE_SECOND_RUNNER not in traits or not spec.generates:
        return 1
    if any(group.kind in ("recurrent", "encoder") for group in built_model.attention):
        return 1
    return 2 if not spec.experts or spec.architecture in _SECOND_RUNNER else 1


def activation_bytes(
    spec: ModelSpec, built_model: BuiltModel, load: Workload, encoder: EncoderRun | None = None
) -> int:
    """Peak of the engine's profile run, in bytes of one rank.

    The peak is the largest of the encoder's pass, a full batch's forward pass, sampling and
    compiling. Source for experts: workspace_shapes of TritonExperts,
    vllm/model_executor/layers/fused_moe.
    """
    kinds = {group.kind for group in built_model.attention}
    has_vision = "vision" in kinds or _has_tower(built_model)
    is_encoder_known = encoder is not None and encoder.is_known
    # A model with images is given embeddings, so that its compiled part has none.
    compiling_bytes = _compiling_bytes(spec, load) if load.graphs and not has_vision else 0
    sparse_memory = sparse_buffers(spec, load)
    peak_bytes = max(
        _forward_bytes(spec, built_model, load) + sparse_memory.peak_bytes,
        _sampling_bytes(spec, load),
        compiling_bytes,
    )
    language_bytes = peak_bytes + max(_expert_bytes(spec, load), sparse_memory.workspace_bytes)
    if has_vision:
        # Embeddings of images and buffers for them (Qwen2.5-VL, Qwen3-VL, Qwen3.5). Profiled
        # images are kept by size.
        language_bytes += (4 if is_encoder_known else 6) * _hidden_bytes(spec, load)
    if "mla" in kinds:
        language_bytes += _LATENT
    if encoder is None or not encoder.is_known:
        return language_bytes
    return max(language_bytes + encoder.kept_bytes, encoder.peak_bytes)


def _hidden_bytes(spec: ModelSpec, load: Workload) -> int:
    """Bytes of the hidden states of a full batch."""
    return spec.hidden * ITEM_BYTES[load.rank.dtype] * load.batched_tokens


def _forward_bytes(spec: ModelSpec, built_model: BuiltModel, load: Workload) -> int:
    """Bytes of a full batch's forward pass: hidden states, the widest MLP and its halves."""
    hidden_bytes = _hidden_bytes(spec, load)
    widest = _widest(built_model, load.rank.tp)
    if not built_model.is_known:
        columns = [
            tensor.shape[0]
            for tensor in built_model.other_tensors
            if tensor.shard in ("column", "expert_column") and len(tensor.shape) == 2
        ]
        widest = 2 * max(columns, default=spec.hidden) // load.rank.tp
    outputs = (widest + widest // 2) * load.batched_tokens
    forward_bytes = 4 * hidden_bytes + outputs * ITEM_BYTES[load.rank.dtype]
    if load.has_drafter:
        forward_bytes += (_DRAFT_BUFFERS + _DRAFT_INPUTS) * hidden_bytes
    return forward_bytes


def _expert_bytes(spec: ModelSpec, load: Workload) -> int:
    """Bytes of each expert's inputs and outputs, which stay until the end of the pass."""
    if not spec.experts:
        return 0
    # Groups of ranks gather the tokens of all for whole experts.
    parts = load.rank.expert_parts if load.rank.dp > 1 else load.rank.tp
    inner_size = spec.experts.intermediate // parts
    rows = max(inner_size, spec.hidden) + max(2 * inner_size, spec.hidden)
    gathered_tokens = load.batched_tokens * load.rank.dp
    values = (spec.experts.per_token * rows + spec.hidden) * gathered_tokens
    return values * ITEM_BYTES[load.rank.dtype]


def _sampling_bytes(spec: ModelSpec, load: Workload) -> int:
    """Bytes of the logits, beyond the hidden states."""
    logits = min(load.seqs, load.batched_tokens) * spec.vocab if spec.generates else 0
    return round(_LOGIT_BYTES[load.runner] * logits) + _hidden_bytes(spec, load)


def _compiling_bytes(spec: ModelSpec, load: Workload) -> int:
    """Bytes of one more embedding, which the compiler copies, and its hidden states."""
    embedding_bytes = spec.vocab * spec.hidden * ITEM_BYTES[load.rank.dtype] // load.rank.tp
    ranks = 1 if load.rank.tp == 1 else 2
    return embedding_bytes + 2 * ranks * _hidden_bytes(spec, load)


@lru_cache(maxsize=256)  # asked for each budget that is tried, by all engine versions
def _widest(built_model: BuiltModel, tp: int) -> int:
    """Outputs of the widest layer of text on one rank."""
    text = [
        layer
        for layer in built_model.linears
        if not layer.experts and layer.shard in ("column", "merged", "qkv")
    ]
    return max(((rank_shape(layer, tp) or (0, 0))[1] for layer in text), default=0)


@lru_cache(maxsize=256)
def _has_tower(built_model: BuiltModel) -> bool:
    """Whether layers of it are in a vision tower."""
    return any(is_in_tower(layer.name) for layer in built_model.linears)


def unshared_bytes(
    spec: ModelSpec,
    built_model: BuiltModel,
    load: Workload,
    *,
    graphs_in_budget: bool = True,
    copies_through_host: bool = False,
) -> int:
    """Bytes of an engine on a GPU outside its share: the CUDA context, NCCL, and uncounted graphs
    and sampling.

    copies_through_host: the GPUs reach each other only through the host's memory.
    """
    nccl = _NCCL_THROUGH_HOST if copies_through_host else _NCCL
    outside_bytes = _CONTEXT + (nccl if load.rank.tp * load.rank.pp * load.rank.dp > 1 else 0)
    if load.runner == 2 and spec.generates:
        outside_bytes += _warm_bytes(spec, load)
    if load.graphs and not graphs_in_budget:
        outside_bytes += _graphs(spec, built_model, load, _CAPTURE_BYTES_OF_LAYER)
    return outside_bytes


def _fused_bytes(spec: ModelSpec, load: Workload) -> int:
    """The workspace of fused all-reduces."""
    rank = load.rank
    if rank.pp > 1 or not load.graphs:
        return 0
    limit = _FUSED_MIB.get(rank.capability, {}).get(rank.tp, 0.0) * MIB
    return round(
        _FUSED_TIMES * min(limit, load.batched_tokens * spec.hidden * ITEM_BYTES[rank.dtype])
    )


def _warm_bytes(spec: ModelSpec, load: Workload) -> int:
    """The bytes of sampling, once the second runner warms up."""
    return _WARMUP_LOGIT_BYTES * min(load.seqs, load.batched_tokens) * spec.vocab


@lru_cache(maxsize=256)
def graph_sizes(seqs: int, query: int = 1) -> int:
    """The number of batch sizes with a graph for this many concurrent requests."""
    return _count_sizes(min(2 * seqs * query, _MAX_GRAPH_TOKENS))


def whole_graph_sizes(load: Workload) -> int:
    """The number of batch sizes with a graph that includes attention: those of decoding alone."""
    return _count_sizes(min(load.seqs * load.query, _MAX_GRAPH_TOKENS))


def _count_sizes(limit: int) -> int:
    """The number of batch sizes up to `limit` tokens."""
    small_count = sum(size <= limit for size in (1, 2, 4))
    return small_count + len(range(8, min(limit + 1, 256), 8)) + len(range(256, limit + 1, 16))


def _named_layers(spec: ModelSpec) -> int:
    """Layers of the language model by config.json, without those that are only an MLP, as graphs
    are cut at attention and states; 0: not named."""
    text = spec.config.get("text_config")
    fields = text if isinstance(text, Mapping) else spec.config
    layers = fields.get("num_hidden_layers")
    if type(layers) is not int or not 0 < layers < _MAX_LAYERS:
        return 0
    return layers - layers_without_mixing(fields, layers)


def _graphs(spec: ModelSpec, built_model: BuiltModel, load: Workload, layer_bytes: int) -> int:
    """Bytes of all graphs. Layers that share the keys of others are in graphs too.

    layer_bytes: bytes of one layer in all sizes.
    """
    layers = sum(group.layers for group in built_model.attention if group.kind != "vision")
    if load.rank.pp == 1:
        layers = max(layers, _named_layers(spec))
    part = (graph_sizes(load.seqs, load.query) + _FIRST_GRAPHS) / (
        graph_sizes(_MAX_GRAPH_TOKENS) + _FIRST_GRAPHS
    )
    return round(layers * layer_bytes * part)


def rank_memory(
    spec: ModelSpec,
    built_model: BuiltModel,
    cache: KvCache,
    load: Workload,
    *,
    weights_bytes: int,
    device_bytes: int,
    budget_bytes: int,
    unshared_bytes: int = 0,
    graphs_in_budget: bool = True,
    attention_bytes: int = 0,
    encoder: EncoderRun | None = None,
) -> Memory:
    """The Memory of one rank under a budget. `kv_bytes` is the expected rest, 0 if nothing is left.

    graphs_in_budget: the engine keeps graphs within its budget. Versions before 0.20 capture them
        outside it. So does the second runner until 0.28.0, whose profile_cudagraph_memory is 0
        (vllm/v1/worker/gpu/model_runner.py).
    unshared_bytes: result of the function with this name.
    attention_bytes: buffers of attention that the engine's estimate of its graphs includes.
    encoder: memory of the profile run's encoder. One of an unknown family only widens the band.
    """
    activation = activation_bytes(spec, built_model, load, encoder)
    overhead, outside_bytes = _fixed_bytes(spec, load)
    table_bytes = _table_bytes(spec, built_model, load)
    overhead += table_bytes
    graph = attention_bytes + (
        _graphs(spec, built_model, load, _graph_bytes(load, graphs_in_budget)) if load.graphs else 0
    )
    used_bytes = weights_bytes + activation + overhead + (graph if graphs_in_budget else 0)
    grows = cache.bytes_for(1, load.batched_tokens) > 0
    kv, per_token = max(0, budget_bytes - used_bytes) if grows else 0, cache.bytes_per_token
    unsure_bytes = (
        0
        if built_model.is_known and not built_model.guessed
        else round(weights_bytes * _UNKNOWN_FAMILY)
    )
    # Once kernels are compiled, a start has no peak of compiling.
    compiled = activation_bytes(spec, built_model, load._replace(graphs=False), encoder)
    low_bytes = weights_bytes - unsure_bytes + min(activation // 2, compiled) + overhead // 2
    high_bytes = weights_bytes + weights_bytes // 50 + unsure_bytes + overhead + outside_bytes
    high_bytes += _count_peak(spec, built_model, load, activation, encoder) + attention_bytes
    return Memory(
        gpu_bytes=device_bytes,
        budget_bytes=budget_bytes,
        weights_bytes=weights_bytes,
        loaded_bytes=weights_bytes + table_bytes,
        activation_bytes=activation,
        graph_bytes=graph,
        overhead_bytes=overhead,
        beside_bytes=unshared_bytes,
        kv_bytes=kv,
        kv_bytes_per_token=per_token,
        kv_tokens=kv // per_token if per_token else 0,
        low=low_bytes,
        high=high_bytes,
    )


def _table_bytes(spec: ModelSpec, built_model: BuiltModel, load: Workload) -> int:
    """Bytes of the tables of positions."""
    values = position_values(spec, built_model, _MROPE_STRETCH)
    return ITEM_BYTES[load.rank.dtype] * values * table_factor(spec)


def _fixed_bytes(spec: ModelSpec, load: Workload) -> tuple[int, int]:
    """Bytes of the runtime within the budget, and outside it."""
    if load.device != "cuda":
        return 2 * GIB, GIB // 2
    has_ranks = load.rank.tp * load.rank.pp * load.rank.dp > 1
    overhead = (_OVERHEAD_OF_RANKS if has_ranks else _OVERHEAD) + _fused_bytes(spec, load)
    return overhead, _CONTEXT + (_NCCL if has_ranks else 0) + GIB // 4


def _graph_bytes(load: Workload, graphs_in_budget: bool) -> int:
    """Bytes of one layer's graphs: the first runner's estimate is below its captures, and the
    second one captures nearly all that it estimates."""
    return (
        _GRAPH_BYTES_OF_LAYER if graphs_in_budget and load.runner == 1 else _CAPTURE_BYTES_OF_LAYER
    )


def _count_peak(
    spec: ModelSpec,
    built_model: BuiltModel,
    load: Workload,
    activation: int,
    encoder: EncoderRun | None,
) -> int:
    """The largest peak, with graphs, with the sampling of a warm-up, and with an encoder whose
    largest images are not known."""
    warmup_bytes = _warm_bytes(spec, load) if spec.generates else 0
    limit = max(2 * activation, activation + warmup_bytes) if load.runner == 2 else 2 * activation
    limit += _graphs(spec, built_model, load, _MAX_GRAPH_BYTES_OF_LAYER) if load.graphs else 0
    return limit + (encoder.peak_bytes if encoder is not None and not encoder.is_known else 0)
