"""The next step of a changed wish for the engines of its model, one replica at a time.

The new engine starts alongside the old one where there is room, otherwise in its place. Pure.

    replica to be changed           trial                       next
    -                               by another wish             EndTrial
    -                               starts, or stops            -
    -                               ready                       Adopt
    -                               finds no room               ReplaceInPlace
    -                               failed, by a new wish       AbandonChange
    -                               failed, on the way back     ReplaceInPlace
    does not serve                  none                        RestartWithWish
    serves                          none                        StartTrial
    serves, in place, another starts none                       -
    serves, in place                none                        StopRouting
    unrouted, still answers         none                        -
    unrouted, answers no more       none                        RestartWithWish
    none, one failed by a new wish  none                        AbandonChange
    none, all serve by a new wish   none                        CompleteChange

A refused change is undone in the same way: the previous wish becomes the wish of all replicas
again. Every step may be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.domain import ChatTemplate, Plan, Value, Wish
from gateway.domain.units import gib
from gateway.secret import shown_setting

# Fields of a wish that never need another start. `policy` is compared apart, for remote code.
_LIVE_FIELDS = frozenset({"aliases", "check", "policy"})
# A plan next to the running engine needs at least this share of the tokens of a plan in its place.
_MIN_TOKENS_SHARE = 0.95


@dataclass(frozen=True)
class StartTrial:
    index: int


@dataclass(frozen=True)
class Adopt:
    pass


@dataclass(frozen=True)
class EndTrial:
    pass


@dataclass(frozen=True)
class ReplaceInPlace:
    index: int


@dataclass(frozen=True)
class StopRouting:
    """Requests in flight are answered; new ones go elsewhere."""

    index: int


@dataclass(frozen=True)
class RestartWithWish:
    """The engine stops, and the next one follows the wanted wish."""

    index: int


@dataclass(frozen=True)
class AbandonChange:
    reason: str


@dataclass(frozen=True)
class CompleteChange:
    pass


Step = (
    StartTrial
    | Adopt
    | EndTrial
    | ReplaceInPlace
    | StopRouting
    | RestartWithWish
    | AbandonChange
    | CompleteChange
)


@dataclass(frozen=True)
class ReplicaStatus:
    """The state of one replica during a change.

    `generation` is that of its wish.

    is_starting: not serving yet.
    must_be_replaced: whether no plan fits next to its engine.
    is_unrouted: no new request goes there.
    answers_requests: requests are in flight.
    failure: why no engine starts by this wish; "" if one served or still may.
    """

    index: int
    generation: int
    is_serving: bool
    is_starting: bool = False
    must_be_replaced: bool = False
    is_unrouted: bool = False
    answers_requests: bool = False
    failure: str = ""


TrialState = Literal["starts", "ready", "no_memory", "failed", "stops", "unrelated"]
""""unrelated": the trial has another reason than a changed wish."""


@dataclass(frozen=True)
class TrialStatus:
    index: int
    generation: int
    state: TrialState
    reason: str = ""


def next_step(
    target: int, is_new: bool, replicas: Sequence[ReplicaStatus], trial: TrialStatus | None
) -> Step | None:
    """The next step, or None while nothing can be done.

    `target` is the generation that all replicas shall have. `is_new` is False while the previous
    wish is being restored.
    """
    if trial is not None:
        return _trial_step(target, is_new, trial)
    failed_replica = next(
        (r for r in replicas if is_new and r.generation == target and r.failure), None
    )
    if failed_replica is not None:
        return AbandonChange(failed_replica.failure)
    # Replicas without requests come first.
    replica = min(
        (old_replica for old_replica in replicas if old_replica.generation != target),
        key=lambda old_replica: old_replica.is_serving,
        default=None,
    )
    if replica is None:
        return (
            CompleteChange()
            if is_new and all(new_replica.is_serving for new_replica in replicas)
            else None
        )
    if not replica.is_serving:
        return RestartWithWish(replica.index)
    if not replica.must_be_replaced:
        return StartTrial(replica.index)
    if not replica.is_unrouted:
        return (
            None if any(sibling.is_starting for sibling in replicas) else StopRouting(replica.index)
        )
    return None if replica.answers_requests else RestartWithWish(replica.index)


def _trial_step(target: int, is_new: bool, trial: TrialStatus) -> Step | None:
    if trial.state == "stops":
        return None
    if trial.generation != target:
        return EndTrial()
    match trial.state:
        case "ready":
            return Adopt()
        case "no_memory":
            return ReplaceInPlace(trial.index)
        case "failed":
            return AbandonChange(trial.reason) if is_new else ReplaceInPlace(trial.index)
    return None


def may_need_restart(old_wish: Wish, new_wish: Wish) -> bool:
    """Whether the new wish may need other engines."""
    if old_wish.policy.allow_remote_code != new_wish.policy.allow_remote_code:
        return True
    return any(
        getattr(old_wish, name) != getattr(new_wish, name)
        for name in Wish.model_fields
        if name not in _LIVE_FIELDS
    )


def starts_same_engine(plan: Plan, running_plan: Plan) -> bool:
    """Whether the plan starts the same engine, perhaps on other GPUs of the same kind."""
    return (
        len(plan.gpus) == len(running_plan.gpus)
        and plan.evolve(gpus=running_plan.gpus).fingerprint == running_plan.fingerprint
    )


def is_as_good(trial: Plan, replacement: Plan) -> bool:
    """Whether a plan next to the running engine is as good as one in its place."""
    return (
        str(trial.engine) == str(replacement.engine)
        and trial.max_model_len.value >= replacement.max_model_len.value
        and trial.at_once >= replacement.at_once
        and trial.tensor_parallel.value == replacement.tensor_parallel.value
        and trial.data_parallel.value == replacement.data_parallel.value
        and trial.quantization.value == replacement.quantization.value
        and trial.memory.kv_tokens >= _MIN_TOKENS_SHARE * replacement.memory.kv_tokens
    )


class Difference(Value):
    """One difference. None: the value is absent or unset."""

    field: str
    former: str | None
    present: str | None


def diff_wishes(old_wish: Wish, new_wish: Wish) -> tuple[Difference, ...]:
    """The differences between two wishes. Values of variables are hidden, as they may be secrets,
    and so are those of flags that are secret by name."""
    return tuple(
        Difference(
            field=name, former=_shown_value(name, old_wish), present=_shown_value(name, new_wish)
        )
        for name in Wish.model_fields
        if getattr(old_wish, name) != getattr(new_wish, name)
    )


def _shown_value(name: str, wish: Wish) -> str | None:
    value = getattr(wish, name)
    if value is None or value == Wish.model_fields[name].get_default(call_default_factory=True):
        return None
    if name == "env":
        return ", ".join(value)
    if name == "args":
        return ", ".join(f"{key}={shown_setting(key, item)}" for key, item in value.items())
    if isinstance(value, dict):
        return ", ".join(f"{key}={item}" for key, item in value.items())
    if isinstance(value, Value) and not isinstance(value, ChatTemplate):
        return ", ".join(
            f"{key}={item}" for key, item in value.model_dump(exclude_defaults=True).items()
        )
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def diff_plans(old_plan: Plan, new_plan: Plan) -> tuple[Difference, ...]:
    """The differences between two plans, results included."""
    old_facts = dict(_plan_facts(old_plan))
    new_facts = dict(_plan_facts(new_plan))
    return tuple(
        Difference(field=name, former=old_facts.get(name), present=new_facts.get(name))
        for name in dict.fromkeys((*old_facts, *new_facts))
        if old_facts.get(name) != new_facts.get(name)
    )


def no_effect_reason(wish: Iterable[Difference], old_plan: Plan, new_plan: Plan) -> str:
    """The reason why a changed wish leaves the plan as it is; "": it changes the plan, or no field
    of the wish is part of a plan."""
    fields = {difference.field for difference in wish}
    if fields <= _LIVE_FIELDS or diff_plans(old_plan, new_plan):
        return ""
    reasons = [
        f"{name.replace('_', ' ')} stays {choice.value}: {choice.reason}"
        for name in dict.fromkeys(
            _CHOICE_OF_FIELD[field] for field in _CHOICE_OF_FIELD if field in fields
        )
        for choice in [getattr(new_plan, name)]
    ]
    return (
        "; ".join(reasons)
        or f"no other plan follows from {', '.join(sorted(fields - _LIVE_FIELDS))}"
    )


# The choice of a plan that a field of a wish is about.
_CHOICE_OF_FIELD = {
    "context": "max_model_len",
    "min_context": "max_model_len",
    "max_context": "max_model_len",
    "tensor_parallel": "tensor_parallel",
    "data_parallel": "data_parallel",
    "replicas": "replicas",
    "copies": "replicas",
    "gpus": "tensor_parallel",
    "dtype": "dtype",
    "speculative": "speculation",
    "drafter": "speculation",
}


def _plan_facts(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "engine", str(plan.engine)
    yield "model", plan.model.source
    if plan.model.revision:
        yield "commit", plan.model.revision
    yield "GPUs", ", ".join(plan.gpus) or "none"
    for name, label in _CHOICES:
        yield label, str(getattr(plan, name).value)
    yield "KV cache", f"{gib(plan.memory.kv_bytes)}, {plan.memory.kv_tokens:,} tokens"
    if plan.speed is not None:
        yield "tokens/s, one request", f"{plan.speed.stream.value:.0f} ({plan.speed.grade})"
        yield (
            f"tokens/s, {plan.speed.concurrency} requests",
            f"{plan.speed.total.value:.0f} ({plan.speed.grade})",
        )
    yield from _flag_pairs(plan.argv)
    for name in sorted(plan.env):
        # Its value may be a secret.
        yield f"variable {name}", "set"


_CHOICES = [
    (name, name.replace("_", " "))
    for name in (
        "tensor_parallel",
        "pipeline_parallel",
        "expert_parallel",
        "data_parallel",
        "replicas",
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "speculation",
        "loras",
        "chat_template",
        "tool_parser",
        "reasoning_parser",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
    )
]


def _flag_pairs(argv: Iterable[str]) -> Iterator[tuple[str, str]]:
    for word in argv:
        name, _, value = word.partition("=")
        yield name, value or "on"
