"""Five failures that users reported and the planner must foresee, each with similar cases that must
stay possible.

Where something was never run on that hardware, the plan says "predicted".
"""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain import LayerKernel
from gateway.models.read_drafter import read_drafter
from tests.conformance.layer_cases import QUANTS
from tests.conformance.speculative_questions import DRAFTERS
from tests.support.published import config
from tests.support.reported_plans import make_decision, rejection_of
from tests.support.versions import VLLM_REF, vllm_since


def row(rows: tuple[LayerKernel, ...], layer: str) -> LayerKernel:
    return next(each_row for each_row in rows if each_row.layer.endswith(layer))


# --- two RTX 3090, Qwen3.6-35B-A3B in 4-bit integers by AutoRound:
# github.com/vllm-project/vllm/issues/40354 ---

QWEN36 = config("qwen3.6-35b-a3b", quantization_config=QUANTS["auto-round-language"])
# Images of the largest size take 2 GiB while the engine measures its memory.
NO_IMAGES: dict[str, Any] = {"args": {"limit-mm-per-prompt": '{"image": 0, "video": 0}'}}


def test_vllm_0_19_cannot_cut_the_gates_of_qwen36_in_two() -> None:
    decision = make_decision(QWEN36, "2x3090", "vllm==0.19.1", **NO_IMAGES)
    two = rejection_of(decision, 2)
    assert (two.verdict, two.layer) == (
        "no_kernel",
        "language_model.model.layers.*.linear_attn.in_proj_ba",
    )
    gates = row(two.kernels, "in_proj_ba")
    assert (gates.k, gates.n, gates.kernel) == (2048, 32, None)
    reasons_by_kernel = {
        refusal.kernel.removesuffix("LinearKernel"): refusal.reason for refusal in gates.refusals
    }
    assert set(reasons_by_kernel) == {
        "CutlassW4A8",
        "Machete",
        "AllSpark",
        "Marlin",
        "Conch",
        "Exllama",
    }
    assert "N=32 is not a multiple of 64" in reasons_by_kernel["Marlin"]
    assert "float16" in reasons_by_kernel["Exllama"]
    assert "conch is not installed" in reasons_by_kernel["Conch"]
    best = decision.plans[0]
    assert (best.tensor_parallel.value, best.pipeline_parallel.value, best.verdict) == (1, 1, "ok")
    assert best.max_model_len.value == 32768
    assert "2 copies on 2 GPUs answer" in best.replicas.reason
    # Fewer requests than states leave each copy a cache for those that are expected at once.
    assert "state blocks" in best.max_num_seqs.reason


def test_one_card_serves_qwen36_without_a_warning() -> None:
    decision = make_decision(QWEN36, "2x3090", "vllm==0.19.1", tensor_parallel=1, **NO_IMAGES)
    assert [(plan.verdict, plan.warnings) for plan in decision.plans] == [("ok", ())]
    assert not decision.rejected


def test_images_leave_one_card_no_room_for_long_contexts() -> None:
    plans = make_decision(QWEN36, "2x3090", "vllm==0.19.1", tensor_parallel=1).plans
    assert plans
    assert all(plan.max_model_len.value < 32768 or plan.cost for plan in plans)


def test_newer_vllm_keeps_those_gates_whole_and_older_ways_rank_behind() -> None:
    decision = make_decision(QWEN36, "2x3090", "vllm==0.26.0", "vllm==0.19.1", tensor_parallel=2)
    best = decision.plans[0]
    assert str(best.engine) == "vllm==0.26.0"
    assert best.tensor_parallel.value == 2
    assert row(best.kernels, "in_proj_ba").n == 64
    assert not best.custom_all_reduce.value
    assert "--disable-custom-all-reduce" in best.argv
    # Only float16 activations give the gates a kernel in 0.19.1, and no log shows such a run.
    assert all(
        plan.dtype.value == "float16"
        for plan in decision.plans
        if str(plan.engine) == "vllm==0.19.1"
    )


def test_whole_layers_in_two_stages_have_more_room_than_two_copies_and_less_speed() -> None:
    decision = make_decision(QWEN36, "2x3090", "vllm==0.19.1", **NO_IMAGES)
    staged_plan = next(plan for plan in decision.plans if plan.pipeline_parallel.value == 2)
    assert (staged_plan.tensor_parallel.value, staged_plan.grade) == (1, "predicted")
    copies_plan = next(plan for plan in decision.plans if plan.replicas.value == 2)
    assert copies_plan.rank < staged_plan.rank
    assert staged_plan.memory.kv_tokens > 2 * copies_plan.memory.kv_tokens
    assert "N=32 is not a multiple of 64" in staged_plan.pipeline_parallel.reason


