"""Variants of a model on an engine: the layouts on GPUs that are tried, and the user's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from gateway.domain import Decision, Engine, Plan, Scalar, Wish
from gateway.engines.common.variant import Layouts, Variant, plain_variants
from gateway.planner.command import check_command
from gateway.planner.parallel import sufficient_ranks
from gateway.profiles.profiles import Profiles
from tests.support.makers import engine, wish
from tests.support.planning import decide
from tests.support.published import published_model
from tests.support.versions import SGLANG, VLLM, VLLM_REF

PROFILES = Profiles()
ENGINES = {ref: PROFILES.engine(ref) for ref in PROFILES.engine_files}
RULES = PROFILES.rules(ENGINES.values())
SGLANG_REF = "sglang==0.5.23"
VERSIONS = [
    *(f"vllm=={version}" for version in VLLM),
    *(f"sglang=={version}" for version in SGLANG),
]
ENGINE = engine()
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
V3 = published_model("deepseek-v3", quantization_config=FP8)


def sizes(layouts: Layouts, args: dict[str, Scalar] | None = None, **fields: Any) -> list[Any]:
    """Ranks and groups of each variant, and whether its experts are whole."""
    variants = plain_variants(ENGINE, layouts, args or {}, wish(**fields))
    return [(variant.tp, variant.dp, variant.ep) for variant in variants]


def make_decision(spec: Any, machine: str, *refs: str, **fields: Any) -> Decision:
    parsed_wish = Wish.model_validate({"name": "m", "source": "m", **fields})
    engines = [ENGINES[ref] for ref in refs or (VLLM_REF,)]
    hardware = PROFILES.hardware(machine)
    options = {"speed_knowledge": PROFILES.speed_knowledge, "gpus": PROFILES.gpus}
    return decide(spec, hardware, engines, parsed_wish, PROFILES.facts, rules=RULES, **options)


def layout(plan: Plan) -> tuple[int, int, bool]:
    return plan.tensor_parallel.value, plan.data_parallel.value, plan.expert_parallel.value


# --- tried ---


def test_every_size_of_the_machine_is_tried_without_a_wish() -> None:
    assert sizes(Layouts(4)) == [(size, 1, False) for size in (1, 2, 3, 4)]
    assert [tp for tp, _, _ in sizes(Layouts(100))] == [1, 2, 3, 4, 5, 6, 7, 8]
    # One variant exists without GPUs too, and a gate refuses it with a reason.
    assert plain_variants(ENGINE, Layouts(0), {}, wish()) == (Variant(),)
    assert plain_variants(engine("cpu"), Layouts(0), {}, wish()) == (Variant(),)


def test_the_users_settings_are_in_every_variant() -> None:
    args: dict[str, Scalar] = {
        "pipeline-parallel-size": 2,
        "kv-cache-dtype": "fp8",
        "quantization": "fp8",
    }
    more: dict[str, Scalar] = {**args, "moe-backend": "triton", "linear-backend": "auto"}
    variants = plain_variants(ENGINE, Layouts(8), more, wish())
    assert [variant.tp for variant in variants] == [1, 2, 3, 4]
    assert {
        (variant.pp, variant.kv_dtype, variant.quantization, variant.backends)
        for variant in variants
    } == {(2, "fp8", "fp8", (("moe-backend", "triton"),))}
    assert all(variant.cost == 0 for variant in variants)
    assert sizes(Layouts(2), {"tensor-parallel-size": 16}) == [(16, 1, False)]
    assert sizes(Layouts(4), tensor_parallel=3) == [(3, 1, False)]


def test_groups_are_tried_where_ranks_would_repeat_the_cache() -> None:
    latent = Layouts(8, partial(sufficient_ranks, V3.attention))
    assert sizes(latent)[8:] == [(1, 2, True), (1, 4, True), (1, 8, True)]
    four = Layouts(8, partial(sufficient_ranks, published_model("qwen3-30b-a3b").attention))
    assert sizes(four)[8:] == [(4, 2, True)]
    eight = Layouts(8, partial(sufficient_ranks, published_model("mixtral-8x7b").attention))
    assert len(sizes(eight)) == 8
    # Not where the user sets a size, or wants no whole experts.
    assert sizes(latent, tensor_parallel=1) == [(1, 1, False)]
    assert len(sizes(latent, {"enable-expert-parallel": False})) == 8
    assert len(sizes(latent, {"pipeline-parallel-size": 2})) == 4


def test_whole_experts_of_the_user_keep_layouts_with_ranks_for_them() -> None:
    latent = Layouts(4, partial(sufficient_ranks, V3.attention))
    layouts = sizes(latent, {"enable-expert-parallel": True})
    assert layouts == [(2, 1, True), (3, 1, True), (4, 1, True), (1, 2, True), (1, 4, True)]
    # On one GPU there is no such layout.
    assert sizes(Layouts(1), {"enable-expert-parallel": True}) == [(1, 1, True)]
    # SGLang's switch is a number of ranks.
    assert sizes(Layouts(2), {"enable-expert-parallel": 1})[0] == (1, 1, False)


def test_the_layout_has_the_groups_of_the_user() -> None:
    assert sizes(Layouts(8), {"data-parallel-size": 8}) == [(1, 8, True)]
    assert sizes(Layouts(8), {"data-parallel-size": 4}) == [(1, 4, True), (2, 4, True)]
    layout_args: dict[str, Scalar] = {"data-parallel-size": 2, "tensor-parallel-size": 4}
    assert sizes(Layouts(8), layout_args) == [(4, 2, True)]
    # SGLang's tensor parallel size counts all ranks.
    assert sizes(Layouts(8, counts_groups=True), layout_args) == [(2, 2, True)]
    cut: dict[str, Scalar] = {"data-parallel-size": 2, "enable-expert-parallel": False}
    assert sizes(Layouts(2), cut) == [(1, 2, False)]


# --- planned ---


@pytest.mark.parametrize("ref", VERSIONS)
def test_every_version_plans_groups_and_spells_them(ref: str) -> None:
    plans = make_decision(V3, "8xh200", ref).plans
    plan_of_groups = next(plan for plan in plans if layout(plan) == (1, 8, True))
    lone_layout = next(plan for plan in plans if layout(plan) == (8, 1, False))
    assert len(plan_of_groups.gpus) == 8
    assert len(set(plan_of_groups.gpus)) == 8
    # Attention is whole on each rank, and so are the latents of its own requests alone.
    assert plan_of_groups.memory.weights_bytes > lone_layout.memory.weights_bytes
    assert plan_of_groups.memory.kv_bytes_per_token == lone_layout.memory.kv_bytes_per_token
    assert plan_of_groups.at_once == 8 * plan_of_groups.max_num_seqs.value
    flags = dict(item.removeprefix("--").partition("=")[::2] for item in plan_of_groups.argv)
    if ref.startswith("vllm"):
        assert (flags["tensor-parallel-size"], flags["data-parallel-size"]) == ("1", "8")
        assert "enable-expert-parallel" in flags
        assert flags["max-num-seqs"] == str(plan_of_groups.max_num_seqs.value)
    elif ref == SGLANG_REF:
        assert (flags["tp-size"], flags["attn-dp-size"], flags["ep-size"]) == ("8", "8", "8")
        assert flags["max-running-requests"] == str(plan_of_groups.at_once)
        assert int(flags["chunked-prefill-size"]) == 8 * plan_of_groups.max_num_batched_tokens.value
    else:
        assert (flags["tensor-parallel-size"], flags["data-parallel-size"]) == ("8", "8")
        assert "enable-dp-attention" in flags
        assert flags["expert-parallel-size"] == "8"


@pytest.mark.parametrize("ref", VERSIONS)
def test_a_start_with_groups_is_accepted_by_the_policy(ref: str) -> None:
    plan = next(
        each_plan
        for each_plan in make_decision(V3, "8xh200", ref).plans
        if each_plan.data_parallel.value == 8
    )
    known_engine: Engine = ENGINES[ref]
    spelling = known_engine.spelling
    last = {"model": "/models/m", "served-model-name": "m", "host": "0.0.0.0", "port": "8000"}
    ends = [f"--{spelling.get(name, name)}={value}" for name, value in last.items()]
    argv = (*known_engine.container_command, *plan.argv, *ends)
    check_command(known_engine, argv, plan.env, model="m", port=8000, folder="/models")


def test_groups_hold_more_and_win_where_many_ask() -> None:
    """vllm#51454: data parallel attention holds several times the cache of tensor parallel ranks,
    each of which would keep all latents."""
    plans = make_decision(V3, "8xb200", goal="throughput", concurrency=1024).plans
    assert layout(plans[0]) == (1, 8, True)
    lone_plan = make_decision(V3, "8xb200", tensor_parallel=8).plans[0]
    assert 8 * plans[0].memory.kv_tokens > 3 * lone_plan.memory.kv_tokens
    # One user at a time is served faster by ranks that share the work.
    single = make_decision(V3, "8xb200", goal="latency", concurrency=1).plans[0]
    assert single.data_parallel.value == 1


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-30b-a3b"])
def test_the_users_switch_never_leaves_copies_of_one_rank(name: str) -> None:
    args = {"enable-expert-parallel": True}
    spec = V3 if name == "deepseek-v3" else published_model(name)
    for plan in make_decision(spec, "8xh100", *VERSIONS[:4], args=args).plans:
        tp, dp, whole = layout(plan)
        assert whole
        assert tp * dp > 1


def test_groups_of_the_user_are_planned_or_refused_in_words() -> None:
    args = {"data-parallel-size": 4}
    assert {layout(plan)[1] for plan in make_decision(V3, "8xh200", args=args).plans} == {4}
    by_name = make_decision(V3, "8xh200", SGLANG_REF, args=args).plans[0]
    assert "--attn-dp-size=4" in by_name.argv
    dense = make_decision(published_model("llama-3.1-8b"), "8xh200", args=args)
    assert not dense.plans
    assert "no experts" in dense.rejected[0].reasons[0]
    two_gpu_decision = make_decision(V3, "2xh100", args=args)
    assert two_gpu_decision.rejected[0].verdict == "no_device"
    assert two_gpu_decision.rejected[0].data_parallel == 4
    staged_decision = make_decision(V3, "8xh200", args={**args, "pipeline-parallel-size": 2})
    assert "stages" in staged_decision.rejected[0].reasons[0]
    uneven = make_decision(
        published_model("qwen1.5-moe-a2.7b"), "8xh100", SGLANG_REF, args={"attn-dp-size": 8}
    )
    assert "evenly" in uneven.rejected[0].reasons[0]
    # vLLM gives some ranks one expert more.
    assert make_decision(
        published_model("qwen1.5-moe-a2.7b"), "8xh100", args={"data-parallel-size": 8}
    ).plans


def test_a_flashinfer_kernel_that_groups_crash_comes_last() -> None:
    """vllm/model_executor/layers/fused_moe/oracle/unquantized.py:85 of 0.33.0."""
    spec = published_model("qwen3-30b-a3b")
    kernels = {}
    for args in ({}, {"data-parallel-size": 2}):
        plan = make_decision(spec, "4xrtx-pro-6000", args=args | {"tensor-parallel-size": 2}).plans[
            0
        ]
        kernels[plan.data_parallel.value] = {
            row.kernel for row in plan.kernels if ".experts" in row.layer
        }
    assert kernels[1] != kernels[2]
    assert not any("FLASHINFER_CUTLASS" in (kernel or "") for kernel in kernels[2])
