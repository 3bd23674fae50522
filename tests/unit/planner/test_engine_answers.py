"""Engines that are asked: open questions of a decision, and the changes by their answers."""

from __future__ import annotations

from typing import Any

from gateway.domain import (
    AskedAttention,
    AskedCache,
    AskedKernel,
    Decision,
    EngineAnswer,
    Plan,
    Question,
    ResolvedSettings,
)
from gateway.planner.engine_answers import open_questions
from gateway.profiles.profiles import Profiles
from tests.conformance.layer_cases import QUANTS
from tests.support.makers import wish
from tests.support.planning import decide
from tests.support.published import published_model
from tests.support.versions import SGLANG_REF, VLLM_REF

PROFILES = Profiles()
SOURCE = "sha256:0123"


def make_decision(
    answers: dict[Question, EngineAnswer],
    *,
    quant: str = "",
    engine: str = VLLM_REF,
    model: str = "llama-3.1-8b",
    **wishes: Any,
) -> Decision:
    block: dict[str, Any] = {"quantization_config": QUANTS[quant]} if quant else {}
    engines = [PROFILES.engine(engine)]
    hardware, rules = PROFILES.hardware("2x3090"), PROFILES.rules(engines)
    return decide(
        published_model(model, **block),
        hardware,
        engines,
        wish(**wishes),
        rules=rules,
        answers=answers,
    )


