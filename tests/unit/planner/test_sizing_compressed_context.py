"""Contexts of a model that compresses keys: starts of others, which failed or served."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain import Decision, Scalar
from gateway.domain.units import GIB
from gateway.profiles.profiles import Profiles
from tests.conformance.forecast_cases import family_configs
from tests.support.makers import wish
from tests.support.planning import decide
from tests.support.published import model_from_config
from tests.support.versions import VLLM_REF

PROFILES = Profiles()
# The sizes of DeepSeek V4 Pro.
PRO: dict[str, Any] = family_configs()["deepseek_v4"] | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "o_lora_rank": 1024,
    "index_topk": 1024,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "compress_ratios": [128, 128, *([4, 128] * 29), 4, 0],
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}
COPIES: dict[str, Scalar] = {
    "data-parallel-size": 8,
    "enable-expert-parallel": True,
    "kv-cache-dtype": "fp8",
    "block-size": 256,
    "max-model-len": 800_000,
}


def make_decision(**flags: Scalar) -> Decision:
    """The decision for eight copies of attention on eight H200."""
    args = COPIES | {name.replace("_", "-"): value for name, value in flags.items()}
    engines = [PROFILES.engine(VLLM_REF)]
    return decide(
        model_from_config(PRO),
        PROFILES.hardware("8xh200"),
        engines,
        wish(args=args),
        rules=PROFILES.rules(engines),
    )


@pytest.mark.parametrize(
    "flags",
    [
        {"gpu_memory_utilization": 0.9},
        {"gpu_memory_utilization": 0.95, "max_num_seqs": 1024, "max_num_batched_tokens": 8192},
    ],
)
def test_800_000_tokens_do_not_fit_beside_batches_of_the_usual_size(
    flags: dict[str, Scalar],
) -> None:
    """github.com/vllm-project/recipes/issues/381: no start with the engine's own sizes."""
    decision = make_decision(**flags)
    assert not decision.plans
    assert {rejection.verdict for rejection in decision.rejected} == {"no_memory"}


def test_800_000_tokens_fit_beside_batches_of_512_tokens() -> None:
    """The same machine started so (commit af483b8 of the recipes; recipes/issues/832)."""
    small_batch: dict[str, Scalar] = {"max_num_seqs": 512, "max_num_batched_tokens": 512}
    plan = make_decision(gpu_memory_utilization=0.95, **small_batch).plans[0]
    assert plan.memory.kv_tokens >= plan.max_model_len.value == 800_000


def test_the_largest_share_holds_a_context_with_its_workspaces() -> None:
    """The planner's own sizes count experts for the tokens of all ranks, and keys that are
    gathered, and leave memory outside its share for the context of CUDA and for NCCL."""
    plan = make_decision().plans[0]
    memory = plan.memory
    gathered_tokens = 8 * plan.max_num_batched_tokens.value
    expert_bytes = (6 * 2 * 7168 + 7168) * gathered_tokens * 2
    assert memory.activation_bytes > expert_bytes + GIB
    assert memory.kv_tokens >= plan.max_model_len.value
    assert memory.budget_bytes + memory.beside_bytes <= memory.gpu_bytes
