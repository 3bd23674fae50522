"""Starts the engine of an attempt: brings image and weights here, and asks the host. It may take minutes and reports how far it is.

Nothing here decides or records; the result of a start goes back to the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from gateway.catalog.model_folder import check_unmoved, reach, shared_blobs
from gateway.core.planner.flags import CACHE_BYTES, launch_spec
from gateway.domain import Attempt, Engine, EngineRef, LaunchSpec, ModelRef, Mount
from gateway.errors import BadModel
from gateway.hosts.host import Host
from gateway.hosts.process.environment import engine_dir
from gateway.settings import Settings

Report = Callable[[str], None]
Turn = Callable[[bool], Awaitable[int | None]]
"""Asked whether the engine can be given its KV cache in bytes; the answer comes when it may start, with the bytes."""


class Download(Protocol):
    """`gateway.catalog.download.download` from one Hub."""

    async def __call__(self, repo: str, commit: str, report: Report, /, *, allow_remote_code: bool = False) -> Path: ...


@dataclass(frozen=True)
class Launcher:
    """Starts engines on one host. `profile_of` gives the profile of an engine in its image."""

    settings: Settings
    host: Host
    profile_of: Callable[[EngineRef], Engine]
    download: Download

    async def launch(self, attempt: Attempt, report: Report, turn: Turn, *, allow_remote_code: bool) -> None:
        """Bring engine and weights here and start the engine once `turn` returns. Raises HostError, BadModel and their kin."""
        plan = attempt.plan
        await self.host.prepare(plan.engine, report)
        weights = await self._weights(plan.model, report, allow_remote_code=allow_remote_code)
        drafter = await self._weights(plan.drafter, report, allow_remote_code=False) if plan.drafter else None
        # Beside the event loop: a profile is read.
        engine = await asyncio.to_thread(self.profile_of, plan.engine)
        given = any(item.startswith(f"--{CACHE_BYTES}=") for item in plan.argv)
        cache_bytes = await turn(CACHE_BYTES in engine.flags and not given)
        report("starting the engine")
        spec = partial(self._spec, engine, attempt, weights, drafter, cache_bytes, remote_code=allow_remote_code)
        await self.host.start(await asyncio.to_thread(spec))

    async def _weights(self, model: ModelRef, report: Report, *, allow_remote_code: bool) -> Path:
        if model.revision is None:
            folder = Path(model.source)
            await asyncio.to_thread(check_unmoved, folder)
            return folder
        return await self.download(model.source, model.revision, report, allow_remote_code=allow_remote_code)

    def _spec(
        self,
        engine: Engine,
        attempt: Attempt,
        weights: Path,
        drafter: Path | None,
        cache_bytes: int | None,
        *,
        remote_code: bool,
    ) -> LaunchSpec:
        mounts: tuple[Mount, ...] = ()
        environment: str | None = str(engine_dir(self.settings.data, engine))
        if self.host.kind == "docker":
            folders = [folder for folder in (weights, drafter) if folder is not None]
            mounts = tuple(dict.fromkeys(mount for folder in folders for mount in self._mounts(folder)))
            environment = None
        return launch_spec(
            attempt.plan,
            engine,
            name=attempt.instance_name,
            model=attempt.model,
            attempt=attempt.id,
            port=attempt.port,
            weights=str(weights),
            mounts=mounts,
            environment=environment,
            drafter=str(drafter) if drafter else None,
            cache_bytes=cache_bytes,
            remote_code=remote_code,
        )

    def _mounts(self, weights: Path) -> list[Mount]:
        """The mounts that show an engine's container the weights at the path where we see them."""
        settings = self.settings
        if settings.shared_models is not None:
            if not weights.is_relative_to(settings.models):
                raise BadModel(
                    f"{weights} is not below {settings.models}, the only folder that engines see.",
                    hint="Put the model there.",
                )
            return [Mount(source=settings.shared_models, target=str(settings.models))]
        folders = [folder for folder in (reach(weights), shared_blobs(weights)) if folder is not None]
        return [Mount(source=str(folder), target=str(folder)) for folder in folders]
