"""Refusals, shortages and sizes in public logs of engines, which plans must foresee.

Each outcome is the report's own, and holds for the engine's code of the planned version. Figures of
memory are those of the engines' logs of 2026: weights within 2 %, the KV cache within 10 %. Where a
log does not say otherwise, the flags are the defaults of its version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest

from gateway.domain import Decision, Gpu, Hardware, Plan
from gateway.domain.units import GIB, MIB
from gateway.models.catalog.structure_files import structure_text
from gateway.profiles.profiles import Profiles
from tests.conformance.forecast_cases import family_configs
from tests.conformance.layer_cases import QUANTS
from tests.conformance.weight_questions import MORE
from tests.support.makers import wish
from tests.support.planning import decide
from tests.support.published import config, model_from_config
from tests.support.reported_plans import make_decision
from tests.support.versions import VLLM_REF


class PublicCase(NamedTuple):
    """wanted: the fields of the wish. holds: the report's words about the decision."""

    source: str
    fields: Mapping[str, Any]
    hardware: str
    wish: Mapping[str, Any]
    holds: Callable[[Decision], bool]


FP8, GPTQ = QUANTS["fp8-block"], QUANTS["gptq"]
# Published shapes that differ from a kept file in these fields.
LLAMA_33B = config(
    "llama-3.1-8b", num_hidden_layers=60, hidden_size=6656, num_attention_heads=52,
    num_key_value_heads=52, intermediate_size=17920, vocab_size=32000,
)  # fmt: skip
LLAMA_13B = config(
    "llama-3.1-8b", num_hidden_layers=40, hidden_size=5120, num_attention_heads=40,
    num_key_value_heads=40, intermediate_size=13824, vocab_size=32000,
)  # fmt: skip
QWEN3_235B = config(
    "qwen3-30b-a3b", num_hidden_layers=94, hidden_size=4096, num_attention_heads=64,
    moe_intermediate_size=1536, intermediate_size=12288, quantization_config=FP8,
)  # fmt: skip
QWEN3_480B = config(
    "qwen3-30b-a3b", num_hidden_layers=62, hidden_size=6144, num_attention_heads=96,
    num_key_value_heads=8, num_experts=160, moe_intermediate_size=2560, intermediate_size=8192,
    max_position_embeddings=262144, quantization_config=FP8,
)  # fmt: skip
QWEN15_7B = config(
    "qwen2.5-7b", num_hidden_layers=32, hidden_size=4096, num_attention_heads=32,
    num_key_value_heads=32, intermediate_size=11008, vocab_size=151936,
    max_position_embeddings=32768, quantization_config=GPTQ,
)  # fmt: skip
GPT2_XL = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 1600, "n_head": 25,
    "n_layer": 48, "n_positions": 1024, "n_ctx": 1024, "vocab_size": 50257,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "torch_dtype": "float32",
}  # fmt: skip
PLAIN_CACHE = {"args": {"kv-cache-dtype": "auto"}}


def plans_of(decision: Decision, tensor_parallel: int) -> list[Plan]:
    return [plan for plan in decision.plans if plan.tensor_parallel.value == tensor_parallel]


def has_no_plan_of(tensor_parallel: int) -> Callable[[Decision], bool]:
    """No plan of this size, and others."""
    return lambda decision: not plans_of(decision, tensor_parallel) and bool(decision.plans)


def is_refused(decision: Decision) -> bool:
    return not decision.plans


def cache_of_one(token_bytes: int, low: int, high: int) -> Callable[[Decision], bool]:
    """A plan whose cache holds so many tokens."""
    return lambda decision: any(
        low <= plan.memory.kv_bytes / token_bytes <= high for plan in decision.plans
    )


