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
from gateway.engines.sglang.attention import ForcedBackends, describe_model, select
from gateway.engines.sglang.kv_cache import read_traits as traits_of
from gateway.engines.sglang.memory import MemoryRules, static_memory
from gateway.models.experts import expert_traits
from gateway.models.scheme import LinearShape
from gateway.planner.quantization_methods import MethodRefusalError, check, resolve
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
from tests.support.sglang_kernels import moe_choice_by, scheme_of
from tests.support.versions import order

UNKNOWN = "unknown"
VERDICTS = ("right", "wrong", UNKNOWN)
_GPU_BYTES = 24 << 30
_ROUNDING = 1e-4  # of a share of memory
# One capability of each kind that rules tell apart. Answers of fewer say nothing of the others.
_GPU_KINDS = {"8.6", "8.9", "9.0", "10.0", "12.0"}
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
    """The answers of a version's rules; `unknown`: nothing."""
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
    spec, question = _spec(case.model), attention_question(case)
    model = describe_model(
        spec.attention, spec.architecture, question.kv_dtype, capability, _GPU_BYTES
    )
    attention_choice = select(
        rules.attention_backends, model, ForcedBackends(attention=question.attention)
    )
    if attention_choice.status == "ok":
        return [attention_choice.prefill, attention_choice.decode, attention_choice.page]
    return REFUSED if attention_choice.status == "none" else UNKNOWN


def is_same(case: Case, engine_answer: Any, answer: Any) -> bool:
    """Whether rules and engine agree. Methods of integers without a runner call Marlin."""
    if case.kind == "wna16" and isinstance(engine_answer, list) and isinstance(answer, list):
        return (engine_answer[1] or "marlin") == (answer[1] or "marlin")
    if case.of == "memory":
        close = abs(engine_answer[2] - answer[2]) < _ROUNDING
        return close and (engine_answer[:2], engine_answer[3]) == (answer[:2], answer[3])
    return bool(engine_answer == answer)


def _linear_answer(rules: Any, engine: Engine, case: Case, capability: str) -> Any:
    q = next(linear_scheme for linear_scheme in linear_schemes() if case_of(linear_scheme) == case)
    if refused_as_a_whole(engine, q, capability):
        return REFUSED
    k, n, parts = q.parts
    sizes: dict[str, Any] = {"k": k, "n": n, "full_k": q.k, "full_n": q.n, "parts": parts}
    shape = LinearShape(scheme=scheme_of(q), dtype=q.dtype, origin=q.origin, **sizes)
    choice = choose(rules.linear, shape, capability)
    return UNKNOWN if choice.status == UNKNOWN else choice.kernel or REFUSED


def _memory_answer(rules: MemoryRules, case: Case) -> Any:
    spec, (memory, tp) = _spec(case.model), memory_of(case)
    answer = static_memory(rules, memory, traits_of(spec), tp=tp)
    states = 0
    if any(group.kind == "recurrent" for group in spec.attention):
        has_buffer = spec.architecture in rules.buffered_states
        states = rules.state_slots + (rules.buffered_slots if has_buffer else 0)
    return [answer.chunked_prefill, answer.graph_batch, round(answer.fraction, 5), states]


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
    except MethodRefusalError:
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
    for case in _cases_with_answers(profiles, ref, answers):
        answer = rule_answer(profiles, ref, case.case, case.capability)
        kind = case.case.of + (" forced" if case.case.detail.startswith("forced") else "")
        agrees = is_same(case.case, answer, case.answer)
        verdict = "right" if agrees else UNKNOWN if answer == UNKNOWN else "wrong"
        table[kind, case.capability][verdict] += 1
    return dict(table)


# --- choices ---


