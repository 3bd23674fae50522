"""The start of an engine: the check of its plan, its image and weights, and its turn."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable
from functools import partial

from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.fleet.preparation import LaunchFiles, Preparation
from gateway.controller.steps.attempts import Attempts
from gateway.controller.steps.launcher import Launcher
from gateway.controller.steps.replica_planner import CurrentContext, ReplicaPlanner, plan_for_images
from gateway.controller.steps.start_gate import StartGate, WithdrawnError
from gateway.domain import Attempt, EngineRef, Failure, Hardware, InquiryResult, Plan
from gateway.engines.common.resources import page_cache_bytes
from gateway.errors import FitserveError, HostError, NoPlan
from gateway.logging import Logger
from gateway.store.running_engines import RunningEngine, RunningEngines

log = Logger("fitserve.loop")

# Seconds between two looks at whether a pull or a download still moves.
_STALL_POLL_S = 5.0


class StartSteps:
    """Starts the engine of an attempt, with its image and weights. Each gateway has one object of
    this class."""

    def __init__(
        self,
        replica_planner: ReplicaPlanner,
        attempts: Attempts,
        launcher: Launcher,
        engines: RunningEngines,
        gate: StartGate,
        hardware: Callable[[], Awaitable[Hardware]],
    ) -> None:
        self._replica_planner = replica_planner
        self._attempts = attempts
        self._launcher = launcher
        self._engines = engines
        self._gate = gate
        self._hardware = hardware

    async def launch(
        self, model: ManagedModel, replica: ReplicaState, attempt: Attempt, context: CurrentContext
    ) -> None:
        """Fetch image and weights, and start the engine. A stalled start fails the attempt."""
        reported_at = time.monotonic()

        def report(progress: str) -> None:
            nonlocal reported_at
            if progress != replica.progress:
                reported_at = time.monotonic()
                replica.progress = progress

        has_started = False
        patience_s = self._launcher.settings.start_timeout_s
        bringing = asyncio.ensure_future(
            self._fetch_and_start(model, replica, attempt, context, report)
        )
        try:
            while not (await asyncio.wait({bringing}, timeout=min(_STALL_POLL_S, patience_s / 4)))[
                0
            ]:
                if time.monotonic() - reported_at > patience_s and not self._gate.is_waiting(
                    replica.attempt or attempt
                ):
                    await self._attempts.fail(
                        replica,
                        replica.attempt or attempt,
                        _stall_failure(replica.progress, patience_s),
                    )
                    return
            await bringing
            has_started = True
        except WithdrawnError as error:
            await self._attempts.fail(replica, replica.attempt or attempt, error.failure)
        except FitserveError as error:
            # The plan may have been replaced before the start.
            if replica.attempt is not None and replica.attempt.id == attempt.id:
                if isinstance(error, NoPlan):
                    await self._attempts.refuse(replica, replica.attempt, error)
                else:
                    await self._attempts.fail(
                        replica, replica.attempt, _start_failure(error, replica.progress)
                    )
        finally:
            bringing.cancel()
            with contextlib.suppress(asyncio.CancelledError, FitserveError, WithdrawnError):
                await bringing
            if not has_started:
                replica.cancel_preparation()

    async def _fetch_and_start(
        self,
        model: ManagedModel,
        replica: ReplicaState,
        attempt: Attempt,
        context: CurrentContext,
        report: Callable[[str], None],
    ) -> None:
        """Check the plan while its weights come, and start the engine. Raises HostError, BadModel
        and their kin; NoPlan where engines refuse every plan."""
        self.prepare(model, replica, attempt.plan)
        remote_code = model.wish_of(replica).policy.allow_remote_code
        attempt = await self._pin(model, replica, attempt, report)
        replica.conditions = await self._launcher.conditions(
            attempt.plan, allow_remote_code=remote_code
        )
        check = model.wish_of(replica).check
        is_replaced = check and await self._is_engine_replaced(model, attempt.plan.engine)
        while (
            check
            and (is_replaced or attempt.plan.question is not None)
            and str(attempt.plan.engine) not in model.failed_inquiries
        ):
            attempt = await self._settle(model, replica, attempt, context, report)
            is_replaced = False
            attempt = await self._pin(model, replica, attempt, report)
        entry = RunningEngine(
            wish=model.wish_of(replica), created_at=model.created_at, attempt=attempt
        )
        await asyncio.to_thread(self._engines.write, attempt.instance_name, entry)

        async def turn(sizes: bool) -> int | None:
            return await self._gate.wait_for_turn(attempt, report, accepts_cache_bytes=sizes)

        files = await self.prepare(model, replica, attempt.plan).files(report)
        replica.conditions = await self._launcher.launch(
            attempt, files, report, turn, allow_remote_code=remote_code
        )

    def prepare(self, model: ManagedModel, replica: ReplicaState, plan: Plan) -> Preparation:
        """The preparation of a start by this plan, begun if it was not."""
        preparation = replica.preparation
        if preparation is None or not preparation.serves(plan):
            replica.cancel_preparation()
            code = model.wish_of(replica).policy.allow_remote_code
            bring = partial(self._launcher.fetch_files, allow_remote_code=code)
            preparation = replica.preparation = Preparation(
                plan, bring, self._read_ahead, self._launcher.preparations
            )
        return preparation

    async def _read_ahead(self, plan: Plan, files: LaunchFiles) -> None:
        most_bytes = page_cache_bytes(plan, await self._hardware())
        await self._launcher.read_ahead(plan, files, most_bytes)

    async def _is_engine_replaced(self, model: ManagedModel, engine: EngineRef) -> bool:
        """Whether the image or environment has changed since the answers. Old answers are
        removed."""
        name = str(engine)
        if not any(question.engine == name for question in model.answers):
            return False
        identity = await self._launcher.host.identity(engine)
        old_questions = [
            question
            for question, answer in model.answers.items()
            if question.engine == name and answer.source != identity
        ]
        for question in old_questions:
            del model.answers[question]
        return bool(old_questions)

    async def _pin(
        self,
        model: ManagedModel,
        replica: ReplicaState,
        attempt: Attempt,
        report: Callable[[str], None],
    ) -> Attempt:
        """The attempt with its image present and named by digest, so that the engine asked is the
        engine started. An environment is named by its identity. Raises HostError."""
        pins = model.pins
        plan = attempt.plan
        await self._launcher.host.prepare(plan.engine, report)
        engine = await self._launcher.host.resolve(plan.engine)
        if engine.image is not None and engine.digest is not None:
            pins[engine.image] = engine.digest
            plan = plan_for_images(plan, pins)
        elif environment := await self._environment_digest(engine):
            plan = plan.evolve(software={**plan.software, "environment": environment})
        if plan.grade == "verified" and not await self._attempts.is_verified(plan):
            # The image or environment has changed since: this build has shown nothing yet.
            plan = plan.evolve(grade="predicted")
        if plan == attempt.plan:
            return attempt
        return await self._attempts.rewrite(replica, attempt, plan)

    async def _environment_digest(self, engine: EngineRef) -> str:
        """A digest of the engine's environment, which changes when it is rebuilt; empty: none is
        known."""
        with contextlib.suppress(HostError):
            identity = await self._launcher.host.identity(engine)
            return hashlib.sha256(identity.encode()).hexdigest()[:16]
        return ""

    async def _settle(
        self,
        model: ManagedModel,
        replica: ReplicaState,
        attempt: Attempt,
        context: CurrentContext,
        report: Callable[[str], None],
    ) -> Attempt:
        """The attempt with the best plan after an inquiry. The new plan may need an inquiry of
        another engine."""
        engine = attempt.plan.engine
        try:
            await self._launcher.host.identity(engine)
        except HostError as error:
            model.remember_answers(InquiryResult({}, {str(engine): str(error)}, {}))
            return await self._replan(model, replica, attempt, attempt.plan)
        remote_code = model.wish_of(replica).policy.allow_remote_code
        await self._launcher.expect(attempt, allow_remote_code=remote_code)
        report(f"checking: {engine} checks the plan by its own code")
        async with self._replica_planner.plan_after_inquiry(
            model, context, str(engine), attempt.plan
        ) as result:
            if result.plan is None:
                raise NoPlan(result.reason)
            return await self._replan(model, replica, attempt, result.plan)

    async def _replan(
        self, model: ManagedModel, replica: ReplicaState, attempt: Attempt, plan: Plan
    ) -> Attempt:
        if plan.question is not None and (problem := model.failed_inquiries.get(str(plan.engine))):
            plan = plan.evolve(
                warnings=(*plan.warnings, f"Not checked by the engine's own code: {problem}")
            )
        settled_attempt = await self._attempts.rewrite(replica, attempt, plan)
        log.info(
            "checked",
            model=replica.model,
            replica=replica.index,
            grade=plan.grade,
            plan=plan.fingerprint,
        )
        return settled_attempt


def _start_failure(error: FitserveError, progress: str) -> Failure:
    """The failure of a start for which something is missing."""
    kind = "host_error" if isinstance(error, HostError) else "download"
    return Failure(
        kind=kind,
        phase=progress or "launching",
        message=error.message,
        advice=error.hint,
        proven_subject="nothing",
    )


def _stall_failure(progress: str, patience_s: float) -> Failure:
    return Failure(
        kind="stalled",
        phase=progress or "launching",
        message=(
            f"Nothing moved for {round(patience_s)} seconds; the last progress was:"
            f" {progress or 'nothing'}."
        ),
        advice=(
            "Check the network and the disk. Data received so far is kept."
            " FITSERVE_START_TIMEOUT_S sets the longest wait."
        ),
        proven_subject="nothing",
    )
