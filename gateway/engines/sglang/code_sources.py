"""Places in SGLang's code behind choices and refusals of the planner. Pure."""

from __future__ import annotations

from gateway.engines.common.code_sources import CodeSources

# Further facts of SGLang that the planner builds on:
# * `divide` of a tower's heads: sglang/srt/layers/attention/vision.py:1132 of 0.5.23;
# * NVFP4 groups: modelopt_quant.py:2567 of 0.5.23, and create_weights at :1324 of 0.5.10;
# * fewer concurrent requests than the flag says: resolve_max_num_reqs in
#   srt/mem_cache/kv_cache_configurator.py of 0.5.23;
# * all weights in 16 bits before the first is quantized: load_weights_and_postprocess in
#   srt/model_loader/loader.py:697 of 0.5.10.post1, :1028 of 0.5.23;
# * priorities: preempt_to_schedule in sglang/srt/managers/schedule_policy.py of 0.5.23;
# * fields of config.json by a flag: model_override_args in srt/utils/hf_transformers/config.py of
#   0.5.23.
SOURCES = CodeSources(
    auto_dtype="sglang/srt/configs/model_config.py _get_and_verify_dtype",
    bfloat16="sglang/srt/model_executor/model_runner.py load_model",
    other_dtype="sglang/srt/model_executor/model_runner.py load_model",
    ranks="sglang/srt/layers/linear.py",
    stages="sglang/srt/distributed/utils.py get_pp_indices",
    unlike_ranks="planner",
    expert_adapters="planner",
    # The file is srt/distributed/bootstrap.py in 0.5.23, model_runner.py before.
    balanced_ranks="sglang/srt, _check_tp_memory_balance",
)
