"""What is learned of the sleep of engines: that an engine version gives its memory back on one kind
of GPU, and wakes up again. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.domain import Attempt, Fact, Plan
from gateway.domain.units import gib

# Less of what should come back is no sleep: something else holds it.
_ENOUGH = 0.8


def about(scope: Mapping[str, str]) -> dict[str, str]:
    """Of a plan's scope, where that holds."""
    return {key: scope[key] for key in ("engine", "device") if key in scope}


def expected(plan: Plan) -> int:
    """Bytes of each GPU that should come back: the weights, and the KV cache."""
    return plan.memory.weights_bytes + plan.memory.kv_bytes


def enough(plan: Plan, gave: Mapping[str, int]) -> bool:
    """gave: bytes that came back, by the UUID of a GPU."""
    return bool(gave) and min(gave.values()) >= _ENOUGH * expected(plan)


def proved(attempt: Attempt, gave: Mapping[str, int], at: float) -> Fact:
    plan, least = attempt.plan, min(gave.values(), default=0)
    told = (
        f"{plan.engine} gave {gib(least)} of each GPU back when it fell asleep, and"
        f" {gib(expected(plan))} were expected"
    )
    return _fact(attempt, told, at, works=enough(plan, gave))


def failed(attempt: Attempt, why: str, at: float) -> Fact:
    return _fact(attempt, f"{attempt.plan.engine} {why}", at, works=False)


def _fact(attempt: Attempt, source: str, at: float, *, works: bool) -> Fact:
    return Fact(
        kind="sleep_works" if works else "sleep_fails",
        scope=about(attempt.plan.scope),
        grade="verified" if works else "failed",
        under=attempt.plan.under,
        source=source,
        attempt=attempt.id,
        at=at,
    )
