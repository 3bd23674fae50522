"""Starts and stops engines: brings image and weights to this machine, then calls the host.

A start may take minutes, and reports its progress.

Nothing here decides or records. The result of a start returns to the loop.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from gateway.controller.fleet.preparation import LaunchFiles, Report
from gateway.domain import (
    AdapterRef,
    Attempt,
    ChatTemplate,
    Engine,
    EngineRef,
    Instance,
    LaunchSpec,
    ModelRef,
    Mount,
    Plan,
    StartConditions,
)
from gateway.domain.units import GIB
from gateway.engines.common import resources, trace_flags
from gateway.engines.common.chat import template
from gateway.engines.common.engine_auth import drop_dev_endpoints
from gateway.engines.common.expert_warmups import drop_skips
from gateway.engines.registry import engine_kind
from gateway.errors import BadModel, FitserveError, StoreError
from gateway.hosts.host import Host, HubCommit
from gateway.logging import Logger
from gateway.machine.environment import engine_dir, has_package
from gateway.models.catalog.folder_reach import check_links, reach, shared_blobs
from gateway.models.catalog.hub_cache import HubCache
from gateway.models.catalog.read_ahead import files_of_weights, read_ahead
from gateway.planner.flags import CACHE_BYTES, LaunchInputs, launch_spec
from gateway.settings import Settings

log = Logger("fitserve.loop")

Turn = Callable[[bool], Awaitable[int | None]]
"""Waits for the engine's turn. The argument: can the engine be given its KV cache in bytes? Returns
the bytes, or None."""

_Site = Literal["container", "process", "cluster"]
"""Where an engine runs: other machines reach the port of one in a cluster."""


class Downloader(Protocol):
    """The signature of `gateway.models.catalog.download.download`."""

    async def __call__(
        self, repo: str, commit: str, report: Report, /, *, allow_remote_code: bool = False
    ) -> Path: ...


@dataclass(frozen=True)
class Launcher:
    """Starts engines on one host. `profile_of` gives the profile of an engine in its image."""

    settings: Settings
    host: Host
    profile_of: Callable[[EngineRef], Engine]
    download: Downloader
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One start reads ahead at a time: the next one to load is the first."""
    preparations: set[asyncio.Task[object]] = field(default_factory=set)
    """The tasks that bring files or read them ahead, also after their preparation was ended."""

    async def fetch_files(
        self, plan: Plan, report: Report, *, allow_remote_code: bool
    ) -> LaunchFiles:
        """Bring weights and image to this machine. Raises HostError, BadModel and their kin.

        Weights come first: a start pulls its image at the same time, for the check of its plan.
        """
        weights = await self._fetch_weights(plan.model, report, allow_remote_code=allow_remote_code)
        drafter = (
            await self._fetch_weights(plan.drafter, report, allow_remote_code=False)
            if plan.drafter
            else None
        )
        adapters = {
            adapter.name: await self._fetch_weights(adapter, report, allow_remote_code=False)
            for adapter in plan.adapters
        }
        await self.host.prepare(plan.engine, report)
        return LaunchFiles(weights, drafter, adapters)

    async def read_ahead(self, plan: Plan, files: LaunchFiles, most_bytes: int) -> None:
        """Bring the weights that the engine will read into the page cache, while it imports.

        Other machines read their own disks.
        """
        if self.host.machines is not None:
            return
        load_format = next(
            (
                argument.partition("=")[2]
                for argument in plan.argv
                if argument.startswith("--load-format=")
            ),
            "",
        )
        prefix = engine_kind(plan.engine.kind).weights_prefix
        folders = (files.weights, files.drafter, *files.adapters.values())
        paths = [
            path
            for folder in folders
            if folder is not None
            for path in await asyncio.to_thread(files_of_weights, folder, prefix, load_format)
        ]
        async with self._reading:
            start_s = time.monotonic()
            outcome = await read_ahead(paths, most_bytes)
        if outcome.read:
            log.info(
                "read ahead",
                source=plan.model.source,
                gib=round(outcome.read / GIB, 2),
                cached_gib=round(outcome.cached / GIB, 2),
                seconds=round(time.monotonic() - start_s, 2),
            )

    async def expect(self, attempt: Attempt, *, allow_remote_code: bool) -> None:
        """Announce a start to a host that forks. The model's files, which may not be here yet, do
        not affect the imports."""
        if not self.host.can_fork:
            return
        try:
            engine = await asyncio.to_thread(self.profile_of, attempt.plan.engine)
            files = _launch_files(attempt.plan, lambda source, _: Path(source))
            spec = self._launch_spec(
                engine=engine,
                attempt=attempt,
                files=files,
                templates=None,
                cache_bytes=None,
                site=self._site,
                remote_code=allow_remote_code,
            )
            await self.host.prepare_fork(spec)
        except FitserveError as error:
            log.warning("no process is prepared", model=attempt.model, error=str(error))

    async def launch(
        self,
        attempt: Attempt,
        files: LaunchFiles,
        report: Report,
        turn: Turn,
        *,
        allow_remote_code: bool,
    ) -> StartConditions:
        """Start the engine once `turn` returns.

        Returns the conditions of the start. Raises HostError, BadModel and their kin.
        """
        plan = attempt.plan
        await self._copy_to_machines(attempt, files, report, allow_remote_code=allow_remote_code)
        templates = await asyncio.to_thread(self._template, attempt)
        # The profile is read from disk, so not on the event loop.
        engine = await asyncio.to_thread(self.profile_of, plan.engine)
        is_fixed = any(argument.startswith(f"--{CACHE_BYTES}=") for argument in plan.argv)
        cache_bytes = await turn(CACHE_BYTES in engine.flags and not is_fixed)
        report("starting the engine")
        spec = await asyncio.to_thread(
            self._launch_spec,
            engine,
            attempt,
            files,
            templates,
            cache_bytes,
            self._site,
            remote_code=allow_remote_code,
        )
        start_conditions = await self.conditions(plan, allow_remote_code=allow_remote_code)
        return start_conditions.evolve(origin=(await self.host.start(spec)).origin)

    async def conditions(self, plan: Plan, *, allow_remote_code: bool) -> StartConditions:
        """The conditions of a start now, as far as the host reports them."""
        try:
            engine = await asyncio.to_thread(self.profile_of, plan.engine)
            cache = resources.compile_cache_name(plan, engine, remote_code=allow_remote_code)
            return await self.host.conditions(plan.engine, cache)
        except FitserveError:
            return StartConditions()

    async def stop(self, name: str, grace_s: float) -> None:
        """Stop an engine. A failure is only logged, as the next pass finds the engine still
        there."""
        try:
            await self.host.stop(name, grace_s)
        except FitserveError as error:
            # The traceback adds nothing.
            log.error("an engine does not stop", instance=name, error=str(error))  # noqa: TRY400
            await asyncio.sleep(1.0)

    async def instance(self, attempt: Attempt) -> Instance | None:
        """The engine of an attempt as the host sees it. Raises HostError."""
        return next(
            (
                instance
                for instance in await self.host.list()
                if instance.name == attempt.instance_name
            ),
            None,
        )

    def measuring_launch(
        self,
        attempt: Attempt,
        port: int,
        commit_folder: Callable[[str, str], Path],
        *,
        is_in_container: bool,
        remote_code: bool,
    ) -> LaunchSpec:
        """The launch of an engine on another port, which measures its memory itself.

        `commit_folder` gives the folder of a repository at a commit, present or not. Raises
        BadModel.
        """
        plan = attempt.plan
        engine = self.profile_of(plan.engine)
        templates = self._template(attempt)
        files = _launch_files(plan, commit_folder)
        exported = attempt.evolve(port=port, plan=drop_skips(drop_dev_endpoints(plan)))
        site: _Site = "container" if is_in_container else "process"
        return self._launch_spec(
            engine=engine,
            attempt=exported,
            files=files,
            templates=templates,
            cache_bytes=None,
            site=site,
            remote_code=remote_code,
        )

    @property
    def _site(self) -> _Site:
        if self.host.kind == "docker":
            return "container"
        return "process" if self.host.machines is None else "cluster"

    async def _fetch_weights(
        self, model: ModelRef | AdapterRef, report: Report, *, allow_remote_code: bool
    ) -> Path:
        if model.revision is None:
            folder = Path(model.source)
            await asyncio.to_thread(check_links, folder)
            return folder
        machines = self.host.machines
        commit = HubCommit(model.source, model.revision, allow_remote_code)
        if machines is not None and await machines.has_weights(commit):
            return self._snapshot(model.source, model.revision)
        return await self.download(
            model.source, model.revision, report, allow_remote_code=allow_remote_code
        )

    def _snapshot(self, repo: str, commit: str) -> Path:
        """The folder of a commit in the cache of the Hub, present or not."""
        return HubCache(self.settings.models, self.settings.data / "hub").snapshot(repo, commit)

    async def _copy_to_machines(
        self, attempt: Attempt, files: LaunchFiles, report: Report, *, allow_remote_code: bool
    ) -> None:
        """Copy the weights to the machines of the start. Raises HostError."""
        machines = self.host.machines
        plan = attempt.plan
        if machines is None:
            return
        commits = [
            HubCommit(model.source, model.revision, allows_code)
            for model, allows_code in (
                (plan.model, allow_remote_code),
                (plan.drafter, False),
                *((adapter, False) for adapter in plan.adapters),
            )
            if model is not None and model.revision is not None
        ]
        if commits:
            engine = await asyncio.to_thread(self.profile_of, plan.engine)
            spec = self._launch_spec(
                engine=engine,
                attempt=attempt,
                files=files,
                templates=None,
                cache_bytes=None,
                site=self._site,
                remote_code=allow_remote_code,
            )
            await machines.copy_weights(spec, commits, report)

    def _launch_spec(
        self,
        engine: Engine,
        attempt: Attempt,
        files: LaunchFiles,
        templates: Path | None,
        cache_bytes: int | None,
        site: _Site,
        *,
        remote_code: bool,
    ) -> LaunchSpec:
        """The start of an engine on the host, with its mounts and paths as the engine sees them."""
        mounts: tuple[Mount, ...] = ()
        environment: str | None = str(engine_dir(self.settings.data, engine))
        if site == "container":
            folders = [
                folder
                for folder in (files.weights, files.drafter, *files.adapters.values())
                if folder is not None
            ]
            mounts = tuple(
                dict.fromkeys(mount for folder in folders for mount in self._mounts(folder))
            )
            if templates is not None and self.settings.shared_models is None:
                mounts += (Mount(source=str(templates), target=str(templates)),)
            environment = None
        return launch_spec(
            attempt.plan,
            engine,
            LaunchInputs(
                str(files.weights),
                mounts=mounts,
                environment=environment,
                drafter=str(files.drafter) if files.drafter else None,
                templates=str(templates) if templates else None,
                adapters=tuple((name, str(folder)) for name, folder in files.adapters.items()),
                allows_remote_code=remote_code,
                cache_bytes=cache_bytes,
                media_hosts=self.settings.engine_media_hosts,
                is_exposed=site == "cluster",
                trace_endpoint=self._trace_endpoint(engine, site),
            ),
            name=attempt.instance_name,
            model=attempt.model,
            attempt=attempt.id,
            port=attempt.port,
        )

    def _trace_endpoint(self, engine: Engine, site: _Site) -> str:
        """The collector of the engine's own traces; "" where its environment has no library for
        it, as its start would fail. Machines of a cluster look into theirs."""
        endpoint = self.settings.engine_otlp_endpoint
        folder = engine_dir(self.settings.data, engine)
        if endpoint and site == "process" and not has_package(folder, trace_flags.LIBRARY):
            log.warning(
                "the engine starts without traces: its environment has no OpenTelemetry",
                engine=str(engine.ref),
                hint=f"Install opentelemetry-exporter-otlp in {folder}.",
            )
            return ""
        return endpoint

    def store_template(self, text: str) -> None:
        """Keep a chat template for plans that name it. Raises StoreError."""
        digest = ChatTemplate(text=text).digest
        try:
            _write_file(
                self.settings.data / template.FOLDER, template.file_name(digest), text.encode()
            )
        except OSError as error:
            raise StoreError(
                f"The chat template cannot be kept: {error.strerror}.",
                hint="Free space on the disk of the data folder.",
            ) from None

    def _template(self, attempt: Attempt) -> Path | None:
        """The folder of the chat template as the engine sees it; None without a template. Raises
        BadModel."""
        digest = template.digest_in(attempt.plan.argv)
        if digest is None:
            return None
        folder = self.settings.data / template.FOLDER
        name = template.file_name(digest)
        try:
            text = (folder / name).read_bytes()
            if self.settings.shared_models is not None:
                # Engines see only one folder.
                folder = self.settings.models / template.FOLDER
                _write_file(folder, name, text)
        except OSError as error:
            raise BadModel(
                f"The chat template of this plan for {attempt.model} is not at {folder / name}:"
                f" {error.strerror}.",
                hint=f"`fitserve retry {attempt.model}` makes a new plan.",
            ) from None
        return folder

    def _mounts(self, weights: Path) -> list[Mount]:
        """The mounts that show a container the weights under the same path as here."""
        settings = self.settings
        if settings.shared_models is not None:
            if not weights.is_relative_to(settings.models):
                raise BadModel(
                    f"{weights} is not below {settings.models}, the only folder that engines see.",
                    hint="Move the model below it.",
                )
            return [Mount(source=settings.shared_models, target=str(settings.models))]
        folders = [
            folder for folder in (reach(weights), shared_blobs(weights)) if folder is not None
        ]
        return [Mount(source=str(folder), target=str(folder)) for folder in folders]


def _launch_files(plan: Plan, commit_folder: Callable[[str, str], Path]) -> LaunchFiles:
    """The files of a start, present or not. `commit_folder` gives the folder of a repository's
    commit."""

    def folder(model: ModelRef | AdapterRef) -> Path:
        return (
            Path(model.source)
            if model.revision is None
            else commit_folder(model.source, model.revision)
        )

    drafter = folder(plan.drafter) if plan.drafter is not None else None
    adapters = {adapter.name: folder(adapter) for adapter in plan.adapters}
    return LaunchFiles(folder(plan.model), drafter, adapters)


def _write_file(folder: Path, name: str, text: bytes) -> None:
    """Write a file atomically, readable by an engine that runs as another user. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    draft = folder / f"{name}.{secrets.token_hex(4)}"
    draft.write_bytes(text)
    draft.chmod(0o644)
    draft.replace(folder / name)