def test_another_engine_does_not_cure_a_tile() -> None:
    decision = make_decision(
        QWEN36, "2x3090", "sglang==0.5.10.post1", tensor_parallel=2, text_only=True
    )
    assert not decision.plans
    assert decision.rejected[0].verdict in ("no_kernel", "unsupported_quantization")


def test_gemma_4_in_the_same_format_loads_on_two_cards() -> None:
    gemma = config("gemma-4-31b", quantization_config=QUANTS["auto-round-language"])
    assert make_decision(gemma, "2x3090", "vllm==0.19.1", tensor_parallel=2).plans


def test_a_cache_that_the_checkpoint_declares_and_no_backend_takes_is_kept_whole() -> None:
    scheme = {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}
    gemma = config(
        "gemma-4-31b",
        quantization_config=QUANTS["w4a16"] | scheme | {"ignore": ["lm_head", "re:.*vision.*"]},
    )
    best = make_decision(gemma, "2x3090", VLLM_REF).plans[0]
    assert best.kv_cache_dtype.value == "bfloat16"
    assert "declares fp8, which no attention backend takes here" in best.kv_cache_dtype.reason
    assert "--kv-cache-dtype=bfloat16" in best.argv
    assert make_decision(gemma, "8xh100", VLLM_REF).plans[0].kv_cache_dtype.value == "fp8"
    # It writes the scheme over the flag.
    assert not make_decision(gemma, "2x3090", "vllm==0.19.1").plans


def test_hopper_is_judged_by_its_own_kernels() -> None:
    decision = make_decision(QWEN36, "8xh100", "vllm==0.19.1")
    qkv = row(decision.plans[0].kernels, "self_attn.qkv_proj")
    assert qkv.kernel == "MacheteLinearKernel"


# --- RTX PRO 6000, a gpt-oss-20b stored as compressed-tensors MXFP4:
# github.com/vllm-project/vllm/issues/38022 ---