def choices_of(
    profiles: Profiles, ref: str, near: str, other_refs: Iterable[str]
) -> tuple[KnownChoice, ...]:
    """The choices of a version that the rules of `near` do not make."""
    answers, refs = answers_near(ref, near), [near, *other_refs]
    cases = list(_judge(profiles, ref, answers, refs))
    whole = _whole_families(cases, refs)
    plain: dict[tuple[str, str], list[Judged]] = defaultdict(list)
    for judged_case in cases:
        if judged_case.case.of == "attention_backends" and not judged_case.case.detail:
            plain[judged_case.name, judged_case.capability].append(judged_case)
    values_by_case: dict[tuple[Case, str], dict[str, set[str]]] = defaultdict(
        lambda: defaultdict(set)
    )
    for judged_case in cases:
        if near in judged_case.right or (
            judged_case.case.of == "moe" and judged_case.name in whole
        ):
            continue
        # A model's rules are lent whole: their words about a forced backend alone are not a reason.
        usual = plain[judged_case.name, judged_case.capability] if judged_case.case.detail else []
        if judged_case.case.of == "attention_backends" and any(
            near in other_answer.right and not judged_case.right & other_answer.right - {near}
            for other_answer in usual
        ):
            continue
        if choice := _choice_of(profiles, judged_case, refs):
            form = judged_case.case.detail if judged_case.case.of == "linear" else ""
            case = judged_case.case._replace(model="", detail=form)
            values_by_case[case, json.dumps(choice)][judged_case.name].add(judged_case.capability)
    rows: dict[tuple[Case, str, tuple[str, ...]], list[str]] = defaultdict(list)
    for (case, row), by_name in values_by_case.items():
        for name, capabilities in by_name.items():
            rows[case, row, _capabilities(capabilities, answers)].append(name)
    names_by_answer: dict[str, list[str]] = defaultdict(list)
    for name, other_answer in whole.items():
        names_by_answer[other_answer].append(name)
    all_conditions = _conditions_on(_capabilities(answers, answers))
    choices = [
        *(
            KnownChoice(
                rules_file="moe",
                conditions=all_conditions | {"families": tuple(sorted(names))},
                rules=other_answer,
            )
            for other_answer, names in names_by_answer.items()
        ),
        *(
            KnownChoice.model_validate(
                {"of": case.of, "where": _conditions(case, capabilities, names), **json.loads(row)}
            )
            for (case, row, capabilities), names in rows.items()
        ),
    ]
    return (*_merge(choices), *_memory_choices(profiles, ref, answers, refs))


def _whole_families(judged: list[Judged], refs: list[str]) -> dict[str, str]:
    """Family of experts -> the version whose rules answer all cases of it that any rules answer,
    where the nearest ones do not."""
    family_names: dict[str, str] = {}
    families: dict[str, list[Judged]] = defaultdict(list)
    for case in judged:
        if case.case.of == "moe" and case.right:
            families[case.name].append(case)
    for name, cases_of in families.items():
        if all(refs[0] in case.right for case in cases_of):
            continue
        for other_ref in refs[1:]:
            if all(other_ref in case.right for case in cases_of):
                family_names[name] = other_ref
                break
    return family_names


def _merge(choices: list[KnownChoice]) -> list[KnownChoice]:
    """Rows that differ in one condition of several values become one row."""
    for field in ("groups", "bits", "schemes"):
        merged_choices: dict[str, KnownChoice] = {}
        for choice in choices:
            where = dict(choice.conditions)
            values = where.pop(field, ())
            key = json.dumps(
                [choice.evolve(conditions=where).model_dump(mode="json"), bool(values)]
            )
            if key in merged_choices and values:
                field_values = merged_choices[key].conditions[field]
                values = tuple(sorted({*field_values, *values}))  # type: ignore[misc]
            merged_choices[key] = choice.evolve(
                conditions={**choice.conditions, field: values} if values else choice.conditions
            )
        choices = list(merged_choices.values())
    return choices


