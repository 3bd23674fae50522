"""The wish in force of a model, and the one that takes its place: durable before either holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from gateway.controller.fleet.managed_model import ManagedModel
from gateway.domain import Change, Wish
from gateway.logging import Logger
from gateway.store.store import Store

log = Logger("fitserve.loop")


class WishChanges:
    """Shared by all models of a gateway."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._writing = asyncio.Lock()
        """Held while a wish in force is written: of two at once the database would keep the one and
        this process the other."""

    async def begin(self, model: ManagedModel, wish: Wish) -> None:
        """Another wish is to take the place of the one in force. Raises NotFound, StoreError."""
        change = Change(wish=wish, generation=model.newest + 1, at=time.time())
        await asyncio.to_thread(self._store.save_change, model.wish, model.generation, change)
        model.change = change

    async def refuse(self, model: ManagedModel, reason: str) -> None:
        """The wish from before is in force again. Raises StoreError."""
        if model.change is not None:
            refused = model.change.evolve(refused=reason)
            await asyncio.to_thread(self._store.save_change, model.wish, model.generation, refused)
            model.change = refused
            log.warning("a change was given up", model=model.wish.name, reason=reason)

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

    async def keep_commits(self, model: ManagedModel, commits: Mapping[str, str]) -> None:
        """A model is added with its commits; this one is older than that, or was added by name
        alone. Raises NotFound, StoreError."""
        async with self._writing:
            if model.wanted == model.generation and commits.items() - model.wish.commits.items():
                model.wish = model.wish.evolve(commits={**commits, **model.wish.commits})
                await asyncio.to_thread(self._store.save_wish, model.wish)
