"""The choice among plans of one model on the GPUs of a machine."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.domain import Choice, Decision, EngineRef, Fact, IntChoice, ModelSpec, Plan
from gateway.engines.common.planning_input import PlanningInput
from gateway.errors import BadFlag, FitserveError
from gateway.planner.decide import rank_plans
from gateway.profiles.profiles import Profiles
from tests.support.examples import quicker
from tests.support.makers import GIB, engine, machine, make_decision, plan, spec, wish
from tests.support.planning import decide
from tests.support.published import published_model


def test_a_model_that_fits_one_gpu_gets_one_gpu() -> None:
    best = plan("2x3090")
    assert best.tensor_parallel.value == 1
    assert len(best.gpus) == 1
    assert best.verdict == "ok"


def test_a_gpu_may_be_named_by_its_number() -> None:
    second = machine("2x3090").gpus[1]
    assert plan("2x3090", gpus=("1",)).gpus == (second.uuid,)
    assert plan("2x3090", gpus=(second.uuid,)).gpus == (second.uuid,)
    with pytest.raises(FitserveError, match="no GPU 2"):
        make_decision("2x3090", gpus=("2",))


def test_two_gpus_rank_first_when_one_leaves_too_little_context() -> None:
    # 8B in bf16 leaves a 24 GiB card about 5 GiB: 40 k tokens. Twice the layers leave nothing like
    # that.
    decision = make_decision("2x3090", model=spec(num_hidden_layers=44))
    assert decision.plans[0].tensor_parallel.value == 2
    assert decision.plans[0].max_model_len.value >= 32768


def test_custom_all_reduce_is_off_without_peer_to_peer_and_says_why() -> None:
    best = plan("2x3090", tensor_parallel=2)
    assert not best.custom_all_reduce.value
    assert "--disable-custom-all-reduce" in best.argv
    assert "NVLink" in best.custom_all_reduce.reason
    assert plan("8xh100", tensor_parallel=2).custom_all_reduce.value


def test_every_choice_has_a_reason_and_a_source() -> None:
    best = plan("8xh100")
    choices = [
        value for name in Plan.model_fields if isinstance(value := getattr(best, name), Choice)
    ]
    assert len(choices) == 23
    assert all(choice.reason and choice.source for choice in choices)


def test_illegal_sizes_are_rejected_with_the_reason() -> None:
    decision = make_decision(
        "8xh100", model=spec(num_attention_heads=28, num_key_value_heads=4, hidden_size=3584)
    )
    assert {each_plan.tensor_parallel.value for each_plan in decision.plans} == {1, 2, 4}
    reasons = {rejection.tensor_parallel: rejection for rejection in decision.rejected}
    assert reasons[8].verdict == "illegal_parallelism"
    assert "28 attention heads" in reasons[8].reasons[0]


def test_a_model_too_large_for_the_machine_is_refused_with_the_bytes() -> None:
    decision = make_decision("2x3090", model=spec(num_hidden_layers=400))
    assert not decision.plans
    assert {rejection.verdict for rejection in decision.rejected} == {"no_memory"}
    assert "GiB are needed" in decision.rejected[0].reasons[0]


def test_min_context_is_a_hard_limit_and_max_context_a_cap() -> None:
    assert not make_decision("2x3090", min_context=131072, tensor_parallel=1).plans
    assert make_decision("2x3090", min_context=131072).rejected[0].verdict == "no_memory"
    assert plan("8xh100", max_context=4096).max_model_len.value == 4096


def test_a_context_beyond_the_models_own_limit_is_answered_with_that() -> None:
    best = plan("8xh100", max_context=10**7)
    assert best.max_model_len.value == 131072
    assert (
        "A context of 10000000 tokens was asked for, and the model's own limit is 131072."
        in best.warnings
    )


def test_no_form_reaches_a_context_beyond_the_models_own_limit() -> None:
    refusals = make_decision("8xh100", min_context=200_000).rejected
    assert {refusal.verdict for refusal in refusals} == {"bad_flag"}
    assert "own limit is 131072" in refusals[0].reasons[0]
    rejections = make_decision("8xh100", min_context=8000, max_context=4000).rejected
    assert "one of at most 4000 as well: raise --max-context" in rejections[0].reasons[0]


def test_a_small_lack_of_memory_is_shown_as_a_difference() -> None:
    def reason_of(share: float) -> str:
        shared_decision = make_decision(
            "2x3090", tensor_parallel=1, args={"gpu-memory-utilization": share}
        )
        return "; ".join(
            reason for rejection in shared_decision.rejected for reason in rejection.reasons
        )

    low, high = 0.01, 0.9
    while high - low > 1e-6:
        share = (low + high) / 2
        low, high = (share, high) if "are available" in reason_of(share) else (low, share)
    assert "besides the KV cache, 1 MiB more than are available" in reason_of(low)


def test_user_flags_win_over_the_planner() -> None:
    best = plan("8xh100", args={"--max-num-seqs": 7, "max_model_len": "9000", "dtype": "half"})
    assert (best.max_num_seqs.value, best.max_num_seqs.source) == (7, "user")
    assert best.max_model_len.value == 9000
    assert best.dtype.value == "float16"
    assert "--max-model-len=9000" in best.argv
    assert "--dtype=half" in best.argv
    assert sum(item.startswith("--max-num-seqs") for item in best.argv) == 1


def test_a_user_flag_that_cannot_fit_is_refused_with_a_fitting_value() -> None:
    decision = make_decision("2x3090", args={"max-model-len": 131072, "tensor-parallel-size": 1})
    assert not decision.plans
    assert "--max-model-len 131072" in decision.rejected[0].reasons[0]


def test_a_context_beyond_the_models_own_limit_is_refused_as_that() -> None:
    rejection = make_decision("8xh100", args={"max-model-len": 10**8}).rejected[0]
    assert rejection.verdict == "bad_flag"
    assert (
        "--max-model-len 100000000 was set, and the model's own limit is " in rejection.reasons[0]
    )


def test_unknown_and_reserved_flags_are_refused_with_the_nearest() -> None:
    with pytest.raises(BadFlag, match="max-num-seqs"):
        make_decision(args={"max-num-seq": 3})
    with pytest.raises(BadFlag, match="cannot be given"):
        make_decision(args={"host": "0.0.0.0"})


def test_sizes_below_one_are_refused() -> None:
    for flag in ("max-num-seqs", "max-num-batched-tokens", "max-model-len"):
        with pytest.raises(BadFlag, match="at least 1"):
            make_decision(args={flag: -5})


def test_old_gpus_compute_bfloat16_weights_in_float16() -> None:
    old_machine = machine("2x3090")
    turing = old_machine.evolve(
        gpus=tuple(gpu.evolve(capability="7.5", name="T4") for gpu in old_machine.gpus)
    )
    best = decide(spec(), turing, [engine()], wish()).plans[0]
    assert best.dtype.value == "float16"
    decision = decide(spec(), turing, [engine()], wish(dtype="bfloat16"))
    assert decision.rejected[0].verdict == "no_kernel"


def test_a_gpu_that_others_fill_is_left_alone() -> None:
    hardware = machine("2x3090")
    busy = hardware.evolve(gpus=(hardware.gpus[0].evolve(free_bytes=2 * GIB), hardware.gpus[1]))
    assert decide(spec(), busy, [engine()], wish()).plans[0].gpus == (hardware.gpus[1].uuid,)


def test_memory_promised_to_another_engine_is_not_promised_twice() -> None:
    hardware = machine("2x3090")
    promised_bytes = {hardware.gpus[0].uuid: 20 * GIB}
    best = decide(spec(), hardware, [engine()], wish(), promised_bytes=promised_bytes).plans[0]
    assert best.gpus == (hardware.gpus[1].uuid,)
    assert not decide(
        spec(),
        hardware,
        [engine()],
        wish(),
        promised_bytes={gpu.uuid: 20 * GIB for gpu in hardware.gpus},
    ).plans


def decide_beside(left_gib: int, **fields: Any) -> Decision:
    """Llama 8B on an H200 of which another engine was promised all but so much."""
    profiles = Profiles()
    hardware, engines = machine("h200"), profiles.engines(("vllm==0.26.0",), device="cuda")
    promised_bytes = {hardware.gpus[0].uuid: (hardware.gpus[0].total_bytes or 0) - left_gib * GIB}
    request = wish(**fields)
    return decide(
        published_model("llama-3.1-8b"),
        hardware,
        engines,
        request,
        promised_bytes=promised_bytes,
        rules=profiles.rules(engines),
    )


def test_no_weights_are_halved_beside_a_neighbour_and_no_context_is_cut_to_nothing() -> None:
    decision = decide_beside(20)
    assert not decision.plans
    reason = decision.rejected[0].reasons[0]
    assert "next to other models it would have weights halved to fp8" in reason
    assert "131072 without them" in reason
    # A wish for it gets it; memory that a neighbour leaves is taken where it is enough.
    assert decide_beside(20, args={"quantization": "fp8"}).plans
    assert not decide_beside(22).plans[0].quantizes_weights
    # The margin of the other is not touched: nothing is left beside its promised bytes.
    assert "0.00 GiB are available" in decide_beside(4).rejected[0].reasons[0]


def test_a_model_that_is_too_large_alone_too_is_planned_with_halved_weights() -> None:
    profiles = Profiles()
    hardware, engines = machine("3090"), profiles.engines(("vllm==0.26.0",), device="cuda")
    promised_bytes = {hardware.gpus[0].uuid: GIB}
    large = published_model("qwen2.5-7b", num_hidden_layers=48)
    assert (
        decide(
            large,
            hardware,
            engines,
            wish(),
            promised_bytes=promised_bytes,
            rules=profiles.rules(engines),
        )
        .plans[0]
        .quantizes_weights
    )


def test_the_cpu_gets_a_kv_cache_for_several_requests_in_bytes() -> None:
    best = plan("cpu", model=spec(num_hidden_layers=4))
    assert best.gpus == ()
    assert f"--kv-cache-memory-bytes={best.memory.kv_bytes}" in best.argv
    assert best.memory.kv_tokens >= best.max_model_len.value
    assert "--enforce-eager" in best.argv


def test_the_engines_own_maximum_becomes_the_next_plans_context() -> None:
    first_plan = plan("cpu", model=spec(num_hidden_layers=4))
    fact = Fact(
        kind="max_context",
        scope=first_plan.scope,
        value=8064,
        grade="failed",
        source="the log line",
    )
    second = plan("cpu", model=spec(num_hidden_layers=4), facts=(fact,))
    assert second.max_model_len.value == 8064
    assert "the log line" in second.max_model_len.source
    assert second.fingerprint != first_plan.fingerprint
    # Its scope is this engine, model, device and budget: elsewhere it says nothing.
    other_plan = plan("8xh100", facts=(fact,))
    assert other_plan.max_model_len.value > 8064


def test_a_failed_plan_is_never_proposed_again() -> None:
    facts: tuple[Fact, ...] = ()
    fingerprints = set()
    while True:
        decision = make_decision("2x3090", facts=facts)
        if not decision.plans:
            break
        best = decision.plans[0]
        assert best.fingerprint not in fingerprints
        fingerprints.add(best.fingerprint)
        facts += (
            Fact(
                kind="plan_failed",
                scope={"fingerprint": best.fingerprint},
                grade="failed",
                source="it broke",
            ),
        )
    # One GPU, two GPUs, and one conservative try of each.
    assert len(fingerprints) == 4
    assert all(
        "it broke" in reason
        for rejection in decision.rejected
        for reason in rejection.reasons
        if rejection.verdict == "known_bad"
    )


def test_the_careful_try_runs_without_graphs_and_with_a_smaller_batch() -> None:
    first_plan = plan("2x3090", tensor_parallel=1)
    fact = Fact(
        kind="plan_failed",
        scope={"fingerprint": first_plan.fingerprint},
        grade="failed",
        source="it broke",
    )
    conservative = plan("2x3090", tensor_parallel=1, facts=(fact,))
    assert conservative.enforce_eager.value
    assert conservative.max_num_seqs.value < first_plan.max_num_seqs.value
    assert conservative.memory.budget_bytes < first_plan.memory.budget_bytes
    assert conservative.verdict == "degraded"


def test_remote_code_and_unknown_architectures_are_refused() -> None:
    hostile = spec().evolve(remote_code=("auto_map in config.json",))
    assert make_decision(model=hostile).rejected[0].verdict == "untrusted_code", (
        "what this engine has of its own is not known"
    )
    assert make_decision(model=hostile, policy={"allow_remote_code": True}).plans
    decision = decide(spec(), machine(), [engine(architectures=("GemmaForCausalLM",))], wish())
    assert decision.rejected[0].verdict == "unsupported_architecture"


def test_code_beside_a_model_is_no_obstacle_for_an_engine_that_has_its_own() -> None:
    model = spec(model_type="llama").evolve(
        remote_code=("auto_map in config.json", "modeling_x.py")
    )
    tokenizer_model = model.evolve(
        remote_code=("auto_map in config.json", "auto_map in tokenizer_config.json")
    )
    fields = {"architectures": (model.architecture,), "config_classes": ("llama",)}

    def verdicts(model: ModelSpec, **about: Any) -> set[str]:
        decision = decide(model, machine(), [engine(**about)], wish())
        assert not any("trust" in word for plan in decision.plans for word in plan.argv), (
            "no engine is told to run it"
        )
        return (
            {rejection.verdict for rejection in decision.rejected} if not decision.plans else set()
        )

    assert verdicts(model, **fields) == set()
    assert verdicts(model, architectures=("LlamaForCausalLM",)) == {"untrusted_code"}
    assert verdicts(model, **fields | {"config_classes": ("qwen3",)}) == {"untrusted_code"}
    assert verdicts(model, config_classes=("llama",)) == {"untrusted_code"}, (
        "its architectures are not known"
    )
    assert verdicts(tokenizer_model, **fields) == {"untrusted_code"}
    assert verdicts(tokenizer_model, **fields, tokenizers=("llama",)) == set()


def test_quantized_weights_are_not_guessed_at() -> None:
    decision = make_decision(model=spec(quantization_config={"quant_method": "gptq", "bits": 4}))
    assert {rejection.verdict for rejection in decision.rejected} == {"unsupported_quantization"}


def test_the_same_input_gives_the_same_decision() -> None:
    assert make_decision("8xh100") == make_decision("8xh100")


@settings(max_examples=quicker(60), deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "min_context": st.integers(1, 10**7),
            "max_context": st.integers(1, 10**7),
            "tensor_parallel": st.integers(1, 9),
            "dtype": st.sampled_from(["auto", "bfloat16", "float16", "float32"]),
            "args": st.dictionaries(
                st.sampled_from(sorted(engine().flags)),
                st.integers() | st.text(max_size=8) | st.booleans(),
                max_size=3,
            ),
        },
    ),
    st.sampled_from(["cpu", "2x3090", "8xh100"]),
)
def test_no_wish_breaks_the_planner(fields: dict[str, Any], hardware: str) -> None:
    try:
        decision = make_decision(hardware, **fields)
    except FitserveError:
        return
    for each_plan in decision.plans:
        assert each_plan.max_model_len.value >= 1
        assert each_plan.memory.kv_tokens >= each_plan.max_model_len.value


# --- the operator's environment ---


def test_every_variable_names_its_origin() -> None:
    env_of_all_engines = {
        "NCCL_DEBUG": "WARN",
        "HTTP_PROXY": "http://proxy:1",
        "OMP_NUM_THREADS": "4",
        "VLLM_NO_SUCH": "1",
    }
    decision = decide(
        spec(),
        machine(),
        [engine()],
        wish(env={"NCCL_DEBUG": "INFO"}),
        global_env=env_of_all_engines,
    )
    best = decision.plans[0]
    assert {name: choice.source for name, choice in best.variables.items()} == {
        "NCCL_DEBUG": "user",
        "HTTP_PROXY": "FITSERVE_ENGINE_ENV",
        "OMP_NUM_THREADS": "FITSERVE_ENGINE_ENV",
        "NO_PROXY": "planner",
    }
    assert best.env == {name: choice.value for name, choice in best.variables.items()}
    assert best.env["NCCL_DEBUG"] == "INFO"
    assert [
        line for line in best.warnings if "VLLM_NO_SUCH of FITSERVE_ENGINE_ENV is left out" in line
    ]
    assert best.fingerprint != plan().fingerprint


def test_a_fact_learned_with_a_variable_needs_it_and_one_without_holds_always() -> None:
    env = {"NCCL_BUFFSIZE": "8388608"}
    small: dict[str, Any] = {"model": spec(num_hidden_layers=4)}
    plain, tuned_plan = plan("cpu", **small), plan("cpu", **small, env=env)
    assert tuned_plan.scope == plain.scope | {"env": "NCCL_BUFFSIZE=8388608"}

    def shortened_context(failed_plan: Plan, **fields: Any) -> int:
        fact = Fact(
            kind="max_context",
            scope=failed_plan.scope,
            value=8064,
            grade="failed",
            source="the log line",
        )
        return plan("cpu", **small, facts=(fact,), **fields).max_model_len.value

    assert shortened_context(tuned_plan, env=env) == 8064
    assert shortened_context(tuned_plan) > 8064
    assert shortened_context(tuned_plan, env={"NCCL_BUFFSIZE": "1"}) > 8064
    assert shortened_context(plain) == shortened_context(plain, env=env) == 8064


def test_an_engine_that_failed_with_a_variable_is_planned_without_it() -> None:
    env = {"TORCHDYNAMO_VERBOSE": "1"}
    scope = {"engine": engine().ref, "capability": "8.6", "env": "TORCHDYNAMO_VERBOSE=1"}
    fact = Fact(kind="engine_fails", scope=scope, grade="failed", source="it broke")
    assert make_decision(facts=(fact,)).plans
    assert not make_decision(facts=(fact,), env=env).plans


def test_an_engine_that_failed_at_a_task_is_planned_for_others() -> None:
    scope = {"engine": engine().ref, "capability": "8.6", "task": "transcribe"}
    fact = Fact(kind="engine_fails", scope=scope, grade="failed", source="it cannot read sound")
    speech = spec().evolve(task="transcribe")
    assert make_decision(facts=(fact,)).plans
    decision = make_decision(model=speech, facts=(fact,))
    assert not decision.plans
    assert {rejection.verdict for rejection in decision.rejected} == {"known_bad"}


SOUND = EngineRef(kind="vllm", version="9.8.0", image="e")
WEAK = EngineRef(kind="vllm", version="9.9.0", image="e")
ORDER = {str(WEAK): (True, 0), str(SOUND): (False, 1)}


def first(sound: int, weak: int, **wished: Any) -> EngineRef:
    """The engine of the better one of two plans that differ in their context."""
    base = plan("3090")
    plans = [
        base.evolve(engine=ref, max_model_len=IntChoice(value=tokens, reason="", source=""))
        for ref, tokens in ((WEAK, weak), (SOUND, sound))
    ]
    engine_ref: EngineRef = rank_plans(
        PlanningInput(spec(), machine("3090"), wish(**wished)), plans, ORDER
    )[0].engine
    return engine_ref


@settings(deadline=None)
@given(st.integers(1000, 131072), st.floats(1, 1.099))
def test_a_vulnerable_version_never_wins_by_a_slightly_longer_context(
    sound: int, longer: float
) -> None:
    assert first(sound, int(sound * longer)) == SOUND
    assert first(sound, int(sound * longer), context=int(sound * longer)) == SOUND
    assert first(sound, int(sound * longer), goal="context") == SOUND


def test_a_context_that_is_much_longer_is_worth_a_published_weakness() -> None:
    assert first(16384, 32768) == WEAK
    assert first(31000, 40000, context=40000) == WEAK
