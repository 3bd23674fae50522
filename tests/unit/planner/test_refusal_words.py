"""The words for a model without a plan."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain import Decision, EngineAvailability, FitAdvice, ModelForm, Promise
from gateway.domain.units import GIB
from gateway.planner.explain import rejections
from gateway.planner.refusal_words import cause, cure, no_plan_reason, refusal_lines
from gateway.profiles.profiles import Profiles
from tests.support.makers import wish
from tests.support.planning import decide
from tests.support.published import published_model
from tests.support.versions import VLLM_REF

PROFILES = Profiles()
ENGINES = [PROFILES.engine(VLLM_REF)]
RULES = PROFILES.rules(ENGINES)
HELD = (
    Promise(
        model="demo", bytes_by_gpu={"ram": GIB}, is_pinned=False, words="demo holds 1 GiB of RAM"
    ),
)
FORM = ModelForm(
    quantization="awq", source="o/m-AWQ", weights_bytes=GIB, context=9, engine="e==1", gpus=2
)


def decide_without_room(model: str, machine: str, **wished: Any) -> Decision:
    request = wish(**wished)
    return decide(published_model(model), PROFILES.hardware(machine), ENGINES, request, rules=RULES)


def test_memory_counts_more_than_layouts_that_nobody_asked_for() -> None:
    decision = decide_without_room("deepseek-v3", "8x3090")
    verdicts = [rejection.verdict for rejection in decision.rejected]
    assert {"illegal_parallelism", "no_memory"} <= set(verdicts)
    fitting = FitAdvice(weights_bytes=600 * GIB, room_bytes=160 * GIB)
    with_room = decision.evolve(would_fit=fitting)
    assert (
        cause(with_room) == "The weights take 600.00 GiB; at most 160.00 GiB fit on this machine."
    )
    assert cause(with_room.evolve(hardware="8x3090")).endswith(" fit on 8x3090.")
    assert refusal_lines(with_room)[1].startswith("No change that was planned gives a plan;")
    assert "besides the KV cache" in cause(decision)


def test_a_cause_is_one_sentence_where_each_of_many_backends_refuses() -> None:
    decision = decide_without_room("deepseek-v3.2", "4090")
    assert cause(decision) == "No attention backend for the 61 mla layers of head size 576."
    (group, *_) = rejections(decision.rejected)
    assert len(group.lines) > 3
    for line in group.lines[1:]:
        clauses = line.partition(": ")[2].split("; ")
        assert len(set(clauses)) == len(clauses)


def test_a_holder_or_a_form_is_the_cure_only_where_it_gives_a_plan() -> None:
    decision = decide_without_room("deepseek-v3", "2x3090")
    assert cure(decision) == ""
    decision_with_holders = decision.evolve(holders=HELD)
    assert cure(decision_with_holders) == (
        "demo holds 1 GiB of RAM. Without that there is a plan: `fitserve stop demo`."
    )
    # The command takes one name.
    two = decision.evolve(holders=(*HELD, HELD[0].evolve(model="b"), HELD[0]))
    assert cure(two).endswith(" plan: `fitserve stop demo; fitserve stop b`.")
    fitting = FitAdvice(weights_bytes=1, room_bytes=1, forms=(FORM, FORM))
    with_forms = decision.evolve(would_fit=fitting)
    assert cure(with_forms).startswith("Take another form of the model: o/m-AWQ (awq): 1.00 GiB,")
    assert len(refusal_lines(with_forms)) == 5
    change = fitting.evolve(change="Leave out `--tp`: it fits")
    assert cure(decision_with_holders.evolve(would_fit=change)) == "Leave out `--tp`: it fits."
    assert no_plan_reason(decision_with_holders.evolve(would_fit=change)).endswith(
        "Leave out `--tp`: it fits."
    )


@pytest.mark.parametrize(
    ("has_engine", "words"), [(False, "engine profile"), (True, "can be started")]
)
def test_a_machine_without_engines_is_named_as_the_cause(*, has_engine: bool, words: str) -> None:
    engines = (
        (EngineAvailability(engine="vllm==1", is_available=False, reason="no"),)
        if has_engine
        else ()
    )
    assert words in cause(Decision(model="m", hardware="h", engines=engines))


def test_numbers_of_gpus_that_divide_nothing_are_one_group() -> None:
    decision = decide_without_room("qwen3-8b", "8xh100")
    illegal = [
        group for group in rejections(decision.rejected) if group.verdict == "illegal_parallelism"
    ]
    assert [group.candidates for group in illegal] == [f"{VLLM_REF} TP=3,5,6,7"]
    assert (
        illegal[0].lines[0].startswith("32 attention heads cannot be shared by 3, 5, 6 or 7 GPUs")
    )
