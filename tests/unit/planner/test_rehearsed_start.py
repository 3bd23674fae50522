"""The effect of a rehearsed start: a plan whose start the engine refuses is none."""

from __future__ import annotations

import asyncio
from collections.abc import Container
from typing import Any

import pytest

from gateway.domain import (
    AskedCache,
    Decision,
    EngineAnswer,
    EngineRef,
    Plan,
    Question,
    RehearsedStart,
    StartSettings,
)
from gateway.engines.inquiry.inquirer import rehearses
from gateway.planner.engine_answers import open_questions
from gateway.planner.rehearsed_start import (
    build_start_settings,
    is_proven,
    missing_stages,
    start_refusal,
)
from gateway.planner.service.engine_check import EngineCheck, model_files
from tests.support.makers import wish
from tests.support.planning import decide
from tests.support.stateful_cases import CASES, ENGINES, MACHINES, RULES
from tests.support.versions import VLLM_REF

NAME, MACHINE = "qwen-27b", "2xh100"
ENGINE = [engine for engine in ENGINES if engine.ref == VLLM_REF]


def decision(**fields: Any) -> Decision:
    return decide(
        CASES[NAME], MACHINES[MACHINE], ENGINE, wish(tensor_parallel=1), rules=RULES, **fields
    )


@pytest.fixture(scope="module")
def forecast() -> Plan:
    return decision().plans[0]


