"""The plan that a copy gets back after a cause outside the plan ended its engine. Pure.

interrupted_plan(attempts)            the plan that served until then; None: another failure between
plan_to_restore(plan, cap)            the same, if the copy may have it back
wish_for_restore(wish, plan)          the wish for this engine on these GPUs
restore_decision(decision, plan)      the decision, if the copy gets its place back
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.diagnosis.ending import is_environmental
from gateway.domain import Attempt, Cap, Choice, Decision, Plan, Wish

# Failures of a start that is cut off, for example by a power cut: nothing follows from them.
_INTERRUPTION_KINDS = frozenset({"exited", "killed", "ended_with_gateway"})
_SIZES = frozenset({"max_model_len", "max_num_seqs", "max_num_batched_tokens", "replicas"})
# Choices that change neither place nor memory.
_FREE_CHOICES = _SIZES | {"request_order"}


def interrupted_plan(attempts: Sequence[Attempt]) -> Plan | None:
    """The last plan that served, if only causes outside of plans ended the attempts since.

    attempts: the ended attempts of one copy for its present wish, oldest first.
    """
    for attempt in reversed(attempts):
        if attempt.failure is None or not is_environmental(attempt.failure):
            return None
        if attempt.ready_at is not None:
            return attempt.plan
        if attempt.failure.kind not in _INTERRUPTION_KINDS:
            return None
    return None


def plan_to_restore(plan: Plan, cap: Cap | None) -> Plan | None:
    """The plan, unless it runs on the CPU or had a cap that ended. cap: of the copy now.

    Copies in RAM all have one place. Without the cap the copy may take more memory.
    """
    return None if not plan.gpus or (plan.cap is not None and cap is None) else plan


def wish_for_restore(wish: Wish, plan: Plan) -> Wish:
    """The wish to decide with the plan as `Sharing.plan_to_restore`."""
    return wish.evolve(engines=(str(plan.engine),), gpus=plan.gpus, replicas=plan.replicas.value)


def restore_decision(decision: Decision, plan: Plan) -> Decision | None:
    """The decision if its best plan has the place of `plan`, with as much memory or less.

    Facts that were learned since may change sizes. None: the model runs in another way, whose sizes
    are not known to work, so it has to be planned again.
    """
    best_plan = decision.plans[0] if decision.plans else None
    if (
        best_plan is None
        or best_plan.gpus != plan.gpus
        or best_plan.memory.promised_bytes > plan.memory.promised_bytes
        or _drop_sizes(best_plan) != _drop_sizes(plan)
    ):
        return None
    return decision.evolve(plans=(best_plan.evolve(replicas=plan.replicas), *decision.plans[1:]))


def _drop_sizes(plan: Plan) -> object:
    """All choices of the plan that its place and its memory follow from."""
    choices = {
        name: value.value
        for name, value in plan
        if isinstance(value, Choice) and name not in _FREE_CHOICES
    }
    return (
        choices,
        [(layer_kernel.layer, layer_kernel.kernel) for layer_kernel in plan.kernels],
        [(layer_attention.kind, layer_attention.backend) for layer_attention in plan.attention],
    )
