"""What a changed wish asks of the engines of its model next: one replica after the other, beside
what serves where there is room, else in its
place. Pure.

    replica that is to be changed   trial                       next
    -                               by another wish             EndTrial
    -                               starts, or stops            -
    -                               ready                       Adopt
    -                               finds no room               GoInPlace
    -                               failed, by a new wish       GiveUp
    -                               failed, on the way back     GoInPlace
    does not serve                  none                        Replace
    serves                          none                        TryBeside
    serves, in place, another comes none                        -
    serves, in place                none                        StopRouting
    left, answers still             none                        -
    left, answers no more           none                        Replace
    none, one failed by a new wish  none                        GiveUp
    none, all serve by a new wish   none                        Finish

A change that was given up is undone in the same way: the wish from before is the wish of all
replicas again. Every step may be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.domain import ChatTemplate, Plan, Value, Wish
from gateway.domain.units import gib

# What no engine is started again for; of the policy, all but what the engine is told.
_LIVE = frozenset({"aliases", "check", "policy"})
# Of the tokens that a plan holds in the place of what serves, a plan beside that has to hold so
# many.
_AS_MANY = 0.95


@dataclass(frozen=True)
class TryBeside:
    index: int


@dataclass(frozen=True)
class Adopt:
    pass


@dataclass(frozen=True)
class EndTrial:
    pass


@dataclass(frozen=True)
class GoInPlace:
    index: int


@dataclass(frozen=True)
class StopRouting:
    """No new request goes there; those in flight end."""

    index: int


@dataclass(frozen=True)
class Replace:
    """Its engine stops, and the next one is by the wish that is wanted."""

    index: int


@dataclass(frozen=True)
class GiveUp:
    reason: str


@dataclass(frozen=True)
class Finish:
    pass


Step = TryBeside | Adopt | EndTrial | GoInPlace | StopRouting | Replace | GiveUp | Finish


@dataclass(frozen=True)
class ReplicaStatus:
    """generation: of the wish that it is by. comes: it does not serve yet, and is on its way.
        in_place: nothing fits beside it. left: it is out of the routes. answers: requests are in
    flight there. failed: why its engine does not start by its wish; "" where it served by that, or
        may still.
    """

    index: int
    generation: int
    serves: bool
    comes: bool = False
    in_place: bool = False
    left: bool = False
    answers: bool = False
    failed: str = ""


@dataclass(frozen=True)
class TrialStatus:
    index: int
    generation: int
    state: Literal["starts", "ready", "no_room", "failed", "stops", "others"]
    """others: it is tried for another reason than a changed wish."""
    reason: str = ""


def next_step(
    wanted: int, new: bool, replicas: Sequence[ReplicaStatus], trial: TrialStatus | None
) -> Step | None:
    """wanted: the generation that all replicas are to have. new: it is that of a new wish, else the
    wish from before comes back."""
    if trial is not None:
        return _of_trial(wanted, new, trial)
    failed = next(
        (one for one in replicas if new and one.generation == wanted and one.failed), None
    )
    if failed is not None:
        return GiveUp(failed.failed)
    # Those first that nobody is served by.
    replica = min(
        (one for one in replicas if one.generation != wanted),
        key=lambda one: one.serves,
        default=None,
    )
    if replica is None:
        return Finish() if new and all(one.serves for one in replicas) else None
    if not replica.serves:
        return Replace(replica.index)
    if not replica.in_place:
        return TryBeside(replica.index)
    if not replica.left:
        return None if any(one.comes for one in replicas) else StopRouting(replica.index)
    return None if replica.answers else Replace(replica.index)


def _of_trial(wanted: int, new: bool, trial: TrialStatus) -> Step | None:
    if trial.state == "stops":
        return None
    if trial.generation != wanted:
        return EndTrial()
    match trial.state:
        case "ready":
            return Adopt()
        case "no_room":
            return GoInPlace(trial.index)
        case "failed":
            return GiveUp(trial.reason) if new else GoInPlace(trial.index)
    return None


def starts_anew(old: Wish, new: Wish) -> bool:
    """Whether the new wish may need other engines: all that is planned, or said to them, may."""
    if old.policy.allow_remote_code != new.policy.allow_remote_code:
        return True
    return any(
        getattr(old, name) != getattr(new, name) for name in Wish.model_fields if name not in _LIVE
    )


def same_start(plan: Plan, running: Plan) -> bool:
    """Whether the plan would start what runs, perhaps on other GPUs of the same kind."""
    alike: Plan = plan.evolve(gpus=running.gpus)
    return len(plan.gpus) == len(running.gpus) and alike.fingerprint == running.fingerprint


def as_good(beside: Plan, instead: Plan) -> bool:
    """Whether a plan beside what serves gives what one in its place would: a neighbour that is
    about to stop takes nothing from it."""
    return (
        str(beside.engine) == str(instead.engine)
        and beside.max_model_len.value >= instead.max_model_len.value
        and beside.max_num_seqs.value >= instead.max_num_seqs.value
        and beside.tensor_parallel.value == instead.tensor_parallel.value
        and beside.quantization.value == instead.quantization.value
        and beside.memory.kv_tokens >= _AS_MANY * instead.memory.kv_tokens
    )


class Difference(Value):
    """One thing that is otherwise. None: it is not there, or nobody said anything about it."""

    what: str
    old: str | None
    new: str | None


def of_wishes(old: Wish, new: Wish) -> tuple[Difference, ...]:
    """What somebody asks for otherwise. Values of variables are not told: they may be secrets."""
    return tuple(
        Difference(what=name, old=_said(name, old), new=_said(name, new))
        for name in Wish.model_fields
        if getattr(old, name) != getattr(new, name)
    )


def _said(name: str, wish: Wish) -> str | None:
    value = getattr(wish, name)
    if value is None or value == Wish.model_fields[name].get_default(call_default_factory=True):
        return None
    if name == "env":
        return ", ".join(value)
    if isinstance(value, dict):
        return ", ".join(f"{key}={item}" for key, item in value.items())
    if isinstance(value, Value) and not isinstance(value, ChatTemplate):
        return ", ".join(
            f"{key}={item}" for key, item in value.model_dump(exclude_defaults=True).items()
        )
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def of_plans(old: Plan, new: Plan) -> tuple[Difference, ...]:
    """What the new plan does otherwise, and what comes of that."""
    before, after = dict(_told(old)), dict(_told(new))
    return tuple(
        Difference(what=what, old=before.get(what), new=after.get(what))
        for what in dict.fromkeys((*before, *after))
        if before.get(what) != after.get(what)
    )


def _told(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "engine", str(plan.engine)
    yield "model", plan.model.source
    if plan.model.revision:
        yield "commit", plan.model.revision
    yield "GPUs", ", ".join(plan.gpus) or "none"
    for name, words in _CHOICES:
        yield words, str(getattr(plan, name).value)
    yield "KV cache", f"{gib(plan.memory.kv_bytes)}, {plan.memory.kv_tokens:,} tokens"
    if plan.speed is not None:
        yield "tokens/s, one request", f"{plan.speed.stream.value:.0f} ({plan.speed.grade})"
        yield (
            f"tokens/s, {plan.speed.concurrency} requests",
            f"{plan.speed.total.value:.0f} ({plan.speed.grade})",
        )
    yield from _flags(plan.argv)
    for name in sorted(plan.env):
        # Its value may be a secret.
        yield f"variable {name}", "set"


_CHOICES = [
    (name, name.replace("_", " "))
    for name in (
        *(
            "tensor_parallel",
            "pipeline_parallel",
            "expert_parallel",
            "replicas",
            "dtype",
            "quantization",
            "kv_cache_dtype",
        ),
        *(
            "speculation",
            "loras",
            "chat_template",
            "tool_parser",
            "reasoning_parser",
            "max_model_len",
            "max_num_seqs",
        ),
        "max_num_batched_tokens",
    )
]


def _flags(argv: Iterable[str]) -> Iterator[tuple[str, str]]:
    for word in argv:
        name, _, value = word.partition("=")
        yield name, value or "on"
