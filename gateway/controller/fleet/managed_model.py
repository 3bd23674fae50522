"""A model and its replicas as the loop holds them in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from gateway.controller.decisions.eviction import Eviction, Place
from gateway.controller.decisions.reconcile import Rest
from gateway.controller.watch.endpoint_watcher import EndpointWatcher
from gateway.controller.watch.watcher import Watcher
from gateway.domain import (
    Abilities,
    Asked,
    Attempt,
    Change,
    EngineAnswer,
    Instance,
    Observation,
    Offer,
    Plan,
    Question,
    Rival,
    Wish,
)
from gateway.planner.starts import Stage
from gateway.supervision import Setback

# An engine that could not be asked is not asked at each start; what kept it from answering may have
# passed after so long.
_ASK_AGAIN_S = 600.0


@dataclass
class ReplicaState:
    """One replica as the loop holds it: what is recorded, what is seen, what is under way."""

    model: str
    index: int
    attempt: Attempt | None = None
    history: list[Attempt] = field(default_factory=list)
    watcher: Watcher | None = None
    task: asyncio.Task[None] | None = None
    stopping: bool = False
    progress: str = ""
    blocked: str | None = None
    blocked_at: float = 0.0
    looks_again: bool = False
    """It has no plan, and is planned again because time went by, or something became free: until
    that is known it stays what it was."""
    takes: tuple[Offer, ...] = ()
    """What other models give before it can be planned: it waits for that."""
    received_offers: tuple[Offer, ...] = ()
    """What others gave for it, until it has a plan: nobody else takes that."""
    gave_to: frozenset[str] = frozenset()
    """The models for which it last gave KV cache."""
    requested_copies: set[tuple[str, int, str]] = field(default_factory=set)
    """Which copies were last asked to give, and how, since it last had a plan."""
    on_request: bool = False
    """There is room for it once others leave, which they do when it is asked."""
    status: Rest = Rest("starting")
    generation: int = 0
    """Of the wish that it is planned by."""
    seeks: bool = False
    """A trial that gets the next plan where one fails: it tries a changed wish."""
    no_room: bool = False
    """What it tries does not fit beside what serves."""
    in_place: bool = False
    """Another wish takes its place: nothing fits beside it."""
    unrouted_at: float | None = None
    """When its engine left the routes, for another one takes its place: it answers what it has, and
    stops."""
    made_room: bool = False
    """What it served with stopped for another engine, which does not serve yet."""
    spent: int | None = None
    """The number of an attempt whose engine could not fall asleep or wake up: it ends."""
    leaving: Eviction | None = None
    """Why it gets no request and its engine stops or sleeps, until it does not run any more."""
    woken: tuple[float, float] | None = None
    """When its engine was last told to wake up, and when it answered; None: it never slept."""
    setback: Setback = field(init=False)

    def __post_init__(self) -> None:
        self.setback = Setback("a replica", model=self.model, replica=self.index)

    @property
    def problems(self) -> Iterator[str]:
        """Errors that nobody expected, which its work meets now."""
        if self.setback.problem is not None:
            yield self.setback.problem
        if self.watcher is not None:
            yield from self.watcher.problems

    @property
    def busy(self) -> bool:
        return self.task is not None

    @property
    def asleep(self) -> bool:
        """Its engine sleeps, and what it gave is known."""
        return (
            self.attempt is not None
            and self.attempt.asleep is not None
            and self.attempt.asleep.gave is not None
        )

    @property
    def attempts(self) -> list[Attempt]:
        """All attempts of the replica that are remembered, the live one last."""
        return [*self.history, *([self.attempt] if self.attempt else [])]

    def instance_among(self, instances: Iterable[Instance]) -> Instance | None:
        """The instance of the live attempt; without a live attempt, an instance that an ended
        attempt left behind."""
        attempts = [*([self.attempt] if self.attempt else []), *reversed(self.history)]
        found = {instance.name: instance for instance in instances}
        leftovers = [
            found[attempt.instance_name] for attempt in attempts if attempt.instance_name in found
        ]
        if not leftovers or self.attempt is None or leftovers[0].attempt == self.attempt.id:
            return leftovers[0] if leftovers else None
        # One that another plan takes the place of has to be gone before the other is started.
        replaced = (
            self.attempt.state == "starting"
            and leftovers[0].fingerprint != self.attempt.fingerprint
        )
        return leftovers[0] if replaced else None

    def block(self, reason: str) -> None:
        """There is nothing to start for now."""
        self.blocked, self.blocked_at, self.takes, self.received_offers, self.on_request = (
            reason,
            time.monotonic(),
            (),
            (),
            False,
        )

    def wait_for(self, takes: tuple[Offer, ...]) -> bool:
        """There is nothing to start before others gave this. Returns whether that is asked of
        others than the last time."""
        self.block("waits: " + "; ".join(offer.words for offer in takes))
        before, self.requested_copies = (
            self.requested_copies,
            {(one.model, one.replica, one.how) for one in takes},
        )
        self.takes = takes
        return self.requested_copies != before

    def receive(self, given: tuple[Offer, ...]) -> None:
        """It waits for nothing any more, and is planned: with this, which stays for it until
        then."""
        self.blocked, self.takes, self.received_offers = None, (), given

    def rest_until_asked(self, reason: str, takes: tuple[Offer, ...], *, asks: bool) -> None:
        """There is no plan now, and others would give this to a request that waits; asks: and will,
        for it asks already."""
        then = "It is loaded once they may leave" if asks else "A request loads it all the same"
        self.block(f"{reason.rstrip('.')}. {then}: {'; '.join(offer.words for offer in takes)}")
        self.on_request = True

    async def unwatch(self) -> None:
        if self.watcher is not None:
            watcher, self.watcher = self.watcher, None
            await watcher.close()

    @property
    def stage(self) -> Stage:
        """How far its engine is, as others on the same GPUs feel that."""
        seen = self.watcher.observation if self.watcher is not None else Observation()
        if (
            self.attempt is not None
            and self.attempt.asleep is not None
            and self.attempt.asleep.gave is None
        ):
            return "loads"
        if (
            seen.warm
            or seen.answering
            or (self.attempt is not None and self.attempt.state == "ready")
        ):
            return "stands"
        return "warms" if seen.stands else "loads"

    @property
    def measures(self) -> bool:
        """Its engine has imported its code, and looks at its GPUs."""
        return self.watcher is not None and self.watcher.observation.phase != Observation().phase

    @property
    def phase(self) -> str:
        waits = self.blocked if self.takes and self.blocked else "starting"
        if self.asleep:
            return self.progress or waits
        return self.progress or (self.watcher.observation.phase if self.watcher else waits)


@dataclass
class ManagedModel:
    """One wanted model: its replicas, or its endpoints elsewhere."""

    wish: Wish
    created_at: float
    deleting: bool = False
    replicas: list[ReplicaState] = field(default_factory=list)
    endpoints: list[EndpointWatcher] = field(default_factory=list)
    decision: bytes | None = None
    """The planner's last answer, as JSON."""
    forgiven_at: float = 0.0
    """Failures until then no longer count, because somebody asked to try again."""
    answers: dict[Question, EngineAnswer] = field(default_factory=dict)
    """What engines said of the model when they were asked."""
    pins: dict[str, str] = field(default_factory=dict)
    """By the name of an image the digest that it had when it was first asked or started: restarts
    take the same, wherever the name has moved."""
    inquiry_problems: dict[str, tuple[str, float]] = field(default_factory=dict)
    """By engine, why it could not be asked, and when that was."""
    inquiry_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while engines are asked about the model: what one replica hears, the others need not
    ask."""
    measured: Plan | None = None
    """The plan that serves with its own figures, once they were measured."""
    rival: Rival | None = None
    """A plan that should be better than what runs, by what was measured of that."""
    keeps_until: float = 0.0
    """Until then it gives nothing of its KV cache: the last time came to nothing. Of the monotonic
    clock."""
    trial: ReplicaState | None = None
    """Another plan, tried beside what runs: no client's request goes there. Once its attempt has
    ended it only stops."""
    generation: int = 0
    """Of the wish in force."""
    change: Change | None = None
    """Another wish that takes its place, or that was given up."""
    stopped: bool = False
    """Its owner has stopped it, and it is not loaded until its owner starts it."""
    used_at: float = 0.0
    """When it was last asked, in Unix seconds; 0: not since it was added."""
    hold: str = ""
    """Why no copy of it is loaded now; empty: it may be."""
    has_requests: bool = False
    """A request waits for it."""
    offered: frozenset[Place] = frozenset()
    """The copies of others that could have left for it when it was last planned."""
    gave_way: bool = False
    """It had to leave, and was not loaded since."""
    unused: bool = True
    """Nobody has asked for it since it was last away."""
    on_request: bool = False
    """It may have to leave, or to wait for others that do: its requests wait for it."""
    setback: Setback = field(init=False)

    def __post_init__(self) -> None:
        self.setback = Setback("a model", model=self.wish.name)

    @property
    def wanted(self) -> int:
        """The generation that all replicas are to have."""
        return (
            self.change.generation
            if self.change is not None and not self.change.refused
            else self.generation
        )

    @property
    def newest(self) -> int:
        """The newest generation of its wishes, of those given up too."""
        replicas = [*self.replicas, *([self.trial] if self.trial is not None else [])]
        known = [
            self.generation,
            *(attempt.generation for replica in replicas for attempt in replica.attempts),
        ]
        return max([*known, *([self.change.generation] if self.change is not None else [])])

    def wish_of(self, replica: ReplicaState) -> Wish:
        """The wish that a replica is planned by."""
        new = (
            self.change is not None and replica.generation == self.change.generation == self.wanted
        )
        return self.change.wish if self.change is not None and new else self.wish

    @property
    def asks(self) -> bool:
        """Others leave for it where there is no room."""
        return self.has_requests or self.wish.policy.pinned

    @property
    def unsettled(self) -> bool:
        """Some of its engines are to be replaced by engines of another wish."""
        return self.wanted != self.generation or any(
            one.generation != self.wanted for one in self.replicas
        )

    @property
    def needs(self) -> tuple[Place, ...]:
        """The copies of other models that have to leave before it can be loaded."""
        takes = (take for one in self.replicas for take in one.takes)
        return tuple(
            sorted({(take.model, take.replica) for take in takes if take.how != "surplus"})
        )

    @property
    def ends(self) -> tuple[Place, ...]:
        """Those of them that have to stop: to sleep would give too little."""
        takes = (take for one in self.replicas for take in one.takes)
        return tuple(sorted({(take.model, take.replica) for take in takes if take.how == "stop"}))

    @property
    def out_since(self) -> float:
        """When its last engine ended; when it was added, where it never had one."""
        return max(
            (one.history[-1].ended_at or 0.0 for one in self.replicas if one.history),
            default=self.created_at,
        )

    def remember_answers(self, asked: Asked) -> None:
        """Remember what came of asking engines about the model."""
        self.answers.update(asked.answers)
        for engine, problem in asked.problems.items():
            self.inquiry_problems.setdefault(engine, (problem, time.monotonic()))

    @property
    def failed_inquiries(self) -> dict[str, str]:
        """The engines that are not asked now, by name, and why: to ask them has just failed."""
        self.inquiry_problems = {
            engine: (why, at)
            for engine, (why, at) in self.inquiry_problems.items()
            if time.monotonic() - at < _ASK_AGAIN_S
        }
        return {engine: why for engine, (why, _) in self.inquiry_problems.items()}

    @property
    def all_replicas(self) -> list[ReplicaState]:
        """With the one of another plan, where one is tried beside them."""
        return [*self.replicas, *([self.trial] if self.trial is not None else [])]

    @property
    def serving(self) -> list[Attempt]:
        """The attempts that clients are served by."""
        return [
            one.attempt for one in self.replicas if one.attempt is not None and one.attempt.serves
        ]

    @property
    def abilities(self) -> Abilities | None:
        """What its engine showed that it does for apps, now or the last time; None: none was
        asked."""
        tried = sorted(
            (one for replica in self.replicas for one in replica.attempts),
            key=lambda one: (one.state == "ready", one.id),
        )
        return next(
            (
                one.abilities
                for one in reversed(tried)
                if one.ready_at is not None and one.abilities
            ),
            None,
        )

    @property
    def problems(self) -> Iterator[str]:
        """Errors that nobody expected, which its work meets now; the work goes on after a while."""
        if self.setback.problem is not None:
            yield self.setback.problem
        for replica in self.replicas:
            yield from replica.problems
