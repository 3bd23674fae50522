"""What a copy has again when something outside of its plan ended its engine: the plan that it had,
on the same GPUs, with as much of them. Pure.

outlived(attempts)   -> the plan that served until then; None: something else came between
again(plan, cap)     -> the same where it is to be had again; None: what it left to others may be had too
there(wish, plan)    -> the wish with which it is asked for: that engine, on these GPUs
same(decision, plan) -> what was decided by that wish, where the copy has its place again; None: it
is to be planned anew
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.diagnosis.ending import environmental
from gateway.domain import Attempt, Cap, Choice, Decision, Plan, Wish

# How a start ends that somebody pulls the plug of: it tells nothing, and the next one is as if it
# had not been.
_CUT_OFF = frozenset({"exited", "killed", "ended_with_gateway"})
_SIZES = frozenset({"max_model_len", "max_num_seqs", "max_num_batched_tokens", "replicas"})


def outlived(attempts: Sequence[Attempt]) -> Plan | None:
    """attempts: of one copy by its present wish, oldest first; all have ended."""
    for attempt in reversed(attempts):
        if attempt.failure is None or not environmental(attempt.failure):
            return None
        if attempt.ready_at is not None:
            return attempt.plan
        if attempt.failure.kind not in _CUT_OFF:
            return None
    return None


def again(plan: Plan, cap: Cap | None) -> Plan | None:
    """cap: what the copy keeps to now. Without those for whose sake it had one it may take what is
    free; in RAM all copies have one place."""
    return None if not plan.gpus or (plan.cap is not None and cap is None) else plan


def there(wish: Wish, plan: Plan) -> Wish:
    """To be decided with the plan as `Sharing.again`."""
    return wish.evolve(engines=(str(plan.engine),), gpus=plan.gpus, replicas=plan.replicas.value)


def same(decision: Decision, plan: Plan) -> Decision | None:
    """What was learned meanwhile may have changed the sizes of the plan, though not its place: it
    takes no more than it did. Another way to run
    the model is planned anew: of the size of this plan nothing is known to fail, though it failed
    here before.
    """
    best = decision.plans[0] if decision.plans else None
    if (
        best is None
        or best.gpus != plan.gpus
        or best.memory.promised_bytes > plan.memory.promised_bytes
        or _way(best) != _way(plan)
    ):
        return None
    return decision.evolve(plans=(best.evolve(replicas=plan.replicas), *decision.plans[1:]))


def _way(plan: Plan) -> object:
    """All that was chosen but sizes."""
    chosen = {
        name: value.value
        for name, value in plan
        if isinstance(value, Choice) and name not in _SIZES
    }
    return (
        chosen,
        [(one.layer, one.kernel) for one in plan.kernels],
        [(one.kind, one.backend) for one in plan.attention],
    )
