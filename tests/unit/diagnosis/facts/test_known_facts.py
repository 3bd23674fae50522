"""Facts by their subject: the same answers as a look at every fact, and no look at facts about
something else."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.diagnosis.facts.known_facts import KnownFacts
from gateway.domain import Fact
from gateway.planner.layer_kernels import ObservedRefusals
from gateway.profiles.profiles import Profiles
from tests.support.makers import machine, spec, wish
from tests.support.planning import decide

PROFILES = Profiles()

scopes = st.dictionaries(st.sampled_from("abc"), st.sampled_from("xyz"))
kinds = st.sampled_from(["kernel_fails", "max_context"])
facts = st.builds(
    lambda kind, scope: Fact(kind=kind, scope=scope, grade="failed", source="a line"), kinds, scopes
)


@given(
    st.lists(facts, max_size=30),
    kinds,
    st.dictionaries(st.sampled_from("abcd"), st.sampled_from([*"xyz", None])),
)
def test_the_held_facts_are_those_of_a_search_through_all_in_its_order(
    all_facts: list[Fact], kind: str, subject: dict[str, str | None]
) -> None:
    facts_of_search = [
        fact
        for fact in all_facts
        if fact.kind == kind
        and all(subject.get(name) == value for name, value in fact.scope.items())
    ]
    assert [id(fact) for fact in KnownFacts(all_facts).holding(kind, subject)] == [
        id(fact) for fact in facts_of_search
    ]


@given(st.lists(facts, max_size=5), st.sampled_from("abcd"), st.sampled_from("xyz"))
def test_a_value_that_no_fact_is_about_finds_none(
    all_facts: list[Fact], name: str, value: str
) -> None:
    known_facts = KnownFacts(all_facts)
    if not known_facts.may_hold("max_context", name, value):
        everything = {
            field: fact.scope.get(field, "") for fact in all_facts for field in "abcd"
        } | {name: value}
        assert list(known_facts.holding("max_context", everything)) == []


@given(
    st.lists(scopes, max_size=30),
    st.dictionaries(st.sampled_from("abc"), st.sampled_from("xyz"), min_size=3),
)
def test_the_first_refusal_that_was_seen_of_a_layer_counts(
    seen_scopes: list[dict[str, str]], layer: dict[str, str]
) -> None:
    rows = [
        (frozenset(scope.items()), f"refusal {number}") for number, scope in enumerate(seen_scopes)
    ]
    words_of_search = next((words for scope, words in rows if scope <= layer.items()), None)
    assert ObservedRefusals(rows).refusal_text(tuple(layer.items())) == words_of_search


class Looked(str):
    """A kind of fact that counts its readers."""

    looks: ClassVar[Counter[str]] = Counter()

    def __eq__(self, other: object) -> bool:
        self.looks[str(self)] += 1
        return super().__eq__(other)

    def __hash__(self) -> int:
        self.looks[str(self)] += 1
        return super().__hash__()


@pytest.mark.parametrize(
    "kind",
    [
        "kernel_fails",
        "kernel_refuses",
        "engine_fails",
        "needs_memory",
        "plan_failed",
        "max_context",
    ],
)
def test_an_unrelated_fact_is_compared_once_for_all_layers_and_variants(
    kind: str,
) -> None:
    scope = {"engine": "vllm==0.0.1", "kernel": "none", "fingerprint": "0"}
    other_facts = [
        Fact(
            kind="plan_failed", scope=scope | {"k": str(number)}, grade="failed", source="a line"
        ).evolve(kind=Looked(kind))
        for number in range(100)
    ]
    Looked.looks.clear()
    engines = PROFILES.engines(("vllm",), device="cuda")
    decision = decide(
        spec(), machine("8xh100"), engines, wish(), other_facts, rules=PROFILES.rules(engines)
    )
    assert decision.plans
    assert 0 < Looked.looks[kind] <= 10 * len(other_facts)
