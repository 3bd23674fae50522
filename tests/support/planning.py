"""Decisions of the planner, from values that a test has at hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gateway.diagnosis.facts.known_facts import KnownFacts
from gateway.domain import Decision, Engine, Fact, Hardware, ModelSpec, Wish
from gateway.engines.common.candidate import EngineRules
from gateway.engines.common.planning_input import PlanningInput
from gateway.planner.decide import decide as decide_with


def decide(
    spec: ModelSpec,
    hardware: Hardware,
    engines: Sequence[Engine],
    wish: Wish,
    facts: Iterable[Fact] = (),
    rules: Mapping[str, EngineRules] | None = None,
    **fields: Any,
) -> Decision:
    """The decision of `planner.decide`. fields: the others of PlanningInput; None: its default."""
    options = {name: value for name, value in fields.items() if value is not None}
    return decide_with(
        PlanningInput(spec, hardware, wish, KnownFacts(tuple(facts)), **options), engines, rules
    )
