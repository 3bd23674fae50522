"""The admin API: what models and engines take on the disk, who uses it, and the removal of a
model's weights."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from fastapi import APIRouter, Request
from pydantic import Field

from gateway.controller.fleet.fleet import Fleet
from gateway.controller.fleet.managed_model import ManagedModel
from gateway.controller.orders import Orders
from gateway.domain import ModelRef, Value
from gateway.models.catalog.disk import DiskJob, read_disk, revision_of
from gateway.settings import Settings

router = APIRouter(prefix="/admin", tags=["admin"])

_POLL_S = 0.1


class RevisionView(Value):
    """A commit of a repository. Files that another commit has too are counted for both."""

    repo: str
    commit: str
    bytes: int
    last_used: float
    names: tuple[str, ...] = Field(
        description="branches and tags that mean it, as far as programs of this machine asked"
    )
    ours: bool = Field(
        description="this or another gateway has served it; else another program brought it"
    )
    models: tuple[str, ...] = Field((), description="the models of this gateway that need it")


class EngineOnDisk(Value):
    name: str
    folder: str
    bytes: int
    caches_bytes: int = Field(description="what it compiled, kept for its next start")
    last_used: float
    models: tuple[str, ...] = ()


class DiskView(Value):
    cache: str
    cache_bytes: int = Field(description="each file once; with what no revision has")
    unfinished_bytes: int = Field(description="of downloads that go on, or were cut off")
    free_bytes: int
    unused_bytes: int = Field(description="of revisions that no model of this gateway needs")
    revisions: tuple[RevisionView, ...]
    engines: tuple[EngineOnDisk, ...]


class KeptRevision(Value):
    repo: str
    commit: str
    models: tuple[str, ...]


class RemovedWeights(Value):
    name: str
    state: str = "removed"
    freed_bytes: int
    removed: tuple[tuple[str, str], ...]
    kept: tuple[KeptRevision, ...] = Field(description="other models need them")


@router.get("/disk")
async def disk(request: Request) -> DiskView:
    """What models and engines take on the disk, and which models need it."""
    models: Mapping[str, ManagedModel] = request.app.state.fleet.models
    found, users = await read_disk(_job(request)), _users(models)
    revisions = [
        RevisionView(**one, models=tuple(sorted(users.get((one["repo"], one["commit"]), ()))))
        for one in found.pop("revisions")
    ]
    running: dict[str, set[str]] = {}
    for model in models.values():
        for engine in (
            replica.attempt.plan.engine for replica in model.replicas if replica.attempt is not None
        ):
            running.setdefault(f"{engine.kind}-{engine.version}", set()).add(model.wish.name)
    engines = [
        EngineOnDisk(**one, models=tuple(sorted(running.get(one["name"], ()))))
        for one in found.pop("engines")
    ]
    unused = sum(one.bytes for one in revisions if not one.models)
    order = sorted(revisions, key=lambda one: -one.bytes)
    return DiskView(**found, unused_bytes=unused, revisions=tuple(order), engines=tuple(engines))


async def remove_with_weights(request: Request, name: str) -> RemovedWeights:
    """Remove a model, wait until nothing of it runs, and delete the revisions that no other model
    needs."""
    fleet: Fleet = request.app.state.fleet
    orders: Orders = request.app.state.orders
    model = fleet.model(name)
    mine = revisions(model)
    await orders.remove(name)
    while fleet.models.get(name) is model:  # noqa: ASYNC110 - its engines stop, which takes seconds
        await asyncio.sleep(_POLL_S)
    users = _users(fleet.models)
    kept = tuple(
        KeptRevision(repo=one[0], commit=one[1], models=tuple(sorted(users[one])))
        for one in sorted(mine)
        if one in users
    )
    going = sorted(mine - users.keys())
    gone = (
        await read_disk(_job(request)._replace(remove=going))
        if going
        else {"freed_bytes": 0, "removed": []}
    )
    return RemovedWeights(name=name, kept=kept, **gone)


def revisions(model: ManagedModel) -> set[tuple[str, str]]:
    """(repository, commit) that a model needs: those of its wish, of what its engines run, and
    folders in a Hub's cache."""
    attempts = [attempt for replica in model.replicas for attempt in replica.attempts]
    refs = [
        ref
        for attempt in attempts
        for ref in (attempt.plan.model, attempt.plan.drafter)
        if isinstance(ref, ModelRef)
    ]
    found = {(name.partition("@")[0], commit) for name, commit in model.wish.commits.items()}
    adapters = [adapter for attempt in attempts for adapter in attempt.plan.adapters]
    named = [(ref.source, ref.revision) for ref in refs] + [
        (one.source, one.revision) for one in adapters
    ]
    found |= {(source, revision) for source, revision in named if revision is not None}
    sources = [*(source for source, _ in named), model.wish.source or "", model.wish.drafter or ""]
    sources += model.wish.loras.values()
    return found | {one for one in map(revision_of, sources) if one is not None}


def _users(models: Mapping[str, ManagedModel]) -> dict[tuple[str, str], set[str]]:
    users: dict[tuple[str, str], set[str]] = {}
    for model in models.values():
        for one in revisions(model):
            users.setdefault(one, set()).add(model.wish.name)
    return users


def _job(request: Request) -> DiskJob:
    settings: Settings = request.app.state.settings
    return DiskJob(str(settings.models), str(settings.data / "hub"), str(settings.data))