def _choice_of(profiles: Profiles, judged: Judged, refs: list[str]) -> dict[str, Any] | None:
    """The rules of a further version that tell this answer, or the answer itself; None: neither.

    A backend that no rules describe tells nothing, and sizes of integer weights decide too. Rules
    that say `unknown` are better than wrong ones.
    """
    for other_ref in refs[1:]:
        if other_ref in judged.right:
            return {"rules": other_ref}
    if judged.answer == REFUSED and judged.case.of == "moe":
        return {"refuses": True}
    backend = None
    if judged.answer != REFUSED and not judged.case.detail.startswith(("forced", "kv")):
        backend = _backend_of(profiles, judged, refs)
    answers_by_version = {
        ref: rule_answer(profiles, ref, judged.case, judged.capability) for ref in refs
    }
    if (
        backend is None
        and answers_by_version[refs[0]] != UNKNOWN
        and judged.case.of != "attention_backends"
    ):
        return next(
            (
                {"rules": other_ref}
                for other_ref in refs[1:]
                if answers_by_version[other_ref] == UNKNOWN
            ),
            None,
        )
    if answers_by_version[refs[0]] == UNKNOWN and judged.case.of == "linear":
        return None  # the rules know why they do not say
    return backend


def _backend_of(profiles: Profiles, judged: Judged, refs: list[str]) -> dict[str, Any] | None:
    """The backend of the answer, if rules describe it."""
    if judged.case.kind == "wna16":
        return None
    rules: list[Any] = [profiles.rules([profiles.engine(ref)])[ref] for ref in refs]
    if judged.case.of == "linear":
        is_known = any(judged.answer in rule.linear.kernels for rule in rules)
        return {"backend": judged.answer} if is_known else None
    first, second = judged.answer[:2]
    if judged.case.of == "moe":
        backend = f"{judged.case.kind.partition('_')[0]} {second}" if second else first
        is_known = any(backend in rule.moe.backends for rule in rules)
        return {"backend": backend, "method": first} if is_known else None
    backends = {name for rule in rules for name in rule.attention_backends.backends}
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
    capabilities_of_rule: list[str] = []
    for major in sorted({capability.partition(".")[0] for capability in capabilities}, key=int):
        siblings = {
            capability for capability in capabilities if capability.partition(".")[0] == major
        }
        siblings_with_answer = {answer for answer in answers if answer.partition(".")[0] == major}
        # FP8 begins with 8.9.
        whole = siblings == siblings_with_answer and (
            major != "8" or len({capability == "8.9" for capability in siblings_with_answer}) > 1
        )
        before = major == "8" and "8.9" not in siblings
        capabilities_of_rule += (
            [f"{major}.*"] if whole else ["8.0", "8.6", "8.7"] if before else sorted(siblings)
        )
    return tuple(capabilities_of_rule)


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
        for capability, case_answers in answers.items():
            answer = case_answers.get(case.key)
            if answer is None or _tells_nothing(case, answer):
                continue
            if case.of == "memory":
                if capability != min(answers, key=order) or answer == REFUSED:
                    continue
                recurrent = any(group.kind == "recurrent" for group in _spec(case.model).attention)
                answer = [*answer[:2], round(answer[2], 5), answer[3] if recurrent else 0]
            yield Judged(case, capability, name, answer, frozenset())


def _tells_nothing(case: Case, answer: Any) -> bool:
    """Whether a reduced config is refused for missing fields, or the layer names a runner that does
    not multiply such experts."""
    if case.of == "attention_backends":
        return answer == REFUSED and not (MODELS / f"{case.model}.json").is_file()
    if answer == _UNQUANTIZED and case.of == "moe":
        return case.kind != "unquantized"
    return case.of == "moe" and case.kind == "nvfp4" and answer[1] == "triton"


def _judge(
    profiles: Profiles, ref: str, answers: Mapping[str, Mapping[str, Any]], refs: list[str]
) -> Iterator[Judged]:
    for case in _cases_with_answers(profiles, ref, answers):
        if case.case.of != "memory":
            right = {
                other_ref
                for other_ref in refs
                if is_same(
                    case.case,
                    rule_answer(profiles, other_ref, case.case, case.capability),
                    case.answer,
                )
            }
            yield case._replace(right=frozenset(right))


