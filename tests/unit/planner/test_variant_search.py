"""The search of one engine version: its tries, its words and its end."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain import Decision, Fact, LayerAttention, Plan
from gateway.engines.common.refusal import RefusalError, VariantEvidence
from gateway.planner.command import check_environment
from gateway.planner.gates.kernel_gates import gate_alike
from gateway.profiles.profiles import Profiles
from tests.conformance.layer_cases import QUANTS
from tests.support.makers import wish
from tests.support.planning import decide
from tests.support.published import published_model
from tests.support.versions import SGLANG_REF, VLLM_REF

PROFILES = Profiles()


def make_decision(
    name: str, hardware: str, ref: str, facts: tuple[Fact, ...] = (), quant: str = "", **wishes: Any
) -> Decision:
    block: dict[str, Any] = {"quantization_config": QUANTS[quant]} if quant else {}
    engines = [PROFILES.engine(ref)]
    hardware_value = PROFILES.hardware(hardware)
    return decide(
        published_model(name, **block),
        hardware_value,
        engines,
        wish(**wishes),
        facts,
        rules=PROFILES.rules(engines),
        speed_knowledge=PROFILES.speed_knowledge,
    )


def test_a_model_too_large_for_each_gpu_is_shared_by_stages() -> None:
    decision = make_decision(
        "seed-oss-36b", "2x3090", VLLM_REF, tensor_parallel=1, max_context=1024, quant="w8a16"
    )
    best = decision.plans[0]
    assert (best.pipeline_parallel.value, best.cost) == (2, 1)
    assert "shared by 2 stages" in best.pipeline_parallel.reason
    assert "GiB are needed" in best.pipeline_parallel.reason
    assert "--pipeline-parallel-size=2" in best.argv
    # A refused variant is told as it was asked for, without the cures.
    assert [
        (rejection.tensor_parallel, rejection.pipeline_parallel, rejection.verdict)
        for rejection in decision.rejected
    ] == [(1, 1, "no_memory")]


def test_weights_are_quantized_while_they_load_only_where_nothing_milder_helps() -> None:
    mild = make_decision("llama-3.1-8b", "2x3090", VLLM_REF)
    assert all(plan.quantization.value == "none" for plan in mild.plans)
    scarce = make_decision("phi-4", "4090", VLLM_REF)
    best = scarce.plans[0]
    assert best.quantization.value == "fp8"
    assert "--quantization=fp8" in best.argv
    assert "weights are halved" in best.quantization.reason
    assert any("costs some accuracy" in warning for warning in best.warnings)


def test_a_cache_of_half_the_bytes_holds_the_context_that_was_asked_for() -> None:
    decision = make_decision("llama-3.1-8b", "3090", VLLM_REF, min_context=70_000)
    best = next(plan for plan in decision.plans if plan.quantization.value == "none")
    assert best.kv_cache_dtype.value == "fp8"
    assert best.max_model_len.value >= 70_000
    assert "--kv-cache-dtype=fp8" in best.argv


LLAMA_70B: dict[str, Any] = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}


def test_stages_give_up_as_much_for_a_context_as_ranks_do() -> None:
    """A 32B with 40 heads, which three GPUs cannot cut: requests at once, and graphs. A cache of 8
    bits would save less than the workspace of FlashInfer costs, which alone reads it on 8.6."""
    sizes: dict[str, Any] = {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    }
    engines = [PROFILES.engine(VLLM_REF)]
    spec, hardware = published_model("qwen2.5-7b", **sizes), PROFILES.hardware("3x3090")
    best = decide(
        spec,
        hardware,
        engines,
        wish(),
        rules=PROFILES.rules(engines),
        speed_knowledge=PROFILES.speed_knowledge,
        gpus=PROFILES.gpus,
    ).plans[0]
    assert (best.tensor_parallel.value, best.pipeline_parallel.value, best.quantization.value) == (
        1,
        3,
        "none",
    )
    assert (best.max_num_seqs.value, best.kv_cache_dtype.value, best.enforce_eager.value) == (
        16,
        "auto",
        True,
    )
    assert best.max_model_len.value > 10_000


def test_a_tight_model_gives_up_features_for_a_useful_context() -> None:
    engines, hardware = [PROFILES.engine(VLLM_REF)], PROFILES.hardware("2x3090")
    model = published_model("llama-3.1-8b", **LLAMA_70B, quantization_config=QUANTS["awq"])
    decision = decide(
        model, hardware, engines, wish(tensor_parallel=2), rules=PROFILES.rules(engines)
    )
    settings = [
        (plan.max_num_seqs.value, plan.enforce_eager.value, plan.kv_cache_dtype.value)
        for plan in sorted(decision.plans, key=lambda plan: plan.cost)
    ]
    # Few requests have few sizes of graphs, which leaves memory too.
    assert settings == [
        (16, False, "auto"),
        (16, True, "auto"),
        (16, False, "fp8"),
        (16, True, "fp8"),
    ]
    assert decision.rejected[0].verdict == "no_memory"
    contexts = [
        plan.max_model_len.value for plan in sorted(decision.plans, key=lambda plan: plan.cost)
    ]
    # A cache of 8 bits needs FlashInfer on 8.6, and a workspace with it.
    assert 8192 < contexts[0] < contexts[2] < 16_384 < contexts[1] < contexts[3]
    graphs = [
        plan.memory.graph_bytes for plan in sorted(decision.plans, key=lambda plan: plan.cost)
    ]
    assert 0 == graphs[1] < graphs[0]
    best = decision.plans[0]
    assert best.max_model_len.value > 30_000
    assert "no CUDA graphs, which costs speed" in best.enforce_eager.reason
    assert "which costs some accuracy" in best.kv_cache_dtype.reason
    assert "fewer concurrent requests" in best.max_num_seqs.reason
    assert all(
        plan.memory is not None and plan.memory.low <= plan.memory.budget_bytes
        for plan in decision.plans
    )


def test_nothing_is_given_up_where_more_gpus_hold_the_context() -> None:
    engines, hardware = [PROFILES.engine(VLLM_REF)], PROFILES.hardware("3x3090")
    model = published_model("llama-3.1-8b", **LLAMA_70B, quantization_config=QUANTS["awq"])
    plans = decide(model, hardware, engines, wish(), rules=PROFILES.rules(engines)).plans
    assert (plans[0].tensor_parallel.value, plans[0].pipeline_parallel.value) == (1, 3)
    assert plans[0].max_model_len.value >= 32_768
    assert {
        (plan.max_num_seqs.value, plan.enforce_eager.value, plan.kv_cache_dtype.value)
        for plan in plans
    } == {(256, False, "auto")}


def test_a_larger_share_is_taken_where_it_is_needed_and_free() -> None:
    engines, hardware = [PROFILES.engine(VLLM_REF)], PROFILES.hardware("3090")
    model = published_model("gemma-3-27b", quantization_config=QUANTS["w4a16"])

    def shares(free: int | None) -> list[float]:
        hardware_with_memory = hardware.evolve(
            gpus=tuple(gpu.evolve(free_bytes=free) for gpu in hardware.gpus)
        )
        plans = decide(
            model, hardware_with_memory, engines, wish(), rules=PROFILES.rules(engines)
        ).plans
        flags = [flag.partition("=") for plan in plans for flag in plan.argv]
        return [float(value) for name, _, value in flags if name == "--gpu-memory-utilization"]

    free = hardware.gpus[0].free_bytes or 0
    assert max(shares(free)) > 0.92
    assert max(shares(free - (1 << 30))) < max(shares(free)) - 0.03  # a desktop's share
    assert max(shares(None)) <= 0.92
    long = decide(
        published_model("llama-3.2-1b"), hardware, engines, wish(), rules=PROFILES.rules(engines)
    ).plans
    assert [plan.cost for plan in long] == [0]
    assert "--gpu-memory-utilization=0.92" in long[0].argv


def test_a_user_setting_of_the_cache_is_not_overruled() -> None:
    decision = make_decision(
        "llama-3.1-8b", "3090", VLLM_REF, min_context=70_000, args={"kv-cache-dtype": "auto"}
    )
    assert all(plan.quantization.value == "fp8" for plan in decision.plans)
    assert all(plan.kv_cache_dtype.value == "auto" for plan in decision.plans)


def test_the_refusal_of_a_layer_shows_its_other_obstacles() -> None:
    decision = make_decision(
        "qwen3.6-35b-a3b", "2x3090", "vllm==0.19.1", quant="auto-round-language", tensor_parallel=2
    )
    rejection = decision.rejected[0]
    assert rejection.layer is not None
    assert rejection.layer.endswith("in_proj_ba")
    assert rejection.memory is not None
    assert len(rejection.kernels) > 5
    assert {row.status for row in rejection.attention} == {"ok"}


def test_a_failed_plan_and_its_careful_try_are_both_ruled_out() -> None:
    facts: tuple[Fact, ...] = ()
    steps: list[tuple[bool, str]] = []
    while (decision := make_decision("llama-3.1-8b", "3090", VLLM_REF, facts)).plans and len(
        steps
    ) < 20:
        best = decision.plans[0]
        steps.append((best.enforce_eager.value, best.fingerprint))
        facts += (
            Fact(
                kind="plan_failed",
                scope={"fingerprint": best.fingerprint},
                grade="failed",
                source="it broke",
            ),
        )
    assert [eager for eager, _ in steps] == [False, True]
    assert len({fingerprint for _, fingerprint in steps}) == 2
    assert {rejection.verdict for rejection in decision.rejected} == {"known_bad"}


def test_every_search_ends_soon() -> None:
    # Every kernel of every layer fails, on a machine with many sizes.
    kernels = {
        row.kernel
        for plan in make_decision("qwen3-30b-a3b", "8xh100", VLLM_REF, quant="fp8-block").plans
        for row in plan.kernels
    }
    facts = tuple(
        Fact(kind="kernel_fails", scope={"kernel": str(name)}, grade="failed", source="x")
        for name in kernels
    )
    decision = make_decision("qwen3-30b-a3b", "8xh100", VLLM_REF, facts, quant="fp8-block")
    assert not {row.kernel for plan in decision.plans for row in plan.kernels} & kernels
    assert len(decision.plans) + len(decision.rejected) <= 64


def test_other_gpus_serve_copies_where_no_kernel_lets_them_share_one() -> None:
    fields: dict[str, Any] = {
        "quant": "auto-round-language",
        "args": {"limit-mm-per-prompt": '{"image": 0, "video": 0}'},
    }
    best = make_decision("qwen3.6-35b-a3b", "4x3090", "vllm==0.19.1", **fields).plans[0]
    assert (best.tensor_parallel.value, best.replicas.value) == (1, 4)
    plan = make_decision("qwen3.6-35b-a3b", "4x3090", "vllm==0.19.1", replicas=2, **fields).plans[0]
    assert (plan.replicas.value, plan.replicas.source) == (2, "user")
    # Where more GPUs could share a copy, the others stay free.
    assert make_decision("llama-3.1-8b", "4x3090", VLLM_REF).plans[0].replicas.value == 1


def test_a_kernel_refused_for_one_layer_still_computes_the_others() -> None:
    fields: dict[str, Any] = {"quant": "w4a16"}
    first_plan = make_decision("llama-3.1-8b", "3090", "vllm==0.19.1", **fields).plans[0]
    rows = {row.layer.rpartition(".")[2]: row for row in first_plan.kernels}
    row_of_kernel = rows["down_proj"]
    assert row_of_kernel.kernel == rows["qkv_proj"].kernel == "MarlinLinearKernel"
    scope = {
        "engine": "vllm==0.19.1",
        "capability": "8.6",
        "kernel": row_of_kernel.kernel,
        "scheme": row_of_kernel.scheme,
    }
    scope |= {"k": str(row_of_kernel.k), "n": str(row_of_kernel.n)}
    fact = Fact(
        kind="kernel_refuses",
        scope=scope,
        grade="failed",
        source="size_k = 14336 is not what it takes",
    )
    plan_after = make_decision("llama-3.1-8b", "3090", "vllm==0.19.1", (fact,), **fields).plans[0]
    kernels = {row.layer.rpartition(".")[2]: row.kernel for row in plan_after.kernels}
    assert kernels["down_proj"] not in (None, "MarlinLinearKernel")
    assert kernels["qkv_proj"] == "MarlinLinearKernel"
    assert "VLLM_DISABLED_KERNELS" not in plan_after.env
    row_after = next(row for row in plan_after.kernels if row.layer.endswith("down_proj"))
    assert any("size_k = 14336" in refusal.reason for refusal in row_after.refusals)
    # On another GPU nothing is known of it.
    assert (
        make_decision("llama-3.1-8b", "4090", "vllm==0.19.1", (fact,), **fields).plans[0].dtype
        == first_plan.dtype
    )


def test_a_kernel_that_fails_is_left_out_of_the_whole_model_which_the_plan_says() -> None:
    first_plan = make_decision("llama-3.1-8b", "3090", "vllm==0.19.1", quant="w4a16").plans[0]
    failing = next(row for row in first_plan.kernels if row.layer.endswith("down_proj"))
    scope = {
        "engine": "vllm==0.19.1",
        "kernel": str(failing.kernel),
        "k": str(failing.k),
        "n": str(failing.n),
    }
    fact = Fact(kind="kernel_fails", scope=scope, grade="failed", source="it crashed")
    plan_after = make_decision(
        "llama-3.1-8b", "3090", "vllm==0.19.1", (fact,), quant="w4a16"
    ).plans[0]
    assert plan_after.env["VLLM_DISABLED_KERNELS"] == failing.kernel
    assert "MarlinLinearKernel" not in {row.kernel for row in plan_after.kernels}
    (warning,) = [
        warning for warning in plan_after.warnings if "for the whole model only" in warning
    ]
    assert (
        f"{sum(row.count for row in first_plan.kernels if row.kernel == failing.kernel)} layers go"
        " without it" in warning
    )


def test_memory_for_many_requests_is_looked_for_if_many_are_to_be_served() -> None:
    """Four hundred at once, of which the context that is wanted leaves room for five."""
    engines, hardware = [PROFILES.engine(VLLM_REF)], PROFILES.hardware("2x4090")
    model = published_model("llama-3.1-8b", **LLAMA_70B, quantization_config=QUANTS["awq"])
    options: dict[str, Any] = {
        "rules": PROFILES.rules(engines),
        "speed_knowledge": PROFILES.speed_knowledge,
        "gpus": PROFILES.gpus,
    }
    small_batch, large_batch = (
        decide(
            model, hardware, engines, wish(context=8192, goal=goal, concurrency=400), **options
        ).plans
        for goal in ("balanced", "throughput")
    )
    assert small_batch[0].kv_cache_dtype.value == "auto"
    assert large_batch[0].kv_cache_dtype.value == "fp8"
    assert _total(large_batch[0]) > 1.1 * _total(small_batch[0])


# --- unlike GPUs ---


def on_5090_and_3090(index: int, **changes: Any) -> Decision:
    """Of a model that neither of the two holds alone."""
    engines, pair = [PROFILES.engine(VLLM_REF)], PROFILES.hardware("5090+3090")
    gpus = tuple(gpu.evolve(**changes) if gpu.index == index else gpu for gpu in pair.gpus)
    model = published_model("qwen3.6-35b-a3b", quantization_config=QUANTS["fp8-block"])
    return decide(model, pair.evolve(gpus=gpus), engines, wish(), rules=PROFILES.rules(engines))


def test_a_model_too_large_for_the_larger_of_unlike_gpus_is_shared_by_stages() -> None:
    best = on_5090_and_3090(0).plans[0]
    assert (best.tensor_parallel.value, best.pipeline_parallel.value, len(best.gpus)) == (1, 2, 2)
    assert any(
        "stages are on different GPUs (NVIDIA GeForce RTX 5090, NVIDIA GeForce RTX 3090)" in warning
        for warning in best.warnings
    )
    assert best.memory.gpu_bytes == 24 << 30
    lone_plan = make_decision("qwen3-8b", "5090+3090", VLLM_REF).plans[0]
    assert (lone_plan.pipeline_parallel.value, len(lone_plan.gpus)) == (1, 1)


@pytest.mark.parametrize(
    ("ref", "name", "model", "quant", "layers", "ways"),
    [
        (VLLM_REF, "VLLM_PP_LAYER_PARTITION", "seed-oss-36b", "awq", 64, 2),
        # The 5090 has no room for as many as it is faster.
        (SGLANG_REF, "SGLANG_PP_LAYER_PARTITION", "qwen3-30b-a3b", "w8a16", 48, 1),
    ],
)
def test_unlike_gpus_get_stages_by_memory_and_speed(
    ref: str, name: str, model: str, quant: str, layers: int, ways: int
) -> None:
    """The 5090 holds a third more and reads twice as fast."""
    engine = PROFILES.engine(ref)
    spec = published_model(model, quantization_config=QUANTS[quant])
    pair = PROFILES.hardware("5090+3090")
    options: dict[str, Any] = {
        "rules": PROFILES.rules([engine]),
        "speed_knowledge": PROFILES.speed_knowledge,
        "gpus": PROFILES.gpus,
    }
    plans = decide(spec, pair, [engine], wish(), **options).plans
    staged_plans = [plan for plan in plans if plan.pipeline_parallel.value == 2]
    even_plan = next(plan for plan in staged_plans if name not in plan.env)
    uneven = [plan for plan in staged_plans if name in plan.env]
    assert len({plan.env[name] for plan in uneven}) == ways
    for plan in uneven:
        large, small = map(int, plan.env[name].split(","))
        assert large + small == layers
        assert large > small
        assert (plan.variables[name].source, plan.scope["layers"]) == ("planner", plan.env[name])
        assert (
            f"{large} and {small} layers on NVIDIA GeForce RTX 5090 and NVIDIA GeForce RTX 3090"
            in plan.variables[name].reason
        )
        check_environment(engine, plan.env)
    assert max(map(_total, uneven)) > 1.2 * _total(even_plan)
    assert max(plan.max_model_len.value for plan in uneven) > 1.2 * even_plan.max_model_len.value
    assert plans[0] in uneven
    # A user's own division is not overruled.
    own_plans = decide(spec, pair, [engine], wish(env={name: f"{layers - 20},20"}), **options).plans
    assert {plan.env[name] for plan in own_plans} == {f"{layers - 20},20"}


def _total(plan: Plan) -> float:
    return plan.speed.total.value if plan.speed else 0.0


def test_the_fullest_of_unlike_gpus_bounds_the_share() -> None:
    total = PROFILES.hardware("5090+3090").gpus[0].total_bytes or 0
    best = on_5090_and_3090(0, free_bytes=total * 93 // 100).plans[0]
    assert "--gpu-memory-utilization=0.84" in best.argv
    assert on_5090_and_3090(1, capability="7.0").plans == ()
    assert on_5090_and_3090(1, capability="7.5").plans == ()


def ranks_on(ref: str, quant: str = "", **changes: Any) -> Decision:
    """Two ranks on a pair of unlike GPUs, of which the second is changed."""
    engines, pair = [PROFILES.engine(ref)], PROFILES.hardware("3090+4090")
    gpus = (pair.gpus[0], pair.gpus[1].evolve(**changes))
    block: dict[str, Any] = {"quantization_config": QUANTS[quant]} if quant else {}
    return decide(
        published_model("qwen3-8b", **block),
        pair.evolve(gpus=gpus),
        engines,
        wish(tensor_parallel=2),
        rules=PROFILES.rules(engines),
    )


@pytest.mark.parametrize("quant", ["", "awq"])
def test_ranks_on_unlike_gpus_have_the_cache_of_the_smaller_one_and_say_so(quant: str) -> None:
    small: dict[str, Any] = {"total_bytes": 16 << 30, "free_bytes": 15 << 30}
    equal_ranks, unlike = ranks_on(VLLM_REF, quant), ranks_on(VLLM_REF, quant, **small)
    best, smaller = equal_ranks.plans[0], unlike.plans[0]
    assert (best.tensor_parallel.value, len(best.gpus)) == (2, 2)
    assert any("Its ranks are on different GPUs" in warning for warning in best.warnings)
    assert best.memory
    assert smaller.memory
    assert smaller.memory.budget_bytes <= 15 << 30 < best.memory.budget_bytes
    assert "--disable-custom-all-reduce" in best.argv


def test_ranks_that_would_need_different_kernels_are_refused() -> None:
    """FP8 is computed from 8.9 on. Processes ask the first GPU which kernel they need."""
    rejection = ranks_on(VLLM_REF, "fp8-dynamic").rejected[0]
    assert (rejection.verdict, "would need different kernels" in rejection.reasons[0]) == (
        "no_kernel",
        True,
    )


def test_sglang_refuses_ranks_with_unlike_free_memory() -> None:
    assert ranks_on(SGLANG_REF).plans
    small: dict[str, Any] = {"total_bytes": 16 << 30, "free_bytes": 15 << 30}
    rejection = ranks_on(SGLANG_REF, **small).rejected[0]
    assert (rejection.verdict, "nine tenths" in rejection.reasons[0]) == ("no_device", True)


def test_stages_that_would_keep_their_caches_unlike_are_refused() -> None:
    row = LayerAttention(
        kind="full", layers=8, head_dim=128, backend="FLASH_ATTN", status="ok", block=16
    )
    tower = LayerAttention(kind="vision", layers=8, head_dim=64, backend="FLASH_ATTN", status="ok")
    (gpu,) = PROFILES.hardware("3090").gpus
    first_variant_evidence = VariantEvidence(attention=(row, tower))
    gate_alike(
        first_variant_evidence,
        VariantEvidence(attention=(row, tower.evolve(backend="TORCH_SDPA"))),
        gpu,
    )
    for changed_row in (row.evolve(backend="TRITON_ATTN"), row.evolve(block=32)):
        with pytest.raises(
            RefusalError, match="keep their caches unlike: on NVIDIA GeForce RTX 3090"
        ):
            gate_alike(first_variant_evidence, VariantEvidence(attention=(changed_row,)), gpu)
