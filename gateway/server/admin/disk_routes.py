"""The admin API of disk space: usage by models and engines, and removal of a model's weights."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from fastapi import APIRouter, Request
from pydantic import Field

from gateway.controller.fleet.managed_model import ManagedModel
from gateway.domain import ModelRef, Value
from gateway.models.catalog.disk import DiskJob, parse_revision, read_disk, revision_bytes
from gateway.server.gateway_parts import gateway_of

router = APIRouter(prefix="/admin", tags=["admin"])

_POLL_S = 0.1


class RevisionView(Value):
    """A commit of a repository. Files shared by two commits are counted for both."""

    repo: str
    commit: str
    bytes: int
    last_used: float
    names: tuple[str, ...] = Field(
        description="branches and tags of the commit, if programs of this machine resolved them"
    )
    is_from_fitserve: bool = Field(
        description="this or another gateway has served it; otherwise another program downloaded it"
    )
    missing: tuple[str, ...] = Field(
        (), description="files that are gone: their links in the cache lead nowhere"
    )
    models: tuple[str, ...] = Field((), description="the models of this gateway that need it")


class EngineOnDisk(Value):
    name: str
    folder: str
    bytes: int
    caches_bytes: int = Field(description="bytes of compiled code, kept for the next start")
    last_used: float
    models: tuple[str, ...] = ()


class DiskView(Value):
    cache: str
    cache_bytes: int = Field(description="each file once, including files of no revision")
    unfinished_bytes: int = Field(description="bytes of running or interrupted downloads")
    free_bytes: int
    unused_bytes: int = Field(description="bytes of revisions that no model of this gateway needs")
    revisions: tuple[RevisionView, ...]
    engines: tuple[EngineOnDisk, ...]


class RevisionOfModel(Value):
    """A commit of a repository on the disk."""

    repo: str
    commit: str
    bytes: int


class ModelOnDisk(Value):
    name: str
    revisions: tuple[RevisionOfModel, ...]
    folder_bytes: int | None = Field(
        None, description="bytes of a source that is a folder outside the cache"
    )


class ModelsOnDisk(Value):
    data: tuple[ModelOnDisk, ...]


class KeptRevision(Value):
    repo: str
    commit: str
    models: tuple[str, ...]


class RemovedWeights(Value):
    name: str
    state: str = "removed"
    freed_bytes: int
    removed: tuple[tuple[str, str], ...]
    kept: tuple[KeptRevision, ...] = Field(description="revisions that other models need")


@router.get("/disk")
async def disk(request: Request) -> DiskView:
    """The disk space of models and engines, and the models that need it."""
    models = gateway_of(request).loop.fleet.models
    usage = await read_disk(_disk_job(request))
    users = _models_by_snapshot(models)
    revisions = [
        RevisionView(**entry, models=tuple(sorted(users.get((entry["repo"], entry["commit"]), ()))))
        for entry in usage.pop("revisions")
    ]
    running_sources: dict[str, set[str]] = {}
    for model in models.values():
        for engine in (
            replica.attempt.plan.engine for replica in model.replicas if replica.attempt is not None
        ):
            running_sources.setdefault(f"{engine.kind}-{engine.version}", set()).add(
                model.wish.name
            )
    engines = [
        EngineOnDisk(**entry, models=tuple(sorted(running_sources.get(entry["name"], ()))))
        for entry in usage.pop("engines")
    ]
    unused_bytes = sum(entry.bytes for entry in revisions if not entry.models)
    sorted_revisions = sorted(revisions, key=lambda entry: -entry.bytes)
    return DiskView(
        **usage,
        unused_bytes=unused_bytes,
        revisions=tuple(sorted_revisions),
        engines=tuple(engines),
    )


@router.get("/disk/models")
async def disk_of_models(request: Request) -> ModelsOnDisk:
    """The revisions and the folder on the disk of each model. No other repository and no engine is
    read."""
    gateway = gateway_of(request)
    models = gateway.loop.fleet.models
    cache = gateway.hub.disk
    revisions_by_model = {name: sorted(revisions(model)) for name, model in models.items()}
    folders = {
        name: Path(source)
        for name, model in models.items()
        if (source := model.wish.source or "").startswith("/") and parse_revision(source) is None
    }

    def read() -> ModelsOnDisk:
        rows = {
            (repo, commit): RevisionOfModel(repo=repo, commit=commit, bytes=revision_bytes(folder))
            for repo, commit in {pair for pairs in revisions_by_model.values() for pair in pairs}
            if (folder := cache.folder_of(repo, commit)) is not None
        }
        return ModelsOnDisk(
            data=tuple(
                ModelOnDisk(
                    name=name,
                    revisions=tuple(rows[pair] for pair in pairs if pair in rows),
                    folder_bytes=revision_bytes(folders[name]) if name in folders else None,
                )
                for name, pairs in revisions_by_model.items()
            )
        )

    return await asyncio.to_thread(read)


async def remove_with_weights(request: Request, name: str) -> RemovedWeights:
    """Remove a model, wait until it no longer runs, and delete the revisions that no other model
    needs."""
    gateway = gateway_of(request)
    fleet = gateway.loop.fleet
    owner_commands = gateway.loop.owner_commands
    model = fleet.model(name)
    own_revisions = revisions(model)
    await owner_commands.remove(name)
    while fleet.models.get(name) is model:  # noqa: ASYNC110 - its engines stop, which takes seconds
        await asyncio.sleep(_POLL_S)
    users = _models_by_snapshot(fleet.models)
    references = tuple(
        KeptRevision(repo=revision[0], commit=revision[1], models=tuple(sorted(users[revision])))
        for revision in sorted(own_revisions)
        if revision in users
    )
    unused_revisions = sorted(own_revisions - users.keys())
    removal = (
        await read_disk(_disk_job(request)._replace(remove=unused_revisions))
        if unused_revisions
        else {"freed_bytes": 0, "removed": []}
    )
    return RemovedWeights(name=name, kept=references, **removal)


def revisions(model: ManagedModel) -> set[tuple[str, str]]:
    """(repository, commit) that a model needs: of its wish, of its engines, and of folders in a
    Hub's cache."""
    attempts = [attempt for replica in model.replicas for attempt in replica.attempts]
    refs = [
        ref
        for attempt in attempts
        for ref in (attempt.plan.model, attempt.plan.drafter)
        if isinstance(ref, ModelRef)
    ]
    pairs = {(name.partition("@")[0], commit) for name, commit in model.wish.commits.items()}
    adapters = [adapter for attempt in attempts for adapter in attempt.plan.adapters]
    named_sources = [(ref.source, ref.revision) for ref in refs] + [
        (pair.source, pair.revision) for pair in adapters
    ]
    pairs |= {(source, revision) for source, revision in named_sources if revision is not None}
    sources = [
        *(source for source, _ in named_sources),
        model.wish.source or "",
        model.wish.drafter or "",
    ]
    sources += model.wish.loras.values()
    return pairs | {pair for pair in map(parse_revision, sources) if pair is not None}


def _models_by_snapshot(models: Mapping[str, ManagedModel]) -> dict[tuple[str, str], set[str]]:
    users: dict[tuple[str, str], set[str]] = {}
    for model in models.values():
        for revision in revisions(model):
            users.setdefault(revision, set()).add(model.wish.name)
    return users


def _disk_job(request: Request) -> DiskJob:
    settings = gateway_of(request).serving.settings
    return DiskJob(str(settings.models), str(settings.data / "hub"), str(settings.data))
