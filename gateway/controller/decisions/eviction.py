"""Which models are loaded now, which stay, and which give way to another, copy by copy. Pure: what
is known of each model in, what each is to do out.

model     asked     and                                                    then
any       -         its owner has stopped it                               leaves, and rests
out       yes       its turn has come                                      loads; where it finds no room, another one leaves for it
asleep    yes       the same                                               wakes up; where its memory was given away, another one leaves for it
asleep    no        its owner, or a plan that lacks what it still has      leaves: it stops
out       yes       others have waited longer                              waits for its turn
out       no        pinned                                                 as if it were asked
out       no        new, kept for ever, or used within its keep_alive      loads where there is room, and nobody waits
out       no        else                                                   rests until a request comes
serves    no        idle for longer than its keep_alive, not pinned        leaves
serves    -         the plan of who is asked needs memory of some of its   these copies leave once their residence is over, and what they answer
                    copies, not pinned                                     is answered; the others serve
unused, needed      nobody has asked for it since it was last away          leaves at once
idle, needed        an engine measures the memory of its GPUs now          leaves once that is over
serves    -         a copy of it is away, and nobody waits                 the copy comes back where there is room
serves    queued    a copy of it is away, no model that is out is asked    the copy comes back; where it finds no room, who is not asked leaves for it

Plans are offered the copies that could leave in the order of `eviction_order`: those first that nobody
asks. Who leaves is put to sleep where its engine can (gateway/planner/sharing/leaving.py), else
stopped.
Who leaves gets no new request; those wait, or go to the copies that stay. A residence of a copy is
as long as its load took (LEAST_S at least, MOST_S at most), so that no more than half of the time
goes into loading. Who was loaded for no request, and has had none, has no residence: for it to be
loaded again nobody has to leave, so each time that it leaves a request is answered. A model that
had to leave waits from then on, behind those that wait already: so each of N models that want one
place has it in turn, and no request waits for longer than N residences, loads and drains
(FITSERVE_DRAIN_S each).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from gateway.domain.units import in_words

LEAST_S, MOST_S = 5.0, 60.0

State = Literal["out", "asleep", "loads", "serves", "leaves"]
# It takes a load, or waking up, before it serves.
_AWAY = ("out", "asleep")
_BEST: tuple[State, ...] = ("serves", "leaves", "loads", "asleep")
Why = Literal["idle", "room", "owner"]


Place = tuple[str, int]
"""A copy of a model: its name, and the number of the copy."""


@dataclass(frozen=True)
class Copy:
    """One copy of a model. since: when it came into its state, in Unix seconds. load_s: what its
    last load took. watched: an engine measures the
    memory of its GPUs now, and would fail if this copy gave some back."""

    index: int
    state: State
    since: float = 0.0
    load_s: float = 0.0
    watched: bool = False

    @property
    def residence_s(self) -> float:
        return min(MOST_S, max(LEAST_S, self.load_s))


@dataclass(frozen=True)
class LoadedModel:
    """One model. Times are in Unix seconds. requests: in flight. waited_s: the oldest request that
    waits.
    room: False where no plan was found with what is left of the machine, for the copies that are
    away; needs: the copies of others that have to leave for one, ends: those of them that have to
    stop, promised: others give what it lacks and stay; on_request: there is one once all have left
    that ever leave. able: it could be started now but for its room. gave_way: since the gateway
    runs it had to leave. new: it was never loaded, so that nobody knows whether it can be. unused:
    nobody has asked for it since it was last away.
    """

    name: str
    copies: tuple[Copy, ...]
    stopped: bool = False
    keep_alive_s: float = -1.0
    pinned: bool = False
    priority: int = 0
    used_at: float = 0.0
    requests: int = 0
    waited_s: float | None = None
    room: bool = True
    needs: tuple[Place, ...] = ()
    ends: tuple[Place, ...] = ()
    promised: bool = False
    on_request: bool = False
    able: bool = True
    gave_way: bool = False
    new: bool = False
    unused: bool = False

    @property
    def state(self) -> State:
        """What the model is to its clients: it serves as long as one copy does."""
        states = {copy.state for copy in self.copies}
        return next((state for state in _BEST if state in states), "out")

    @property
    def since(self) -> float:
        """When it came into its state."""
        if self.state == "serves":
            return min(copy.since for copy in self.serving)
        return max((copy.since for copy in self.copies), default=0.0)

    @property
    def serving(self) -> list[Copy]:
        return [copy for copy in self.copies if copy.state == "serves"]

    @property
    def moves(self) -> bool:
        """Some of it loads or leaves: what others can have is not known before that is over."""
        return any(copy.state in ("loads", "leaves") for copy in self.copies)

    @property
    def short(self) -> bool:
        """A copy is away, and another one is not."""
        return self.state not in _AWAY and any(copy.state in _AWAY for copy in self.copies)

    @property
    def asked(self) -> bool:
        return bool(self.requests) or self.waited_s is not None

    def idle_s(self, now: float) -> float:
        return (
            0.0
            if self.asked
            else now - max(self.used_at, self.since if self.state == "serves" else 0.0)
        )


@dataclass(frozen=True)
class Eviction:
    """ends: it is stopped, though it could sleep."""

    why: Why
    words: str
    ends: bool = False


@dataclass(frozen=True)
class Moves:
    """leave: the copies that leave. hold: the models of which no copy is to be loaded now, and why.
    Whatever is in neither goes on as it is, and is loaded where it is out."""

    leave: Mapping[Place, Eviction] = field(default_factory=dict)
    hold: Mapping[str, str] = field(default_factory=dict)


def decide(residents: Iterable[LoadedModel], now: float) -> Moves:
    """What each model is to do now."""
    known = list(residents)
    leave: dict[Place, Eviction] = {}
    hold: dict[str, str] = {}
    for one in known:
        if one.stopped:
            hold[one.name] = "stopped by its owner"
            why = Eviction("owner", "its owner stops it", ends=True)
            leave |= {
                place: why
                for place, copy in _places(one)
                if copy.state in ("serves", "loads", "asleep")
            }
        elif _expired(one, now):
            why = Eviction("idle", f"it was not asked for {in_words(one.idle_s(now))}")
            leave |= {
                place: why
                for place, copy in _places(one)
                if copy.state in ("serves", "loads") and not copy.watched
            }
    # Who serves already comes after those that do not.
    queue = sorted(
        (one for one in known if _asks(one)),
        key=lambda one: (one.state == "serves", _turn(one, now), one.name),
    )
    going = bool(leave) or any(copy.state == "leaves" for one in known for copy in one.copies)
    first: LoadedModel | None = None
    for one in queue:
        if first is not None:
            hold[one.name] = f"it waits for its turn, after {first.name}"
        elif one.needs and not going:
            first = one
            leave |= _room(one, known, now)
            hold[one.name] = (
                f"it waits for {', '.join(sorted({name for name, _ in one.needs}))} to leave"
            )
        elif one.room or (one.promised and not one.needs):
            first = one
        elif going or any(copy.state == "loads" for other in known for copy in other.copies):
            # Whoever loads can leave later.
            first = one
            hold[one.name] = "it waits until another model has left, or may leave"
    for one in known:
        if one.stopped or _asks(one) or not one.able:
            continue
        if one.state == "out" and not _warm(one, now):
            hold[one.name] = "it is loaded when it is asked"
        elif (one.state == "out" or one.short) and (first is not None or going):
            hold[one.name] = "others load first"
    return Moves(leave, hold)


def _places(one: LoadedModel) -> Iterator[tuple[Place, Copy]]:
    return (((one.name, copy.index), copy) for copy in one.copies)


def _room(one: LoadedModel, known: Iterable[LoadedModel], now: float) -> dict[Place, Eviction]:
    """The copies that leave now for a model that is asked: none before each has had its time, and
    none while an engine measures its memory."""
    found: dict[Place, Eviction] = {}
    for other in known:
        for place, copy in _places(other):
            ends = place in one.ends
            serves = copy.state == "serves" and place in one.needs and not other.pinned
            if not serves and not (copy.state == "asleep" and ends):
                continue
            # For more of a model that serves nobody leaves that is asked.
            stays = serves and (
                not _had_time(other, copy, now) or (one.state == "serves" and other.asked)
            )
            if stays or copy.watched:
                return {}
            found[place] = Eviction("room", f"it makes room for {one.name}", ends=ends)
    return found


def warm_order(one: LoadedModel) -> tuple[bool, int, float]:
    """Who is loaded first where several may be."""
    return not one.pinned, -one.priority, -one.used_at


def eviction_order(residents: Iterable[LoadedModel], now: float) -> list[Place]:
    """The copies that could leave for another model, in the order in which it is asked of them:
    those first of models that nobody asks, and that
    have had their time; of these the lowest priority; of these those without which their model
    serves all the same; and then the least recently used.
    """
    found: list[tuple[tuple[bool, bool, int, bool, float, str, int], Place]] = []
    for one in residents:
        if one.pinned or one.stopped:
            continue
        copies = sorted(one.serving, key=lambda copy: (not _had_time(one, copy, now), -copy.index))
        for copy in copies:
            since = copy.since if one.asked else one.used_at
            only = copy is copies[-1]
            order = (
                one.asked,
                not _had_time(one, copy, now),
                one.priority,
                only,
                since,
                one.name,
                -copy.index,
            )
            found.append((order, (one.name, copy.index)))
    return [place for _, place in sorted(found)]


def loadable(residents: Iterable[LoadedModel], one: LoadedModel) -> bool:
    """Whether a request would bring it back: there is room, or somebody could leave for it."""
    going = any(other.moves for other in residents if other.name != one.name)
    comes = one.room or one.on_request or one.state not in _AWAY or one.promised or bool(one.needs)
    return one.able and not one.stopped and (comes or going)


def _asks(one: LoadedModel) -> bool:
    """Whether others leave for it: who is away and is asked, and who serves and has a copy away
    while requests wait."""
    wants = one.waited_s is not None or (one.pinned and one.state in _AWAY)
    return (
        wants
        and not one.stopped
        and one.able
        and (one.state in _AWAY or (one.state == "serves" and one.short))
    )


def _turn(one: LoadedModel, now: float) -> float:
    """Since when it waits for its turn: since its oldest request came, but not since before it had
    to leave."""
    return max(now - one.waited_s if one.waited_s is not None else 0.0, one.since)


def _expired(one: LoadedModel, now: float) -> bool:
    return (
        one.state == "serves"
        and not one.pinned
        and not one.asked
        and one.keep_alive_s >= 0
        and one.idle_s(now) >= one.keep_alive_s
    )


def _warm(one: LoadedModel, now: float) -> bool:
    return (
        one.new or one.keep_alive_s < 0 or (not one.gave_way and one.idle_s(now) < one.keep_alive_s)
    )


def _had_time(one: LoadedModel, copy: Copy, now: float) -> bool:
    """Whether the residence of its copy is over, if it has one."""
    return one.unused or now - copy.since >= copy.residence_s