CASES = (
    PublicCase("gpustack#2259", config("gemma-3-27b"), "3x3090", {}, has_no_plan_of(3)),
    PublicCase("AdaptThink#1", config("qwen2.5-7b"), "8xh100", {}, has_no_plan_of(8)),
    PublicCase(
        "FSDrive#21",
        config("qwen2.5-1.5b"),
        "8xh100",
        {"args": {"tensor-parallel-size": "8"}},
        is_refused,
    ),
    PublicCase("vllm#52435", config("gpt-oss-20b"), "3x3090", {}, has_no_plan_of(3)),
    PublicCase(
        "vllm#41695",
        config("qwen3-30b-a3b", quantization_config=FP8),
        "5090",
        {"context": 16384},
        lambda decision: all(plan.max_model_len.value < 16384 for plan in decision.plans),
    ),
    PublicCase(
        "vllm#41695, in bfloat16",
        config("qwen3.6-35b-a3b"),
        "5090",
        {"text_only": True},
        is_refused,
    ),
    PublicCase(
        "vllm#52915",
        config("qwen3.6-35b-a3b", quantization_config=FP8),
        "8xh100",
        {},
        has_no_plan_of(8),
    ),
    PublicCase(
        "vllm#42510", config("llama-3.1-8b"), "3090", {"args": {"block-size": "8"}}, is_refused
    ),
    PublicCase(
        "vllm#21348",
        QWEN3_235B,
        "4xh100",
        {},
        lambda decision: any(
            6 <= plan.memory.kv_bytes / GIB <= 14 for plan in plans_of(decision, 4)
        ),
    ),
    PublicCase(
        "vllm-project/recipes#12",
        QWEN3_480B,
        "8xh200",
        {"args": {"data-parallel-size": "8"}},
        lambda decision: any(
            180_000 <= plan.max_model_len.value <= 232_000 for plan in decision.plans
        ),
    ),
    PublicCase(
        "vllm#2652", LLAMA_33B, "8xh100", {"args": {"tensor-parallel-size": "8"}}, is_refused
    ),
    PublicCase("vllm#596", LLAMA_13B, "3x3090", {}, has_no_plan_of(3)),
    PublicCase("vllm#1705", GPT2_XL, "2x3090", {}, has_no_plan_of(2)),
    PublicCase(
        "vllm#26431",
        config("llama-3.1-8b"),
        "3090",
        {"args": {"kv-cache-dtype": "fp8"}},
        lambda decision: (
            {row.backend for plan in decision.plans for row in plan.attention} == {"FLASHINFER"}
        ),
    ),
    PublicCase(
        "zai-org/GLM-4#510", config("llama-3.1-8b"), "v100", {"dtype": "bfloat16"}, is_refused
    ),
    PublicCase("vllm#1157", config("qwen2.5-1.5b"), "t4", {"dtype": "bfloat16"}, is_refused),
    PublicCase(
        "Qwen3#16",
        QWEN15_7B,
        "3090",
        PLAIN_CACHE,
        cache_of_one(32 * 2 * 32 * 128 * 2, 22_000, 31_000),
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.source)
def test_a_plan_foresees_public_cases_of_vllm(case: PublicCase) -> None:
    decision = make_decision(dict(case.fields), case.hardware, VLLM_REF, **case.wish)
    assert case.holds(decision), [plan.argv for plan in decision.plans]


# --- memory of real starts ---

PROFILES = Profiles()
QWEN25_05B = config(
    "qwen2.5-1.5b", num_hidden_layers=24, hidden_size=896, intermediate_size=4864,
    num_attention_heads=14, num_key_value_heads=2,
)  # fmt: skip
QWEN3_06B = config(
    "qwen3-8b", num_hidden_layers=28, hidden_size=1024, intermediate_size=3072,
    num_attention_heads=16, tie_word_embeddings=True,
)  # fmt: skip
QWEN3_32B = config(
    "qwen3-8b", num_hidden_layers=64, hidden_size=5120, intermediate_size=25600,
    num_attention_heads=64,
)  # fmt: skip
GEMMA_FP8 = config(
    "gemma-4-26b-a4b",
    quantization_config=QUANTS["fp8-dynamic"]
    | {"ignore": ["lm_head", "re:.*vision.*", "re:.*router.*"]},
)
QWEN_AWQ = config(
    "qwen2.5-7b",
    quantization_config={
        name: value for name, value in QUANTS["awq"].items() if name != "modules_to_not_convert"
    },
)
QWEN3_VL_2B = config(
    "qwen3-vl-8b",
    tie_word_embeddings=True,
    text_config=config("qwen3-vl-8b")["text_config"]
    | {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "tie_word_embeddings": True,
    },
    vision_config=config("qwen3-vl-8b")["vision_config"]
    | {
        "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2048,
        "deepstack_visual_indexes": [5, 11, 17],
    },
)  # fmt: skip
GPT_OSS = config("gpt-oss-20b", quantization_config=QUANTS["mxfp4"])
# The text model's fields stand twice, and the towers' sizes are the class's own.
_OCR_TEXT = {
    "first_k_dense_replace": 1, "hidden_size": 1280, "intermediate_size": 6848,
    "kv_lora_rank": None, "max_position_embeddings": 8192, "moe_intermediate_size": 896,
    "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "num_attention_heads": 10,
    "num_experts_per_tok": 6, "num_hidden_layers": 12, "num_key_value_heads": 10,
    "q_lora_rank": None, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "topk_group": 1,
    "topk_method": "greedy", "use_mla": False, "v_head_dim": 0, "vocab_size": 129280,
}  # fmt: skip
DEEPSEEK_OCR = {
    **_OCR_TEXT,
    "architectures": ["DeepseekOCRForCausalLM"],
    "model_type": "deepseek_vl_v2",
    "torch_dtype": "bfloat16",
    "language_config": _OCR_TEXT | {"architectures": ["DeepseekV2ForCausalLM"]},
    "projector_config": {"input_dim": 2048, "model_type": "mlp_projector", "n_embed": 1280},
    "vision_config": {"image_size": 1024, "model_type": "vision"},
}
LONG = 32768
# Cards of which no machine is kept: name, capability, MiB.
CARDS = {
    "v100-32g": ("Tesla V100-SXM2-32GB", "7.0", 32510),
    "4070-laptop": ("NVIDIA GeForce RTX 4070 Laptop GPU", "8.9", 8188),
    "3050-laptop": ("NVIDIA GeForce RTX 3050 6GB Laptop GPU", "8.6", 6050),
}


class Start(NamedTuple):
    """share: the share of the GPU. weights_gib, kv_gib: the sizes in the log, of one rank; kv_gib
    None: no cache was left."""

    version: str
    hardware: str
    fields: Mapping[str, Any]
    share: float
    length: int
    kv_gib: float | None
    weights_gib: float | None = None
    more: Mapping[str, Any] = {}
    ranks: int = 1
    backend: str = ""
    drafts: int = 0  # tokens of a step that the model's own layers draft


STARTS = {
    "qwen3-8b on an A100 of 40 GiB": Start(
        "0.19.1", "2xa100-40g", config("qwen3-8b"), 0.9, 40960, 19.36, 15.27, backend="FLASH_ATTN"
    ),
    "qwen3-8b on an H100": Start("0.19.1", "h100", config("qwen3-8b"), 0.9, 40960, 53.54),
    "qwen3-8b on a 4090, kernels not compiled": Start(
        "0.27.1", "4090", config("qwen3-8b"), 0.9, 8192, 4.92, 15.27, backend="FLASH_ATTN"
    ),
    "qwen3-32b in 4 bits on 24 GiB": Start(
        "0.19.1", "3090", {**QWEN3_32B, "quantization_config": QUANTS["auto-round"]}, 0.85, 40960,
        None, 18.03, {"max-num-batched-tokens": 8192},
    ),
    "qwen2.5-7b on a V100": Start(
        "0.18.0", "v100-32g", config("qwen2.5-7b"), 0.9, LONG, 13.1, 14.25,
        {"max-num-batched-tokens": 8192, "enforce-eager": True}, backend="TRITON_ATTN",
    ),
    "qwen2.5-0.5b on 24 GiB": Start("0.27.1", "4090", QWEN25_05B, 0.85, 2048, 18.65, 0.93),
    "qwen2.5-0.5b on 24 GiB, large batches": Start(
        "0.27.1", "4090", QWEN25_05B, 0.92, LONG, 20.52, 0.93, {"max-num-batched-tokens": 8192}
    ),
    "qwen3-32b on half a card": Start(
        "0.27.1", "rtx-pro-6000", QWEN3_32B, 0.426, LONG, None, 61.03
    ),
    "qwen3-32b on two half cards": Start(
        "0.27.1", "2xrtx-pro-6000", QWEN3_32B, 0.426, LONG, 8.22, 30.59, ranks=2
    ),
    "llama-3.1-8b on an A40": Start(
        "0.26.0", "a40", config("llama-3.1-8b"), 0.9, 4096, 23.9, more={"max-num-seqs": 256}
    ),
    "qwen2.5-1.5b on a laptop": Start(
        "0.30.0", "4070-laptop", config("qwen2.5-1.5b"), 0.8, 4096, 1.95
    ),
    "gpt-oss-20b on an A100": Start("0.19.1", "a100", GPT_OSS, 0.65, 131072, 36.56, 13.72),
    "gemma-4-26b on an A100": Start(
        "0.19.1", "a100", config("gemma-4-26b-a4b"), 0.9, 131072, 21.5, 48.5,
        {"enforce-eager": True},
    ),
    "qwen3-0.6b on GB10": Start("0.27.1", "gb10", QWEN3_06B, 0.6, 40960, 69.4),
    "qwen3-0.6b on 6 GiB": Start(
        "0.26.0", "3050-laptop", QWEN3_06B, 0.6, 2048, 2.14, more={"enforce-eager": True}
    ),
    # The profile run has images or videos of the largest size.
    "qwen3.5-9b on an L40S": Start(
        "0.19.1", "l40s", config("qwen3.5-9b"), 0.9, LONG, 20.27, 17.66,
        {"max-num-batched-tokens": 8192, "enable-prefix-caching": False}, backend="FLASH_ATTN",
    ),
    "qwen2.5-vl-7b on a fifth of an A100": Start(
        "0.23.0", "a100", config("qwen2.5-vl-7b"), 0.22, 128000, None, 15.67
    ),
    "gemma-4-31b on a PRO 6000": Start(
        "0.23.0", "rtx-pro-6000", config("gemma-4-31b"), 0.94, LONG, 28.41, 58.99,
        {"max-num-batched-tokens": 8192, "max-num-seqs": 20}, backend="TRITON_ATTN",
    ),
    "gemma-4-e4b on a 3090": Start(
        "0.22.1", "3090", config("gemma-4-e4b"), 0.9, LONG, 4.1, 15.18
    ),
    "qwen3-235b on four PRO 6000": Start(
        "0.27.1", "4xrtx-pro-6000", QWEN3_235B, 0.9, LONG, 27.85, 55.19, {"max-num-seqs": 32}, 4
    ),
    "qwen3-8b on an L4": Start("0.27.1", "4xl4", config("qwen3-8b"), 0.9, 8192, 3.14, 15.27),
    "gemma-4-26b in FP8 on an L40S": Start(
        "0.25.1", "l40s", GEMMA_FP8, 0.92, LONG, 12.75, 25.8
    ),
    "gemma-4-e4b on an L40S": Start(
        "0.25.1", "l40s", config("gemma-4-e4b"), 0.85, 16384, 22.01
    ),
    "llama-3.1-8b on an A100 of 40 GiB": Start(
        "0.19.0", "2xa100-40g", config("llama-3.1-8b"), 0.85, LONG, 17.12
    ),
    "qwen2.5-7b in AWQ on a 4080": Start(
        "0.26.0", "4080", QWEN_AWQ, 0.9, LONG, 8.0, 5.29
    ),
    "qwen3-vl-2b on a 5070 Ti": Start(
        "0.20.0", "5070ti", QWEN3_VL_2B, 0.9, 2048, 8.13, 4.24,
        {"max-num-seqs": 1, "enforce-eager": True},
    ),
}  # fmt: skip
# github.com/vllm-project/vllm/issues/50159: tokens of Qwen2.5-0.5B with either model runner.
RUNNERS = {"": 6_900_336, "1": 6_900_336, "0": 6_891_296}


def machine_of(name: str) -> Hardware:
    if name not in CARDS:
        return PROFILES.hardware(name)
    card, capability, size = CARDS[name]
    hardware = PROFILES.hardware("3090")
    gpu: Gpu = hardware.gpus[0].evolve(
        name=card, capability=capability, total_bytes=size * MIB, free_bytes=size * MIB
    )
    return hardware.evolve(gpus=(gpu,))


def decision_of(start: Start, env: Mapping[str, str] | None = None) -> Decision:
    fields = dict(start.fields)
    engines = PROFILES.engines((f"vllm=={start.version}",), device="cuda")
    args = {
        "gpu-memory-utilization": start.share,
        "max-model-len": start.length,
        "kv-cache-dtype": "auto",
        **start.more,
    }
    request_fields: dict[str, Any] = {
        "args": args,
        "tensor_parallel": start.ranks,
        "env": dict(env or {}),
    }
    if start.drafts:
        request_fields |= {"speculative": "mtp", "num_speculative_tokens": start.drafts}
    return decide(
        model_from_config(fields, structure=structure_text(fields)),
        machine_of(start.hardware),
        engines,
        wish(**request_fields),
        PROFILES.facts,
        rules=PROFILES.rules(engines),
    )


@pytest.mark.parametrize("name", STARTS)
def test_a_plan_foresees_the_memory_of_a_public_start(name: str) -> None:
    start = STARTS[name]
    decision = decision_of(start)
    if start.kv_gib is None:
        assert not decision.plans
        memory = next(rejection.memory for rejection in decision.rejected if rejection.memory)
    else:
        plan: Plan = decision.plans[0]
        memory = plan.memory
        assert memory is not None
        assert memory.kv_bytes / GIB == pytest.approx(start.kv_gib, rel=0.1)
        assert not start.backend or start.backend in {row.backend for row in plan.attention}
    if start.weights_gib is not None:
        assert memory.loaded_bytes is not None
        assert memory.loaded_bytes / GIB == pytest.approx(start.weights_gib, rel=0.02)


@pytest.mark.parametrize("version", ["0.18.0", "0.26.0", "0.33.0"])
def test_the_weights_of_deepseek_ocr_count_both_towers(version: str) -> None:
    """A report of 0.18.0 on another accelerator: 6.2162 GiB, 831,872 tokens in 47.6 GiB."""
    plan = decision_of(Start(version, "a6000", DEEPSEEK_OCR, 0.9, 8192, None)).plans[0]
    memory = plan.memory
    assert memory is not None
    assert memory.loaded_bytes is not None
    assert memory.loaded_bytes / GIB == pytest.approx(6.2162, rel=0.005)
    assert memory.kv_bytes_per_token * 831_872 / GIB == pytest.approx(47.6, rel=0.005)


@pytest.mark.parametrize("runner", RUNNERS)
def test_either_model_runner_has_its_own_room(runner: str) -> None:
    env = {"VLLM_USE_V2_MODEL_RUNNER": runner} if runner else {}
    start = Start("0.26.0", "rtx-pro-6000", QWEN25_05B, 0.85, 8192, None)
    memory = decision_of(start, env).plans[0].memory
    assert memory is not None
    assert memory.kv_tokens == pytest.approx(RUNNERS[runner], rel=0.03)


# --- sizes that logs of SGLang name ---


class SglangStart(NamedTuple):
    """Sizes of a start of SGLang. weights_gib: None where the report does not say. requests: at
    once, by its states of recurrent layers. Reports of 2026-04-01 and of A100 name a development
    version, and are held to the next release."""

    source: str
    fields: Mapping[str, Any]
    hardware: str
    version: str
    wish: Mapping[str, Any]
    weights_gib: float | None
    tokens: int
    requests: int | None = None
    backend: str = ""
    experts: str = ""  # their runner


QWEN_27B = config(
    "qwen3.5-9b",
    text_config=config("qwen3.5-9b")["text_config"]
    | {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
        "num_attention_heads": 24, "linear_num_value_heads": 48,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 16,
    },
    vision_config=config("qwen3.5-9b")["vision_config"] | {"out_hidden_size": 5120},
    # The publisher leaves these layers and the tower in 16 bits.
    quantization_config=FP8
    | {
        "ignored_layers": [
            "lm_head",
            *(
                f"model.visual.blocks.{number}.{part}"
                for number in range(27)
                for part in ("attn.proj", "attn.qkv", "mlp.linear_fc1", "mlp.linear_fc2")
            ),
            *(
                f"model.language_model.layers.{number}.linear_attn.in_proj_{part}"
                for number in range(64)
                for part in "ab"
            ),
        ]
    },
)  # fmt: skip
QWEN3_4B = config("qwen3-8b", hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True)
EMBEDDING_GEMMA = {
    "architectures": ["Gemma3TextModel"], "model_type": "gemma3_text", "dtype": "bfloat16",
    "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 24,
    "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
    "sliding_window": 512, "max_position_embeddings": 2048, "use_bidirectional_attention": True,
    "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 4,
}  # fmt: skip
SHARE = "mem-fraction-static"
SGLANG_STARTS = (
    SglangStart(
        "Qwen3-32B on one H100, 2026-10",
        QWEN3_32B, "8xh100", "0.5.19",
        {"tensor_parallel": 1, "context": 8192, "args": {SHARE: 0.9}},
        61.07, 39_078,
    ),
    SglangStart(
        "Qwen3.8-27B-FP8 on one H100, 2026-08-22",
        QWEN_27B, "8xh100", "0.5.18",
        {"tensor_parallel": 1, "text_only": True, "args": {SHARE: 0.85}},
        28.47, 330_323, 24, "fa3",
    ),
    SglangStart(
        "Qwen3.6-27B-FP8 on one RTX PRO 6000, 2026-05-09",
        QWEN_27B, "rtx-pro-6000", "0.5.11", {"text_only": True, "args": {SHARE: 0.8}},
        28.47, 403_904,
    ),
    SglangStart(
        "Qwen3-30B-A3B-FP8 on one H100, 2026-08-27",
        config("qwen3-30b-a3b", quantization_config=FP8), "8xh100", "0.5.18",
        {"tensor_parallel": 1, "args": {"attention-backend": "triton"}},
        29.15, 392_920, None, "triton",
    ),
    SglangStart(
        "Qwen3-8B on one B200, 2026-04-27",
        config("qwen3-8b"), "8xb200", "0.5.10.post1", {"tensor_parallel": 1},
        15.28, 992_896, None, "trtllm_mha",
    ),
    SglangStart(
        "Qwen3.5-9B on two RTX 4090, 2026-04-14",
        config("qwen3.5-9b"), "2x4090", "0.5.10.post1",
        {"tensor_parallel": 2, "text_only": True, "args": {SHARE: 0.8}},
        8.85, 327_310, 60, "flashinfer",  # 62 in the log: plans take steps of four
    ),
    SglangStart(
        "Qwen3-30B-A3B on one RTX PRO 6000, with its tokens, backend and runner named",
        config("qwen3-30b-a3b"), "rtx-pro-6000", "0.5.13",
        {
            "args": {
                SHARE: 0.9, "max-total-tokens": 4096, "disable-cuda-graph": True,
                "attention-backend": "triton", "moe-runner-backend": "triton",
            },
        },
        56.89, 4096, None, "triton", "triton",
    ),
    SglangStart(
        "Qwen3-4B on one H100, course report of 2026", QWEN3_4B, "8xh100", "0.5.18",
        {"tensor_parallel": 1, "context": LONG, "args": {SHARE: 0.85}},
        None, 430_067,
    ),
    SglangStart(
        "Qwen3-32B-FP8 on one A100, with FP8 of five bits in its cache, 2026-09",
        {**QWEN3_32B, "quantization_config": FP8}, "8xa100-80g", "0.5.20",
        {
            "tensor_parallel": 1, "context": LONG,
            "args": {
                SHARE: 0.85, "page-size": 64, "chunked-prefill-size": 8192,
                "kv-cache-dtype": "fp8_e5m2", "attention-backend": "triton",
            },
        },
        32.59, 281_216, None, "triton",
    ),
    SglangStart(
        "Qwen3-Reranker-0.6B on one H100, without prefix cache, 2026-09",
        QWEN3_06B, "8xh100", "0.5.18",
        {"tensor_parallel": 1, "args": {SHARE: 0.3, "disable-radix-cache": True}},
        1.18, 208_651,
    ),
    SglangStart(
        "embeddinggemma-300m on one H100, whose files name the language model, 2026-09",
        EMBEDDING_GEMMA, "8xh100", "0.5.18", {"tensor_parallel": 1, "args": {SHARE: 0.5}},
        0.59, 1_686_301,
    ),
    SglangStart(
        "Granite-4.0-h-small on one H200, 2026-04-01",
        config("granite-4.0-h-small"), "h200", "0.5.10.post1", {},
        None, 2_265_808,
    ),
)  # fmt: skip


@pytest.mark.parametrize("start", SGLANG_STARTS, ids=lambda start: start.source)
def test_a_plan_foresees_public_logs_of_sglang(start: SglangStart) -> None:
    ref = f"sglang=={start.version}"
    plan = make_decision(dict(start.fields), start.hardware, ref, **start.wish).plans[0]
    if start.weights_gib is not None:
        assert plan.memory.loaded_bytes is not None
        assert plan.memory.loaded_bytes / GIB == pytest.approx(start.weights_gib, rel=0.02)
    assert plan.memory.kv_tokens == pytest.approx(start.tokens, rel=0.03)
    assert start.requests in (None, plan.max_num_seqs.value)
    assert start.backend in ("", *(row.backend for row in plan.attention))
    assert start.experts in ("", *(row.kernel for row in plan.kernels if "expert" in row.layer))


# --- starts of vLLM with drafts of the model's own layers ---


def test_drafts_take_their_part_of_a_public_start() -> None:
    """github.com/noonghunna/club-3090/issues/1087: Qwen3.8-27B in FP8 on two 5090. The sizes of
    its batches are those of the report beside it."""
    start = Start(
        "0.27.1", "2x5090", QWEN_27B, 0.92, 262144, 12.26,
        more={"kv-cache-dtype": "fp8", "max-num-seqs": 2, "max-num-batched-tokens": 8192},
        ranks=2, drafts=3,
    )  # fmt: skip
    memory = decision_of(start).plans[0].memory
    assert memory is not None
    assert memory.kv_bytes / GIB == pytest.approx(12.26, rel=0.05)


# --- tokens that logs of vLLM name ---

QWEN_27B_INT4 = {
    **QWEN_27B,
    "quantization_config": QUANTS["auto-round-language"]
    | {
        "extra_config": {
            f"model.language_model.layers.{number}.linear_attn.in_proj_{part}": {
                "bits": 16, "data_type": "float"
            }
            for number in range(64)
            for part in "ab"
        }
    },
}  # fmt: skip
GEMMA_31B_INT4 = config(
    "gemma-4-31b",
    quantization_config=QUANTS["w4a16"]
    | {
        "ignore": ["lm_head", "re:.*vision_tower.*", "re:.*embed_vision.*"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32,
                    "symmetric": True, "dynamic": False,
                },
            }
        },
    },
)  # fmt: skip
QWEN25_3B = config(
    "qwen2.5-1.5b", num_hidden_layers=36, hidden_size=2048, intermediate_size=11008,
    num_attention_heads=16, max_position_embeddings=131072,
)  # fmt: skip
WHOLE = 262144
TWO_REQUESTS = {"max-num-seqs": 2, "max-num-batched-tokens": 8192, "enable-prefix-caching": True}
TOKEN_STARTS = {
    "qwen3.6-27b on four of six 3090, FP8 of five bits in its cache, 2026-05-14": (
        Start(
            "0.20.2", "4x3090", QWEN_27B_INT4, 0.92, WHOLE, None,
            more={
                "kv-cache-dtype": "fp8_e5m2", "max-num-seqs": 4, "max-num-batched-tokens": 8192
            },
            ranks=4, drafts=3,
        ),
        1_774_963,
    ),
    "qwen3.6-27b on four 3090, with a scale for each head, 2026-06-22": (
        Start(
            "0.22.0", "4x3090", QWEN_27B_INT4, 0.92, WHOLE, None,
            more=TWO_REQUESTS | {"kv-cache-dtype": "int8_per_token_head"},
            ranks=4, backend="TRITON_ATTN", drafts=3,
        ),
        1_746_661,
    ),
    "gemma-4-31b in 4 bits on four 3090, 2026-07-28": (
        Start(
            "0.25.1", "4x3090", GEMMA_31B_INT4, 0.91, WHOLE, None,
            more={"max-num-seqs": 2, "max-num-batched-tokens": 4096},
            ranks=4, backend="TRITON_ATTN",
        ),
        650_262,
    ),
    "qwen2.5-3b on two fifths of a 3090, 2026-06-16": (
        Start(
            "0.22.0", "3090", QWEN25_3B, 0.4, 131072, None,
            more={"kv-cache-dtype": "fp8_e4m3", "max-num-seqs": 1}, backend="FLASHINFER",
        ),
        174_000,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOKEN_STARTS)
def test_a_plan_foresees_the_tokens_of_a_public_start(name: str) -> None:
    """The figures are from github.com/noonghunna/club-3090."""
    start, tokens = TOKEN_STARTS[name]
    plan = decision_of(start).plans[0]
    assert plan.memory is not None
    assert plan.memory.kv_tokens == pytest.approx(tokens, rel=0.1)
    assert start.backend in {"", *(row.backend for row in plan.attention)}


# --- cases of which the expected outcome stood before the first plan ---


class LaterCase(NamedTuple):
    """A case of one engine version, as of PublicCase."""

    source: str
    fields: Mapping[str, Any]
    hardware: str
    version: str
    wish: Mapping[str, Any]
    holds: Callable[[Decision], bool]


def holds_tokens(ranks: int, tokens: int, rel: float) -> Callable[[Decision], bool]:
    return lambda decision: any(
        abs((plan.memory.kv_tokens or 0) / tokens - 1) <= rel
        for plan in plans_of(decision, ranks)
        if plan.memory is not None
    )


def has_plan_of(tensor_parallel: int) -> Callable[[Decision], bool]:
    return lambda decision: bool(plans_of(decision, tensor_parallel))


def cuts_no_experts_to(ranks: int) -> Callable[[Decision], bool]:
    """Whole experts on their own ranks may stand there."""
    return lambda decision: all(
        "--enable-expert-parallel" in plan.argv or plan.data_parallel.value > 1
        for plan in plans_of(decision, ranks)
    )


def runs_experts_on(kernel: str) -> Callable[[Decision], bool]:
    return lambda decision: (
        {row.kernel for row in decision.plans[0].kernels if "expert" in row.layer} == {kernel}
    )


FAMILIES = family_configs()
QWEN_27B_NVFP4 = QWEN_27B | {
    "quantization_config": QUANTS["nvfp4"]
    | {
        "kv_cache_scheme": {
            "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False,
            "symmetric": True,
        },
        "ignore": ["lm_head", "re:.*visual.*", "re:.*linear_attn.*", "re:.*mtp.*"],
    }
}  # fmt: skip
QWEN_35B_NVFP4 = config(
    "qwen3.6-35b-a3b",
    quantization_config=MORE["modelopt-nvfp4-weight-only"],
    text_config=config("qwen3.6-35b-a3b")["text_config"]
    | {"max_position_embeddings": 262144, "mamba_ssm_dtype": "float32"},
)
KIMI_K2_THINKING = FAMILIES["kimi_k2"] | {
    "max_position_embeddings": 262144,
    "quantization_config": GEMMA_31B_INT4["quantization_config"]
    | {
        "ignore": [
            "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        ]
    },
}  # fmt: skip
NEMOTRON_NVFP4 = config("nemotron-3-nano-30b-a3b", quantization_config=QUANTS["modelopt-nvfp4"])
MINIMAX_FP8 = config("minimax-m2", quantization_config=FP8)
GEMMA_NVFP4 = config("gemma-4-26b-a4b", quantization_config=QUANTS["modelopt-nvfp4"])
PLAIN = {"kv-cache-dtype": "auto"}
LATER_CASES = (
    LaterCase(
        "vllm#49011: no cache of NVFP4 on 12.0", QWEN_27B_NVFP4, "5090", "0.25.1",
        {"args": {"kv-cache-dtype": "nvfp4"}, "context": 8192}, is_refused,
    ),
    LaterCase(
        "unsloth#7091: the checkpoint's FP8 cache", QWEN_27B_NVFP4, "4090", "0.25.0",
        {"args": {"attention-backend": "FLASH_ATTN"}, "context": 4096}, is_refused,
    ),
    LaterCase(
        "vllm#55380: FlashInfer on 7.5", QWEN_27B, "2x2080 ti", "0.28.0",
        {
            "args": {"attention-backend": "FLASHINFER"}, "context": 4096, "tensor_parallel": 2,
        },
        is_refused,
    ),
    LaterCase(
        "club-3090#652", QWEN_35B_NVFP4, "5090", "0.24.0",
        {
            "args": {
                "kv-cache-memory-bytes": int(6.01 * GIB), "kv-cache-dtype": "fp8",
                "max-model-len": 131072, "max-num-seqs": 1, "max-num-batched-tokens": 8192,
                "enable-prefix-caching": True,
            }
        },
        holds_tokens(1, 569_878, 0.01),
    ),
    LaterCase(
        "vllm#43507", GEMMA_NVFP4, "5090", "0.24.0",
        {"args": {"moe-backend": "marlin"}}, runs_experts_on("MARLIN"),
    ),
    LaterCase(
        "vllm#49949: 1,856 in blocks of 16", NEMOTRON_NVFP4, "8xh100", "0.25.1",
        {"args": {"tensor-parallel-size": 8}}, cuts_no_experts_to(8),
    ),
    LaterCase(
        "vllm#49949: at half", NEMOTRON_NVFP4, "8xh100", "0.25.1",
        {"args": {"tensor-parallel-size": 4}}, has_plan_of(4),
    ),
    LaterCase(
        "recipes: Kimi-K2-Thinking", KIMI_K2_THINKING, "8xh200", "0.18.0",
        {"args": PLAIN | {"tensor-parallel-size": 8}}, holds_tokens(8, 715_072, 0.1),
    ),
    LaterCase(
        "recipes: Step-3.5-Flash", FAMILIES["step3p5"] | {"quantization_config": FP8},
        "4xh200", "0.33.0", {}, cuts_no_experts_to(4),
    ),
    LaterCase(
        "recipes: MiniMax-M2 at eight", MINIMAX_FP8, "8xh100", "0.27.1", {},
        cuts_no_experts_to(8),
    ),
    LaterCase(
        "recipes: MiniMax-M2 at four", MINIMAX_FP8, "4xh100", "0.33.0",
        {"tensor_parallel": 4}, has_plan_of(4),
    ),
    LaterCase(
        "recipes: gemma-4-26b of NVFP4", GEMMA_NVFP4, "rtx-pro-6000", "0.29.0",
        {"args": {"gpu-memory-utilization": 0.92, "max-model-len": 262144}}, has_plan_of(1),
    ),
    LaterCase(
        "recipes: MiMo-V2-Flash", FAMILIES["mimo_v2_flash"] | {"quantization_config": FP8},
        "4xh200", "0.33.0", {"tensor_parallel": 4}, has_plan_of(4),
    ),
)  # fmt: skip


@pytest.mark.parametrize("case", LATER_CASES, ids=lambda case: case.source)
def test_a_plan_foresees_a_later_case(case: LaterCase) -> None:
    decision = make_decision(dict(case.fields), case.hardware, f"vllm=={case.version}", **case.wish)
    assert case.holds(decision), [plan.argv for plan in decision.plans]
