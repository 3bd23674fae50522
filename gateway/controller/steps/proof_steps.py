"""The proof that a replica's engine generates, and what it does for apps."""

from __future__ import annotations

import asyncio

from gateway.controller.fleet.managed_model import ReplicaState
from gateway.controller.watch.verify import alive, shown, verify
from gateway.controller.watch.watcher import Watcher
from gateway.domain import Attempt, Failure
from gateway.engines.common.chat import abilities
from gateway.store.store import Store

# How long the last log lines of a broken engine may take, in turns of the event loop and not in
# seconds: on a busy machine the reader of the log gets as many turns.
_LAST_WORDS, _TURN_S = 10, 0.1
# In which an engine that could not answer for apps has to answer the smallest request.
_ALIVE_S = 30.0


class ProofSteps:
    """Shared by all replicas of a gateway."""

    def __init__(self, store: Store, patience_s: float) -> None:
        """patience_s: for how long an engine may be silent."""
        self._store = store
        self._patience_s = patience_s

    async def verify(self, replica: ReplicaState, attempt: Attempt, forgiven_at: float) -> None:
        """forgiven_at: what was shown before no longer counts."""
        watcher = replica.watcher
        if watcher is None:
            return

        def report(progress: str) -> None:
            replica.progress = progress

        asked = watcher.client, watcher.url, attempt.served_name, attempt.plan
        failure = await verify(*asked, self._patience_s, report, watcher.proved)
        if failure is None:
            report("verifying: tool calls, thoughts and answers by a schema")
            failure = await self._shown(replica, attempt, watcher, forgiven_at)
        if failure is None:
            watcher.note(verified=True, phase="serving")
        else:
            if failure.kind == "verification_failed":
                # A crash shows in the log a moment after the connection breaks, and the log names
                # the cause better.
                turn = 0
                while turn < _LAST_WORDS or watcher.failure_pending:
                    await asyncio.sleep(_TURN_S)
                    turn += 1
            watcher.fail(failure)

    async def _shown(
        self, replica: ReplicaState, attempt: Attempt, watcher: Watcher, forgiven_at: float
    ) -> Failure | None:
        """What the engine does for apps, with the attempt. A failure where the engine ended of the
        question: then it is not asked again."""
        known = abilities.earlier(attempt, replica.history, forgiven_at)
        if known is None:
            asked = attempt.evolve(abilities=abilities.unasked(attempt.plan))
            await asyncio.to_thread(self._store.save_attempt, asked)
            self._note(replica, asked)
            engine = (watcher.client, watcher.url, attempt.served_name, attempt.plan)
            known = await shown(*engine)
            if any(one.state == "unknown" for _, one in known) and not await alive(
                *engine, _ALIVE_S
            ):
                return abilities.ended()
        self._note(replica, attempt.evolve(abilities=known))
        return None

    def _note(self, replica: ReplicaState, attempt: Attempt) -> None:
        """The same attempt, with more that is known of it, if it is still the replica's."""
        if replica.attempt is not None and replica.attempt.id == attempt.id:
            replica.attempt = attempt
