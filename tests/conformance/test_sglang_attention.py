"""The attention backends of SGLang: every kept answer of the engine equals the planner's."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.engines.common.rules.subject import AttentionQuery, Subject
from gateway.engines.sglang.attention import ForcedBackends, Selection, describe_model, select
from tests.conformance import sglang_attention_questions as asked
from tests.conformance.golden import golden, pairs
from tests.support.versions import SGLANG
from tests.unit.engines.sglang.test_attention import model, rows, rules

MIB = 1024**2


# The specs of models that are only made up for the questions.
MADE_UP: dict[str, dict[str, Any]] = {
    "falcon-h1": {"recurrent": "mamba2"},
    "glm-4.7-flash": {"kind": "mla"},
}


MADE_UP |= {"glm-5": {"kind": "mla", "sparse": True}, "lfm2": {}, "llama-4": {}}


def resolve(version: str, capability: str, q: asked.Question) -> Selection:
    if q.model in asked.OTHERS:
        architecture = asked.OTHERS[q.model]["architectures"][0]
        query = AttentionQuery(
            **{"kind": "full", **MADE_UP[q.model]}, architecture=architecture, kv_dtype=q.kv_dtype
        )
        about = Subject(capability, attention=query, gpu_gib=q.gpu_mib / 1024)
    else:
        spec = model(q.model)
        about = describe_model(
            spec.attention, spec.architecture, q.kv_dtype, capability, q.gpu_mib * MIB
        )
    forced_backends = ForcedBackends(
        attention=q.attention, prefill=q.prefill, decode=q.decode, page=q.page
    )
    return select(rules(version), about, forced_backends)


@pytest.mark.parametrize("capability", asked.CAPABILITIES)
@pytest.mark.parametrize("version", SGLANG)
def test_backends_and_pages_equal_the_engines(version: str, capability: str) -> None:
    wrong = []
    for question, answer in pairs(asked, version, capability):
        choice = resolve(version, capability, question)
        planner_answer = (
            [choice.prefill, choice.decode, choice.page] if choice.status == "ok" else choice.status
        )
        if planner_answer != ("none" if isinstance(answer, str) else answer[:3]):
            wrong.append((question, answer, choice))
    assert wrong == []


@pytest.mark.parametrize("capability", asked.CAPABILITIES)
@pytest.mark.parametrize("version", SGLANG)
def test_recurrent_layers_and_towers_get_the_backends_of_the_engine(
    version: str, capability: str
) -> None:
    wrong = []
    plain = [
        (q, answer)
        for q, answer in pairs(asked, version, capability)
        if q == asked.Question(q.model)
    ]
    plain = [(q, answer) for q, answer in plain if q.model not in asked.OTHERS]
    for question, answer in plain:
        if isinstance(answer, str):
            continue
        planner_rows = rows(version, question.model, capability)
        recurrent, tower = answer[3], answer[5]
        if recurrent is not None:
            _, prefill, decode = recurrent
            if planner_rows["recurrent"].backend != (
                prefill if prefill == decode else f"{prefill}/{decode}"
            ):
                wrong.append((question, recurrent, planner_rows["recurrent"]))
        if "vision" in planner_rows and planner_rows["vision"].backend != tower:
            wrong.append((question, tower, planner_rows["vision"]))
    assert len(plain) >= 40
    assert wrong == []


def test_every_backend_and_every_limit_was_asked_for() -> None:
    """A rule that no answer depends on is not held to anything; these are the ones that none of the
    models reaches."""
    for version in SGLANG:
        answers = [
            answer
            for question_answers in golden(asked, version).values()
            for answer in question_answers
        ]
        backends = {
            name for answer in answers if not isinstance(answer, str) for name in answer[:2]
        }
        assert set(rules(version).backends) - backends <= {"flashmla", "cutlass_mla", "nsa", "dsa"}
        assert len({answer for answer in answers if isinstance(answer, str)}) >= 10
