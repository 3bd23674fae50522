"""Places in vLLM's code behind choices and refusals of the planner. Pure."""

from __future__ import annotations

from gateway.engines.common.code_sources import CodeSources

# Further facts of vLLM that the planner builds on:
# * tensor parallelism: verify_with_parallel_config (vllm/config/model.py) for heads, `divide` in
#   linear.py and vocab_parallel_embedding.py of vllm/model_executor/layers, fused_moe/config.py
#   there for experts; `divide` of a tower's heads in glm4_1v.py:277 of 0.19.1, siglip.py and
#   clip.py of vllm/model_executor/models;
# * NVFP4 groups: w2_weight_scale (modelopt.py:1509 of 0.26.0, :980 of 0.33.0), and create_weights
#   (:1103 of 0.19.1, :2028 of 0.33.0). Marlin fails in the profile run
#   (github.com/vllm-project/vllm/issues/49949), and others read wrong scales;
# * the same tokens of KV cache on every rank: get_kv_cache_configs in
#   vllm/v1/core/kv_cache_utils.py;
# * tokens of a step of decoding: uniform_decode_query_len in vllm/config/vllm.py;
# * no start with CUDA graphs for more requests than blocks, after loading and compiling:
#   resolve_cudagraph_mode_and_sizes in vllm/config/compilation.py of 0.26.0 (until 0.19.1 larger
#   batches only got no graphs); levels without full graphs: OPTIMIZATION_LEVEL_00 and _01 in
#   vllm/config/vllm.py of 0.32.0;
# * a KV cache in RAM, which takes every block that is computed: vllm/v1/kv_offload of 0.26.0;
# * priorities: Scheduler.schedule and _try_schedule_encoder_inputs in
#   vllm/v1/core/sched/scheduler.py, validate_block_size in vllm/config/vllm.py (0.33.0);
# * fields of config.json and the task by flags: hf_overrides, _get_runner_type and
#   _get_convert_type in vllm/config/model.py of 0.33.0;
# * the class of transformers in place of a missing one: _try_resolve_transformers in
#   vllm/model_executor/models/registry.py; own configuration classes before the repository's code:
#   HFConfigParser in vllm/transformers_utils/config.py.
# The places below are those of 0.18.0 to 0.33.0.
SOURCES = CodeSources(
    auto_dtype="vllm/config/model.py _resolve_auto_dtype",
    bfloat16="vllm/platforms/cuda.py check_if_supports_dtype",
    other_dtype="vllm/platforms/cuda.py",
    ranks="vllm/config/model.py, vllm/model_executor/layers/linear.py",
    stages="vllm/distributed/utils.py",
    # All processes ask the first visible GPU for its capability.
    unlike_ranks="vllm/platforms/cuda.py",
    # Experts are wrapped whether an adapter changes them or not, and refused where their kernel
    # has no LoRA.
    expert_adapters="vllm/lora/layers/fused_moe.py",
)
