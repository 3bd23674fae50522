"""Refusals before anything is sized, and the words of a plan about its engine and GPU."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.diagnosis.facts.learn import prove_success
from gateway.domain import Advisory, Decision, Engine, Fact, Flag, Hardware, Plan
from gateway.planner.propose import advice
from gateway.profiles.profiles import Profiles
from tests.support.makers import attempt, engine, machine, make_decision, spec, wish
from tests.support.planning import decide
from tests.support.published import published_model
from tests.support.versions import NEWEST_VLLM, SGLANG, SGLANG_REF, VLLM_REF

PROFILES = Profiles()


def decide_on(hardware: Hardware, *refs: str, model: Any = None, **wishes: Any) -> Decision:
    engines = [PROFILES.engine(ref) for ref in refs]
    rules = PROFILES.rules(engines)
    return decide(
        model or spec(), hardware, engines, wish(**wishes), rules=rules, gpus=PROFILES.gpus
    )


def verdicts(decision: Decision) -> set[str]:
    return {rejection.verdict for rejection in decision.rejected}


# --- the machine ---


def test_a_driver_too_old_is_refused_with_the_needed_version() -> None:
    old_machine = machine("2x3090").evolve(driver="570.133.20")
    decision = decide_on(old_machine, VLLM_REF, "vllm==0.19.1")
    assert {str(plan.engine) for plan in decision.plans} == {"vllm==0.19.1"}
    rejection = decision.rejected[0]
    assert (rejection.verdict, rejection.source) == (
        "driver_too_old",
        f"profile vllm=={NEWEST_VLLM}",
    )
    assert "needs driver 580 or newer, this machine has 570.133.20" in rejection.reasons[0]
    assert decide_on(old_machine.evolve(driver="580.0"), VLLM_REF).plans


def test_a_driver_that_could_not_be_read_refuses_nothing() -> None:
    assert decide_on(machine("3090").evolve(driver=None), VLLM_REF).plans


def test_an_image_for_another_processor_is_refused() -> None:
    decision = decide_on(machine("gb10").evolve(arch="riscv64"), SGLANG_REF)
    assert verdicts(decision) == {"unsupported_platform"}
    reason = "its image is built for x86_64 and aarch64, this machine is riscv64"
    assert reason in decision.rejected[0].reasons[0]
    for ref in (VLLM_REF, *(f"sglang=={version}" for version in SGLANG)):
        assert "unsupported_platform" not in verdicts(decide_on(machine("gb10"), ref))


def test_an_engine_for_gpus_has_no_device_without_one() -> None:
    decision = decide_on(machine("cpu"), VLLM_REF)
    assert verdicts(decision) == {"no_device"}
    assert "1 GPU is needed, and the machine has 0" in decision.rejected[0].reasons[0]


def test_a_capability_below_the_engines_is_refused() -> None:
    decision = decide_on(machine("v100"), VLLM_REF)
    assert verdicts(decision) == {"no_kernel"}
    assert (
        f"vllm=={NEWEST_VLLM} is compiled for compute capability 7.5, 8.0, 8.6, 8.9, 9.0, 10.0,"
        " 12.0; Tesla"
        " V100-SXM2-16GB has 7.0" in decision.rejected[0].reasons[0]
    )


def test_bfloat16_is_refused_on_request_and_else_replaced_on_old_gpus() -> None:
    decision = decide_on(machine("t4"), "vllm==0.19.1", dtype="bfloat16", max_context=1024)
    assert "bfloat16 needs compute capability 8.0" in decision.rejected[0].reasons[0]
    small = published_model("qwen2.5-1.5b")
    assert decide_on(machine("t4"), "vllm==0.19.1", model=small).plans[0].dtype.value == "float16"


def test_float32_replaces_a_refused_float16_on_gpus_without_bfloat16() -> None:
    small = published_model("gemma-3-1b")
    # The published heads of 256 take more shared memory in 32 bits than a T4 has.
    assert verdicts(decide_on(machine("t4"), VLLM_REF, model=small)) == {"no_backend"}
    best = decide_on(
        machine("t4"), VLLM_REF, model=published_model("gemma-3-1b", head_dim=128)
    ).plans[0]
    assert best.dtype.value == "float32"
    assert (
        "refuses float16 for gemma3_text: it is numerically unstable; it takes twice the memory"
        in best.dtype.reason
    )
    assert (
        decide_on(
            machine("3090"), VLLM_REF, model=published_model("gemma-3-1b", torch_dtype="float16")
        )
        .plans[0]
        .dtype.value
        == "bfloat16"
    )
    rejection = decide_on(machine("3090"), VLLM_REF, model=small, dtype="float16").rejected[0]
    assert "refuses float16" in rejection.reasons[0]


# --- the KV cache ---


def test_a_kv_cache_that_a_version_lacks_or_that_is_not_understood_is_refused() -> None:
    turbo = {"kv-cache-dtype": "turboquant_k8v4"}
    assert verdicts(decide_on(machine("3090"), "vllm==0.19.1", VLLM_REF, args=turbo)) == {
        "bad_flag",
        "no_backend",
    }
    rejection = decide_on(machine("3090"), VLLM_REF, args=turbo).rejected[0]
    assert "a KV cache in turboquant_k8v4" in rejection.reasons[0]
    packed_rejection = decide_on(
        machine("3090"), SGLANG_REF, args={"kv-cache-dtype": "mxfp8"}
    ).rejected[0]
    assert (packed_rejection.verdict, "not known here" in packed_rejection.reasons[0]) == (
        "no_backend",
        True,
    )


@pytest.mark.parametrize(("ref", "name"), [(VLLM_REF, "fp8"), (SGLANG_REF, "fp8_e4m3")])
def test_half_a_kv_cache_is_asked_for_by_the_engines_own_name(ref: str, name: str) -> None:
    whole = decide_on(machine("3090"), ref, tensor_parallel=1).plans[0].max_model_len.value
    best = decide_on(machine("3090"), ref, tensor_parallel=1, min_context=whole * 7 // 4).plans[0]
    assert best.kv_cache_dtype.value == name
    assert f"--kv-cache-dtype={name}" in best.argv


# --- SGLang ---


LIMIT = "limit-mm-data-per-request"
NO_MEDIA = '{"image": 0, "video": 0, "audio": 0}'


@pytest.mark.parametrize("version", SGLANG)
def test_sglang_gets_flags_to_refuse_media(version: str) -> None:
    """It would open the files of this machine that a request names. Its own first request is an
    image, so it makes none."""
    ref, model = f"sglang=={version}", published_model("qwen3-vl-8b")
    best = decide_on(machine("8xh100"), ref, model=model, tensor_parallel=1, text_only=True).plans[
        0
    ]
    assert best.verdict == "degraded"
    assert best.warnings[0].startswith(
        f"As text only: {ref} opens local files that a request names"
    )
    assert [
        argument for argument in best.argv if "mm-data" in argument or "warmup" in argument
    ] == [f"--{LIMIT}={NO_MEDIA}", "--skip-server-warmup"]
    args = {LIMIT: '{"audio": 0, "image": 0, "video": 0}', "skip_server_warmup": True}
    own_plan = decide_on(machine("8xh100"), ref, model=model, tensor_parallel=1, args=args).plans[0]
    assert (own_plan.verdict, own_plan.argv.count("--skip-server-warmup")) == ("ok", 1)
    text = decide_on(machine("8xh100"), ref, tensor_parallel=1).plans[0]
    assert text.verdict == "ok"
    assert not [argument for argument in text.argv if "mm-data" in argument or "warmup" in argument]


def test_a_model_that_only_sglang_takes_for_multimodal_is_started_so_too() -> None:
    """Its config.json names no tower: they are in the engine's own code."""
    for architecture, is_multimodal in (("Phi4MMForCausalLM", True), ("Phi3ForCausalLM", False)):
        model = published_model("phi-4-mini").evolve(architecture=architecture)
        best = decide_on(
            machine("8xh100"), SGLANG_REF, model=model, tensor_parallel=1, text_only=True
        ).plans[0]
        assert ("--skip-server-warmup" in best.argv) == is_multimodal


