"""A model and its replicas as the loop holds them in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from gateway.controller.decisions.copies import CopyChange
from gateway.controller.decisions.eviction import STOP_REASON, CopyId, Eviction
from gateway.controller.decisions.reconcile import NoAction
from gateway.controller.fleet.plan_inputs import FailedPlanning
from gateway.controller.fleet.preparation import Preparation
from gateway.controller.watch.endpoint_watcher import EndpointWatcher
from gateway.controller.watch.watcher import Watcher
from gateway.diagnosis.start_clock import StartClock
from gateway.domain import (
    Abilities,
    Attempt,
    Change,
    EngineAnswer,
    InquiryResult,
    Instance,
    Observation,
    Offer,
    Plan,
    Question,
    Rival,
    StartConditions,
    Wish,
)
from gateway.domain.running import MAX_ENDED_ATTEMPTS
from gateway.logging import Logger
from gateway.planner.starts import EnginePhase
from gateway.supervision import ErrorBackoff

log = Logger("fitserve.loop")

REPLAN_S = 30.0
"""Seconds before a replica without a plan is first planned again, and between two looks for
changes."""
# The longest time in seconds between two plans of a replica without one while nothing changes.
_MAX_REPLAN_S = 600.0
# Seconds before an engine whose inquiry failed is asked again. The cause may be gone by then.
_INQUIRY_RETRY_S = 600.0


@dataclass
class ReplicaPlanning:
    """The planning of one replica: the reason without a plan, and offers of other models.

    An absent plan is not permanent: the replica is planned again by `looks_again` or by time.
    """

    blocked_reason: str | None = None
    blocked_at: float = 0.0
    looks_again: bool = False
    """A replica without a plan is planned again. Until the result is known its status stays."""
    failure_count: int = 0
    """Plans in a row that were made without a known change, and found nothing."""
    failed_planning: FailedPlanning | None = None
    """Its last plan, which found nothing; None: the next plan is made in any case."""
    is_outdated: bool = False
    """Memory became free, or a request came, while its plan was made."""
    awaited_offers: tuple[Offer, ...] = ()
    """Offers of other models that it waits for before it is planned."""
    received_offers: tuple[Offer, ...] = ()
    """The gifts of others for it, reserved until it has a plan."""
    requested_copies: set[tuple[str, int, str]] = field(default_factory=set)
    """The copies last asked to give, and how, since it last had a plan."""
    waits_for_request: bool = False
    """There is room once other models are evicted, which a request causes."""
    intended_plan: Plan | None = None
    """The plan with the offers that it waits for."""

    @property
    def replan_s(self) -> float:
        """Seconds from a block to the next plan without a known change: a Hub may answer again."""
        return min(REPLAN_S * 2.0 ** min(self.failure_count, 16), _MAX_REPLAN_S)

    def block_planning(self, reason: str) -> None:
        """Note that nothing can be started for now."""
        self.blocked_reason, self.blocked_at = reason, time.monotonic()
        self.awaited_offers = ()
        self.received_offers = ()
        self.waits_for_request = False

    def restore_block(self, failed_planning: FailedPlanning) -> None:
        """Note that nothing has changed since its last plan, which found nothing."""
        self.block_planning(failed_planning.reason)
        self.blocked_at = failed_planning.at
        self.waits_for_request = failed_planning.waits_for_request

    def wait_for(self, offers: tuple[Offer, ...], intended_plan: Plan | None = None) -> bool:
        """Note that other models must give these offers first.

        Returns whether the set of givers has changed.
        """
        self.block_planning("waits: " + "; ".join(offer.words for offer in offers))
        former_copies = self.requested_copies
        self.requested_copies = {(offer.model, offer.replica, offer.kind) for offer in offers}
        self.awaited_offers = offers
        self.intended_plan = intended_plan
        return self.requested_copies != former_copies

    def accept_offers(self, gifts: tuple[Offer, ...]) -> None:
        """Note that the gifts have arrived. The memory of the gifts is reserved until the replica
        is planned."""
        self.blocked_reason = None
        self.awaited_offers = ()
        self.received_offers = gifts

    def wait_for_request(
        self, reason: str, offers: tuple[Offer, ...], *, needs_request: bool
    ) -> None:
        """Note that there is no plan now, but a waiting request would get these offers.

        `needs_request`: a request waits already.
        """
        remedy = (
            "It is loaded once other models may be unloaded"
            if needs_request
            else "A request loads it by this"
        )
        self.block_planning(
            f"{reason.rstrip('.')}. {remedy}: {'; '.join(offer.words for offer in offers)}"
        )
        self.waits_for_request = True


@dataclass
class ReplicaRollout:
    """The part of one replica in a change of its model's wish: the replica may be the trial, or the
    predecessor whose engine makes room."""

    seeks_plan: bool = False
    """A trial of a changed wish, which gets another plan where one fails."""
    lacks_memory: bool = False
    """The trial does not fit next to the serving engine."""
    must_be_replaced: bool = False
    """The successor starts only after this engine stops, because both do not fit together."""
    unrouted_at: float | None = None
    """When its engine left the routes for a successor. It answers its last requests, and stops."""
    awaits_successor: bool = False
    """Its serving engine stopped for a successor that does not serve yet."""


@dataclass
class ReplicaState:
    """One replica in memory: its records, its observation, and the work under way."""

    model: str
    index: int
    attempt: Attempt | None = None
    history: list[Attempt] = field(default_factory=list)
    watcher: Watcher | None = None
    retired_watcher: Watcher | None = None
    """The watcher of its last engine, which copies the end of the log."""
    task: asyncio.Task[None] | None = None
    is_stopping: bool = False
    progress: str = ""
    cache_receivers: frozenset[str] = frozenset()
    """The models for which it last gave KV cache."""
    status: NoAction = NoAction("starting")
    generation: int = 0
    """The generation of the wish that it is planned by."""
    preparation: Preparation | None = None
    """The files of its start, brought and read ahead."""
    early_inquiry: asyncio.Task[None] | None = None
    """Asks its engine about the plan for its turn, while it rests."""
    launched_attempt: int | None = None
    """The attempt that this gateway launched. Phases of other starts were not seen whole."""
    conditions: StartConditions = StartConditions()
    """The conditions under which its present engine started."""
    unsleepable_attempt: int | None = None
    """The attempt whose engine could not fall asleep or wake up. It ends."""
    eviction: Eviction | None = None
    """Its eviction: it gets no request until its engine is stopped or asleep."""
    wake_times: tuple[float, float] | None = None
    """When its engine was last asked to wake up, and when it answered; None: it never slept."""
    planning: ReplicaPlanning = field(default_factory=ReplicaPlanning)
    succession: ReplicaRollout = field(default_factory=ReplicaRollout)
    setback: ErrorBackoff = field(init=False)

    def __post_init__(self) -> None:
        self.setback = ErrorBackoff("a replica", model=self.model, replica=self.index)

    @property
    def problems(self) -> Iterator[str]:
        """Unexpected errors that its work meets now."""
        if self.setback.problem is not None:
            yield self.setback.problem
        if self.watcher is not None:
            yield from self.watcher.problems

    @property
    def is_busy(self) -> bool:
        return self.task is not None

    @property
    def has_engine(self) -> bool:
        """Whether an engine runs, starts or stops."""
        return self.attempt is not None or self.is_busy

    @property
    def is_gone(self) -> bool:
        """Whether the replica has no engine, and none is on its way in or out."""
        return not self.has_engine and self.eviction is None

    def show_leave(self, reason: str) -> None:
        """Show until the next pass that the engine is on its way out."""
        self.status = NoAction("stopping", f"{reason}; requests in flight are answered first")

    @property
    def is_launching(self) -> bool:
        """Whether an engine that this gateway launched is not proven yet."""
        attempt = self.attempt
        return (
            attempt is not None
            and attempt.state == "starting"
            and self.launched_attempt == attempt.id
        )

    @property
    def start_clock(self) -> StartClock | None:
        """The clock of the present start; None: none, or a former gateway launched it."""
        is_launched = self.attempt is not None and self.launched_attempt == self.attempt.id
        return self.watcher.clock if is_launched and self.watcher is not None else None

    @property
    def is_asleep(self) -> bool:
        """Whether the replica's engine sleeps, and the freed memory is known."""
        return self.attempt is not None and self.attempt.is_sleep_confirmed

    @property
    def attempts(self) -> list[Attempt]:
        """All remembered attempts of the replica, the live one last."""
        return [*self.history, *([self.attempt] if self.attempt else [])]

    @property
    def last_ended_id(self) -> int:
        """The number of the last ended attempt; 0: there is none."""
        return self.history[-1].id if self.history else 0

    def remember(self, *ended_attempts: Attempt) -> list[Attempt]:
        """Add ended attempts to the history. Returns the oldest, which leave it beyond a bound."""
        attempts = sorted([*self.history, *ended_attempts], key=attrgetter("id"))
        self.history = attempts[-MAX_ENDED_ATTEMPTS:]
        return attempts[:-MAX_ENDED_ATTEMPTS]

    def instance_among(self, instance_by_name: Mapping[str, Instance]) -> Instance | None:
        """The instance of the live attempt; without one, a left-over instance of an ended
        attempt."""
        attempts = [*([self.attempt] if self.attempt else []), *reversed(self.history)]
        leftovers = [
            instance_by_name[attempt.instance_name]
            for attempt in attempts
            if attempt.instance_name in instance_by_name
        ]
        if not leftovers or self.attempt is None or leftovers[0].attempt == self.attempt.id:
            return leftovers[0] if leftovers else None
        # An engine that another plan replaces has to be gone before the other starts.
        is_replaced = (
            self.attempt.state == "starting"
            and leftovers[0].fingerprint != self.attempt.fingerprint
        )
        return leftovers[0] if is_replaced else None

    def swap_engines(self, neighbour: ReplicaState) -> None:
        """Exchange the engines of two replicas, with all that belongs to them."""
        self.attempt, neighbour.attempt = neighbour.attempt, self.attempt
        self.watcher, neighbour.watcher = neighbour.watcher, self.watcher
        self.generation, neighbour.generation = neighbour.generation, self.generation

    def finish_change(self) -> None:
        """Note that its engine serves the changed wish."""
        self.succession.must_be_replaced = self.succession.awaits_successor = False
        self.succession.unrouted_at = self.planning.blocked_reason = None

    def cancel_preparation(self) -> None:
        if self.preparation is not None:
            self.preparation.cancel()
            self.preparation = None

    def start_inquiry(self, inquiry: Coroutine[Any, Any, None]) -> None:
        """Begin an inquiry for its turn, unless one runs."""
        if self.early_inquiry is not None and not self.early_inquiry.done():
            inquiry.close()
            return
        self.early_inquiry = asyncio.create_task(inquiry)
        self.early_inquiry.add_done_callback(_log_inquiry_failure)

    def cancel_inquiry(self) -> None:
        if self.early_inquiry is not None:
            self.early_inquiry.cancel()
            self.early_inquiry = None

    async def retire_watcher(self) -> None:
        """Stop watching an engine that stops next. The copy of its log goes on."""
        if self.watcher is not None:
            await self._cancel_copy()
            # `unwatch` finds it here too if this is cancelled.
            self.retired_watcher = self.watcher
            self.watcher = None
            if self.retired_watcher is not None and not await self.retired_watcher.retire():
                self.retired_watcher = None

    async def unwatch(self) -> None:
        """Stop watching, and copying the log of its last engine."""
        if self.watcher is not None:
            watcher = self.watcher
            self.watcher = None
            await watcher.close()
        await self._cancel_copy()

    async def _cancel_copy(self) -> None:
        if self.retired_watcher is not None:
            watcher = self.retired_watcher
            self.retired_watcher = None
            await watcher.close()

    @property
    def engine_phase(self) -> EnginePhase:
        """The phase of the engine as other engines on its GPUs see it (`PlacedEngine`)."""
        observation = self.watcher.observation if self.watcher is not None else Observation()
        if (
            self.attempt is not None
            and self.attempt.asleep is not None
            and self.attempt.asleep.freed_bytes is None
        ):
            return "loading"
        if (
            observation.are_graphs_made
            or observation.is_healthy
            or (self.attempt is not None and self.attempt.state == "ready")
        ):
            return "settled"
        return "capturing_graphs" if observation.is_kv_cache_made else "loading"

    @property
    def measures(self) -> bool:
        """Whether the replica's engine has imported its code, and looks at its GPUs."""
        return self.watcher is not None and self.watcher.observation.phase != Observation().phase

    @property
    def phase(self) -> str:
        waits = (self.planning.awaited_offers and self.planning.blocked_reason) or "starting"
        if self.is_asleep:
            return self.progress or waits
        return self.progress or (self.watcher.observation.phase if self.watcher else waits)


