"""Choices of SGLang versions between those with rules, from the answers of their own code.

A version without rules is forecast by the rules of the nearest one. Where these answer otherwise
than the version's code (choice_cases.py), its profile has the choice: rules of a further version
that answer right, or else the backend itself. `scripts/engine-profile` writes `choices`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

from gateway.domain import KnownChoice
from gateway.domain.release import release
from gateway.engines.sglang.attention import ForcedBackends, model_of, select
from gateway.models.experts import expert_traits
from gateway.models.spec import read_model
from gateway.profiles.profiles import Profiles
from tests.conformance.choice_cases import (
    REFUSED,
    Case,
    cases,
    config_of,
    question_of,
    read_answers,
)
from tests.unit.engines.common.kernels.test_sglang_kernels import moe_choice_by

_GPU_BYTES = 24 << 30


class Judged(NamedTuple):
    """A case on GPUs of one capability: whose rules answer it as the engine does."""

    case: Case
    capability: str
    name: str  # architecture, or family of experts
    answer: Any
    right: frozenset[str]


# --- the same question, answered by rules ---


def rule_answer(profiles: Profiles, ref: str, case: Case, capability: str) -> Any:
    """What the rules of a version say; `unknown`: nothing."""
    rules: Any = profiles.rules([profiles.engine(ref)])[ref]
    if case.of == "moe":
        choice = moe_choice_by(rules.moe, question_of(case), capability)
        if choice.status == "unknown":
            return "unknown"
        runner = None if choice.kernel == choice.method else choice.kernel
        return REFUSED if choice.kernel is None else [choice.method, runner]
    spec = _spec(case.model)
    model = model_of(spec.attention, spec.architecture, "auto", capability, _GPU_BYTES)
    chosen = select(rules.attention_backends, model, ForcedBackends())
    if chosen.status == "ok":
        return [chosen.prefill, chosen.decode, chosen.page]
    return REFUSED if chosen.status == "none" else "unknown"


@cache
def _spec(name: str) -> Any:
    return read_model(f"/models/{name}", None, config_of(name), None, None, (), None)


# --- choices ---


def choices_of(
    profiles: Profiles, ref: str, near: str, others: Iterable[str]
) -> tuple[KnownChoice, ...]:
    """The choices of a version that the rules of `near` do not make."""
    judged = list(_judge(profiles, ref, (near, *others)))
    groups: dict[tuple[str, ...], list[Judged]] = defaultdict(list)
    for one in judged:
        groups[one.case.of, one.capability, one.case.origin, one.case.kind].append(one)
    found: list[KnownChoice] = []
    for group in groups.values():
        rest = [one for one in group if near not in one.right]
        for other in others:
            lent = [one for one in rest if other in one.right]
            if lent:
                found.append(_choice(lent, rules=other))
            rest = [one for one in rest if one not in lent]
        for answer in sorted({json.dumps(one.answer) for one in rest if _is_named(one)}):
            same = [one for one in rest if json.dumps(one.answer) == answer]
            first, second = json.loads(answer)[:2]
            if same[0].case.of == "moe":
                backend = f"{same[0].case.kind.partition('_')[0]} {second}"
                found.append(_choice(same, backend=backend, method=first))
            else:
                found.append(_choice(same, backend=first))
    return tuple(found)


def _judge(profiles: Profiles, ref: str, ruled: Iterable[str]) -> Iterator[Judged]:
    refs = list(ruled)
    for case in cases():
        for capability, answers in answers_near(ref, refs[0]).items():
            if case.key not in answers:
                continue
            answer = answers[case.key]
            name = _spec(case.model).architecture
            if case.of == "moe":
                name = expert_traits(_spec(case.model)).family
            right = {one for one in refs if rule_answer(profiles, one, case, capability) == answer}
            yield Judged(case, capability, name, answer, frozenset(right))


def answers_near(ref: str, ruled: str) -> dict[str, dict[str, Any]]:
    """By capability the answers of this version, else those of the asked version that is fewest
    releases away; of two alike the older one.

    Answers that are further away than the version `ruled` with rules tell nothing.
    """
    version, known = (release(one.partition("==")[2]) for one in (ref, ruled))
    kept = read_answers()
    found: dict[str, dict[str, Any]] = {}
    for capability in sorted({one for answers in kept.values() for one in answers}):
        asked = sorted(release(one) for one in kept if capability in kept[one])
        near = min(asked, key=lambda one: (abs(one.micro - version.micro), one))
        if version in asked:
            near = version
        if abs(near.micro - version.micro) < abs(known.micro - version.micro):
            found[capability] = kept[str(near)][capability]
    return found


def _is_named(one: Judged) -> bool:
    """Whether a backend alone tells the answer."""
    if one.answer == REFUSED or one.answer[1] is None:
        return False
    return one.case.of == "moe" or one.answer[0] == one.answer[1]


def _choice(group: list[Judged], **known: str) -> KnownChoice:
    """The choice of these cases, which differ in their names alone."""
    case, names = group[0].case, tuple(sorted({one.name for one in group}))
    major = group[0].capability.partition(".")[0]
    where: dict[str, Any] = {"capabilities": (f"{major}.*",)}
    if case.of == "moe":
        origins = {} if case.origin == "none" else {"origins": (case.origin,)}
        where |= {"schemes": (case.kind,), **origins, "families": names}
        if case.kind == "nvfp4":
            where |= {"weight_only": False}
    else:
        where |= {"architectures": names}
    return KnownChoice(of=case.of, where=where, **known)
