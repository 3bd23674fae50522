"""Commands of owners: add, change, stop, unload or remove a model, set GPUs apart.

A command is on disk before it is answered, except an unload, which the next gateway does not know.
The loop carries it out.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from gateway.controller.decisions.reconcile import NoAction
from gateway.controller.fleet.fleet import Fleet
from gateway.controller.fleet.managed_model import ManagedModel
from gateway.controller.steps.wish_changes import WishChanges
from gateway.domain import Wish
from gateway.domain.wish import WishOrigin
from gateway.errors import BadRequest, Conflict
from gateway.store.store import Store


class OwnerCommands:
    def __init__(
        self,
        store: Store,
        fleet: Fleet,
        wishes: WishChanges,
        on_admission: Callable[[], None],
        wake: Callable[[], None],
    ) -> None:
        """`on_admission` is called for a new model that clients may call; `wake` starts a pass."""
        self._store = store
        self._fleet = fleet
        self._wishes = wishes
        self._on_admission = on_admission
        self._wake = wake
        # Wishes are checked against each other and recorded one at a time, so that no name is taken
        # twice and none is lost.
        self._wishing = asyncio.Lock()

    def model_of_key(self, key: str, name: str) -> ManagedModel | None:
        """The model that a request with this idempotency key added; None: there is none.

        Raises Conflict where the key added a model of another name.
        """
        for model in self._fleet.models.values():
            if not key or model.idempotency_key != key or model.is_deleting:
                continue
            if model.wish.name != name:
                raise Conflict(
                    f"This Idempotency-Key added the model {model.wish.name}.",
                    hint="Send another key with each new request.",
                )
            return model
        return None

    async def add(
        self, wish: Wish, key: str = "", origin: WishOrigin | None = None
    ) -> ManagedModel:
        """Record a new model durably, then start working on it. Raises Conflict, StoreError.

        key: the idempotency key of the request. A model that the same key added is returned.
        origin: the author of the wish; None: unknown.
        """
        self._store.changeable()
        async with self._wishing:
            if (added := self.model_of_key(key, wish.name)) is not None:
                return added
            self._fleet.check_names(wish)
            now = time.time()
            await asyncio.to_thread(self._store.add_model, wish, now, origin)
            model = self._fleet.add_model(ManagedModel(wish, now, idempotency_key=key))
        self._on_admission()
        self._wake()
        return model

    async def remove(self, name: str) -> None:
        """Mark a model for removal. The loop stops its engines. Raises NotFound, StoreError."""
        self._store.changeable()
        await asyncio.to_thread(self._store.mark_deleting, name)
        self._fleet.model(name).is_deleting = True
        self._wake()

    async def change(
        self,
        model: ManagedModel,
        old_wish: Wish,
        wish: Wish,
        *,
        restarts: bool,
        origin: WishOrigin | None = None,
    ) -> ManagedModel:
        """Record another wish for a model durably, then change its engines.

        `old_wish` is the wish that the new one was made from. An equal wish is refused too while a
        change to another one is under way. `restarts`: other engines may be needed. Raises
        NotFound, Conflict, StoreError.

        origin: the author of the wish, for its history; None: unknown.
        """
        name = model.wish.name
        async with self._wishing:
            if self._fleet.models.get(name) is not model or model.wish != old_wish:
                raise Conflict(
                    f"The model {name} was changed by another request.",
                    hint="This change was not made. Try again.",
                )
            if model.is_deleting:
                raise Conflict(
                    f"The model {name} is being removed.", hint="Add it again after its removal."
                )
            if model.change is not None and not model.change.refusal_text:
                ends = f"`fitserve show {name}` shows its progress. Try again afterwards."
                if model.is_stopped:
                    ends = f"Its owner stopped it. `fitserve start {name}` continues the change."
                elif model.is_unloaded:
                    ends = f"Its owner unloaded it. `fitserve start {name}` continues the change."
                raise Conflict(f"The model {name} is being changed already.", hint=ends)
            if wish == old_wish:
                return model
            self._store.changeable()
            self._fleet.check_names(wish)
            origin = origin or WishOrigin(at=time.time())
            if not restarts:
                await self._wishes.enforce(model, wish, model.generation, origin)
            elif not model.serving:
                # Nothing serves, so there is no state to go back to.
                await self._wishes.enforce(model, wish, model.newest_generation + 1, origin)
            else:
                await self._wishes.start(model, wish, origin)
            if restarts:
                model.inquiry_problems.clear()
                model.answers = {}
        self._wake()
        return model

    async def retry(self, name: str) -> ManagedModel:
        """Forget failures, and start again now. Raises NotFound, StoreError."""
        self._store.changeable()
        model = self._fleet.model(name)
        now = time.time()
        await asyncio.to_thread(self._store.forgive, name, now)
        model.forgiven_at = now
        model.is_unloaded = False
        model.inquiry_problems.clear()
        # Work under way keeps its own references. Answers stay on disk as long as their source
        # exists.
        model.pins = {}
        model.answers = {}
        model.setback.clear()
        for replica in model.replicas:
            replica.planning.blocked_reason = None
            replica.planning.failed_planning = None
            replica.setback.clear()
        self._wake()
        return model

    async def stop(self, name: str) -> ManagedModel:
        """Stop the engines, and load the model no more until `start`. Raises NotFound, BadRequest,
        StoreError."""
        return await self._set_stopped(name, is_stopped=True)

    async def start(self, name: str) -> ManagedModel:
        """Load the model again, and from now on by its policy. Raises NotFound, BadRequest,
        StoreError."""
        return await self._set_stopped(name, is_stopped=False)

    async def unload(self, name: str) -> ManagedModel:
        """Stop the engines. The next request loads the model again. Raises NotFound, BadRequest,
        Conflict."""
        model = self._fleet.model(name)
        _check_local(model)
        if model.wish.policy.pinned:
            raise Conflict(
                f"{name} is pinned, so it is never unloaded.",
                hint=f"Run `fitserve set {name} --no-pinned` first, or `fitserve stop {name}`.",
            )
        model.is_unloaded = True
        for replica in model.replicas:
            if replica.has_engine:
                replica.show_leave("its owner unloads it")
        self._wake()
        return model

    async def _set_stopped(self, name: str, *, is_stopped: bool) -> ManagedModel:
        self._store.changeable()
        model = self._fleet.model(name)
        _check_local(model)
        await asyncio.to_thread(self._store.set_stopped, name, is_stopped=is_stopped)
        model.is_stopped = is_stopped
        if is_stopped:
            model.show_stop()
            model.waits_for_request = False
        else:
            for replica in model.replicas:  # shown until the next pass
                if not replica.has_engine:
                    replica.status = NoAction("starting", "its owner starts it")
            # A start by the owner counts as a request.
            model.used_at = time.time()
            model.was_evicted = False
            model.is_unloaded = False
        self._wake()
        return model

    @contextlib.contextmanager
    def reserve_gpus(self, gpus: Sequence[str]) -> Iterator[dict[str, str]]:
        """Keep these GPUs (by UUID) free of starts in this context.

        Gives for each GPU in use its user and the remedy. Raises Conflict if GPUs are set apart
        already.
        """
        if self._fleet.set_apart:
            raise Conflict("The GPUs are being measured already.", hint="Try again in a minute.")
        users = self._fleet.users()
        planned_name = next(
            (
                replica.model
                for replica in self._fleet.replicas()
                if replica.attempt is None and replica.is_busy
            ),
            None,
        )
        wait = f"{planned_name} is being planned on it: try again in a minute"
        holders = {
            uuid: (
                f"{', '.join(users[uuid])} runs on it: remove it (`fitserve rm {users[uuid][0]}`)"
                " and add it again afterwards"
            )
            for uuid in users
        }
        self._fleet.set_apart = frozenset(gpus) - holders.keys()
        try:
            yield {**(dict.fromkeys(gpus, wait) if planned_name else {}), **holders}
        finally:
            self._fleet.set_apart = frozenset()
            self._fleet.schedule_replanning()
            self._wake()


def _check_local(model: ManagedModel) -> None:
    if not model.replicas:
        raise BadRequest(
            f"{model.wish.name} runs elsewhere, so this gateway cannot stop or start it.",
            hint="Stop it there, or `fitserve rm` it here.",
        )
