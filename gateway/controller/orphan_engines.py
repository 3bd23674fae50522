"""Instances of no attempt that we know, of a model that was removed or from before a database was
set back: they are stopped."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import partial

from gateway.domain import Instance
from gateway.logging import Logger
from gateway.supervision import Supervised

log = Logger("fitserve.loop")


class OrphanEngines:
    """Those that are being stopped, by name."""

    def __init__(
        self,
        stop: Callable[[str, float], Awaitable[None]],
        grace_s: float,
        wake: Callable[[], None],
    ) -> None:
        self._stop = stop
        self._grace_s = grace_s
        self._wake = wake
        self._stopping: dict[str, Supervised] = {}

    def look(self, instances: Iterable[Instance], known: Collection[str]) -> None:
        """Stop what is not known. A plan is recorded before its engine is started, so none of these
        is an engine that just starts."""
        self._stopping = {name: work for name, work in self._stopping.items() if not work.done}
        for instance in instances:
            name = instance.name
            if name not in known and name not in self._stopping:
                log.warning("stopping an engine that belongs to nothing", instance=name)
                self._stopping[name] = Supervised(
                    partial(self._stop, name, self._grace_s),
                    "stopping a stray engine",
                    self._wake,
                    instance=name,
                )

    async def close(self) -> None:
        """Lets go of them; they are found again."""
        for work in self._stopping.values():
            await work.close()
