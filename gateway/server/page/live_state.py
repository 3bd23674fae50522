"""The current state for the page: the machine with its engines, and the models with their
requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, TypedDict

from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.fleet.model_state import copies_text, status
from gateway.domain import (
    Hardware,
    MachineView,
    NodeLink,
    Plan,
    PreparedView,
    StartConditions,
    StartTime,
)
from gateway.domain.phases import phase_label
from gateway.domain.units import TransferProgress
from gateway.hosts.node_group import part_name
from gateway.proxy.metrics.counters import Sample
from gateway.proxy.routing.routes import Routes

Expected = Callable[[Plan, StartConditions], StartTime | None]


class GpuEngine(TypedDict):
    """An engine with memory of a GPU, or of the machine without a GPU. `planned`: bytes that it may
    use at most."""

    model: str
    replica: int
    planned: int


class GpuUser(TypedDict):
    pid: int
    name: str | None
    bytes: int | None


class LiveGpu(TypedDict):
    """A GPU. `used`: bytes in use by any process; None: the GPU does not report it."""

    index: int
    uuid: str
    name: str
    capability: str | None
    total: int | None
    used: int | None
    unified: bool
    lost: str | None
    kept: str | None
    holders: list[GpuEngine]
    processes: list[GpuUser]


class LivePreparedEngine(TypedDict):
    """A process that has imported an engine, and forks the next ones. `bytes`: its memory."""

    engine: str
    pid: int
    since: float
    bytes: int | None


class LiveNode(TypedDict):
    """A machine of the cluster.

    engines: how many run there.
    models: names of the models of these engines.
    """

    name: str
    state: str
    gpus: list[str]
    engines: int
    models: list[str]


class LiveLink(TypedDict):
    """The network between two machines, in words.

    measured_at: time in Unix seconds; None: it was not measured.
    """

    a: str
    b: str
    words: str
    measured_at: float | None


class LiveMachine(TypedDict):
    """The machine.

    holders: engines without a GPU.
    nodes: the machines of its cluster.
    links: the networks between them.
    """

    gpus: list[LiveGpu]
    cpu: str | None
    cores: int
    ram_total: int
    ram_used: int
    disk_free: int | None
    driver: str | None
    cuda: str | None
    notes: list[str]
    holders: list[GpuEngine]
    prepared: list[LivePreparedEngine]
    nodes: list[LiveNode]
    links: list[LiveLink]


class LiveDownload(TypedDict):
    """A download: bytes, and bytes per second."""

    done: int
    total: int
    rate: float | None


class LiveStep(TypedDict):
    """A phase of a start.

    since: begin in Unix seconds, of the present one.
    took_s: seconds of one that has ended.
    expected_s: seconds of such a phase; None: unknown.
    """

    phase: str
    since: float | None
    took_s: float | None
    expected_s: float | None


class LiveStart(TypedDict):
    """A start.

    since: begin of its process, in Unix seconds; None: no process yet.
    steps: ended ones, the present one, expected ones.
    low_s, high_s: expected seconds; None: unknown.
    """

    since: float | None
    steps: list[LiveStep]
    low_s: float | None
    high_s: float | None
    grade: str | None
    is_cache_empty: bool | None


class LiveReplica(TypedDict):
    """A replica.

    phase: step of its start.
    progress: the state of a download.
    bytes: memory that its engine may use on each of its GPUs.
    """

    index: int
    state: str
    detail: str
    phase: str | None
    progress: LiveDownload | None
    attempt: int | None
    started_at: float | None
    ready_at: float | None
    engine: str | None
    grade: str | None
    gpus: list[str]
    context: int | None
    bytes: int | None
    in_flight: int
    at_once: int | None
    start: LiveStart | None


class LiveEndpoint(TypedDict):
    url: str
    state: str
    detail: str


class LiveModel(TypedDict):
    """A model.

    inputs: kinds of content in a message; empty: unknown.
    running, waiting: requests.
    copies: number of copies by the load, in words; empty: the number is fixed.
    change: a new wish is being applied, or was refused.
    """

    name: str
    aliases: list[str]
    source: str | None
    state: str
    detail: str
    created_at: float
    used_at: float | None
    stopped: bool
    deleting: bool
    change: Literal["underway", "refused"] | None
    better: bool
    inputs: list[str]
    running: int
    waiting: int
    copies: str
    replicas: list[LiveReplica]
    endpoints: list[LiveEndpoint]


def live_machine(
    hardware: Hardware,
    models: Mapping[str, ManagedModel],
    prepared_views: Iterable[PreparedView] = (),
    nodes: Iterable[MachineView] = (),
    links: Iterable[NodeLink] = (),
) -> LiveMachine:
    """The machine on the page: GPUs with the models that hold them, RAM, disk and nodes."""
    holders = _holders(models.values())
    gpus = [
        LiveGpu(
            index=gpu.index,
            uuid=gpu.uuid,
            name=gpu.name,
            capability=gpu.capability,
            total=gpu.total_bytes,
            used=(
                gpu.total_bytes - gpu.free_bytes
                if gpu.total_bytes is not None and gpu.free_bytes is not None
                else None
            ),
            unified=gpu.memory_kind == "unified",
            lost=gpu.loss_reason,
            kept=gpu.reservation_reason,
            holders=holders.get(gpu.uuid, []),
            processes=[
                GpuUser(pid=process.pid, name=process.name, bytes=process.used_bytes)
                for process in gpu.processes or ()
            ],
        )
        for gpu in hardware.gpus
    ]
    return LiveMachine(
        gpus=gpus,
        cpu=hardware.cpu_name,
        cores=hardware.cpu_cores,
        ram_total=hardware.ram_total_bytes,
        ram_used=hardware.ram_total_bytes - hardware.ram_available_bytes,
        disk_free=hardware.disk_free_bytes,
        driver=hardware.driver,
        cuda=hardware.cuda_driver,
        notes=list(hardware.notes),
        holders=holders.get("", []),
        prepared=[
            LivePreparedEngine(
                engine=engine_process.engine,
                pid=engine_process.pid,
                since=engine_process.since,
                bytes=engine_process.pss_bytes,
            )
            for engine_process in prepared_views
        ],
        nodes=[_live_node(node, models) for node in nodes],
        links=[_live_link(link) for link in links],
    )


def _live_node(node: MachineView, models: Mapping[str, ManagedModel]) -> LiveNode:
    parts = {name: part_name(name) for name in node.engines}
    names = {part.name if part is not None else name for name, part in parts.items()}
    return LiveNode(
        name=node.name,
        state=node.state,
        gpus=list(node.gpus),
        engines=len(node.engines),
        models=sorted(
            model_name
            for model_name, model in models.items()
            if any(
                replica.attempt is not None and replica.attempt.instance_name in names
                for replica in model.replicas
            )
        ),
    )


def _live_link(link: NodeLink) -> LiveLink:
    # Not for one machine.
    from gateway.planner.nodes.words import link_words

    return LiveLink(a=link.a, b=link.b, words=link_words(link), measured_at=link.measured_at)


def live_models(
    models: Iterable[ManagedModel],
    routes: Routes,
    samples: Iterable[Sample],
    expected_start: Expected,
) -> list[LiveModel]:
    request_counts: dict[tuple[str, str], int] = {}
    for name, labels, value in samples:
        if name in ("fitserve_requests_in_flight", "fitserve_requests_queued"):
            request_counts[name, labels[0]] = request_counts.get((name, labels[0]), 0) + int(value)
    return [
        _live_model(
            model,
            routes,
            lambda name, model_name: request_counts.get((name, model_name), 0),
            expected_start,
        )
        for model in models
    ]


def _holders(models: Iterable[ManagedModel]) -> dict[str, list[GpuEngine]]:
    """Engines by the UUID of their GPU; "" for engines without a GPU."""
    holders: dict[str, list[GpuEngine]] = {}
    for model in models:
        for replica in model.all_replicas:
            if replica.attempt is not None and replica.attempt.is_live:
                plan = replica.attempt.plan
                holder = GpuEngine(
                    model=model.wish.name, replica=replica.index, planned=plan.memory.promised_bytes
                )
                for gpu in plan.gpus or ("",):
                    holders.setdefault(gpu, []).append(holder)
    return holders


def _change_state(model: ManagedModel) -> Literal["underway", "refused"] | None:
    if model.change is None:
        return None
    return "refused" if model.change.refusal_text else "underway"


def _live_model(
    model: ManagedModel, routes: Routes, count: Callable[[str, str], int], expected_start: Expected
) -> LiveModel:
    """The part of a model in the page's state."""
    name, (state, detail) = model.wish.name, status(model)
    return LiveModel(
        name=name,
        aliases=list(model.wish.aliases),
        source=model.wish.source,
        state=state,
        detail=detail,
        created_at=model.created_at,
        used_at=round(model.used_at) or None,
        stopped=model.is_stopped,
        deleting=model.is_deleting,
        change=_change_state(model),
        better=model.rival is not None,
        inputs=next(
            (
                list(replica.attempt.plan.model.inputs)
                for replica in model.replicas
                if replica.attempt is not None
            ),
            [],
        ),
        running=count("fitserve_requests_in_flight", name),
        waiting=count("fitserve_requests_queued", name) + routes.waiting(name),
        copies=copies_text(model),
        replicas=[_live_replica(replica, routes, expected_start) for replica in model.replicas],
        endpoints=[
            LiveEndpoint(url=endpoint.url, state=endpoint.state, detail=endpoint.detail)
            for endpoint in model.endpoints
        ],
    )


