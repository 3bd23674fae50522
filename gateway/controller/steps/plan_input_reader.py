"""Reads the inputs of plans: the machine, facts, installed engines and the files of models."""

from __future__ import annotations

import asyncio
import functools
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from gateway.controller.fleet.managed_model import ManagedModel
from gateway.controller.fleet.plan_inputs import Knowledge, PlanInputs, machine_and_memory
from gateway.domain import Hardware

# Entries of one folder that count.
_MAX_ENTRIES = 4000
# More facts of these kinds only rule plans out.
_REFUSAL_KINDS = ("plan_failed", "kernel_fails", "engine_fails", "peers_fail", "sleep_fails")
# Facts about one plan, about speed, or about the way of a start: none gives a plan.
_IRRELEVANT_KINDS = (
    "plan_verified",
    "fork_fails",
    "speed_ratio",
    "speed_measured",
    "machine_speed",
    "network_speed",
)


class PlanInputReader:
    """Reads in a thread, so no hanging disk holds the loop up."""

    def __init__(
        self,
        hardware: Callable[[], Awaitable[Hardware]],
        facts: Callable[[], Sequence[str]],
        data: Path,
    ) -> None:
        """facts: the learned facts, as JSON.
        data: the folder with engines and the Hub's cache.
        """
        self._hardware = hardware
        self._facts = facts
        self._data = data
        self._knowledge = Knowledge(0, frozenset())
        """The last one: models without a plan share it."""

    async def read(self, models: Sequence[ManagedModel]) -> dict[str, PlanInputs]:
        """The present inputs of each model, by name."""
        machine, free_memory = machine_and_memory(await self._hardware())
        sources = {model.wish.name: _model_sources(model) for model in models}
        knowledge, files = await asyncio.to_thread(self._read_knowledge, sources)
        if knowledge != self._knowledge:
            self._knowledge = knowledge
        return {
            name: PlanInputs(machine, free_memory, self._knowledge, digest)
            for name, digest in files.items()
        }

    def _read_knowledge(
        self, sources: dict[str, Sequence[str]]
    ) -> tuple[Knowledge, dict[str, int]]:
        """The knowledge, and a digest of the files of each model. Runs in a thread."""
        facts = [(_fact_kind(text), text) for text in self._facts()]
        helpful = [
            text for kind, text in facts if kind not in (*_REFUSAL_KINDS, *_IRRELEVANT_KINDS)
        ]
        engines = (_entries(self._data / name) for name in ("engines", "learned"))
        knowledge = Knowledge(
            hash((*helpful, *engines)),
            frozenset(hash(text) for kind, text in facts if kind in _REFUSAL_KINDS),
        )
        return knowledge, {
            name: hash(tuple(self._stamp(source) for source in versions))
            for name, versions in sources.items()
        }

    def _stamp(self, source: str) -> tuple[Any, ...]:
        """The entries of a model's folder, or of its repository in the cache."""
        folder = Path(source).expanduser()
        if folder.is_absolute() or source.startswith("."):
            return _entries(folder)
        repository = source.partition("@")[0].replace("/", "--")
        cached_path = self._data / "hub" / f"models--{repository}"
        return (
            *(_entries(cached_path / name) for name in ("blobs", "refs", "snapshots")),
            _entries(folder),
        )


@functools.lru_cache(4096)
def _fact_kind(fact: str) -> str:
    """The kind of a fact in JSON; "" if it has none."""
    try:
        return str(json.loads(fact)["kind"])
    except (ValueError, LookupError, TypeError):
        return ""


def _model_sources(model: ManagedModel) -> Sequence[str]:
    return tuple(name for name in (model.wish.source, *model.wish.loras.values()) if name)


def _entries(folder: Path) -> tuple[Any, ...]:
    """Name, size and time of each entry of a folder; nothing without one."""
    stamps: list[tuple[str, int, int]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    status = entry.stat()
                except OSError:
                    continue
                stamps.append((entry.name, status.st_size, status.st_mtime_ns))
                if len(stamps) >= _MAX_ENTRIES:
                    break
    except (OSError, ValueError):
        return ()
    return tuple(sorted(stamps))
