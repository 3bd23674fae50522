"""What the loop does about one replica: plan, launch, verify, publish, fail, stop. Each records what it did before it counts.

Nothing here decides what comes next. Effects may be cut off anywhere: what they leave is what the next pass finds.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from typing import Literal

from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.fleet.room import Room
from gateway.controller.steps.launcher import Launcher
from gateway.controller.steps.planner import Planner
from gateway.controller.steps.start_gate import StartGate, WithdrawnError
from gateway.controller.watch.verify import alive, shown, verify
from gateway.controller.watch.watcher import Watcher
from gateway.core.changes import as_good, of_plans
from gateway.core.chat import abilities
from gateway.core.facts.learn import excused, judged, learn, proved
from gateway.core.failures.signatures import Signatures
from gateway.core.reconcile import failures_in_a_row
from gateway.core.sharing.surplus import without
from gateway.domain import Asked, Attempt, EngineRef, Failure, Offer, Plan, Planned, RunningPlan, Scalar, Wish
from gateway.domain.image_name import exact
from gateway.errors import FitserveError, HostError, NoPlan
from gateway.logging import Logger
from gateway.machine.gpu_watch import GpuWatch
from gateway.routing.drains import Drains
from gateway.store.running_engines import RunningEngine, RunningEngines
from gateway.store.store import Store

log = Logger("fitserve.loop")

# How long the last log lines of a broken engine may take, in turns of the event loop and not in seconds: on a busy machine the
# reader of the log gets as many turns.
_LAST_WORDS, _TURN_S = 10, 0.1
_PORT_TRIES = 100
# In which an engine that could not answer for apps has to answer the smallest request.
_ALIVE_S = 30.0
# Between two looks at whether a pull or a download still moves.
_STALL_POLL_S = 5.0

# A model whose KV cache could not be cut is not asked again for so long.
_KEEPS_S = 600.0

RoomNow = Callable[[], Room]


class Effects:
    """Shared by all replicas of a gateway."""

    def __init__(
        self,
        store: Store,
        running: RunningEngines,
        planner: Planner,
        launcher: Launcher,
        gpus: GpuWatch,
        gate: StartGate,
        drains: Drains,
        signatures: Callable[[], Signatures],
    ) -> None:
        """signatures: gives what is known of failures, and their cures."""
        self._store = store
        self._running = running
        self._planner = planner
        self._launcher = launcher
        self._gpus = gpus
        self._gate = gate
        self._drains = drains
        self._signatures = signatures
        self.planning = asyncio.Lock()
        """Held while somebody counts on memory that is free."""
        self._writing = asyncio.Lock()
        """Held while a wish in force is written: of two at once the database would keep the one and this process the other."""

    async def plan(
        self,
        model: ManagedModel,
        replica: ReplicaState,
        room: RoomNow,
        instead: RoomNow,
        ports: Callable[[], Collection[int]],
    ) -> None:
        """instead: the room in the place of what serves; what is tried beside has to be as good as a plan for that."""
        try:
            # One at a time: two plans made side by side would count on the same free memory.
            async with self.planning:
                planned = await self._decide(model, room)
                if replica is model.trial and not await self._fits_beside(model, planned, room, instead):
                    replica.no_room = True
                    replica.block("there is no room beside what serves")
                    return
                if planned.takes:
                    if replica.wait_for(planned.takes):
                        log.warning("others give", model=replica.model, takes=[take.words for take in planned.takes])
                    return
                if planned.plan is not None:
                    await self._record(model, replica, planned.plan, ports, planned.template)
                    return
            if not model.wish_of(replica).check or not set(planned.open) - model.not_asked.keys():
                await self._without_plan(model, replica, planned, room)
                return
            # What the rules refuse, the engines' own code may allow.
            replica.progress = f"checking: {planned.open[0]} is asked about what its rules refuse"
            async with self._checked(model, room, planned.open[0], None) as planned:
                if planned.plan is None:
                    await self._without_plan(model, replica, planned, room)
                    return
                await self._record(model, replica, planned.plan, ports, planned.template)
        except FitserveError as error:
            replica.block(str(error))
            log.warning("no plan", model=replica.model, replica=replica.index, reason=str(error))

    async def _fits_beside(self, model: ManagedModel, planned: Planned, room: RoomNow, instead: RoomNow) -> bool:
        if room().claims == instead().claims:
            return True  # what serves holds nothing that plans are made of
        other = await self._decide(model, instead)
        if other.takes or other.plan is None:
            # In its place others may give, or an engine may allow what the rules refuse.
            return not other.takes and not other.open
        return planned.plan is not None and as_good(planned.plan, other.plan)

    async def _without_plan(self, model: ManagedModel, replica: ReplicaState, planned: Planned, room: RoomNow) -> None:
        """It rests where others would leave for it once it is asked. Else raises NoPlan."""
        reason = "; ".join([planned.reason, *self._gpus.lost_messages()])
        if room().if_asked:
            takes = (await self._decide(model, room, "leave")).takes
            if takes:
                replica.rest_until_asked(reason, takes, asks=model.asks)
                model.on_request = True
                return
        raise NoPlan(reason)

    async def _decide(self, model: ManagedModel, room: RoomNow, others: Literal["give", "stay", "leave"] = "give") -> Planned:
        """By what is known now; that is shown. others: what they do for it; `leave` is what all do in time once it is asked, and is not shown. Raises
        BadModel and its kin."""
        facts = await asyncio.to_thread(self._store.fact_texts)
        now = room()
        surplus = [offer for offer in now.sharing.offers if offer.how == "surplus"]
        offers = {"give": now.sharing.offers, "stay": (), "leave": (*surplus, *now.if_asked)}[others]
        planned = await self._planner.decide(
            now.wish, facts, now.claims, answers=model.answers, pins=model.pins, sharing=now.sharing._replace(offers=offers)
        )
        if model.decision is None or not (now.copy or others == "leave"):
            model.decision = planned.decision
        async with self._writing:
            if model.wanted == model.generation and planned.commits.items() - model.wish.commits.items():
                # A model is added with its commits; this one is older than that, or was added by name alone.
                model.wish = model.wish.evolve(commits={**planned.commits, **model.wish.commits})
                await asyncio.to_thread(self._store.save_wish, model.wish)
        return planned._replace(plan=_pinned(planned.plan, model.pins)) if planned.plan else planned

    async def _record(
        self, model: ManagedModel, replica: ReplicaState, plan: Plan, ports: Callable[[], Collection[int]], template: str
    ) -> None:
        if template:
            await asyncio.to_thread(self._launcher.keep_template, template)
        if model.wish_of(replica).replicas is None and replica is not model.trial:
            model.replicas += [
                ReplicaState(replica.model, index, generation=replica.generation)
                for index in range(len(model.replicas), plan.replicas.value)
            ]
        replica.attempt, replica.asked_of = await self._recorded(replica, plan, ports), set()
        log.info(
            "planned",
            model=replica.model,
            replica=replica.index,
            engine=str(plan.engine),
            plan=plan.fingerprint,
            **_after(replica.history, plan),
        )

    async def _recorded(self, replica: ReplicaState, plan: Plan, ports: Callable[[], Collection[int]]) -> Attempt:
        """The start of a plan, on the disk. Raises HostError, StoreError."""
        # The host does not know the port of a start that was recorded and cut off. In containers all engines have the same port.
        for _ in range(_PORT_TRIES):
            port = await self._launcher.host.allocate_port()
            if port not in ports():
                break
        made = (replica.model, replica.index, plan, port, time.time(), replica.generation)
        return await asyncio.to_thread(self._store.add_attempt, *made)

    async def try_beside(
        self, model: ManagedModel, replica: ReplicaState, plan: Plan, ports: Callable[[], Collection[int]]
    ) -> None:
        """Start another plan beside what serves. The gateway that dies before `adopt` leaves two live attempts, of which the next one keeps
        the older. Raises HostError, StoreError."""
        trial = ReplicaState(model.wish.name, replica.index, generation=replica.generation)
        trial.attempt = await self._recorded(trial, plan, ports)
        model.trial = trial

    async def try_instead(
        self, _model: ManagedModel, replica: ReplicaState, plan: Plan, ports: Callable[[], Collection[int]]
    ) -> None:
        """Start another plan in place of what serves, which is known to work: it is what is planned next where the other one fails. Nothing is done
        where something else began meanwhile. Raises HostError, StoreError."""
        old = replica.attempt
        new = await self._recorded(replica, plan, ports)
        if old is None or replica.attempt is not old or replica.busy:
            await asyncio.to_thread(self._store.save_attempt, new.evolve(state="stopped", ended_at=time.time()))
            return
        replica.attempt = new
        await self._end(replica, old)

    async def shrink(
        self,
        model: ManagedModel,
        take: Offer,
        asking: Collection[str],
        room: RoomNow,
        held: Callable[[ManagedModel, ReplicaState], dict[str, int]],
        ports: Callable[[], Collection[int]],
    ) -> None:
        """Start a replica's plan anew with less KV cache, in place of what serves, once that has answered its requests. Where no such plan
        is found nothing changes."""
        replica, old = model.replicas[take.replica], model.replicas[take.replica].attempt
        if old is None:
            return
        log.warning("gives KV cache", model=replica.model, to=sorted(asking), words=take.words)
        try:
            async with self.planning:
                new = await self._smaller(model, old, take, asking, room(), held(model, replica))
            if new is None or new.memory.promised_bytes > take.keeps:
                raise NoPlan("no plan of it is smaller")
            replica.left_at = time.monotonic()
            await self._drains.ended(old.instance_name)
            attempt = await self._recorded(replica, new, ports)
            if replica.attempt is not old:
                await asyncio.to_thread(self._store.save_attempt, attempt.evolve(state="stopped", ended_at=time.time()))
                return
            replica.attempt, replica.made_room = attempt, True
            await self._end(replica, old)
        except FitserveError as error:
            model.keeps_until = time.monotonic() + _KEEPS_S
            log.warning("gives no KV cache", model=replica.model, reason=str(error))
        finally:
            replica.left_at = None

    async def _smaller(
        self, model: ManagedModel, old: Attempt, take: Offer, asking: Collection[str], room: Room, held: dict[str, int]
    ) -> Plan | None:
        """The plan that serves, with less KV cache: the same engine on the same GPUs. Raises BadModel and its kin."""
        plan, before = old.plan, room.sharing.cap
        near = {holder.model for holder in room.sharing.holders if set(plan.gpus) & holder.gives.keys()}
        cap = without(take, plan, {*asking, *near, *(before.models if before else ())})
        same = {"engines": (str(plan.engine),), "gpus": plan.gpus, "tensor_parallel": plan.tensor_parallel.value, "replicas": 1}
        facts = await asyncio.to_thread(self._store.fact_texts)
        running = RunningPlan(plan, held)
        sharing = room.sharing._replace(cap=cap, offers=(), home=plan.gpus)
        found = await self._planner.decide(
            room.wish.evolve(**same), facts, room.claims, None, model.answers, model.pins, running, sharing=sharing
        )
        if found.plan is None or found.plan.cap != cap:
            return None
        fixed, taken = _pinned(found.plan, model.pins), cap.evolve(bytes=found.plan.memory.promised_bytes)
        smaller: Plan = fixed.evolve(question=None, cap=taken)
        return smaller

    async def adopt(self, model: ManagedModel) -> None:
        """What was tried beside serves from now on; what served until now stops when its last answers are given. Raises StoreError."""
        trial = model.trial
        if trial is None or trial.attempt is None or trial.busy:
            return
        replica = model.replicas[trial.index]
        if replica.task is not None:
            replica.task.cancel()  # it comes back by the old plan; nobody needs that any more
            return
        old, watcher, generation = replica.attempt, replica.watcher, replica.generation
        replica.attempt, replica.watcher, replica.shown = trial.attempt, trial.watcher, trial.shown
        replica.generation, replica.in_place, replica.left_at, replica.made_room = trial.generation, False, None, False
        trial.attempt, trial.watcher, trial.generation, trial.seeks = None, watcher, generation, False
        replica.blocked = None
        if old is not None:
            await self._end(trial, old)

    async def end_trial(self, model: ManagedModel) -> None:
        """What was tried beside stops. Raises StoreError."""
        trial = model.trial
        if trial is None:
            return
        trial.seeks = False
        if trial.task is not None and not trial.stopping:
            trial.task.cancel()
        if trial.attempt is not None:
            attempt, trial.attempt = trial.attempt, None
            await self._end(trial, attempt)

    async def replace(self, replica: ReplicaState, generation: int) -> bool:
        """Its engine stops, and the next one is planned by the wish of this generation. False while its step has to end first, which wakes
        the loop. Raises StoreError."""
        if replica.task is not None and not replica.stopping:
            # Once: what the step still has to clean up would be cancelled too.
            if not replica.task.cancelling():
                replica.task.cancel()
            return False
        attempt, replica.attempt = replica.attempt, None
        replica.made_room |= attempt is not None and attempt.state == "ready"
        if attempt is not None:
            await self._end(replica, attempt)
        replica.generation, replica.in_place, replica.left_at, replica.blocked = generation, False, None, None
        replica.setback.over()
        return True

    async def give_up(self, model: ManagedModel, reason: str) -> None:
        """The wish from before is in force again. Raises StoreError."""
        if model.change is not None:
            refused = model.change.evolve(refused=reason)
            await asyncio.to_thread(self._store.save_change, model.wish, model.generation, refused)
            model.change = refused
            log.warning("a change was given up", model=model.wish.name, reason=reason)
        await self.end_trial(model)

    async def finish(self, model: ManagedModel) -> None:
        """The new wish is in force. Raises StoreError."""
        if model.change is not None:
            await self.enforce(model, model.change.wish, model.change.generation)
            log.info("changed", model=model.wish.name)

    async def enforce(self, model: ManagedModel, wish: Wish, generation: int) -> None:
        """This is the wish in force, durably. Raises NotFound, StoreError."""
        async with self._writing:
            await asyncio.to_thread(self._store.save_change, wish, generation, None)
            model.wish, model.generation, model.change, model.rival = wish, generation, None, None

    async def drop(self, model: ManagedModel, replica: ReplicaState) -> None:
        """Fewer replicas are wished for; its engine is stopped as one that belongs to nothing. Raises StoreError."""
        if replica.task is not None:
            replica.task.cancel()
            return
        attempt, replica.attempt = replica.attempt, None
        if attempt is not None:
            await self._end(replica, attempt)
        model.replicas.remove(replica)

    async def retire(self, replica: ReplicaState, attempt: Attempt) -> None:
        """The engine serves nobody any more, and stops next; nothing failed. Raises StoreError."""
        if replica.task is not None and replica.task is not asyncio.current_task():
            replica.task.cancel()
        await self._end(replica, attempt)
        replica.attempt = None
        log.info("retired", model=replica.model, replica=replica.index)

    async def _end(self, replica: ReplicaState, attempt: Attempt) -> None:
        """The attempt is none of the replica's any more, and its engine stops."""
        ended = attempt.evolve(state="stopped", ended_at=time.time())
        replica.history.append(ended)
        await replica.unwatch()
        await asyncio.to_thread(self._store.save_attempt, ended)
        self._running.remove(attempt.instance_name)

    @contextlib.asynccontextmanager
    async def _checked(self, model: ManagedModel, room: RoomNow, engine: str, plan: Plan | None) -> AsyncGenerator[Planned]:
        """What is planned once engines were asked; until the end no other plan is made. Nobody waits while they are asked: what was
        promised to others meanwhile is looked at again. plan, of that engine: what stands where nothing comes of it."""
        limit_s = self._launcher.settings.start_timeout_s / 2
        async with model.asking:
            facts, before = await asyncio.to_thread(self._store.fact_texts), room()
            pins = model.pins
            known = model.answers, model.not_asked, pins
            try:
                sharing = before.sharing._replace(offers=())
                planned, asked = await self._planner.check(before.wish, facts, before.claims, *known, limit_s, sharing)
            except FitserveError as error:
                planned = Planned(plan, str(error), model.decision or b"null")
                asked = Asked({}, {engine: str(error)}, {})
            pins.update(asked.pins)
            model.heard(asked)
        async with self.planning:
            if room() != before:
                planned = await self._decide(model, room, "stay")
            elif not before.copy:
                model.decision = planned.decision
            yield planned._replace(plan=_pinned(planned.plan, pins)) if planned.plan else planned

    async def launch(self, model: ManagedModel, replica: ReplicaState, attempt: Attempt, room: RoomNow) -> None:
        moved = time.monotonic()

        def report(progress: str) -> None:
            nonlocal moved
            if progress != replica.progress:
                moved, replica.progress = time.monotonic(), progress

        patience_s = self._launcher.settings.start_timeout_s
        bringing = asyncio.ensure_future(self._bring(model, replica, attempt, room, report))
        try:
            while not (await asyncio.wait({bringing}, timeout=min(_STALL_POLL_S, patience_s / 4)))[0]:
                if time.monotonic() - moved > patience_s and not self._gate.waits(replica.attempt or attempt):
                    await self.fail(replica, replica.attempt or attempt, _stalled(replica.progress, patience_s))
                    return
            await bringing
        except WithdrawnError as error:
            await self.fail(replica, replica.attempt or attempt, error.failure)
        except FitserveError as error:
            # It may have got another plan before its start.
            if replica.attempt is not None and replica.attempt.id == attempt.id:
                if isinstance(error, NoPlan):
                    await self._give_up(replica, replica.attempt, error)
                else:
                    await self.fail(replica, replica.attempt, _not_started(error, replica.progress))
        finally:
            bringing.cancel()
            with contextlib.suppress(asyncio.CancelledError, FitserveError, WithdrawnError):
                await bringing

    async def _bring(
        self, model: ManagedModel, replica: ReplicaState, attempt: Attempt, room: RoomNow, report: Callable[[str], None]
    ) -> None:
        """Check the plan, and start the engine. Raises HostError, BadModel and their kin; NoPlan where the engines refuse every plan."""
        attempt = await self._pin(model, replica, attempt, report)
        check = model.wish_of(replica).check
        replaced = check and await self._replaced(model, attempt.plan.engine)
        while check and (replaced or attempt.plan.question is not None) and str(attempt.plan.engine) not in model.not_asked:
            attempt, replaced = await self._settle(model, replica, attempt, room, report), False
            attempt = await self._pin(model, replica, attempt, report)
        entry = RunningEngine(wish=model.wish_of(replica), created_at=model.created_at, attempt=attempt)
        await asyncio.to_thread(self._running.write, attempt.instance_name, entry)

        async def turn(sizes: bool) -> int | None:
            return await self._gate.turn(attempt, report, sizes=sizes)

        await self._launcher.launch(attempt, report, turn, allow_remote_code=model.wish_of(replica).policy.allow_remote_code)

    async def _replaced(self, model: ManagedModel, engine: EngineRef) -> bool:
        """Whether another image or environment is here than the one that answered about the model: what that one said is forgotten."""
        name = str(engine)
        if not any(question.engine == name for question in model.answers):
            return False
        here = await self._launcher.host.identity(engine)
        old = [asked for asked, said in model.answers.items() if asked.engine == name and said.source != here]
        for question in old:
            del model.answers[question]
        return bool(old)

    async def _pin(
        self, model: ManagedModel, replica: ReplicaState, attempt: Attempt, report: Callable[[str], None]
    ) -> Attempt:
        """The same attempt, with its engine's image here and named by its digest: what is asked is what is started. Raises HostError."""
        pins, plan = model.pins, attempt.plan
        await self._launcher.host.prepare(plan.engine, report)
        engine = await self._launcher.host.resolve(plan.engine)
        if engine == plan.engine or engine.image is None or engine.digest is None:
            return attempt
        pins[engine.image] = engine.digest
        return await self._rewrite(replica, attempt, _pinned(plan, pins))

    async def _settle(
        self, model: ManagedModel, replica: ReplicaState, attempt: Attempt, room: RoomNow, report: Callable[[str], None]
    ) -> Attempt:
        """The same attempt, with the plan that is best once its engine was asked. Another engine may be to be asked about that one."""
        engine = attempt.plan.engine
        try:
            await self._launcher.host.identity(engine)
        except HostError as error:
            model.heard(Asked({}, {str(engine): str(error)}, {}))
            return await self._replan(model, replica, attempt, attempt.plan)
        report(f"checking: {engine} is asked about the plan")
        async with self._checked(model, room, str(engine), attempt.plan) as planned:
            if planned.plan is None:
                raise NoPlan(planned.reason)
            return await self._replan(model, replica, attempt, planned.plan)

    async def _replan(self, model: ManagedModel, replica: ReplicaState, attempt: Attempt, plan: Plan) -> Attempt:
        if plan.question is not None and (problem := model.not_asked.get(str(plan.engine))):
            plan = plan.evolve(warnings=(*plan.warnings, f"Not checked by the engine's own code: {problem}"))
        settled = await self._rewrite(replica, attempt, plan)
        log.info("checked", model=replica.model, replica=replica.index, grade=plan.grade, plan=plan.fingerprint)
        return settled

    async def _rewrite(self, replica: ReplicaState, attempt: Attempt, plan: Plan) -> Attempt:
        settled: Attempt = attempt.evolve(plan=plan, fingerprint=plan.fingerprint)
        await asyncio.to_thread(self._store.save_plan, settled)
        replica.attempt = settled
        return settled

    async def _give_up(self, replica: ReplicaState, attempt: Attempt, error: NoPlan) -> None:
        """The engines refuse every plan, before a start was made: none has failed that could be tried again."""
        failure = Failure(kind="engine_refuses", phase="checking", message=error.message, advice=error.hint, proves="nothing")
        failure = await self._cured(attempt, failure)
        ended = attempt.evolve(state="stopped", ended_at=time.time(), failure=failure)
        await asyncio.to_thread(self._store.save_attempt, ended)
        replica.attempt = None
        replica.history.append(ended)
        replica.block(str(error))
        log.warning("no plan", model=replica.model, replica=replica.index, reason=str(error))

    async def verify(self, replica: ReplicaState, attempt: Attempt, forgiven_at: float) -> None:
        """forgiven_at: what was shown before no longer counts."""
        watcher = replica.watcher
        if watcher is None:
            return
        patience_s = self._launcher.settings.start_timeout_s

        def report(progress: str) -> None:
            replica.progress = progress

        asked = watcher.client, watcher.url, attempt.served_name, attempt.plan
        failure = await verify(*asked, patience_s, report, watcher.proved)
        if failure is None:
            report("verifying: tool calls, thoughts and answers by a schema")
            failure = await self._shown(replica, attempt, watcher, forgiven_at)
        if failure is None:
            watcher.note(verified=True, phase="serving")
        else:
            if failure.kind == "verification_failed":
                # A crash shows in the log a moment after the connection breaks, and the log names the cause better.
                turn = 0
                while turn < _LAST_WORDS or watcher.failure_pending:
                    await asyncio.sleep(_TURN_S)
                    turn += 1
            watcher.fail(failure)

    async def _shown(self, replica: ReplicaState, attempt: Attempt, watcher: Watcher, forgiven_at: float) -> Failure | None:
        """What the engine does for apps, with the attempt. A failure where the engine ended of the question: then it is not asked again."""
        known = abilities.earlier(attempt, replica.history, forgiven_at)
        if known is None:
            asked = attempt.evolve(abilities=abilities.unasked(attempt.plan))
            await asyncio.to_thread(self._store.save_attempt, asked)
            self._note(replica, asked)
            engine = (watcher.client, watcher.url, attempt.served_name, attempt.plan)
            known = await shown(*engine)
            if any(one.state == "unknown" for _, one in known) and not await alive(*engine, _ALIVE_S):
                return abilities.ended()
        self._note(replica, attempt.evolve(abilities=known))
        return None

    def _note(self, replica: ReplicaState, attempt: Attempt) -> None:
        """The same attempt, with more that is known of it, if it is still the replica's."""
        if replica.attempt is not None and replica.attempt.id == attempt.id:
            replica.attempt = attempt

    async def publish(self, replica: ReplicaState, attempt: Attempt) -> None:
        now = time.time()
        ready = attempt.evolve(state="ready", ready_at=now)
        cache_bytes = taken = None
        if attempt.plan.grade != "verified" and not self._gate.disturbance(attempt):
            moved, taken = await self._gate.since(attempt)
            cache_bytes = replica.watcher.cache_bytes if replica.watcher and not moved else None
        await asyncio.to_thread(self._store.save_attempt, ready, *proved(attempt, now, cache_bytes, taken))
        replica.attempt, replica.made_room = ready, False
        log.info("ready", model=replica.model, replica=replica.index, plan=attempt.fingerprint)

    async def fail(self, replica: ReplicaState, attempt: Attempt, failure: Failure) -> None:
        now = time.time()
        disturbed = self._gate.failed(attempt, failure) or self._gate.disturbance(attempt)
        if not disturbed and failure.proves != "nothing" and attempt.state == "starting":
            disturbed, _ = await self._gate.since(attempt)
        failure = excused(attempt, failure, disturbed)
        if abilities.ended_by_asking(attempt):
            failure = failure.evolve(proves="nothing")  # its plan serves whoever does not ask for that
        failure = judged(attempt, failure, failures_in_a_row(tuple(replica.history)), now)
        failure = await self._cured(attempt, failure)
        ended = attempt.evolve(state="failed", ended_at=now, failure=failure)
        await asyncio.to_thread(self._store.save_attempt, ended, *learn(attempt, failure, now))
        self._running.remove(attempt.instance_name)
        log.warning(
            "failed", model=replica.model, replica=replica.index, kind=failure.kind, reason=failure.message, line=failure.line
        )
        replica.attempt = None
        replica.history.append(ended)
        if replica.task is not None and replica.task is not asyncio.current_task():
            replica.task.cancel()
        await replica.unwatch()

    async def _cured(self, attempt: Attempt, failure: Failure) -> Failure:
        """With the steps that cure it, and the numbers of this case in them."""
        signatures = await asyncio.to_thread(self._signatures)
        return signatures.cured(failure, _case(attempt, self._launcher.settings.start_timeout_s))

    async def stop(self, name: str, grace_s: float, hurry: Callable[[], bool] | None = None) -> None:
        """hurry: given for an engine that has served, which left the routes and first answers what it was asked; as `Drains.ended` wants it."""
        if hurry is not None:
            await self._drains.ended(name, hurry)
        try:
            await self._launcher.host.stop(name, grace_s)
        except FitserveError as error:
            log.error("the engine could not be stopped", instance=name, error=str(error))  # noqa: TRY400 - the traceback adds nothing
            await asyncio.sleep(1.0)