def _memory_choices(
    profiles: Profiles, ref: str, answers: Mapping[str, Mapping[str, Any]], refs: list[str]
) -> list[KnownChoice]:
    """Settings that the answers about memory show: those of a further version, or values."""
    memory_cases = [
        case for case in _cases_with_answers(profiles, ref, answers) if case.case.of == "memory"
    ]
    if not memory_cases:
        return []
    rules = {other_ref: _memory_rules(profiles, other_ref) for other_ref in refs}
    near = rules[refs[0]]
    choices: list[KnownChoice] = []
    detailed_cases = [case for case in memory_cases if case.case.detail]
    right = [
        other_ref
        for other_ref in refs
        if all(
            _memory_answer(rules[other_ref], case.case)[:2] == case.answer[:2]
            for case in detailed_cases
        )
    ]
    if right and refs[0] not in right:
        choices.append(KnownChoice(rules_file="memory", rules=right[0], fields=("classes",)))
        near = near.evolve(classes=rules[right[0]].classes)
    wrong: dict[str, set[str]] = defaultdict(set)
    for case in memory_cases:
        answer = _memory_answer(near, case.case)
        if answer[3] != case.answer[3]:
            wrong["buffered_states"].add(case.name)
        if answer[:2] == case.answer[:2] and abs(answer[2] - case.answer[2]) >= _ROUNDING:
            for field in _GRAPH_FIELDS:
                variant = near.evolve(**{field: tuple({*getattr(near, field)} ^ {case.name})})
                if abs(_memory_answer(variant, case.case)[2] - case.answer[2]) < _ROUNDING:
                    wrong[field].add(case.name)
                    break
    values = {
        field: tuple(sorted({*getattr(near, field)} ^ names)) for field, names in wrong.items()
    }
    if values:
        choices.append(KnownChoice(rules_file="memory", values=values))
    return choices


def _memory_rules(profiles: Profiles, ref: str) -> MemoryRules:
    rules: Any = profiles.rules([profiles.engine(ref)])[ref]
    return rules.memory  # type: ignore[no-any-return]


def answers_near(ref: str, ruled: str) -> dict[str, dict[str, Any]]:
    """By capability the answers of this version, and where it has none those of the asked version
    that is fewest releases away; of two alike the older one.

    Answers that are further away than the version `ruled` with rules tell nothing. Sizes of memory
    do not depend on the capability: those of the nearest version stand below the lowest one.
    """
    version, release_of_rule = (release(reference.partition("==")[2]) for reference in (ref, ruled))
    nearest_answers = read_answers()

    def distance(ref: str) -> tuple[int, bool, Any]:
        neighbour_release = release(ref)
        return (
            abs(neighbour_release.micro - version.micro),
            neighbour_release != version,
            neighbour_release,
        )

    near = [
        neighbour
        for neighbour in nearest_answers
        if distance(neighbour)[0] < abs(release_of_rule.micro - version.micro)
    ]
    answers_by_gpu: dict[str, dict[str, Any]] = defaultdict(dict)
    memory_answers: dict[str, Any] = {}
    for neighbour in sorted(near, key=distance, reverse=True):
        by_gpu = nearest_answers[neighbour]
        for capability in sorted(by_gpu, key=order, reverse=True):
            for key, answer in by_gpu[capability].items():
                of_memory = key.partition(" ")[0] == "memory"
                (memory_answers if of_memory else answers_by_gpu[capability])[key] = answer
    capabilities = sorted(answers_by_gpu, key=order)
    if capabilities:
        answers_by_gpu[capabilities[0]] |= memory_answers
    return {capability: answers_by_gpu[capability] for capability in capabilities}


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
    q = next(linear_scheme for linear_scheme in linear_schemes() if case_of(linear_scheme) == case)
    where |= {"bits": (q.bits,), "groups": (q.group,), "symmetric": q.symmetric}
    where |= {"act_order": "yes" if q.act_order else "no"} if q.kind == "wna16" else {}
    return where | {"static_activation": q.static, "weight_only": q.weight_only}
