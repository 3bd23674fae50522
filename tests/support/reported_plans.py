"""Decisions for models and machines of reports."""

from __future__ import annotations

from typing import Any

from gateway.domain import Decision, RejectedPlan
from gateway.models.catalog.structure_files import structure_text
from gateway.models.drafter import Drafter
from gateway.profiles.profiles import Profiles
from tests.support.makers import wish
from tests.support.planning import decide
from tests.support.published import model_from_config

PROFILES = Profiles()


def make_decision(
    fields: dict[str, Any],
    hardware: str,
    *engines: str,
    drafter: Drafter | None = None,
    **wish_fields: Any,
) -> Decision:
    """The decision for a model of which only config.json is known."""
    wish_fields |= {"drafter": drafter.source} if drafter else {}
    spec = model_from_config(fields, structure=structure_text(fields))
    engine_list = PROFILES.engines(engines, device="cuda")
    rules = PROFILES.rules(engine_list)
    hardware_value = PROFILES.hardware(hardware)
    return decide(
        spec,
        hardware_value,
        engine_list,
        wish(**wish_fields),
        PROFILES.facts,
        rules=rules,
        drafter=drafter,
        speed_knowledge=PROFILES.speed_knowledge,
    )


def rejection_of(decision: Decision, tensor_parallel: int) -> RejectedPlan:
    return next(
        rejection for rejection in decision.rejected if rejection.tensor_parallel == tensor_parallel
    )
