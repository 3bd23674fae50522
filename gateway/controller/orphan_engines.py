"""Stops instances without a known attempt.

Such instances belong to a removed model, or to a database from before a restore.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import partial

from gateway.domain import Instance
from gateway.logging import Logger
from gateway.supervision import SupervisedTask

log = Logger("fitserve.loop")


class OrphanEngines:
    """Stops orphan engines in the background; tracked by instance name."""

    def __init__(
        self,
        stop: Callable[[str, float], Awaitable[None]],
        grace_s: float,
        wake: Callable[[], None],
    ) -> None:
        self._stop = stop
        self._grace_s = grace_s
        self._wake = wake
        self._stopping: dict[str, SupervisedTask] = {}

    def stop_orphans(self, instances: Iterable[Instance], instance_names: Collection[str]) -> None:
        """Stop instances that are not in `instance_names`.

        A plan is recorded before its engine starts, so a starting engine is never an orphan.
        """
        self._stopping = {name: work for name, work in self._stopping.items() if not work.is_done}
        for instance in instances:
            name = instance.name
            if name not in instance_names and name not in self._stopping:
                log.warning("stopping an orphan engine", instance=name)
                self._stopping[name] = SupervisedTask(
                    partial(self._stop, name, self._grace_s),
                    "stopping an orphan engine",
                    self._wake,
                    instance=name,
                )

    async def close(self) -> None:
        """Abandon the stops under way. The next gateway finds the engines again."""
        for work in self._stopping.values():
            await work.close()