@dataclass
class ManagedModel:
    """One wanted model: its replicas, or its endpoints elsewhere."""

    wish: Wish
    created_at: float
    is_deleting: bool = False
    replicas: list[ReplicaState] = field(default_factory=list)
    endpoints: list[EndpointWatcher] = field(default_factory=list)
    decision: bytes | None = None
    """The planner's last answer, as JSON."""
    forgiven_at: float = 0.0
    """Failures until then no longer count, because of a `retry`."""
    answers: dict[Question, EngineAnswer] = field(default_factory=dict)
    """Answers of engines about the model."""
    pins: dict[str, str] = field(default_factory=dict)
    """The digest of each image, by name, as of its first inquiry or start. Restarts use the same
    image, even if the name has moved."""
    inquiry_problems: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Why and when an inquiry of an engine failed, by engine."""
    inquiry_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during an inquiry, as one replica's answers serve the others too."""
    measured_plan: Plan | None = None
    """The serving plan with its measured figures."""
    rival: Rival | None = None
    """A plan that should be better than the running one, by its measurements."""
    no_giving_until_s: float = 0.0
    """Until this monotonic time the model gives no KV cache, as the last try failed."""
    trial: ReplicaState | None = None
    """Another plan, tried alongside the running ones without any client's request.

    Once its attempt has ended it only stops.
    """
    pause_reason: str = ""
    """Why its engines are stopped for a while, to be restored; "" if they are not."""
    generation: int = 0
    """The generation of the wish in force."""
    change: Change | None = None
    """Another wish that takes its place, or that was refused."""
    is_stopped: bool = False
    """Its owner has stopped it. It is not loaded until its owner starts it."""
    is_unloaded: bool = False
    """Its owner has unloaded it. It is not loaded until its next request."""
    idempotency_key: str = ""
    """The key of the request that added it; "": the request had none, or the gateway restarted
    since."""
    used_at: float = 0.0
    """The last use, in Unix seconds; 0: unused since it was added."""
    load_block_reason: str = ""
    """Why no copy of it may be loaded now; "" if one may."""
    is_first_in_line: bool = False
    """The model is the first of those that wait for a place."""
    has_requests: bool = False
    """A request waits for it."""
    evictable_copies_at_last_plan: frozenset[CopyId] = frozenset()
    """The copies of others that might have been evicted when it was last planned."""
    was_evicted: bool = False
    """The model was evicted, and not loaded since."""
    is_unused: bool = True
    """The model had no request since it was last away."""
    waits_for_request: bool = False
    """Requests wait while the model is away: it was evicted, or others must be evicted first."""
    copy_change: CopyChange | None = None
    """The last change of its copies by the load; None: none since the gateway started."""
    copy_hold_reason: str = ""
    """Why a copy that its queue needs is not added; "" if it needs none."""
    setback: ErrorBackoff = field(init=False)

    def __post_init__(self) -> None:
        self.setback = ErrorBackoff("a model", model=self.wish.name)

    @property
    def wanted_copies(self) -> int | None:
        """The number of copies that it shall have; None: as many as the plan finds useful."""
        least_count, most_count = self.wish.least_copies, self.wish.most_copies
        if least_count is None or most_count is None:
            return None
        # Copies that serve at the gateway's start stay until the load is known.
        count = len(self.replicas) if self.copy_change is None else self.copy_change.count
        return min(most_count, max(least_count, count))

    def is_for_load(self, replica: ReplicaState) -> bool:
        """Whether a replica is above the least number of copies that follow the load."""
        return self.wish.copies is not None and replica.index >= (self.wish.least_copies or 0)

    def is_surplus(self, replica: ReplicaState) -> bool:
        """Whether a replica is one more than the load needs."""
        return self.is_for_load(replica) and replica.index >= (self.wanted_copies or 0)

    @property
    def wanted_generation(self) -> int:
        """The generation that all replicas shall have."""
        return (
            self.change.generation
            if self.change is not None and not self.change.refusal_text
            else self.generation
        )

    @property
    def newest_generation(self) -> int:
        """The newest generation of its wishes, refused ones included."""
        replicas = [*self.replicas, *([self.trial] if self.trial is not None else [])]
        attempts = [
            self.generation,
            *(attempt.generation for replica in replicas for attempt in replica.attempts),
        ]
        return max([*attempts, *([self.change.generation] if self.change is not None else [])])

    def wish_of(self, replica: ReplicaState) -> Wish:
        """The wish that a replica is planned by."""
        is_new = (
            self.change is not None
            and replica.generation == self.change.generation == self.wanted_generation
        )
        return self.change.wish if self.change is not None and is_new else self.wish

    @property
    def needs_evictions(self) -> bool:
        """Whether others are evicted for it where there is no room."""
        return self.has_requests or self.wish.policy.pinned

    @property
    def has_pending_changes(self) -> bool:
        """Whether some engines are to be replaced by engines of another wish."""
        return self.wanted_generation != self.generation or any(
            replica.generation != self.wanted_generation for replica in self.replicas
        )

    @property
    def copies_to_evict(self) -> tuple[CopyId, ...]:
        """The copies of other models that must be evicted before it can be loaded."""
        offers = (offer for replica in self.replicas for offer in replica.planning.awaited_offers)
        return tuple(
            sorted({(offer.model, offer.replica) for offer in offers if offer.kind != "surplus"})
        )

    @property
    def copies_to_stop(self) -> tuple[CopyId, ...]:
        """The needed copies that must stop, as sleep would free too little."""
        offers = (offer for replica in self.replicas for offer in replica.planning.awaited_offers)
        return tuple(
            sorted({(offer.model, offer.replica) for offer in offers if offer.kind == "stop"})
        )

    def remember_answers(self, result: InquiryResult) -> None:
        """Remember the result of an inquiry."""
        self.answers.update(result.answers)
        for engine, problem in result.problems.items():
            self.inquiry_problems.setdefault(engine, (problem, time.monotonic()))

    @property
    def failed_inquiries(self) -> dict[str, str]:
        """Engines not to be asked now, with the reason: their inquiry has just failed."""
        self.inquiry_problems = {
            engine: (reason, at)
            for engine, (reason, at) in self.inquiry_problems.items()
            if time.monotonic() - at < _INQUIRY_RETRY_S
        }
        return {engine: reason for engine, (reason, _) in self.inquiry_problems.items()}

    @property
    def all_replicas(self) -> list[ReplicaState]:
        """All replicas, and the trial if there is one."""
        return [*self.replicas, *([self.trial] if self.trial is not None else [])]

    def show_stop(self) -> None:
        """Show until the next pass that the owner stopped the model."""
        for replica in self.replicas:
            if replica.has_engine:
                replica.show_leave("its owner stops it")
            else:
                replica.status = NoAction("stopped", STOP_REASON)

    @property
    def serving(self) -> list[Attempt]:
        """The attempts that serve clients."""
        return [
            replica.attempt
            for replica in self.replicas
            if replica.attempt is not None and replica.attempt.serves
        ]

    @property
    def abilities(self) -> Abilities | None:
        """The abilities that its engine showed, now or the last time; None: never tested."""
        attempts = sorted(
            (attempt for replica in self.replicas for attempt in replica.attempts),
            key=lambda attempt: (attempt.state == "ready", attempt.id),
        )
        return next(
            (
                attempt.abilities
                for attempt in reversed(attempts)
                if attempt.ready_at is not None and attempt.abilities
            ),
            None,
        )

    @property
    def problems(self) -> Iterator[str]:
        """Unexpected errors of its work. The work goes on after a while."""
        if self.setback.problem is not None:
            yield self.setback.problem
        for replica in self.replicas:
            yield from replica.problems


def share_parts(plan: Plan, replica: ReplicaState) -> Plan:
    """The plan, whose parts are those of the replica's last plan where they are equal.

    A plan takes up to 100 KiB of memory, and each remembered start has one.
    """
    if not replica.attempts:
        return plan
    last = replica.attempts[-1].plan
    return plan.evolve(
        **{
            name: part
            for name in plan.model_fields_set
            if (part := getattr(last, name)) == getattr(plan, name)
        }
    )


def _log_inquiry_failure(inquiry: asyncio.Task[None]) -> None:
    # The start at its turn asks itself where no answer is kept.
    if not inquiry.cancelled() and (error := inquiry.exception()) is not None:
        log.warning("an early inquiry failed", error=str(error))
