"""Who is asked, who is idle, who waits, before each pass of the loop; and with that who leaves and
who is held back (gateway/controller/decisions/eviction.py)."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from gateway.controller.decisions.eviction import (
    LEAST_S,
    Copy,
    Eviction,
    LoadedModel,
    Place,
    Why,
    decide,
    eviction_order,
    loadable,
    warm_order,
)
from gateway.controller.fleet.fleet import Fleet
from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.domain import Instance
from gateway.errors import StoreError
from gateway.logging import Logger
from gateway.proxy.routing.routes import Routes
from gateway.settings import Settings
from gateway.store.store import Store

log = Logger("fitserve.loop")

# Between two looks at how many requests have ended while nobody waits, and between two notes on the
# disk of when a model was last asked.
_COUNT_S, _NOTE_S = 1.0, 60.0


class Evictor:
    """`unloads`: how often copies of models left that served, by why. `measures`: as of
    `StartGate`. `ended`: how many requests of each model have
    ended so far."""

    def __init__(
        self,
        fleet: Fleet,
        routes: Routes,
        store: Store,
        settings: Settings,
        measures: Callable[[Collection[str]], bool],
        ended: Callable[[], Mapping[str, float]],
    ) -> None:
        self.unloads: Counter[tuple[str, Why]] = Counter()
        self._fleet = fleet
        self._routes = routes
        self._store = store
        self._settings = settings
        self._measures = measures
        self._ended = ended
        self._counts: Mapping[str, float] | None = None
        self._counted_at = self._noted_at = 0.0
        self._noted: dict[str, float] = {}
        self._order: dict[str, tuple[bool, int, float]] = {}

    async def look(self, instances: Iterable[Instance]) -> None:
        """Decides for all models. Raises StoreError."""
        now, demand = time.time(), self._routes.demand()
        running = {instance.name: instance.model for instance in instances}
        models = [model for model in self._fleet.models.values() if model.replicas]
        self._note_use(models, now, asked=bool(demand))
        for model in models:
            self._see_off(model, running)
        before = self._residents(models, demand, running)
        self._fleet.eviction_order = eviction_order(before, now)
        self._fleet.unasked = {one.name for one in before if not one.asked}
        for model in models:
            self._hear(model, asked=model.wish.name in demand)
        for model, one in ((self._fleet.models[one.name], one) for one in before):
            model.unused = (
                (model.unused or one.state in ("out", "asleep"))
                and not one.asked
                and model.used_at < now
            )
        residents = self._residents(models, demand, running)
        moves = decide(residents, now)
        for place, why in moves.leave.items():
            self._send_off(place, why)
        for model, one in ((self._fleet.models[one.name], one) for one in residents):
            model.hold = moves.hold.get(one.name, "")
            leaves = any(replica.leaving for replica in model.replicas)
            asked_for = model.on_request or one.keep_alive_s >= 0 or one.gave_way or not one.room
            model.on_request = (asked_for or one.name in moves.hold or leaves) and loadable(
                residents, one
            )
        self._order = {one.name: warm_order(one) for one in residents}
        await self._keep(models)

    def in_order(self) -> list[ManagedModel]:
        """All models, those first that are planned first where several may be loaded."""
        last = (True, 101, 0.0)
        return sorted(
            self._fleet.models.values(), key=lambda model: self._order.get(model.wish.name, last)
        )

    def _send_off(self, place: Place, why: Eviction) -> None:
        """The copy gets no request from now on, nor does what is tried in its place."""
        name, index = place
        going = [
            one
            for one in self._fleet.models[name].all_replicas
            if one.index == index and one.leaving is None
        ]
        if going:
            # Who sleeps has left before.
            self.unloads[name, why.why] += not all(one.asleep for one in going)
            log.info("leaves", model=name, replica=index, why=why.words)
        for replica in going:
            replica.leaving = why

    def _see_off(self, model: ManagedModel, running: Mapping[str, str]) -> None:
        """Whoever leaves has left once its engine is gone, or asleep if that is enough."""
        for replica in model.all_replicas:
            if replica.leaving is None or replica.busy:
                continue
            stays = replica.asleep and not (replica.leaving.ends or model.deleting)
            there = replica.attempt is not None or any(
                one.instance_name in running for one in replica.attempts
            )
            if stays or not there:
                replica.leaving, replica.looks_again, model.gave_way = None, True, True
                self._fleet.unblock()

    def _hear(self, model: ManagedModel, *, asked: bool) -> None:
        """Whether requests wait. That others leave is planned with only for a model that is asked,
        and anew where they do not after a while."""
        stops = model.needs
        copies = (
            one
            for name, index in stops
            if (other := self._fleet.models.get(name))
            for one in other.replicas[index:][:1]
        )
        idle = not any(one.leaving for one in copies)
        old = any(
            time.monotonic() - one.blocked_at > LEAST_S for one in model.replicas if one.takes
        )
        wanted = asked or model.wish.policy.pinned
        # Somebody could leave now who could not when it was planned.
        more = wanted and not stops and bool(set(self._fleet.leavers(model)) - model.offered)
        # Requests that wait for a place at copies that serve come and go: they change nothing where
        # nobody leaves for one more copy.
        first = asked and not (model.asked or model.serving)
        if first or more or (stops and idle and (old or not wanted)):
            for replica in model.replicas:
                replica.blocked, replica.takes = None, ()
        model.asked = asked

    def _residents(
        self,
        models: Iterable[ManagedModel],
        demand: Mapping[str, float],
        running: Mapping[str, str],
    ) -> list[LoadedModel]:
        return [
            one for model in models if (one := self._resident(model, demand, running)) is not None
        ]

    def _resident(
        self, model: ManagedModel, demand: Mapping[str, float], running: Mapping[str, str]
    ) -> LoadedModel | None:
        """running: the models of instances, by their names."""
        name, live = (
            model.wish.name,
            [one.attempt for one in model.replicas if one.attempt is not None],
        )
        if model.deleting:
            there = live or self._busy(model) or name in running.values()
            return LoadedModel(name, (Copy(0, "leaves"),)) if there else None
        copies = tuple(
            replace(_copy(model, one), watched=self._watched(one)) for one in model.replicas
        )
        known = LoadedModel(name, copies)
        if known.state == "serves":
            model.gave_way = False
        # What is said of room is said of the copies that are away.
        away = [
            one for one in model.replicas if one.attempt is None or one.asleep
        ] or model.replicas
        unable = [
            one.shown.state in ("quarantined", "backing_off")
            for one in (away if known.short else model.replicas)
        ]
        policy = model.wish.policy
        return replace(
            known,
            stopped=model.stopped,
            keep_alive_s=self._fleet.keep_alive_s(model.wish),
            pinned=policy.pinned,
            priority=policy.priority,
            used_at=model.used_at or model.created_at,
            requests=sum(self._routes.in_flight(one.instance_name) for one in live),
            waited_s=demand.get(name),
            room=any(one.blocked is None for one in away),
            needs=model.needs,
            ends=model.ends,
            promised=any(one.takes for one in model.replicas),
            on_request=any(one.on_request for one in model.replicas),
            able=not all(unable),
            gave_way=model.gave_way,
            new=not any(one.history for one in model.replicas),
            unused=model.unused,
        )

    def _watched(self, replica: ReplicaState) -> bool:
        return replica.attempt is not None and self._measures(replica.attempt.plan.gpus)

    @staticmethod
    def _busy(model: ManagedModel) -> bool:
        return any(one.busy for one in model.replicas)

    def _note_use(self, models: Iterable[ManagedModel], now: float, *, asked: bool) -> None:
        """A model is used while a request is in flight, and when one has ended since the last
        look."""
        for model in models:
            if any(
                self._routes.in_flight(one.attempt.instance_name)
                for one in model.replicas
                if one.attempt is not None
            ):
                model.used_at = now
        if time.monotonic() - self._counted_at < _COUNT_S and not asked:
            return
        before, self._counts, self._counted_at = self._counts, self._ended(), time.monotonic()
        for model in models:
            name = model.wish.name
            if before is not None and self._counts.get(name, 0.0) > before.get(name, 0.0):
                model.used_at = now

    async def _keep(self, models: Iterable[ManagedModel]) -> None:
        """On the disk, now and then."""
        if time.monotonic() - self._noted_at < _NOTE_S or self._store.problem is not None:
            return
        self._noted_at = time.monotonic()
        fresh = {
            one.wish.name: one.used_at
            for one in models
            if one.used_at > self._noted.get(one.wish.name, 0.0)
        }
        if fresh:
            self._noted |= fresh
            try:
                await asyncio.to_thread(self._store.used, fresh)
            except StoreError as error:
                log.warning("when models were last asked could not be noted", error=str(error))


def _copy(model: ManagedModel, replica: ReplicaState) -> Copy:
    attempt, woken = replica.attempt, replica.woken
    if (
        replica.leaving is None
        and attempt is not None
        and attempt.ready_at is not None
        and attempt.serves
    ):
        loaded = attempt.started_at, attempt.ready_at
        began, at = woken if woken is not None and woken[1] > attempt.ready_at else loaded
        return Copy(replica.index, "serves", at, at - began)
    ended = replica.history[-1].ended_at if replica.history else None
    if replica.leaving is not None:
        return Copy(replica.index, "leaves", ended or model.created_at)
    if attempt is not None and attempt.asleep is not None and replica.asleep and not replica.busy:
        return Copy(replica.index, "asleep", attempt.asleep.since)
    return Copy(
        replica.index,
        "loads" if attempt is not None or replica.busy else "out",
        ended or model.created_at,
    )
