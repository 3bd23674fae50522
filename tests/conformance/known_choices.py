"""Choices of SGLang versions between those with rules, from the answers of their own code.

A version without rules is forecast by the rules of the nearest one. Where these answer otherwise
than the version's code (choice_cases.py), its profile has the choice: rules of a further version
that answer right, or else the backend itself. `scripts/engine-profile` writes `choices`.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from gateway.domain import Engine, KnownChoice, Quant
from gateway.domain.release import release
from gateway.engines.common.kernels.linear import choose
from gateway.engines.sglang.attention import ForcedBackends, model_of, select
from gateway.engines.sglang.kv_cache import model_of as traits_of
from gateway.engines.sglang.memory import MemoryRules, static_memory
from gateway.models.experts import expert_traits
from gateway.models.scheme import LinearShape
from gateway.planner.quantization_methods import MethodRefused, check, resolve
from gateway.profiles.profiles import Profiles
from tests.conformance.choice_cases import (
    REFUSED,
    Case,
    attention_question,
    case_of,
    cases,
    config_of,
    linear_schemes,
    memory_of,
    question_of,
    read_answers,
)
from tests.conformance.moe_blocks import block
from tests.support.paths import MODELS
from tests.support.published import model_from_config
from tests.support.versions import order
from tests.unit.engines.common.kernels.test_sglang_kernels import moe_choice_by, scheme_of

UNKNOWN = "unknown"
VERDICTS = ("right", "wrong", UNKNOWN)
_GPU_BYTES = 24 << 30
_ROUNDING = 1e-4  # of a share of memory
# One capability of each kind that rules tell apart. Answers of fewer say nothing of the others.
_GPU_KINDS = {"8.9", "9.0", "10.0", "12.0"}
# The method of experts that the engine leaves unquantized without a word.
_UNQUANTIZED = ["UnquantizedFusedMoEMethod", "triton"]
# Settings of memory.yaml that say which prefill has graphs, and so how much is set aside.
_GRAPH_FIELDS = ("no_prefill_graphs", "multimodal_prefill_graphs", "multimodal", "text_only")


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
    engine = profiles.engine(ref)
    rules: Any = profiles.rules([engine])[ref]
    if case.of == "memory":
        return _memory_answer(rules.memory, case)
    if case.of == "linear":
        return _linear_answer(rules, engine, case, capability)
    if case.of == "moe":
        if refused_as_a_whole(engine, question_of(case), capability):
            return REFUSED
        choice = moe_choice_by(rules.moe, question_of(case), capability)
        if choice.status == UNKNOWN:
            return UNKNOWN
        runner = None if choice.kernel == choice.method else choice.kernel
        return REFUSED if choice.kernel is None else [choice.method, runner]
    spec, asked = _spec(case.model), attention_question(case)
    model = model_of(spec.attention, spec.architecture, asked.kv_dtype, capability, _GPU_BYTES)
    chosen = select(rules.attention_backends, model, ForcedBackends(attention=asked.attention))
    if chosen.status == "ok":
        return [chosen.prefill, chosen.decode, chosen.page]
    return REFUSED if chosen.status == "none" else UNKNOWN


def is_same(case: Case, said: Any, answer: Any) -> bool:
    """Whether rules and engine agree. Methods of integers without a runner call Marlin."""
    if case.kind == "wna16" and isinstance(said, list) and isinstance(answer, list):
        return (said[1] or "marlin") == (answer[1] or "marlin")
    if case.of == "memory":
        close = abs(said[2] - answer[2]) < _ROUNDING
        return close and (said[:2], said[3]) == (answer[:2], answer[3])
    return bool(said == answer)


def _linear_answer(rules: Any, engine: Engine, case: Case, capability: str) -> Any:
    q = next(one for one in linear_schemes() if case_of(one) == case)
    if refused_as_a_whole(engine, q, capability):
        return REFUSED
    k, n, parts = q.parts
    sizes: dict[str, Any] = {"k": k, "n": n, "full_k": q.k, "full_n": q.n, "parts": parts}
    shape = LinearShape(scheme=scheme_of(q), dtype=q.dtype, origin=q.origin, **sizes)
    choice = choose(rules.linear, shape, capability)
    return UNKNOWN if choice.status == UNKNOWN else choice.kernel or REFUSED


def _memory_answer(rules: MemoryRules, case: Case) -> Any:
    spec, (memory, tp) = _spec(case.model), memory_of(case)
    said = static_memory(rules, memory, traits_of(spec), tp=tp)
    states = 0
    if any(group.kind == "recurrent" for group in spec.attention):
        buffered = spec.architecture in rules.buffered_states
        states = rules.state_slots + (rules.buffered_slots if buffered else 0)
    return [said.chunked_prefill, said.graph_batch, round(said.fraction, 5), states]


def refused_as_a_whole(engine: Engine, q: Any, capability: str, model_type: str = "llama") -> bool:
    """The planner refuses such a checkpoint before it looks at any layer."""
    config = block(q)  # None: the engine itself quantizes
    quant, user = (
        (Quant(method=config["quant_method"], config=config), "") if config else (None, "fp8")
    )
    if config is None and q.origin == "none":
        return False
    try:
        check(engine, resolve(engine, quant, user, model_type, capability), capability, q.dtype)
    except MethodRefused:
        return True
    return False


@cache
def _spec(name: str) -> Any:
    return model_from_config(config_of(name), source=f"/models/{name}")


def agreement(
    profiles: Profiles, ref: str, answers: Mapping[str, Mapping[str, Any]]
) -> dict[tuple[str, str], Counter[str]]:
    """(kind of choice, capability) -> how often the planner is right, wrong or says `unknown`."""
    table: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for one in _cases_with_answers(profiles, ref, answers):
        said = rule_answer(profiles, ref, one.case, one.capability)
        kind = one.case.of + (" forced" if one.case.detail.startswith("forced") else "")
        same = is_same(one.case, said, one.answer)
        verdict = "right" if same else UNKNOWN if said == UNKNOWN else "wrong"
        table[kind, one.capability][verdict] += 1
    return dict(table)


# --- choices ---


def choices_of(
    profiles: Profiles, ref: str, near: str, others: Iterable[str]
) -> tuple[KnownChoice, ...]:
    """The choices of a version that the rules of `near` do not make."""
    answers, refs = answers_near(ref, near), [near, *others]
    judged = list(_judge(profiles, ref, answers, refs))
    whole = _whole_families(judged, refs)
    plain: dict[tuple[str, str], list[Judged]] = defaultdict(list)
    for one in judged:
        if one.case.of == "attention_backends" and not one.case.detail:
            plain[one.name, one.capability].append(one)
    known: dict[tuple[Case, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for one in judged:
        if near in one.right or (one.case.of == "moe" and one.name in whole):
            continue
        # A model's rules are lent whole: what they say of a forced backend alone is no reason.
        usual = plain[one.name, one.capability] if one.case.detail else []
        if one.case.of == "attention_backends" and any(
            near in other.right and not one.right & other.right - {near} for other in usual
        ):
            continue
        if choice := _choice_of(profiles, one, refs):
            form = one.case.detail if one.case.of == "linear" else ""
            case = one.case._replace(model="", detail=form)
            known[case, json.dumps(choice)][one.name].add(one.capability)
    rows: dict[tuple[Case, str, tuple[str, ...]], list[str]] = defaultdict(list)
    for (case, row), by_name in known.items():
        for name, capabilities in by_name.items():
            rows[case, row, _capabilities(capabilities, answers)].append(name)
    loans: dict[str, list[str]] = defaultdict(list)
    for name, other in whole.items():
        loans[other].append(name)
    everywhere = _conditions_on(_capabilities(answers, answers))
    found = [
        *(
            KnownChoice(
                of="moe", where=everywhere | {"families": tuple(sorted(names))}, rules=other
            )
            for other, names in loans.items()
        ),
        *(
            KnownChoice.model_validate(
                {"of": case.of, "where": _conditions(case, capabilities, names), **json.loads(row)}
            )
            for (case, row, capabilities), names in rows.items()
        ),
    ]
    return (*_merge(found), *_memory_choices(profiles, ref, answers, refs))


def _whole_families(judged: list[Judged], refs: list[str]) -> dict[str, str]:
    """Family of experts -> the version whose rules answer all cases of it that any rules answer,
    where the nearest ones do not."""
    found: dict[str, str] = {}
    families: dict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        if one.case.of == "moe" and one.right:
            families[one.name].append(one)
    for name, cases_of in families.items():
        if all(refs[0] in one.right for one in cases_of):
            continue
        for other in refs[1:]:
            if all(other in one.right for one in cases_of):
                found[name] = other
                break
    return found


def _merge(choices: list[KnownChoice]) -> list[KnownChoice]:
    """Rows that differ in one condition of several values become one row."""
    for field in ("groups", "bits", "schemes"):
        merged: dict[str, KnownChoice] = {}
        for one in choices:
            where = dict(one.where)
            values = where.pop(field, ())
            key = json.dumps([one.evolve(where=where).model_dump(mode="json"), bool(values)])
            if key in merged and values:
                known = merged[key].where[field]
                values = tuple(sorted({*known, *values}))  # type: ignore[misc]
            merged[key] = one.evolve(where={**one.where, field: values} if values else one.where)
        choices = list(merged.values())
    return choices


def _choice_of(profiles: Profiles, one: Judged, refs: list[str]) -> dict[str, Any] | None:
    """The rules of a further version that tell this answer, or the answer itself; None: neither.

    A backend that no rules describe tells nothing, and sizes of integer weights decide too. Rules
    that say `unknown` are better than wrong ones.
    """
    for other in refs[1:]:
        if other in one.right:
            return {"rules": other}
    if one.answer == REFUSED and one.case.of == "moe":
        return {"refuses": True}
    named = None
    if one.answer != REFUSED and not one.case.detail.startswith(("forced", "kv")):
        named = _backend_of(profiles, one, refs)
    said = {ref: rule_answer(profiles, ref, one.case, one.capability) for ref in refs}
    if named is None and said[refs[0]] != UNKNOWN and one.case.of != "attention_backends":
        return next(({"rules": other} for other in refs[1:] if said[other] == UNKNOWN), None)
    if said[refs[0]] == UNKNOWN and one.case.of == "linear":
        return None  # the rules know why they do not say
    return named


def _backend_of(profiles: Profiles, one: Judged, refs: list[str]) -> dict[str, Any] | None:
    """The backend of the answer, if rules describe it."""
    if one.case.kind == "wna16":
        return None
    rules: list[Any] = [profiles.rules([profiles.engine(ref)])[ref] for ref in refs]
    if one.case.of == "linear":
        known = any(one.answer in each.linear.kernels for each in rules)
        return {"backend": one.answer} if known else None
    first, second = one.answer[:2]
    if one.case.of == "moe":
        backend = f"{one.case.kind.partition('_')[0]} {second}" if second else first
        known = any(backend in each.moe.backends for each in rules)
        return {"backend": backend, "method": first} if known else None
    backends = {name for each in rules for name in each.attention_backends.backends}
    if not {first, second} <= backends:
        return None
    return {"backend": first} | ({"decode": second} if second != first else {})


def _capabilities(
    capabilities: Iterable[str], answers: Mapping[str, Mapping[str, Any]]
) -> tuple[str, ...]:
    """Conditions on the capability: whole families where all asked GPUs of it are alike, and none
    where GPUs of every kind are."""
    if {*capabilities} == {*answers} and answers.keys() >= _GPU_KINDS:
        return ()
    found: list[str] = []
    for major in sorted({one.partition(".")[0] for one in capabilities}, key=int):
        mine = {one for one in capabilities if one.partition(".")[0] == major}
        asked = {one for one in answers if one.partition(".")[0] == major}
        # FP8 begins with 8.9.
        whole = mine == asked and (major != "8" or len({one == "8.9" for one in asked}) > 1)
        before = major == "8" and "8.9" not in mine
        found += [f"{major}.*"] if whole else ["8.0", "8.6", "8.7"] if before else sorted(mine)
    return tuple(found)


def _cases_with_answers(
    profiles: Profiles, ref: str, answers: Mapping[str, Mapping[str, Any]]
) -> Iterator[Judged]:
    """The cases that an answer is known of, of models that the version has."""
    architectures = {*profiles.engine(ref).architectures}
    for case in cases():
        name = _spec(case.model).architecture if case.model else ""
        if name and name not in architectures:
            continue
        if case.of == "moe":
            name = expert_traits(_spec(case.model)).family
        for capability, said in answers.items():
            answer = said.get(case.key)
            if answer is None or _tells_nothing(case, answer):
                continue
            if case.of == "memory":
                if capability != min(answers, key=order) or answer == REFUSED:
                    continue
                recurrent = any(one.kind == "recurrent" for one in _spec(case.model).attention)
                answer = [*answer[:2], round(answer[2], 5), answer[3] if recurrent else 0]
            yield Judged(case, capability, name, answer, frozenset())


def _tells_nothing(case: Case, answer: Any) -> bool:
    """Whether a reduced config is refused for what it lacks, or the layer names a runner that does
    not multiply such experts."""
    if case.of == "attention_backends":
        return answer == REFUSED and not (MODELS / f"{case.model}.json").is_file()
    if answer == _UNQUANTIZED and case.of == "moe":
        return case.kind != "unquantized"
    return case.of == "moe" and case.kind == "nvfp4" and answer[1] == "triton"


def _judge(
    profiles: Profiles, ref: str, answers: Mapping[str, Mapping[str, Any]], refs: list[str]
) -> Iterator[Judged]:
    for one in _cases_with_answers(profiles, ref, answers):
        if one.case.of != "memory":
            right = {
                other
                for other in refs
                if is_same(
                    one.case, rule_answer(profiles, other, one.case, one.capability), one.answer
                )
            }
            yield one._replace(right=frozenset(right))


def _memory_choices(
    profiles: Profiles, ref: str, answers: Mapping[str, Mapping[str, Any]], refs: list[str]
) -> list[KnownChoice]:
    """Settings that the answers about memory show: those of a further version, or values."""
    asked = [one for one in _cases_with_answers(profiles, ref, answers) if one.case.of == "memory"]
    if not asked:
        return []
    rules = {other: _memory_rules(profiles, other) for other in refs}
    near = rules[refs[0]]
    found: list[KnownChoice] = []
    sized = [one for one in asked if one.case.detail]
    right = [
        other
        for other in refs
        if all(_memory_answer(rules[other], one.case)[:2] == one.answer[:2] for one in sized)
    ]
    if right and refs[0] not in right:
        found.append(KnownChoice(of="memory", rules=right[0], fields=("classes",)))
        near = near.evolve(classes=rules[right[0]].classes)
    wrong: dict[str, set[str]] = defaultdict(set)
    for one in asked:
        said = _memory_answer(near, one.case)
        if said[3] != one.answer[3]:
            wrong["buffered_states"].add(one.name)
        if said[:2] == one.answer[:2] and abs(said[2] - one.answer[2]) >= _ROUNDING:
            for field in _GRAPH_FIELDS:
                changed = near.evolve(**{field: tuple({*getattr(near, field)} ^ {one.name})})
                if abs(_memory_answer(changed, one.case)[2] - one.answer[2]) < _ROUNDING:
                    wrong[field].add(one.name)
                    break
    values = {
        field: tuple(sorted({*getattr(near, field)} ^ names)) for field, names in wrong.items()
    }
    if values:
        found.append(KnownChoice(of="memory", values=values))
    return found


def _memory_rules(profiles: Profiles, ref: str) -> MemoryRules:
    rules: Any = profiles.rules([profiles.engine(ref)])[ref]
    return rules.memory  # type: ignore[no-any-return]


def answers_near(ref: str, ruled: str) -> dict[str, dict[str, Any]]:
    """By capability the answers of this version, and where it has none those of the asked version
    that is fewest releases away; of two alike the older one.

    Answers that are further away than the version `ruled` with rules tell nothing.
    """
    version, known = (release(one.partition("==")[2]) for one in (ref, ruled))
    kept = read_answers()

    def away(one: str) -> tuple[int, bool, Any]:
        asked = release(one)
        return abs(asked.micro - version.micro), asked != version, asked

    near = [one for one in kept if away(one)[0] < abs(known.micro - version.micro)]
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for one in sorted(near, key=away, reverse=True):
        for capability, answers in kept[one].items():
            found[capability] |= answers
    return {capability: found[capability] for capability in sorted(found, key=order)}


def _conditions_on(capabilities: tuple[str, ...]) -> dict[str, Any]:
    return {"capabilities": capabilities} if capabilities else {}


def _conditions(case: Case, capabilities: tuple[str, ...], names: list[str]) -> dict[str, Any]:
    """The conditions of these cases, which differ in their names alone."""
    where = _conditions_on(capabilities)
    if case.of == "attention_backends":
        return where | {"architectures": tuple(sorted(names))}
    where |= {"schemes": (case.kind,)}
    if case.origin != "none":
        where |= {"origins": (case.origin,)}
    if case.of == "moe":
        if case.kind == "nvfp4":
            where |= {"weight_only": False}
        return where | {"families": tuple(sorted(names))}
    q = next(one for one in linear_schemes() if case_of(one) == case)
    where |= {"bits": (q.bits,), "groups": (q.group,), "symmetric": q.symmetric}
    where |= {"act_order": "yes" if q.act_order else "no"} if q.kind == "wna16" else {}
    return where | {"static_activation": q.static, "weight_only": q.weight_only}