def _live_replica(replica: ReplicaState, routes: Routes, expected_start: Expected) -> LiveReplica:
    attempt = replica.attempt
    plan = attempt.plan if attempt is not None else None
    return LiveReplica(
        index=replica.index,
        state=replica.status.state,
        detail=replica.status.reason,
        phase=replica.phase if replica.status.state in ("starting", "verifying") else None,
        progress=_live_download(replica.progress),
        attempt=attempt.id if attempt is not None else None,
        started_at=attempt.started_at if attempt is not None else None,
        ready_at=attempt.ready_at if attempt is not None else None,
        engine=str(plan.engine) if plan is not None else None,
        grade=attempt.grade if attempt is not None else None,
        gpus=list(plan.gpus) if plan is not None else [],
        context=plan.max_model_len.value if plan is not None else None,
        bytes=plan.memory.promised_bytes if plan is not None else None,
        in_flight=routes.in_flight(attempt.instance_name) if attempt is not None else 0,
        at_once=plan.at_once if plan is not None else None,
        start=_live_start(replica, expected_start),
    )


def _live_start(replica: ReplicaState, expected_start: Expected) -> LiveStart | None:
    attempt = replica.attempt
    clock = replica.start_clock
    if attempt is None or not replica.is_launching:
        return None
    time_s = expected_start(attempt.plan, replica.conditions)
    now = time.time()
    now_s = time.monotonic()
    return LiveStart(
        since=round(now - clock.total_s(now_s)) if clock is not None else None,
        steps=start_steps(
            clock.seconds(now_s) if clock is not None else {},
            clock.phase if clock is not None else None,
            time_s.phases if time_s is not None else {},
            now,
        ),
        low_s=time_s.low_s if time_s is not None else None,
        high_s=time_s.high_s if time_s is not None else None,
        grade=time_s.grade if time_s is not None else None,
        is_cache_empty=replica.conditions.is_cache_empty,
    )


def start_steps(
    seconds: Mapping[str, float],
    current_phase: str | None,
    expected_seconds: Mapping[str, float],
    now: float,
) -> list[LiveStep]:
    """The phases that began, in that order, then the expected ones after the present one.

    seconds, expected_seconds: the measured and the expected time of each phase.
    current_phase: the phase that runs, or None.
    now: Unix seconds.
    """
    names = list(expected_seconds)
    coming = names
    if current_phase is not None and current_phase in expected_seconds:
        coming = names[names.index(current_phase) + 1 :]
    return [
        LiveStep(
            phase=phase_label(phase),
            since=round(now - seconds[phase]) if phase == current_phase else None,
            took_s=round(seconds[phase]) if phase in seconds and phase != current_phase else None,
            expected_s=expected_seconds.get(phase),
        )
        for phase in dict.fromkeys((*seconds, *coming))
    ]


def _live_download(progress: str) -> LiveDownload | None:
    if not isinstance(progress, TransferProgress):
        return None
    return LiveDownload(done=progress.bytes_done, total=progress.total, rate=progress.rate)
