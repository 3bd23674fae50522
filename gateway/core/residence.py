"""Which models are loaded now, which stay, and which give way to another. Pure: what is known of each model in, what each is to do out.

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
serves    -         the plan of who is asked needs its memory, not         leaves once its residence is over, and what it answers is answered
                    pinned

Plans are offered the models that could leave in the order of `may_leave`: those first that nobody asks. Who leaves is put to sleep where its engine can
(gateway/core/sharing/leaving.py), else stopped.
Who leaves gets no new request; those wait. A residence is as long as the load took (LEAST_S at least, MOST_S at most), so that no more than half of
the time goes into loading. A model that had to leave waits from then on, behind those that wait already: so each of N models that want
one place has it in turn, and no request waits for longer than N residences, loads and drains (FITSERVE_DRAIN_S each).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from gateway.domain.units import in_words

LEAST_S, MOST_S = 5.0, 60.0

State = Literal["out", "asleep", "loads", "serves", "leaves"]
# It takes a load, or waking up, before it serves.
_AWAY = ("out", "asleep")
Why = Literal["idle", "room", "owner"]


@dataclass(frozen=True)
class Resident:
    """One model. Times are in Unix seconds. since: when it came into its state. requests: in flight. waited_s: the oldest request that waits.
    room: False where no plan was found with what is left of the machine; needs: the models that have to leave for one, ends: those of them that
    have to stop, promised: others give what it lacks and stay; on_request: there is one once all have left that ever leave. able: it could be started now but for its room. gave_way: since the
    gateway runs it had to leave. new: it was never loaded, so that nobody knows whether it can be."""

    name: str
    state: State
    since: float = 0.0
    stopped: bool = False
    keep_alive_s: float = -1.0
    pinned: bool = False
    priority: int = 0
    used_at: float = 0.0
    load_s: float = 0.0
    requests: int = 0
    waited_s: float | None = None
    room: bool = True
    needs: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    promised: bool = False
    on_request: bool = False
    able: bool = True
    gave_way: bool = False
    new: bool = False

    @property
    def asked(self) -> bool:
        return bool(self.requests) or self.waited_s is not None

    @property
    def residence_s(self) -> float:
        return min(MOST_S, max(LEAST_S, self.load_s))

    def idle_s(self, now: float) -> float:
        return 0.0 if self.asked else now - max(self.used_at, self.since if self.state == "serves" else 0.0)


@dataclass(frozen=True)
class Leave:
    """ends: it is stopped, though it could sleep."""

    why: Why
    words: str
    ends: bool = False


@dataclass(frozen=True)
class Moves:
    """leave: who leaves. hold: who is out and is not to be loaded now, and why. Whoever is in neither goes on as it is, and is loaded where it is out."""

    leave: Mapping[str, Leave] = field(default_factory=dict)
    hold: Mapping[str, str] = field(default_factory=dict)


def decide(residents: Iterable[Resident], now: float) -> Moves:
    """What each model is to do now."""
    known = list(residents)
    leave: dict[str, Leave] = {}
    hold: dict[str, str] = {}
    for one in known:
        if one.stopped and one.state == "out":
            hold[one.name] = "stopped by its owner"
        elif one.stopped and one.state != "leaves":
            leave[one.name] = Leave("owner", "its owner stops it", ends=True)
        elif _expired(one, now):
            leave[one.name] = Leave("idle", f"it was not asked for {in_words(one.idle_s(now))}")
    queue = sorted((one for one in known if _asks(one)), key=lambda one: (_turn(one, now), one.name))
    going = bool(leave) or any(one.state == "leaves" for one in known)
    first: Resident | None = None
    for one in queue:
        if first is not None:
            hold[one.name] = f"it waits for its turn, after {first.name}"
        elif one.needs and not going:
            first = one
            named = [
                other
                for other in known
                if (other.name in one.needs and other.state == "serves" and not other.pinned)
                or (other.name in one.ends and other.state == "asleep")
            ]
            if all(other.state == "asleep" or _over(other, now) for other in named):
                words = f"it makes room for {one.name}"
                leave |= {other.name: Leave("room", words, ends=other.name in one.ends) for other in named}
            hold[one.name] = f"it waits for {', '.join(sorted(one.needs))} to leave"
        elif one.room or (one.promised and not one.needs):
            first = one
        elif going or any(other.state == "loads" for other in known):
            # Whoever loads can leave later.
            first = one
            hold[one.name] = "it waits until another model has left, or may leave"
    for one in known:
        if one.state == "out" and not one.stopped and not _asks(one) and one.able:
            if not _warm(one, now):
                hold[one.name] = "it is loaded when it is asked"
            elif first is not None or going:
                hold[one.name] = "others load first"
    return Moves(leave, hold)


def warm_order(one: Resident) -> tuple[bool, int, float]:
    """Who is loaded first where several may be."""
    return not one.pinned, -one.priority, -one.used_at


def may_leave(residents: Iterable[Resident], now: float) -> list[str]:
    """The models that could leave for another one, in the order in which it is asked of them: those first that nobody asks, and whose residence
    is over; of these the lowest priority, and then the least recently used."""
    found = [one for one in residents if one.state == "serves" and not one.pinned and not one.stopped]
    found.sort(
        key=lambda one: (one.asked, not _over(one, now), one.priority, one.since if one.asked else one.used_at, one.name)
    )
    return [one.name for one in found]


def loadable(residents: Iterable[Resident], one: Resident) -> bool:
    """Whether a request would bring it back: there is room, or somebody could leave for it."""
    going = any(other.state in ("loads", "leaves") for other in residents if other.name != one.name)
    comes = one.room or one.on_request or one.state not in _AWAY or one.promised or bool(one.needs)
    return one.able and not one.stopped and (comes or going)


def _asks(one: Resident) -> bool:
    return one.state in _AWAY and not one.stopped and one.able and (one.waited_s is not None or one.pinned)


def _turn(one: Resident, now: float) -> float:
    """Since when it waits for its turn: since its oldest request came, but not since before it had to leave."""
    return max(now - one.waited_s if one.waited_s is not None else 0.0, one.since)


def _expired(one: Resident, now: float) -> bool:
    return (
        one.state == "serves"
        and not one.pinned
        and not one.asked
        and one.keep_alive_s >= 0
        and one.idle_s(now) >= one.keep_alive_s
    )


def _warm(one: Resident, now: float) -> bool:
    return one.new or one.keep_alive_s < 0 or (not one.gave_way and one.idle_s(now) < one.keep_alive_s)


def _over(one: Resident, now: float) -> bool:
    """Whether its residence is over."""
    return now - one.since >= one.residence_s