@pytest.mark.parametrize("version", SGLANG)
def test_sglang_does_not_serve_media(version: str) -> None:
    args = {LIMIT: '{"image": 1}'}
    decision = decide_on(
        machine("8xh100"),
        f"sglang=={version}",
        model=published_model("qwen3-vl-8b"),
        tensor_parallel=1,
        args=args,
    )
    assert not decision.plans
    assert [rejection.verdict for rejection in decision.rejected] == ["unsafe_media"]
    assert (
        f"without --arg {LIMIT} and with --text-only this model is served as text only"
        in decision.rejected[0].reasons[0]
    )
    assert "srt/utils/common.py" in decision.rejected[0].source


def test_a_model_that_sees_is_served_by_vllm_where_both_can() -> None:
    engines = (SGLANG_REF, VLLM_REF)
    model = published_model("qwen3-vl-8b")
    plans = decide_on(
        machine("8xh100"), *engines, model=model, tensor_parallel=1, text_only=True
    ).plans
    assert [plan.engine.kind for plan in plans] == ["vllm", "sglang"]
    assert [plan.drops for plan in plans] == [(), ("image", "video")]
    assert [plan.model.inputs for plan in plans] == [("text", "image", "video"), ("text",)]
    single_decision = decide_on(machine("8xh100"), *engines, model=model, tensor_parallel=1)
    assert [plan.engine.kind for plan in single_decision.plans] == ["vllm"]
    assert [rejection.verdict for rejection in single_decision.rejected] == ["text_only"]
    assert "--text-only" in single_decision.rejected[0].reasons[0]


def test_sglang_gets_the_embedding_flag_and_no_variables_of_vllm() -> None:
    embeds = published_model("qwen3-embedding-0.6b", "embed")
    for version in SGLANG:
        best = decide_on(machine("3090"), f"sglang=={version}", model=embeds).plans[0]
        assert "--is-embedding" in best.argv
        assert not [
            name
            for name in {**PROFILES.engine(f"sglang=={version}").env, **best.env}
            if name.startswith("VLLM")
        ]
        assert (
            "--is-embedding" not in decide_on(machine("3090"), f"sglang=={version}").plans[0].argv
        )
    assert "--is-embedding" not in decide_on(machine("3090"), VLLM_REF, model=embeds).plans[0].argv