GPT_OSS_CT = config("gpt-oss-20b", quantization_config=QUANTS["mxfp4-ct"])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_packed_mxfp4_experts_with_2880_inputs_are_refused_before_they_crash(tp: int) -> None:
    hardware = {1: "rtx-pro-6000", 2: "2x4090", 4: "4x3090"}[tp]
    decision = make_decision(GPT_OSS_CT, hardware, "vllm==0.18.0", tensor_parallel=tp)
    assert not decision.plans
    rejection = rejection_of(decision, tp)
    assert rejection.verdict == "runtime_fail"
    assert "would crash at the first request" in rejection.reasons[0]
    down = row(rejection.kernels, "experts.w2")
    assert (down.k, down.n, down.status) == (2880 // tp, 2880, "crash")
    if tp == 1:
        assert "2880" in down.note
        assert "64 over" in down.note


def test_a_start_without_graphs_has_the_same_crash() -> None:
    decision = make_decision(
        GPT_OSS_CT, "rtx-pro-6000", "vllm==0.18.0", args={"enforce-eager": True}
    )
    assert not decision.plans
    assert decision.rejected[0].verdict == "runtime_fail"


def test_the_same_weights_in_fp8_run_as_was_reported() -> None:
    fp8 = config(
        "gpt-oss-20b",
        quantization_config={**QUANTS["fp8-dynamic"], "ignore": ["lm_head", "re:.*router$"]},
    )
    best = make_decision(fp8, "rtx-pro-6000", "vllm==0.18.0").plans[0]
    assert row(best.kernels, "experts.w2").status == "ok"


def test_the_native_format_of_the_same_model_is_padded_and_runs() -> None:
    native = config("gpt-oss-20b", quantization_config=QUANTS["mxfp4"])
    for engine in (f"vllm=={version}" for version in vllm_since("0.19")):
        assert make_decision(native, "rtx-pro-6000", engine).plans, engine
    # The 42 GB of bf16 fit.
    assert make_decision(config("gpt-oss-20b"), "rtx-pro-6000", "vllm==0.18.0").plans


@pytest.mark.parametrize("tp", [1, 2])
def test_the_same_experts_in_4_bits_and_groups_of_32_are_foreseen_to_crash(tp: int) -> None:
    """On an H200 it crashed while graphs were captured, and without graphs at the first request;
    the next version has other kernels."""
    group = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    block = {
        **QUANTS["w4a16"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": group}},
    }
    four_bits = config(
        "gpt-oss-20b",
        quantization_config={**block, "ignore": ["lm_head", "re:.*router$", "re:.*self_attn.*"]},
    )
    decision = make_decision(four_bits, "8xh100", "vllm==0.26.0", tensor_parallel=tp)
    assert not decision.plans
    assert rejection_of(decision, tp).verdict == "runtime_fail"
    assert "a block of 96 of K=2880 has 3 groups of 32" in rejection_of(decision, tp).reasons[0]
    assert make_decision(four_bits, "8xh100", VLLM_REF, tensor_parallel=tp).plans


# --- dense layers of 2112 inputs in 4 bits: github.com/vllm-project/vllm/pull/43731 ---

ODD = config(
    "llama-3.1-8b",
    intermediate_size=2112,
    quantization_config={**QUANTS["w4a16"], "config_groups": {"group_0": {"targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32,
            "symmetric": True}}}},
)  # fmt: skip


@pytest.mark.parametrize("hardware", ["2x3090", "2xa100-40g"])
def test_a_tile_that_old_marlin_refuses_new_marlin_takes(hardware: str) -> None:
    old_decision = make_decision(ODD, hardware, "vllm==0.19.1", tensor_parallel=1, dtype="bfloat16")
    assert rejection_of(old_decision, 1).verdict == "no_kernel"
    assert "K=2112 is not a multiple of 128" in rejection_of(old_decision, 1).reasons[0]
    new_plan = make_decision(ODD, hardware, "vllm==0.26.0", tensor_parallel=1).plans[0]
    assert row(new_plan.kernels, "mlp.down_proj").kernel == "MarlinLinearKernel"


def test_gemma_4_with_odd_layer_sizes_needs_the_newer_version() -> None:
    group = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    block = {
        **QUANTS["w4a16"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": group}},
    }
    gemma = config(
        "gemma-4-26b-a4b",
        quantization_config={**block, "ignore": ["lm_head", "re:.*router.*", "re:.*vision.*"]},
    )
    old = rejection_of(
        make_decision(gemma, "2x3090", "vllm==0.19.1", tensor_parallel=1, dtype="bfloat16"), 1
    )
    assert (old.verdict, old.layer) == ("no_kernel", "language_model.model.layers.*.mlp.down_proj")
    new_plan = make_decision(gemma, "2x3090", "vllm==0.26.0", tensor_parallel=1).plans[0]
    assert row(new_plan.kernels, "mlp.down_proj").kernel == "MarlinLinearKernel"
    assert row(new_plan.kernels, "experts.w2").status == "ok"


def test_act_order_is_never_given_to_a_kernel_that_ignores_it() -> None:
    config_with_order = config(
        "llama-3.1-8b",
        intermediate_size=2112,
        quantization_config={**QUANTS["gptq-act-order"], "group_size": 32},
    )
    for engine in (f"vllm=={version}" for version in vllm_since("0.19")):
        decision = make_decision(config_with_order, "2x3090", engine, tensor_parallel=1)
        rows = [kernel for plan in decision.plans for kernel in plan.kernels]
        assert not [
            each_row for each_row in rows if each_row.kernel and "Triton" in each_row.kernel
        ]


# --- two RTX 3090, Gemma 4 31B with a DFlash drafter:
# huggingface.co/RedHatAI/gemma-4-31B-it-speculator.dflash, discussion 1 ---

GEMMA = config("gemma-4-31b", quantization_config=QUANTS["auto-round-language"])
DFLASH = read_drafter(
    "RedHatAI/gemma-4-31B-it-speculator.dflash", None, DRAFTERS["dflash gemma-4-31b"]
)


def test_vllm_0_19_has_no_dflash_and_serves_gemma_alone() -> None:
    decision = make_decision(GEMMA, "2x3090", "vllm==0.19.1", drafter=DFLASH, tensor_parallel=2)
    best = decision.plans[0]
    assert (best.tensor_parallel.value, best.verdict, best.speculation.value) == (2, "ok", "none")
    assert not [item for item in best.argv if "speculative" in item]
    assert (
        "dflash: vllm==0.19.1 has no such method; it has draft_model, eagle"
        in best.speculation.reason
    )
    assert best.warnings[-1].startswith(
        "The model is served without speculative decoding, because RedHatAI/"
    )
    lone_plan = make_decision(GEMMA, "2x3090", "vllm==0.19.1", tensor_parallel=2).plans[0]
    assert (best.argv, best.memory, best.kernels) == (
        lone_plan.argv,
        lone_plan.memory,
        lone_plan.kernels,
    )


def test_vllm_0_18_drops_a_dflash_drafter_too_and_knows_no_gemma_4() -> None:
    drafter = read_drafter("z-lab/Qwen3-8B-DFlash", None, DRAFTERS["dflash qwen3"])
    best = make_decision(config("qwen3-8b"), "2x3090", "vllm==0.18.0", drafter=drafter).plans[0]
    assert best.speculation.value == "none"
    assert "has no such method" in best.speculation.reason
    gemma = make_decision(GEMMA, "2x3090", "vllm==0.18.0", drafter=DFLASH, tensor_parallel=2)
    assert rejection_of(gemma, 2).verdict == "unsupported_architecture"


@pytest.mark.parametrize("engine", [f"vllm=={version}" for version in vllm_since("0.26")])
def test_newer_vllm_drafts_eight_tokens_as_the_drafters_config_says(engine: str) -> None:
    best = make_decision(GEMMA, "2x3090", engine, drafter=DFLASH, tensor_parallel=2).plans[0]
    assert (best.speculation.value, best.num_speculative_tokens.value) == ("dflash", 8)
    assert (
        best.num_speculative_tokens.reason
        == "taken from speculators_config.proposal_methods[0].speculative_tokens = 8"
    )
    settings = next(item for item in best.argv if item.startswith("--speculative-config="))
    assert '"method": "dflash"' in settings
    assert '"num_speculative_tokens": 8' in settings
    # The engine chooses a backend for each of the two models: one forced on both could fit neither.
    assert not [item for item in best.argv if "attention-backend" in item]
    assert (best.kv_cache_dtype.value, best.grade) == ("auto", "predicted")
    # The drafter's weights and cache are counted: less context is left than without it.
    lone_plan = make_decision(GEMMA, "2x3090", engine, tensor_parallel=2).plans[0]
    assert best.memory.weights_bytes > lone_plan.memory.weights_bytes
    assert best.max_model_len.value < lone_plan.max_model_len.value


def test_a_drafter_that_no_backend_computes_is_dropped_with_the_table() -> None:
    # Heads of 20 with sinks stand for the heads of 256 that the reporter's build refused: these
    # versions take those.
    odd = DFLASH.evolve(
        attention=tuple(group.evolve(head_dim=20, has_sinks=True) for group in DFLASH.attention)
    )
    best = make_decision(GEMMA, "2x3090", "vllm==0.26.0", drafter=odd, tensor_parallel=2).plans[0]
    assert best.speculation.value == "none"
    for backend in ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"):
        assert f"{backend}: " in best.speculation.reason


def test_a_drafter_without_room_beside_the_model_costs_only_itself() -> None:
    # Pages of heads of 500 cannot share a cache with the target's.
    odd = DFLASH.evolve(attention=tuple(group.evolve(head_dim=500) for group in DFLASH.attention))
    best = make_decision(GEMMA, "2x3090", "vllm==0.26.0", drafter=odd, tensor_parallel=2).plans[0]
    assert (best.speculation.value, best.num_speculative_tokens.value) == ("none", 0)
    assert "do not divide each other" in best.speculation.reason
    assert not [item for item in best.argv if "speculative" in item]


def test_a_drafter_made_for_another_model_costs_only_itself() -> None:
    best = make_decision(config("qwen3-8b"), "2x3090", VLLM_REF, drafter=DFLASH).plans[0]
    assert best.speculation.value == "none"
    assert "made for a target of hidden size 5376" in best.speculation.reason


# --- DGX Spark, --quantization fp8 on vLLM 0.18.0: github.com/vllm-project/vllm/issues/40934 ---

FP8 = {
    "quantization": "fp8",
    "kv-cache-dtype": "fp8_e4m3",
    "enforce-eager": True,
    "gpu-memory-utilization": 0.2,
}


def test_a_kernel_that_is_known_to_fail_on_the_gb10_is_left_out() -> None:
    decision = make_decision(
        config("qwen3.5-9b"), "gb10", "vllm==0.18.0", args={**FP8, "max-model-len": 8192}
    )
    bad = decision.rejected[0]
    assert bad.verdict == "known_bad"
    assert "CutlassFP8ScaledMMLinearKernel" in bad.reasons[0]
    assert "issues/40934" in bad.reasons[0]
    best = decision.plans[0]
    assert best.env["VLLM_DISABLED_KERNELS"] == "CutlassFP8ScaledMMLinearKernel"
    assert "CutlassFP8ScaledMMLinearKernel" in best.kernel_overrides.value
    assert all(kernel.kernel != "CutlassFP8ScaledMMLinearKernel" for kernel in best.kernels)
    assert "--gpu-memory-utilization=0.2" in best.argv


def test_the_same_model_without_fp8_and_the_same_fp8_elsewhere_are_left_alone() -> None:
    plain = make_decision(config("qwen3.5-9b"), "gb10", "vllm==0.18.0").plans[0]
    assert "VLLM_DISABLED_KERNELS" not in plain.env
    other_decision = make_decision(
        config("qwen3.5-9b"), "rtx-pro-6000", "vllm==0.18.0", args={"quantization": "fp8"}
    ).plans[0]
    assert "VLLM_DISABLED_KERNELS" not in other_decision.env


def test_a_newer_version_keeps_its_own_kernel_and_the_users_share_of_memory() -> None:
    best = make_decision(
        config("qwen3.5-9b"), "gb10", VLLM_REF, args={**FP8, "max-model-len": 8192}
    ).plans[0]
    assert "VLLM_DISABLED_KERNELS" not in best.env
    assert best.kernel_overrides.value == "none"
    assert best.memory.budget_bytes <= 0.2 * best.memory.gpu_bytes + 1
