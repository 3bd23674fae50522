"""Decides the loading and eviction of models, copy by copy. Pure.

model   requests  condition                                        action
any     -         stopped by its owner                             is unloaded, and rests
out     yes       its turn has come                                loads; may evict a model
any     no        unloaded by its owner                            is unloaded until a request
asleep  yes       its turn has come                                wakes up; may evict a model
asleep  no        stopped, or a plan needs the rest of its memory  stops
out     yes       others have waited longer                        waits for its turn
out     no        pinned                                           as with requests
out     no        new, kept for ever, or within its keep_alive     loads unless others wait
out     no        else                                             rests until a request comes
serves  no        idle for longer than its keep_alive, not pinned  is evicted
serves  -         a requested model needs some copies, not pinned  these are evicted after residence
                                                                   and last answer; the rest serve
unused  -         needed; no request since it was last away        is evicted immediately
idle    -         needed; an engine measures its GPUs now          is evicted afterwards
serves  -         a copy is away, and no request waits             loads the copy if there is room
serves  queued    a copy is away, no model that is out has         loads the copy; may evict a model
                  requests                                         without requests

Plans are offered copies in `eviction_order`: models without requests come first. An evicted copy
sleeps where its engine can (gateway/planner/sharing/leaving.py), else it stops. A leaving copy gets
no new request; new requests wait or go to other copies.

The residence of a copy lasts as long as its load took, within MIN_S and MAX_S. So at most half of
the time goes into loading. A preloaded model that served nothing may be evicted immediately,
because evicting it always serves a waiting request.

An evicted model waits after those that wait already. So N models that want one place have it in
turn, and no request waits for longer than N residences, loads and drains (FITSERVE_DRAIN_S each).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from gateway.domain.units import duration_text

STOP_REASON = "its owner stopped it"
"""The reason of a model that rests until its owner starts it."""
MIN_S = 5.0
MAX_S = 60.0
# Loads that take no longer cost the same.
_CHEAP_WAKE_S = 1.0

State = Literal["out", "asleep", "loads", "serves", "leaves"]
# States that need a load or a wake-up before the model serves.
_ABSENT_STATES = ("out", "asleep")
_STATE_RANK: tuple[State, ...] = ("serves", "leaves", "loads", "asleep")
EvictionCause = Literal["idle", "room", "owner", "load"]


CopyId = tuple[str, int]
"""A copy of a model: its name, and the number of the copy."""


@dataclass(frozen=True)
class Copy:
    """One copy of a model.

    `entered_at` is when it entered its state, in monotonic seconds; `load_s` is how long its last
    load took.
    `is_watched`: an engine measures the memory of its GPUs now, and would fail if this copy freed
    some.
    """

    index: int
    state: State
    entered_at: float = 0.0
    load_s: float = 0.0
    is_watched: bool = False

    @property
    def residence_s(self) -> float:
        return min(MAX_S, max(MIN_S, self.load_s))


@dataclass(frozen=True)
class LoadedModel:
    """One model. Times are in monotonic seconds."""

    name: str
    copies: tuple[Copy, ...]
    is_stopped: bool = False
    is_unloaded: bool = False
    """The owner unloaded the model. Its next request loads it."""
    keep_alive_s: float = -1.0
    is_pinned: bool = False
    priority: int = 0
    used_at: float = 0.0
    requests: int = 0
    """Requests in flight."""
    waited_s: float | None = None
    """How long the oldest queued request has waited."""
    has_plan: bool = True
    """There is a plan for the missing copies."""
    must_evict: tuple[CopyId, ...] = ()
    """The copies that leave before the model starts."""
    must_stop: tuple[CopyId, ...] = ()
    """Copies of `must_evict` whose engine stops, because sleep would free too little memory."""
    is_promised_memory: bool = False
    """Other models give the missing memory, and stay."""
    waits_for_request: bool = False
    """There is a plan once all evictable copies are gone."""
    can_start: bool = True
    """No failure keeps it from a start."""
    was_evicted: bool = False
    """The model was evicted since the gateway started."""
    was_never_loaded: bool = False
    is_without_requests: bool = False
    """The model had no request since its last load."""

    @property
    def state(self) -> State:
        """The state as clients see it: a model serves as long as one copy does."""
        states = {copy.state for copy in self.copies}
        return next((state for state in _STATE_RANK if state in states), "out")

    @property
    def entered_at(self) -> float:
        """When the model entered its state, in monotonic seconds."""
        if self.state == "serves":
            return min(copy.entered_at for copy in self.serving)
        return max((copy.entered_at for copy in self.copies), default=0.0)

    @property
    def serving(self) -> list[Copy]:
        return [copy for copy in self.copies if copy.state == "serves"]

    @property
    def is_in_transition(self) -> bool:
        """Whether a copy loads or leaves. The room for others is unknown until then."""
        return any(copy.state in ("loads", "leaves") for copy in self.copies)

    @property
    def lacks_copies(self) -> bool:
        """Whether some copies are away and others are not."""
        return self.state not in _ABSENT_STATES and any(
            copy.state in _ABSENT_STATES for copy in self.copies
        )

    @property
    def is_requested(self) -> bool:
        return bool(self.requests) or self.waited_s is not None

    def idle_s(self, now: float) -> float:
        return (
            0.0
            if self.is_requested
            else now - max(self.used_at, self.entered_at if self.state == "serves" else 0.0)
        )


@dataclass(frozen=True)
class Eviction:
    """An eviction and its reason. `stops_engine`: the engine stops, even if it could sleep."""

    cause: EvictionCause
    reason: str
    stops_engine: bool = False


@dataclass(frozen=True)
class EvictionDecision:
    """The evictions, and the models that must not be loaded now, with the reason.

    A model in neither stays as it is, and is loaded where it is out. `next_to_load`: the model that
    is
    loaded next: its start is prepared while others leave.
    """

    evictions: Mapping[CopyId, Eviction] = field(default_factory=dict)
    hold_reasons: Mapping[str, str] = field(default_factory=dict)
    next_to_load: str = field(default="", compare=False)


def decide_evictions(models: Iterable[LoadedModel], now: float) -> EvictionDecision:
    """The evictions and holds for all models now."""
    models = list(models)
    evictions: dict[CopyId, Eviction] = {}
    for model in models:
        evictions |= _list_evictions(model, now)
    hold_reasons = {model.name: STOP_REASON for model in models if model.is_stopped}
    in_progress = bool(evictions) or _is_any("leaves", models)
    first: LoadedModel | None = None
    for model in _queue(models, now):
        if first is not None:
            hold_reasons[model.name] = f"it waits for its turn after {first.name}"
        elif model.must_evict and not in_progress:
            first = model
            evictions |= _evictions_for(model, models, now)
            names = ", ".join(sorted({name for name, _ in model.must_evict}))
            hold_reasons[model.name] = f"it waits for {names} to be unloaded"
        elif model.has_plan or (model.is_promised_memory and not model.must_evict):
            first = model
        elif in_progress or _is_any("loads", models):
            # A loading model can be evicted later.
            first = model
            hold_reasons[model.name] = "it waits until another model is unloaded"
    is_moving = first is not None or in_progress
    for model in models:
        if reason := _idle_hold_reason(model, now, is_moving=is_moving):
            hold_reasons[model.name] = reason
    return EvictionDecision(evictions, hold_reasons, first.name if first is not None else "")


def _list_evictions(model: LoadedModel, now: float) -> dict[CopyId, Eviction]:
    """The copies that leave for no other model: their owner stops them, or nobody uses them."""
    eviction: Eviction | None = None
    if model.is_stopped:
        eviction = Eviction("owner", "its owner stops it", stops_engine=True)
    elif model.is_unloaded:
        eviction = Eviction("owner", "its owner unloads it", stops_engine=True)
    if eviction is not None:
        return {
            copy_id: eviction
            for copy_id, copy in _copies_by_id(model)
            if copy.state in ("serves", "loads", "asleep")
        }
    if not _is_expired(model, now):
        return {}
    eviction = Eviction("idle", f"no request for {duration_text(model.idle_s(now))}")
    return {
        copy_id: eviction
        for copy_id, copy in _copies_by_id(model)
        if copy.state in ("serves", "loads") and not copy.is_watched
    }


def _queue(models: Iterable[LoadedModel], now: float) -> list[LoadedModel]:
    """The models that need evictions, in the order of their turns: those that serve come last."""
    return sorted(
        (model for model in models if _needs_evictions(model)),
        key=lambda model: (model.state == "serves", _waiting_since(model, now), model.name),
    )


def _is_any(state: State, models: Iterable[LoadedModel]) -> bool:
    """Whether any copy of any model is in this state."""
    return any(copy.state == state for model in models for copy in model.copies)


def _idle_hold_reason(model: LoadedModel, now: float, *, is_moving: bool) -> str:
    """Why a model that needs no evictions is not loaded; "": it is loaded, or may be.

    is_moving: another model has its turn, or a copy is being unloaded.
    """
    if model.is_stopped or _needs_evictions(model) or not model.can_start:
        return ""
    if model.state == "out" and not _is_warm(model, now):
        return "the next request loads it"
    waits = (model.state == "out" or model.lacks_copies) and is_moving
    return "other models load first" if waits else ""


def _copies_by_id(model: LoadedModel) -> Iterator[tuple[CopyId, Copy]]:
    return (((model.name, copy.index), copy) for copy in model.copies)


def _evictions_for(
    model: LoadedModel, models: Iterable[LoadedModel], now: float
) -> dict[CopyId, Eviction]:
    """The copies that must be evicted now for a waiting model.

    The result is empty until the residence of each is over and no engine measures its memory.
    """
    evictions: dict[CopyId, Eviction] = {}
    for neighbour in models:
        for copy_id, copy in _copies_by_id(neighbour):
            ends = copy_id in model.must_stop
            is_serving = (
                copy.state == "serves" and copy_id in model.must_evict and not neighbour.is_pinned
            )
            if not is_serving and not (copy.state == "asleep" and ends):
                continue
            # A second copy never evicts a model that has requests.
            must_stay = is_serving and (
                not _is_residence_over(neighbour, copy, now)
                or (model.state == "serves" and neighbour.is_requested)
            )
            if must_stay or copy.is_watched:
                return {}
            evictions[copy_id] = Eviction(
                "room", f"it makes room for {model.name}", stops_engine=ends
            )
    return evictions


def load_order(model: LoadedModel) -> tuple[bool, int, float]:
    """The sort key for loading: pinned, then priority, then the last use."""
    return not model.is_pinned, -model.priority, -model.used_at


def eviction_order(models: Iterable[LoadedModel], now: float) -> list[CopyId]:
    """The copies that may be evicted for another model, in this order.

    Copies of models without requests come first, then copies whose residence is over, then low
    priority, then copies that are not their model's last. Last comes the cost: idle time by the
    seconds of its last load. Of equal loads the least recently used goes first.
    """
    ordered_copies: list[tuple[tuple[bool, bool, int, bool, float, str, int], CopyId]] = []
    for model in models:
        if model.is_pinned or model.is_stopped:
            continue
        copies = sorted(
            model.serving, key=lambda copy: (not _is_residence_over(model, copy, now), -copy.index)
        )
        for copy in copies:
            used_at = copy.entered_at if model.is_requested else model.used_at
            is_last = copy is copies[-1]
            order = (
                model.is_requested,
                not _is_residence_over(model, copy, now),
                model.priority,
                is_last,
                (used_at - now) / max(_CHEAP_WAKE_S, copy.load_s),
                model.name,
                -copy.index,
            )
            ordered_copies.append((order, (model.name, copy.index)))
    return [copy_id for _, copy_id in sorted(ordered_copies)]


def is_loadable(model: LoadedModel, transitions: Collection[str]) -> bool:
    """Whether a request would load the model: there is room, or another model may be evicted.

    transitions: the names of models in transition.
    """
    is_in_progress = len(transitions) > (model.name in transitions)
    has_way = (
        model.has_plan
        or model.waits_for_request
        or model.state not in _ABSENT_STATES
        or model.is_promised_memory
        or bool(model.must_evict)
    )
    return model.can_start and not model.is_stopped and (has_way or is_in_progress)


def _needs_evictions(model: LoadedModel) -> bool:
    """Whether others are evicted for it: it is away and requested, or it lacks a copy while
    requests wait."""
    needs_place = model.waited_s is not None or (model.is_pinned and model.state in _ABSENT_STATES)
    return (
        needs_place
        and not model.is_stopped
        and model.can_start
        and (model.state in _ABSENT_STATES or (model.state == "serves" and model.lacks_copies))
    )


def _waiting_since(model: LoadedModel, now: float) -> float:
    """Since when it waits: since its oldest request, but not since before its own eviction."""
    return max(now - model.waited_s if model.waited_s is not None else 0.0, model.entered_at)


def _is_expired(model: LoadedModel, now: float) -> bool:
    return (
        model.state == "serves"
        and not model.is_pinned
        and not model.is_requested
        and model.keep_alive_s >= 0
        and model.idle_s(now) >= model.keep_alive_s
    )


def _is_warm(model: LoadedModel, now: float) -> bool:
    return not model.is_unloaded and (
        model.was_never_loaded
        or model.keep_alive_s < 0
        or (not model.was_evicted and model.idle_s(now) < model.keep_alive_s)
    )


def _is_residence_over(model: LoadedModel, copy: Copy, now: float) -> bool:
    """Whether the residence of the copy is over. An unused model has none."""
    return model.is_without_requests or now - copy.entered_at >= copy.residence_s