def _pinned(plan: Plan, pins: Mapping[str, str]) -> Plan:
    """The plan for exactly these images; what is learned from it holds for them."""
    engine = exact(plan.engine, pins)
    found: Plan = plan.evolve(engine=engine, under={**plan.under, "digest": engine.digest}) if engine.digest else plan
    return found


def _after(history: Sequence[Attempt], plan: Plan) -> dict[str, str]:
    """For the log: which failure a plan follows, and what is other in it."""
    if not history or (failure := history[-1].failure) is None:
        return {}
    return {
        "after": failure.kind,
        "differs": ", ".join(one.what for one in of_plans(history[-1].plan, plan)) or "the same plan again",
    }


def _case(attempt: Attempt, patience_s: float) -> dict[str, Scalar]:
    """What the cure of a failure may speak of."""
    plan = attempt.plan
    known: dict[str, Scalar] = {"model": attempt.model, "engine": str(plan.engine), "patience": round(patience_s)}
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "tensor_parallel"):
        known[name] = getattr(plan, name).value
    if plan.engine.image is not None:
        known["image"] = plan.engine.image
    return known | ({"ranks": len(plan.gpus)} if len(plan.gpus) > 1 else {})


def _not_started(error: FitserveError, progress: str) -> Failure:
    """Of a start for which something is missing."""
    kind = "host_error" if isinstance(error, HostError) else "download"
    return Failure(kind=kind, phase=progress or "launching", message=error.message, advice=error.hint, proves="nothing")


def _stalled(progress: str, patience_s: float) -> Failure:
    return Failure(
        kind="stalled",
        phase=progress or "launching",
        message=f"Nothing moved for {round(patience_s)} seconds; the last that was heard is: {progress or 'nothing'}.",
        advice="Look at the network and the disk; what is there already is kept. FITSERVE_START_TIMEOUT_S sets the patience.",
        proves="nothing",
    )
