"""Decides the number of copies of models whose copies follow their load. Pure.

queue    copies                    condition                           decision
any      the last one is out       it is above the least number        one copy less
waits    all serve and are busy    there is room for one more          one copy more
waits    all serve and are busy    idle copies of others make room     one copy less of these
waits    all serve and are busy    there is no room                    a reason for people
empty    more than the least       fewer carry the load for long       one copy less
any      one comes or leaves       -                                   nothing

A copy is added once the oldest request has waited for `CopyRules.wait_s`, and taken back after
`CopyRules.idle_s` without a queue in which one copy less would have been at most half full. So a
load that needed a copy never takes it back: that load fills more than half of the others. Between
two changes of a model lie at least `CopyRules.pause_s`.

A copy for the load never makes another model leave. It takes free memory, and that of idle copies
above the least number of other models. Models that wait without any copy come first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gateway.domain.plan import RAM
from gateway.domain.units import duration_text, gib, plural

CopyState = Literal["serves", "comes", "leaves", "out"]
CopyCause = Literal["queue", "calm", "room", "eviction", "failure"]

LOAD_SHARE = 0.5
"""Part of the capacity of copies below which they are calm, and from which they are busy."""


@dataclass(frozen=True)
class CopyRules:
    """The bounds of decisions, in seconds.

    wait_s: how long the oldest request waits before a copy is added.
    idle_s: how long fewer copies would carry the load before one is taken back.
    pause_s: the least time between two changes of a model.
    """

    wait_s: float = 10.0
    idle_s: float = 300.0
    pause_s: float = 60.0


@dataclass(frozen=True)
class CopyLoad:
    """One copy.

    held_bytes: bytes of each device that were promised to it; empty: it is not planned yet.
    is_settled: its residence is over, and no engine measures the memory that it would free.
    reason: why it is out.
    has_failed: it is out because it failed, or found no place.
    """

    state: CopyState
    requests: int = 0
    capacity: int = 1
    held_bytes: Mapping[str, int] = field(default_factory=dict)
    is_settled: bool = True
    reason: str = ""
    has_failed: bool = False


@dataclass(frozen=True)
class CopySize:
    """The least memory of one more copy: bytes on each of its devices.

    devices: the number of GPUs; 0: it is in RAM.
    allowed_gpus: UUIDs of the GPUs that it may take; None: any.
    """

    bytes: int = 0
    devices: int = 0
    allowed_gpus: frozenset[str] | None = None


@dataclass(frozen=True)
class ScaledModel:
    """One model whose copies follow the load. Times are in monotonic seconds.

    copies: the wanted ones, in the order of their numbers.
    leaving_bytes: bytes of each device that its leaving copies still hold.
    is_leaving: a copy that was taken back is not gone yet.
    waited_s: how long its oldest queued request has waited; None: no request waits.
    calm_since: time from which one copy less would carry its load; None: it would not.
    changed_at: the last change of its number of copies; None: there was none.
    barred_until: no copy is added before, as the last one failed or found no room.
    """

    name: str
    least_count: int
    most_count: int
    copies: tuple[CopyLoad, ...]
    size: CopySize = CopySize()
    leaving_bytes: Mapping[str, int] = field(default_factory=dict)
    is_leaving: bool = False
    waited_s: float | None = None
    queue_length: int = 0
    calm_since: float | None = None
    changed_at: float | None = None
    barred_until: float = 0.0
    priority: int = 0
    is_pinned: bool = False

    @property
    def may_give(self) -> bool:
        """Whether its last copy is above its least number, and nothing of it is under way."""
        return (
            len(self.copies) > self.least_count
            and not self.is_leaving
            and all(copy.state in ("serves", "out") for copy in self.copies)
        )

    def is_calm(self, now: float, for_s: float) -> bool:
        """Whether fewer copies would have carried its load for so long, at these copies."""
        return (
            self.waited_s is None
            and self.calm_since is not None
            and now - self.calm_since >= for_s
            and (self.changed_at is None or now - self.changed_at >= for_s)
        )


@dataclass(frozen=True)
class CopyChange:
    """Another number of copies of a model, and why.

    waited_s, queue_length: the wait of the oldest request, and the number of waiting ones.
    at: Unix seconds.
    """

    count: int
    former_count: int
    cause: CopyCause
    reason: str
    waited_s: float = 0.0
    queue_length: int = 0
    at: float = 0.0


@dataclass(frozen=True)
class CopyDecision:
    """The changes by model, and for models that need a copy and get none the reason."""

    changes: Mapping[str, CopyChange] = field(default_factory=dict)
    hold_reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Room:
    """The memory for further copies.

    free_bytes: bytes that no engine has or was promised, of each GPU and of RAM; None: unknown, so
    that only the planner knows.
    waiting_model: a model that waits without any copy, and comes first; "": there is none.
    """

    free_bytes: Mapping[str, int] | None = None
    waiting_model: str = ""


def decide_copies(
    models: Iterable[ScaledModel], room: Room, now: float, rules: CopyRules
) -> CopyDecision:
    """The changes of all models now, at most one for each."""
    models = sorted(models, key=lambda model: (-(model.waited_s or 0.0), model.name))
    changes = {
        model.name: change
        for model in models
        if (change := _removal(model, now, rules)) is not None
    }
    hold_reasons: dict[str, str] = {}
    free_bytes = _unreserved_bytes(models, room)
    for model in models:
        if model.name in changes or not _needs_copy(model, now, rules):
            continue
        if room.waiting_model:
            hold_reasons[model.name] = f"{room.waiting_model} has no copy, and comes first"
            continue
        if free_bytes is None or has_place(model.size, free_bytes):
            free_bytes = _reserve(model.size, free_bytes)
            changes[model.name] = _addition(model)
            continue
        gone_bytes = _add_bytes(
            free_bytes,
            *(neighbour.leaving_bytes for neighbour in models),
            *_departing_bytes(models, changes),
        )
        if has_place(model.size, gone_bytes):
            hold_reasons[model.name] = "it waits for the memory of a copy that leaves"
            continue
        givers = _givers(model, models, gone_bytes, [*changes], now, rules)
        for giver in givers:
            changes[giver.name] = _change(
                giver, -1, "room", f"its copy is idle, and makes room for {model.name}"
            )
        hold_reasons[model.name] = (
            f"it waits for the memory of {', '.join(giver.name for giver in givers)}"
            if givers
            else _shortage(model.size, free_bytes)
        )
    return CopyDecision(changes, hold_reasons)


def capacity_of(copies: Iterable[CopyLoad]) -> int:
    """Requests that these copies take concurrently."""
    return sum(copy.capacity for copy in copies)


def has_spare_copy(copies: Sequence[CopyLoad]) -> bool:
    """Whether these copies without the last one would be at most half full with all requests."""
    requests = sum(copy.requests for copy in copies)
    return len(copies) > 1 and requests <= LOAD_SHARE * capacity_of(copies[:-1])


def has_place(size: CopySize, free_bytes: Mapping[str, int]) -> bool:
    """Whether there are devices with the least memory of a copy."""
    return len(_places(size, free_bytes)) >= max(1, size.devices)


def _places(size: CopySize, free_bytes: Mapping[str, int]) -> list[str]:
    """The devices with enough memory for a copy, the largest first."""
    devices = (
        device
        for device, count in free_bytes.items()
        if count >= size.bytes
        and (device == RAM) == (size.devices == 0)
        and (size.allowed_gpus is None or device == RAM or device in size.allowed_gpus)
    )
    return sorted(devices, key=lambda device: (-free_bytes[device], device))


def _reserve(size: CopySize, free_bytes: Mapping[str, int] | None) -> Mapping[str, int] | None:
    """The free memory without that of one more copy."""
    if free_bytes is None:
        return None
    taken_devices = _places(size, free_bytes)[: max(1, size.devices)]
    return {
        device: count - (size.bytes if device in taken_devices else 0)
        for device, count in free_bytes.items()
    }


def _unreserved_bytes(models: Iterable[ScaledModel], room: Room) -> Mapping[str, int] | None:
    """The free memory without that of copies that come and are not planned yet."""
    free_bytes = room.free_bytes
    for model in models:
        for copy in model.copies:
            if copy.state == "comes" and not copy.held_bytes:
                free_bytes = _reserve(model.size, free_bytes)
    return free_bytes


def _needs_copy(model: ScaledModel, now: float, rules: CopyRules) -> bool:
    """Whether a queue waits for too long at busy copies, and one more is allowed now."""
    requests = sum(copy.requests for copy in model.copies)
    return (
        model.waited_s is not None
        and model.waited_s >= rules.wait_s
        and model.least_count <= len(model.copies) < model.most_count
        and not model.is_leaving
        and all(copy.state == "serves" for copy in model.copies)
        and requests >= LOAD_SHARE * capacity_of(model.copies)
        and (model.changed_at is None or now - model.changed_at >= rules.pause_s)
        and now >= model.barred_until
    )


def _removal(model: ScaledModel, now: float, rules: CopyRules) -> CopyChange | None:
    """The change to one copy less, if the last one is out or was not needed for long."""
    if len(model.copies) <= model.least_count or model.is_leaving:
        return None
    last_copy = model.copies[-1]
    if last_copy.state == "out":
        return _change(
            model, -1, "failure" if last_copy.has_failed else "eviction", last_copy.reason
        )
    if (
        last_copy.state in ("serves", "comes")
        and last_copy.is_settled
        and not any(copy.state == "leaves" for copy in model.copies)
        and model.is_calm(now, rules.idle_s)
    ):
        reason = f"for {duration_text(rules.idle_s)} one copy less would have carried the load"
        return _change(model, -1, "calm", reason)
    return None


def _addition(model: ScaledModel) -> CopyChange:
    reason = f"its oldest request has waited for {duration_text(model.waited_s or 0.0)}"
    # The queues of several workers are not counted.
    if model.queue_length:
        reason += f", with {plural(model.queue_length, 'request')} in the queue"
    return _change(model, 1, "queue", reason)


def _change(model: ScaledModel, step: int, cause: CopyCause, reason: str) -> CopyChange:
    former_count = len(model.copies)
    return CopyChange(
        former_count + step,
        former_count,
        cause,
        reason,
        round(model.waited_s or 0.0, 1),
        model.queue_length,
    )


def _departing_bytes(
    models: Iterable[ScaledModel], changes: Mapping[str, CopyChange]
) -> list[Mapping[str, int]]:
    """The memory of the copies that leave by these changes."""
    return [
        model.copies[-1].held_bytes
        for model in models
        if model.name in changes and changes[model.name].count < len(model.copies)
    ]


def _givers(
    model: ScaledModel,
    models: Iterable[ScaledModel],
    free_bytes: Mapping[str, int],
    changing_names: Iterable[str],
    now: float,
    rules: CopyRules,
) -> list[ScaledModel]:
    """The models that give an idle copy for this one: one where that suffices, and none where all
    together do not."""
    candidates = [
        neighbour
        for neighbour in models
        if neighbour is not model
        and neighbour.name not in changing_names
        and _is_giver(neighbour, now, rules)
    ]
    candidates.sort(key=lambda giver: (giver.priority, giver.calm_since or 0.0, giver.name))
    for giver in candidates:
        if has_place(model.size, _add_bytes(free_bytes, giver.copies[-1].held_bytes)):
            return [giver]
    for count in range(2, len(candidates) + 1):
        givers = candidates[:count]
        held_bytes = [giver.copies[-1].held_bytes for giver in givers]
        if has_place(model.size, _add_bytes(free_bytes, *held_bytes)):
            return givers
    return []


def _is_giver(model: ScaledModel, now: float, rules: CopyRules) -> bool:
    """Whether the last copy of a model is idle, and may go for another model."""
    return (
        model.may_give
        and not model.is_pinned
        and model.copies[-1].is_settled
        and model.copies[-1].requests == 0
        and model.is_calm(now, rules.wait_s)
        and (model.changed_at is None or now - model.changed_at >= rules.pause_s)
    )


def _add_bytes(free_bytes: Mapping[str, int], *given_bytes: Mapping[str, int]) -> Mapping[str, int]:
    """The free memory with that of copies that leave."""
    sums = dict(free_bytes)
    for held_bytes in given_bytes:
        for device, count in held_bytes.items():
            sums[device] = sums.get(device, 0) + count
    return sums


def _shortage(size: CopySize, free_bytes: Mapping[str, int]) -> str:
    """Why there is no room for one more copy."""
    is_on_gpus = size.devices > 0
    place = f"on {plural(size.devices, 'GPU')}" if is_on_gpus else "of RAM"
    largest_bytes = max(
        (count for device, count in free_bytes.items() if (device == RAM) != is_on_gpus), default=0
    )
    return (
        f"no room: one more copy needs {gib(size.bytes)} {place}, {gib(max(0, largest_bytes))} is"
        " free, and no idle copy of another model is above its least number"
    )