def answer(forecast: Plan, start: RehearsedStart | None, **kv: int) -> EngineAnswer:
    """The engine's answer, with a cache as the rules forecast it."""
    item = kv.pop("block_bytes", 54525952)
    needs = tuple((tokens, item * (4 + tokens // 800)) for tokens in (1, 1024, 32768, 262144))
    return EngineAnswer(
        weights=forecast.memory.weights_bytes,
        kv=AskedCache(block_bytes=item, needed=needs, **kv),
        start=start,
        source="the engine",
    )


def make_decision(forecast: Plan, start: RehearsedStart | None, **kv: int) -> Decision:
    assert forecast.question is not None
    return decision(answers={forecast.question: answer(forecast, start, **kv)})


def test_the_start_of_an_open_plan_goes_along_with_its_question(forecast: Plan) -> None:
    (row,) = open_questions(decision())
    assert forecast.question in row.questions
    start = dict(row.starts)[forecast.question]
    assert start == build_start_settings(forecast)
    assert start.kv_bytes == forecast.memory.kv_bytes > 0
    assert f"--max-num-seqs={forecast.max_num_seqs.value}" in start.argv
    assert f"--max-model-len={forecast.max_model_len.value}" in start.argv


def test_flags_that_name_files_stay_out_of_a_rehearsal(forecast: Plan) -> None:
    plan = forecast.evolve(argv=(*forecast.argv, "--chat-template=/x", "--lora-modules=a=/b"))
    assert build_start_settings(plan) == build_start_settings(forecast)


@pytest.mark.parametrize("stage", ["arguments", "model", "backends", "cache", "graphs"])
def test_a_plan_whose_start_is_refused_is_none(forecast: Plan, stage: str) -> None:
    start = build_start_settings(make_decision(forecast, None).plans[0])
    rehearsal = RehearsedStart(settings=start, refused="ValueError: no", stage=stage)
    decision = make_decision(forecast, rehearsal)
    assert not any(build_start_settings(plan) == start for plan in decision.plans)
    assert any(
        rejection.verdict == "engine_refuses" and rejection.reasons == ("ValueError: no",)
        for rejection in decision.rejected
    )


@pytest.mark.parametrize("stage", ["arguments", "model", "cache"])
def test_a_plan_whose_start_crashes_makes_room_for_another(forecast: Plan, stage: str) -> None:
    start, words = build_start_settings(make_decision(forecast, None).plans[0]), "KeyError: 'theta'"
    crash = RehearsedStart(
        settings=start, refused=words, stage=stage, location="rope.py:7", has_crashed=True
    )
    assert forecast.question is not None
    answers = {forecast.question: answer(forecast, crash)}
    decision = decide(CASES[NAME], MACHINES[MACHINE], ENGINE, wish(), rules=RULES, answers=answers)
    assert decision.plans[0].tensor_parallel.value == 2
    assert not any(build_start_settings(plan) == start for plan in decision.plans)
    (reason,) = (
        rejection.reasons[0]
        for rejection in decision.rejected
        if rejection.verdict == "engine_refuses"
    )
    assert reason.startswith("KeyError: 'theta' at rope.py:7. ")
    assert "`--engine`" in reason


def test_a_crash_of_other_sizes_does_not_count(forecast: Plan) -> None:
    other_start_settings = StartSettings(argv=("--max-model-len=1",), kv_bytes=1)
    crash = RehearsedStart(
        settings=other_start_settings, refused="IndexError: 0", stage="model", has_crashed=True
    )
    assert not start_refusal(forecast, answer(forecast, crash))


def test_a_start_that_ran_leaves_the_plan(forecast: Plan) -> None:
    start = build_start_settings(make_decision(forecast, None).plans[0])
    best = make_decision(forecast, RehearsedStart(settings=start, run_stages=("cache",))).plans[0]
    assert (best.grade, best.question) == ("checked", None)


def test_a_refusal_of_other_sizes_does_not_count(forecast: Plan) -> None:
    other_start_settings = StartSettings(argv=("--max-model-len=1",), kv_bytes=1)
    of_sizes = RehearsedStart(settings=other_start_settings, refused="too long", stage="cache")
    assert not start_refusal(forecast, answer(forecast, of_sizes))
    of_flags = of_sizes.evolve(stage="backends")
    assert start_refusal(forecast, answer(forecast, of_flags)) == "too long"


def test_the_engines_own_states_lower_the_requests(forecast: Plan) -> None:
    state = forecast.memory.kv_bytes // 100
    best = make_decision(forecast, None, state_bytes=state).plans[0]
    assert best.grade == "checked"
    assert best.max_num_seqs.value < 100
    assert "state blocks fit" in best.max_num_seqs.reason
    two = make_decision(forecast, None, state_bytes=state, states_per_request=5).plans[0]
    assert two.max_num_seqs.value <= 20


def test_sizes_that_an_answer_changed_are_rehearsed_once_more(forecast: Plan) -> None:
    """The engine refused the forecast's requests, and its own states lower them."""
    assert forecast.question is not None
    state = forecast.memory.kv_bytes // 100
    rehearsal = RehearsedStart(
        settings=build_start_settings(forecast), refused="too many", stage="graphs"
    )
    first_answer = answer(forecast, rehearsal, state_bytes=state)
    (row,) = open_questions(outcome := decision(answers={forecast.question: first_answer}))
    plan = outcome.plans[0]
    assert plan.grade == "checked"
    assert plan.max_num_seqs.value < 100
    assert (
        dict(row.starts)[row.questions[0]]
        == build_start_settings(plan)
        != build_start_settings(forecast)
    )
    second = first_answer.evolve(
        start=RehearsedStart(settings=build_start_settings(plan), run_stages=("graphs",))
    )
    best = decision(answers={forecast.question: second}).plans[0]
    assert (best.argv, best.question) == (plan.argv, None)


@pytest.mark.parametrize(
    ("argv", "proven"),
    [
        (("--max-num-seqs=8", "--max-model-len=4096"), True),
        (("--max-num-seqs=8", "--max-model-len=4096", "--gpu-memory-utilization=0.5"), True),
        (("--max-num-seqs=16", "--max-model-len=8192"), True),
        (("--max-num-seqs=7", "--max-model-len=4096"), False),
        (("--max-num-seqs=8", "--max-model-len=2048"), False),
        (("--max-num-seqs=8",), False),
        (("--max-num-seqs=8", "--max-model-len=4096", "--enforce-eager"), False),
    ],
)
def test_a_rehearsed_start_proves_only_smaller_limits(
    forecast: Plan, argv: tuple[str, ...], proven: bool
) -> None:
    plan = forecast.evolve(
        argv=("--max-model-len=4096", "--max-num-seqs=8", "--gpu-memory-utilization=0.9")
    )
    start = RehearsedStart(settings=StartSettings(argv=argv), run_stages=("graphs",))
    assert is_proven(plan, answer(forecast, start)) == proven


def test_a_refused_rehearsal_proves_no_start(forecast: Plan) -> None:
    plan = forecast.evolve(argv=("--max-num-seqs=8",))
    settings = StartSettings(argv=("--max-num-seqs=16",))
    rehearsal = RehearsedStart(settings=settings, refused="too many", stage="graphs")
    assert not is_proven(plan, answer(forecast, rehearsal))
    assert is_proven(plan, answer(forecast, None))


def test_a_kept_answer_of_another_start_is_asked_again(forecast: Plan) -> None:
    start = build_start_settings(forecast)
    kept_answer = answer(forecast, RehearsedStart(settings=start))
    assert rehearses(kept_answer, start)
    assert rehearses(kept_answer, start.evolve(kv_bytes=start.kv_bytes + start.kv_bytes // 100))
    assert not rehearses(kept_answer, start.evolve(kv_bytes=start.kv_bytes * 2))
    assert not rehearses(kept_answer, start.evolve(argv=("--max-num-seqs=1",)))
    assert rehearses(answer(forecast, None), start), "an engine that rehearses nothing"


def test_a_checked_plan_names_unrehearsed_parts(forecast: Plan) -> None:
    start = build_start_settings(make_decision(forecast, None).plans[0])
    rehearsed_start = RehearsedStart(settings=start, skipped_steps=("capture of CUDA graphs",))
    best = make_decision(forecast, rehearsed_start).plans[0]
    assert best.unrehearsed == ("capture of CUDA graphs",)
    with_files = best.evolve(argv=(*best.argv, "--lora-modules=a=/b"))
    assert missing_stages(with_files, answer(forecast, rehearsed_start)) == (
        "capture of CUDA graphs",
        "--lora-modules: its file",
    )
    assert forecast.unrehearsed == ()


class _Inquirer:
    """Stands for an engine that refuses the first start for its size, and runs the next one."""

    def __init__(self, answer: EngineAnswer) -> None:
        self.answer = answer
        self.questions: list[StartSettings] = []

    async def exact(self, engine: EngineRef) -> EngineRef:
        return engine

    async def answers(
        self,
        *,
        starts: dict[Question, Any],
        unproven_questions: Container[Question],
        **_: Any,
    ) -> dict[Question, EngineAnswer]:
        (question,) = starts
        assert (question in unproven_questions) == bool(self.questions)
        self.questions.append(start := starts[question])
        refusal = "" if len(self.questions) > 1 else "too many"
        rehearsal = RehearsedStart(settings=start, refused=refusal, stage="graphs")
        return {question: self.answer.evolve(start=rehearsal)}


def test_a_check_rehearses_changed_sizes_once(forecast: Plan) -> None:
    forecast_answer = answer(forecast, None, state_bytes=forecast.memory.kv_bytes // 100)
    inquirer: Any = _Inquirer(forecast_answer)
    check = EngineCheck(inquirer, MACHINES[MACHINE], model_files({}, None))

    async def settled_decision() -> Decision:
        outcome = decision()
        while await check.query(open_questions(outcome)[:1]):
            outcome = decision(answers=check.answers)
        return outcome

    best = asyncio.run(settled_decision()).plans[0]
    assert (best.grade, best.question) == ("checked", None)
    assert inquirer.questions == [build_start_settings(forecast), build_start_settings(best)]
    assert best.max_num_seqs.value < forecast.max_num_seqs.value
