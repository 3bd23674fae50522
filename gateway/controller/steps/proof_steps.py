"""The proof that a replica's engine generates, and the test of its abilities for apps."""

from __future__ import annotations

import asyncio

from gateway.controller.fleet.managed_model import ReplicaState
from gateway.controller.watch.ability_tests import probe_abilities
from gateway.controller.watch.engine_questions import is_alive
from gateway.controller.watch.verify import verify
from gateway.controller.watch.watcher import Watcher
from gateway.domain import Attempt
from gateway.domain.running import TRIAL_GENERATION
from gateway.engines.common.chat import abilities
from gateway.store.store import Store

# The wait for the last log lines of a broken engine, in turns of the event loop instead of seconds.
# The log reader gets this many turns, even on a busy machine.
_LAST_WORDS = 10
_TURN_S = 0.1
# Seconds that the test of abilities may delay a start.
_ABILITIES_S = 3.0
# Seconds for the smallest request after an ability test without an answer.
_SMALL_REQUEST_TIMEOUT_S = 30.0


class ProofSteps:
    """Proves that an engine generates, and tests its abilities. Each gateway has one object of this
    class."""

    def __init__(self, store: Store, patience_s: float) -> None:
        """`patience_s` is the longest silence of an engine."""
        self._store = store
        self._patience_s = patience_s

    async def verify(self, replica: ReplicaState, attempt: Attempt, forgiven_at: float) -> None:
        """Prove that the engine serves, and note the result.

        Abilities shown before `forgiven_at` do not count.
        """
        watcher = replica.watcher
        if watcher is None:
            return

        def report(progress: str) -> None:
            replica.progress = progress

        target = watcher.client, watcher.url, attempt.served_name, attempt.plan
        failure = await verify(*target, self._patience_s, report, watcher.record_proof_time)
        if failure is None and replica.generation == TRIAL_GENERATION:
            # Questions about abilities would go on during the measurement.
            watcher.update(is_verified=True, phase="serving")
        elif failure is None:
            report("verifying: tool calls, thoughts and answers by a schema")
            await self._test_abilities(replica, attempt, watcher, forgiven_at)
            watcher.update(is_verified=True, phase="serving")
        else:
            if failure.kind == "verification_failed":
                # A crash shows in the log a moment after the connection breaks, and the log names
                # the cause better.
                turn = 0
                while turn < _LAST_WORDS or watcher.has_pending_failure:
                    await asyncio.sleep(_TURN_S)
                    turn += 1
            watcher.fail(failure)

    async def _test_abilities(
        self, replica: ReplicaState, attempt: Attempt, watcher: Watcher, forgiven_at: float
    ) -> None:
        """Test the abilities for apps. Answers that take longer come while the engine serves."""
        earlier_abilities = abilities.earlier(attempt, replica.history, forgiven_at)
        if earlier_abilities is not None:
            self._update_attempt(replica, attempt.evolve(abilities=earlier_abilities))
            return
        untested_attempt = attempt.evolve(abilities=abilities.abilities_by_plan(attempt.plan))
        await asyncio.to_thread(self._store.save_attempt, untested_attempt)
        self._update_attempt(replica, untested_attempt)
        questions = asyncio.create_task(self._query_abilities(attempt, watcher))
        watcher.adopt_questions(questions)
        await asyncio.wait({questions}, timeout=_ABILITIES_S)
        if watcher.observation.abilities is not None:
            self._update_attempt(replica, attempt.evolve(abilities=watcher.observation.abilities))

    async def _query_abilities(self, attempt: Attempt, watcher: Watcher) -> None:
        """Note the abilities that the engine shows, or that it ended. Then the test is not
        repeated."""
        engine = (watcher.client, watcher.url, attempt.served_name, attempt.plan)
        results = await probe_abilities(*engine)
        if any(ability.state == "unknown" for _, ability in results) and not await is_alive(
            *engine, _SMALL_REQUEST_TIMEOUT_S
        ):
            watcher.fail(abilities.test_failure())
        else:
            watcher.update(abilities=results)

    def _update_attempt(self, replica: ReplicaState, attempt: Attempt) -> None:
        """Replace the attempt by one with more knowledge, if it is still the replica's."""
        if replica.attempt is not None and replica.attempt.id == attempt.id:
            replica.attempt = attempt