def answer(plan: Plan, **changes: Any) -> EngineAnswer:
    """The answer of an engine that agrees with the forecast."""
    length, bytes_ = 16_384, 16_384 * plan.memory.kv_bytes_per_token
    engine_answer = EngineAnswer(
        kernels=tuple(
            AskedKernel(
                layer=row.layer,
                kernel=row.kernel or "",
                k=row.k or 0,
                n=row.n or 0,
                count=row.count,
            )
            for row in plan.kernels
        ),
        attention=tuple(
            AskedAttention(
                kind=row.kind,
                head_dim=row.head_dim,
                backend=row.backend or "",
                version=row.version or 0,
                layers=row.layers,
            )
            for row in plan.attention
        ),
        weights=plan.memory.weights_bytes,
        kv=AskedCache(
            block_bytes=bytes_ // 1024,
            reserved_blocks=1,
            needed=((16, bytes_ // 1024), (length // 2, bytes_ // 2), (length, bytes_)),
        ),
        resolved_settings=ResolvedSettings(
            architecture="LlamaForCausalLM",
            dtype="bfloat16",
            quantization="",
            kv_cache_dtype="auto",
            max_model_len=131072,
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            enforce_eager=False,
            runner="generate",
        ),
        source=SOURCE,
    )
    return engine_answer.evolve(**changes)


def make_question(plan: Plan) -> Question:
    assert plan.question is not None
    return plan.question


def test_the_question_is_the_command_line_without_sizes_of_the_answer() -> None:
    best = make_decision({}).plans[0]
    question = make_question(best)
    changing_flags = (
        "--max-model-len=",
        "--gpu-memory-utilization=",
        "--kv-cache-memory-bytes=",
        "--speculative-config=",
    )
    assert question.argv == tuple(
        sorted(item for item in best.argv if not item.startswith(changing_flags))
    )
    assert (question.engine, question.capability) == (VLLM_REF, "8.6")


def test_a_model_with_reserved_positions_is_asked_about_the_length_for_users() -> None:
    engines = [PROFILES.engine(VLLM_REF)]
    hardware, rules = PROFILES.hardware("2x3090"), PROFILES.rules(engines)
    best = decide(published_model("bge-m3"), hardware, engines, wish(), rules=rules).plans[0]
    assert "--max-model-len=8192" in make_question(best).argv


def test_an_answer_that_agrees_raises_the_grade_and_changes_no_size() -> None:
    forecast = make_decision({}).plans[0]
    assert forecast.grade == "predicted"
    best = make_decision({make_question(forecast): answer(forecast)}).plans[0]
    assert (best.grade, best.question) == ("checked", None)
    assert best.argv == forecast.argv
    assert best.memory.weights_bytes == forecast.memory.weights_bytes
    assert [(row.layer, row.kernel, row.scheme) for row in best.kernels] == [
        (row.layer, row.kernel, row.scheme) for row in forecast.kernels
    ]


def test_recurrent_layers_keep_their_size_of_heads_where_the_engine_tells_none() -> None:
    forecast = make_decision({}, model="qwen3.5-9b").plans[0]
    engine_answer = answer(forecast)
    sizeless = engine_answer.evolve(
        attention=tuple(
            row.evolve(head_dim=0) if row.kind == "recurrent" else row
            for row in engine_answer.attention
        )
    )
    best = make_decision({make_question(forecast): sizeless}, model="qwen3.5-9b").plans[0]
    assert best.grade == "checked"
    assert {row.kind: row.head_dim for row in best.attention}["recurrent"] == 128


def test_the_engines_bytes_win_over_ours() -> None:
    forecast = make_decision({}).plans[0]
    heavier = answer(forecast, weights=forecast.memory.weights_bytes + 1_000_000_000)
    best = next(
        plan
        for plan in make_decision({make_question(forecast): heavier}).plans
        if plan.grade == "checked"
    )
    assert best.memory.weights_bytes == heavier.weights
    assert best.memory.kv_bytes < forecast.memory.kv_bytes


def test_a_refusal_has_the_engines_own_words_and_the_search_continues() -> None:
    forecast = make_decision({})
    engine_answer = EngineAnswer(refusal_text="ValueError: Failed to find a kernel", source=SOURCE)
    decision = make_decision({make_question(forecast.plans[0]): engine_answer})
    assert [plan.argv for plan in decision.plans] == [plan.argv for plan in forecast.plans[1:]]
    rejection = next(rejection for rejection in decision.rejected if rejection.source == SOURCE)
    assert (rejection.verdict, rejection.reasons) == (
        "engine_refuses",
        (engine_answer.refusal_text,),
    )


def test_a_refusal_that_the_rules_foresaw_is_cured_as_they_cure_it() -> None:
    """The engine's words stand in the refusal; which changes are tried follows from the layer that
    the rules name."""
    forecast = make_decision(
        {}, quant="gptq", tensor_parallel=2, args={"linear-backend": "machete"}
    )
    foreseen = forecast.rejected[0]
    assert foreseen.verdict == "no_kernel"
    assert foreseen.question is not None
    engine_answer = EngineAnswer(refusal_text="ValueError: no kernel", source=SOURCE)
    decision = make_decision(
        {foreseen.question: engine_answer},
        quant="gptq",
        tensor_parallel=2,
        args={"linear-backend": "machete"},
    )
    assert (decision.rejected[0].verdict, decision.rejected[0].reasons) == (
        "no_kernel",
        (engine_answer.refusal_text,),
    )
    assert len(decision.plans) == len(forecast.plans)


def test_an_answer_overrules_a_refusal_of_the_rules() -> None:
    args = {"linear-backend": "machete"}
    foreseen = make_decision({}, quant="gptq", tensor_parallel=2, args=args).rejected[0]
    plain = make_decision({}, quant="gptq", tensor_parallel=2).plans[0]
    assert foreseen.question is not None
    best = make_decision(
        {foreseen.question: answer(plain)}, quant="gptq", tensor_parallel=2, args=args
    ).plans[0]
    assert best.grade == "checked"
    assert "--linear-backend=machete" in best.argv


def test_a_known_failure_of_a_kernel_still_counts_once_the_engine_chose_it() -> None:
    """An engine says which kernel it takes, not that this kernel is known to fail on such a GPU."""
    from gateway.domain import Fact

    forecast = make_decision({}, quant="gptq").plans[0]
    kernel = next(row.kernel for row in forecast.kernels if row.kernel and row.kernel != "torch")
    fact = Fact.model_validate(
        {
            "kind": "kernel_fails",
            "scope": {"kernel": kernel, "engine": VLLM_REF},
            "grade": "failed",
            "source": "a log",
        }
    )
    engines = [PROFILES.engine(VLLM_REF)]
    model = published_model("llama-3.1-8b", quantization_config=QUANTS["gptq"])
    hardware = PROFILES.hardware("2x3090")
    rules = PROFILES.rules(engines)
    answers = {make_question(forecast): answer(forecast)}
    decision = decide(model, hardware, engines, wish(), [fact], rules=rules, answers=answers)
    assert any(
        rejection.verdict == "known_bad" and kernel in rejection.reasons[0]
        for rejection in decision.rejected
    )


def test_a_known_crash_of_the_kernel_of_experts_still_counts_once_it_was_chosen() -> None:
    engines = [PROFILES.engine(SGLANG_REF)]
    hardware = PROFILES.hardware("2x3090")
    rules = PROFILES.rules(engines)
    model = published_model("mixtral-8x7b", quantization_config=QUANTS["fp8"])

    def outcome(answers: dict[Question, EngineAnswer]) -> Decision:
        return decide(
            model, hardware, engines, wish(tensor_parallel=2), rules=rules, answers=answers
        )

    foreseen = outcome({}).rejected[0]
    assert (foreseen.verdict, foreseen.question is None) == ("runtime_fail", False)
    assert foreseen.question is not None
    experts = next(row for row in foreseen.kernels if row.layer.endswith(".experts.w2"))
    row = AskedKernel(
        layer=experts.layer.removesuffix(".w2"),
        kernel="triton",
        k=experts.n or 0,
        n=experts.k or 0,
        experts=8,
        count=experts.count,
    )
    engine_answer = EngineAnswer(kernels=(row,), weights=1 << 30, source=SOURCE)
    assert outcome({foreseen.question: engine_answer}).rejected[0].verdict == "runtime_fail"


def test_a_refusal_in_compiled_code_outlives_an_answer_that_does_not_see_it() -> None:
    """Marlin's repacking takes 64 outputs at a time, which is said in a CUDA file: two GPUs have 32
    each of this layer."""
    engines = [PROFILES.engine(SGLANG_REF)]
    hardware, rules = PROFILES.hardware("2x3090"), PROFILES.rules(engines)
    model = published_model("qwen3.6-35b-a3b", quantization_config=QUANTS["auto-round-language"])

    def outcome(answers: dict[Question, EngineAnswer]) -> Decision:
        request = wish(tensor_parallel=2, text_only=True)
        return decide(model, hardware, engines, request, rules=rules, answers=answers)

    foreseen = outcome({}).rejected[0]
    assert foreseen.question is not None
    kernel_row = AskedKernel(
        layer="model.language_model.layers.*.linear_attn.in_proj_ba",
        kernel="apply_gptq_marlin_linear",
        k=2048,
        n=32,
        count=30,
    )
    for kernel, verdict in (("apply_gptq_marlin_linear", "no_kernel"), ("another", "")):
        row = kernel_row.evolve(kernel=kernel)
        engine_answer = EngineAnswer(kernels=(row,), weights=1 << 30, source=SOURCE)
        decision = outcome({foreseen.question: engine_answer})
        assert [rejection.verdict for rejection in decision.rejected if rejection.question is None][
            :1
        ] == ([verdict] if verdict else [])


def test_one_engine_is_asked_at_a_time_until_the_best_plan_was_checked() -> None:
    forecast = make_decision({})
    ((engine, questions, _),) = open_questions(forecast)
    assert str(engine) == VLLM_REF
    assert questions[0] == forecast.plans[0].question
    assert len(set(questions)) == len(questions)
    decision = make_decision({make_question(plan): answer(plan) for plan in forecast.plans})
    assert open_questions(decision) == ()


# --- rule gaps ---


def test_an_answer_that_agrees_is_no_gap_and_without_answers_there_is_none() -> None:
    forecast = make_decision({})
    assert forecast.gaps == ()
    assert make_decision({make_question(forecast.plans[0]): answer(forecast.plans[0])}).gaps == ()


def test_kernels_backends_and_bytes_are_compared_each() -> None:
    forecast = make_decision({}).plans[0]
    agreeing_answer = answer(forecast)
    rows = [
        row.evolve(kernel="Other") if row.layer.endswith("qkv_proj") else row
        for row in agreeing_answer.kernels
    ]
    assert agreeing_answer.kv is not None
    cache = agreeing_answer.kv.evolve(
        needed=tuple((tokens, size * 2) for tokens, size in agreeing_answer.kv.needed)
    )
    other_answer = agreeing_answer.evolve(
        kernels=tuple(rows),
        attention=tuple(
            row.evolve(backend="FLEX_ATTENTION", version=0) for row in agreeing_answer.attention
        ),
        weights=agreeing_answer.weights + 1_000_000_000,
        kv=cache,
    )
    question = make_question(forecast)
    gaps = {gap.subject: gap for gap in make_decision({question: other_answer}).gaps}
    assert set(gaps) == {
        "kernel of qkv_proj",
        "attention of full layers of head size 128",
        "weights",
        "KV cache",
    }
    kernel = gaps["kernel of qkv_proj"]
    kernel_of_plan = next(row.kernel for row in forecast.kernels if row.layer.endswith("qkv_proj"))
    assert (kernel.forecast, kernel.answer) == (kernel_of_plan, "Other")
    assert (kernel.engine, kernel.rules, kernel.source, kernel.capability) == (
        VLLM_REF,
        VLLM_REF,
        SOURCE,
        "8.6",
    )
    assert kernel.argv == question.argv
    assert kernel.model.startswith(
        "LlamaForCausalLM, model_type=llama, num_hidden_layers=32, hidden_size=4096"
    )
    assert gaps["weights"].forecast == f"{forecast.memory.weights_bytes} bytes on a rank"


def test_sizes_that_differ_by_a_rounding_are_equal() -> None:
    forecast = make_decision({}).plans[0]
    near = answer(forecast, weights=forecast.memory.weights_bytes + 1_000_000)
    assert make_decision({make_question(forecast): near}).gaps == ()


def test_an_unforeseen_refusal_is_a_gap_in_the_engines_words() -> None:
    forecast = make_decision({})
    engine_answer = EngineAnswer(
        refusal_text="ValueError: no kernel, see /home/me/secret-model/config.json", source=SOURCE
    )
    (gap,) = make_decision({make_question(forecast.plans[0]): engine_answer}).gaps
    assert (gap.subject, gap.forecast, gap.answer) == (
        "refusal",
        "loads",
        "ValueError: no kernel, see PATH",
    )


def test_only_a_refusal_unknown_to_the_engine_is_a_gap() -> None:
    args = {"linear-backend": "machete"}
    foreseen, *_ = make_decision({}, quant="gptq", tensor_parallel=2, args=args).rejected
    assert foreseen.question is not None
    engine_answer = EngineAnswer(refusal_text="ValueError: Failed to find a kernel", source=SOURCE)
    assert (
        make_decision(
            {foreseen.question: engine_answer}, quant="gptq", tensor_parallel=2, args=args
        ).gaps
        == ()
    )
    plain = make_decision({}, quant="gptq", tensor_parallel=2).plans[0]
    (gap,) = make_decision(
        {foreseen.question: answer(plain)}, quant="gptq", tensor_parallel=2, args=args
    ).gaps
    assert (gap.subject, gap.answer) == ("refusal", "loads")
    assert "no kernel for" in gap.forecast


def test_a_version_without_rules_names_whose_rules_were_wrong() -> None:
    forecast = make_decision({}, engine="vllm==0.28.0").plans[0]
    (gap,) = make_decision(
        {make_question(forecast): answer(forecast, weights=1)}, engine="vllm==0.28.0"
    ).gaps
    assert (gap.engine, gap.rules) == ("vllm==0.28.0", "vllm==0.26.0")


def test_sglangs_own_share_of_the_gpu_wins_over_ours() -> None:
    forecast = next(plan for plan in make_decision({}, engine=SGLANG_REF).plans if plan.cost == 0)
    agreeing_answer = answer(forecast)
    assert agreeing_answer.resolved_settings is not None
    assert agreeing_answer.kv is not None
    less = agreeing_answer.evolve(
        resolved_settings=agreeing_answer.resolved_settings.evolve(static_fraction=0.5),
        kv=agreeing_answer.kv.evolve(reserved_blocks=0),
    )
    best = next(
        plan
        for plan in make_decision({make_question(forecast): less}, engine=SGLANG_REF).plans
        if plan.grade == "checked"
    )
    assert "--mem-fraction-static=0.5" in best.argv
    assert best.memory.kv_bytes < forecast.memory.kv_bytes


def test_weights_quantized_while_they_load_have_their_final_size() -> None:
    """An engine is asked before it loads: then such weights are still in 16 bits."""
    args = {"quantization": "fp8"}
    forecast = make_decision({}, args=args).plans[0]
    whole = answer(forecast, weights=2 * forecast.memory.weights_bytes)
    best = next(
        plan
        for plan in make_decision({make_question(forecast): whole}, args=args).plans
        if plan.grade == "checked"
    )
    assert best.memory.weights_bytes == forecast.memory.weights_bytes