# --- facts against an engine version ---

WEAK = Advisory(id="CVE-1", summary="s", fixed_in="9.10.0", source="https://example.org")


def two(*advisories: Advisory) -> Plan:
    new_engine, old_engine = engine(version="9.9.1", advisories=advisories), engine(version="9.9.0")
    return decide(spec(), machine("3090"), [new_engine, old_engine], wish()).plans[0]


def test_the_one_of_equal_plans_without_known_weaknesses_ranks_first() -> None:
    assert two().engine.version == "9.9.1"
    assert two(WEAK).engine.version == "9.9.0"


def test_a_plan_names_known_weaknesses_of_its_engine_and_the_fixed_version() -> None:
    def refusal_text(*advisories: Advisory) -> str:
        new_engine: Engine = engine(version="9.9.1", advisories=advisories)
        return decide(spec(), machine("3090"), [new_engine], wish()).plans[0].advice

    assert refusal_text() == ""
    older = WEAK.evolve(id="CVE-2", fixed_in="9.9.11")
    assert (
        refusal_text(WEAK, older)
        == "Known weaknesses of vllm==9.9.1: CVE-1, CVE-2; from 9.10.0 on it has none of them."
    )
    assert "of 1 no fixed version is known" in refusal_text(
        WEAK, WEAK.evolve(id="CVE-3", fixed_in=None)
    )
    assert "and 8 more; from 0.32.0 on" in advice(PROFILES.engine("vllm==0.19.1"))
    assert advice(PROFILES.engine(VLLM_REF)) == ""


# --- formats that a GPU does not multiply ---


@pytest.mark.parametrize(
    ("hardware", "block", "format_"),
    [
        ("3090", {"quant_method": "fp8", "activation_scheme": "dynamic"}, "FP8"),
        ("4090", {"quant_method": "fp8", "activation_scheme": "dynamic"}, ""),
        (
            "8xh100",
            {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "ignore": ["lm_head"],
                "group_size": 16,
            },
            "FP4",
        ),
        (
            "5090",
            {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "ignore": ["lm_head"],
                "group_size": 16,
            },
            "",
        ),
        (
            "3090",
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
            "",
        ),
    ],
)
def test_a_format_that_the_gpu_lacks_is_smaller_and_not_faster(
    hardware: str, block: dict[str, Any], format_: str
) -> None:
    best = decide_on(
        machine(hardware), VLLM_REF, model=spec(quantization_config=block), tensor_parallel=1
    ).plans[0]
    warnings = [warning for warning in best.warnings if "smaller, not faster" in warning]
    assert [warning.partition(" weights")[0].removeprefix("The ") for warning in warnings] == (
        [format_] if format_ else []
    )


def test_mxfp4_on_ampere_says_so() -> None:
    model = published_model(
        "gpt-oss-20b",
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    )
    best = decide_on(machine("8xa100-80g"), VLLM_REF, model=model, tensor_parallel=1).plans[0]
    assert any(
        warning.startswith("The FP4 weights are smaller, not faster") for warning in best.warnings
    )


# --- facts for an engine version ---


def test_a_plan_that_worked_is_verified_while_driver_and_image_are_the_same() -> None:
    success = attempt(7)
    (fact,) = prove_success(success, 12.0)
    assert (fact.kind, fact.grade, fact.attempt, fact.at) == ("plan_verified", "verified", 7, 12.0)
    assert fact.scope == {"fingerprint": success.fingerprint}
    assert fact.software == {"image": "engine:9.9.0", "driver": machine("2x3090").driver}
    second_plans = make_decision("2x3090", facts=(fact,)).plans
    assert [plan.grade for plan in second_plans if plan.fingerprint == success.fingerprint] == [
        "verified"
    ]
    assert {plan.grade for plan in second_plans if plan.fingerprint != success.fingerprint} == {
        "predicted"
    }
    stale = fact.evolve(software={**fact.software, "driver": "1.0"})
    assert {plan.grade for plan in make_decision("2x3090", facts=(stale,)).plans} == {"predicted"}
    assert prove_success(attempt(8, plan=second_plans[0]), 13.0) == ()


def test_a_plan_that_failed_after_it_worked_is_refused() -> None:
    success = attempt(7)
    fact = Fact(
        kind="plan_failed",
        scope={"fingerprint": success.fingerprint},
        grade="failed",
        source="it broke",
    )
    for facts in ((*prove_success(success, 1.0), fact), (fact, *prove_success(success, 1.0))):
        assert success.fingerprint not in {
            plan.fingerprint for plan in make_decision("2x3090", facts=facts).plans
        }


def test_another_dtype_of_the_user_is_not_repaired() -> None:
    new_engine = engine(
        flags={**engine().flags, "dtype": Flag(type="str", choices=("auto", "bfloat16", "float16"))}
    )
    assert decide(spec(), machine("t4"), [new_engine], wish(dtype="bfloat16")).plans == ()
