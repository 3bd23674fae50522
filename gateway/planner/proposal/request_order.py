"""Whether an engine orders its requests by the priority of their callers. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.domain import Choice, Scalar, str_choice
from gateway.domain.choice import ONE_CLASS
from gateway.engines.common.candidate import Candidate

ARRIVAL_ORDER, PRIORITY_ORDER = "arrival", "priority"
# Source: Scheduler.schedule in vllm/v1/core/sched/scheduler.py of 0.33.0, and preempt_to_schedule
# in sglang/srt/managers/schedule_policy.py of 0.5.23.
_COST = "where its memory is short, the last class gives its place up, and is computed again"


def request_order(candidate: Candidate) -> Choice[str]:
    """The order of waiting requests within the engine."""
    engine, args = candidate.engine, candidate.args
    flags = candidate.rules.priority_flags(engine)
    switch = next(iter(flags), "")
    if switch in args:
        order = PRIORITY_ORDER if args[switch] == flags[switch] else ARRIVAL_ORDER
        return str_choice(order, "set by the user", "user")
    classes = candidate.inputs.key_classes
    if classes < 2:
        return str_choice(ARRIVAL_ORDER, ONE_CLASS, "planner")
    source = f"profile {engine.ref}"
    if not flags:
        reason = f"{engine.ref} has no order by priority; the gateway's own queue has"
        return str_choice(ARRIVAL_ORDER, reason, source)
    if objection := candidate.rules.priority_objection(args):
        return str_choice(ARRIVAL_ORDER, objection, source)
    return str_choice(PRIORITY_ORDER, f"keys have {classes} classes; {_COST}", source)


def order_flags(candidate: Candidate, order: Choice[str]) -> Mapping[str, Scalar]:
    """The flags of an order that the planner chose. A question leaves them out, because they
    compute nothing."""
    if order.value == ARRIVAL_ORDER or order.source == "user":
        return {}
    return candidate.rules.priority_flags(candidate.engine)
