"""The wish in force of a model, and its successor: on disk before either counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from gateway.controller.fleet.managed_model import ManagedModel
from gateway.domain import Change, Wish
from gateway.domain.wish import WishOrigin
from gateway.logging import Logger
from gateway.store.store import Store

log = Logger("fitserve.loop")


class WishChanges:
    """Begins, refuses and finishes changes of wishes. Each gateway has one object of this class."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._writing = asyncio.Lock()
        """Held while a wish is written. Otherwise database and memory could keep different ones."""

    async def start(self, model: ManagedModel, wish: Wish, origin: WishOrigin) -> None:
        """Begin the change to another wish. Raises NotFound, StoreError."""
        change = Change(wish=wish, generation=model.newest_generation + 1, at=time.time())
        await asyncio.to_thread(
            self._store.save_change, model.wish, model.generation, change, origin
        )
        model.change = change

    async def refuse(self, model: ManagedModel, reason: str) -> None:
        """Give a change up, and restore the previous wish. Raises StoreError."""
        if model.change is not None:
            refused_change = model.change.evolve(refusal_text=reason)
            await asyncio.to_thread(
                self._store.save_change, model.wish, model.generation, refused_change
            )
            model.change = refused_change
            log.warning("a change was given up", model=model.wish.name, reason=reason)

    async def finish(self, model: ManagedModel) -> None:
        """Put the new wish in force. Raises StoreError."""
        if model.change is not None:
            await self.enforce(model, model.change.wish, model.change.generation)
            log.info("changed", model=model.wish.name)

    async def enforce(
        self, model: ManagedModel, wish: Wish, generation: int, origin: WishOrigin | None = None
    ) -> None:
        """Put a wish in force durably. Raises NotFound, StoreError.

        origin: the author of a wish that is not in the history yet.
        """
        async with self._writing:
            await asyncio.to_thread(
                self._store.save_change, wish, generation, change=None, origin=origin
            )
            model.wish = wish
            model.generation = generation
            model.change = None
            model.rival = None

    async def store_commits(self, model: ManagedModel, commits: Mapping[str, str]) -> None:
        """Store the commits of a model that was added by name, or before commits were kept. Raises
        NotFound, StoreError."""
        async with self._writing:
            if (
                model.wanted_generation == model.generation
                and commits.items() - model.wish.commits.items()
            ):
                model.wish = model.wish.evolve(commits={**commits, **model.wish.commits})
                await asyncio.to_thread(self._store.save_wish, model.wish)
