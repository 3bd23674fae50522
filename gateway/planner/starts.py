"""The order of engine starts on shared GPUs, and starts that neighbours disturbed. Pure.

    start_block(start, waiting, running)  why this start has to wait, or None
    disturbances(before, after)           engines that a neighbour has just disturbed, and how
    undisturbed_attempts(history)         the attempts that count

An engine measures the free memory of its GPUs while it starts, and counts every change as its own:
vLLM from `request_memory` to the end of `determine_available_memory`, SGLang from
`init_torch_distributed` to the end of `init_memory_pool`. So only one engine at a time measures on
a GPU. Engines on different GPUs start side by side.

A vLLM with a KV cache in bytes (`--kv-cache-memory-bytes`) measures nothing. vLLM compares the free
memory with its share once, then it takes these bytes (engines/vllm/engine.py has the sources). The
comparison holds, because the plans of a GPU never promise more memory than the GPU has. So such
engines (`is_sized`) start side by side on one GPU too. An estimate that is too low would fail while
the engine serves. So the bytes leave room for the plan's error and for a part of the GPU. A model
whose engine failed in this way measures from then on.

A plan that has served gets the bytes that its engine measured then, and its next start measures
nothing: 2 to 20 s less where CUDA graphs were estimated (tests/logs).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from gateway.domain import Hardware, Plan
from gateway.domain.record import FrozenRecord
from gateway.domain.units import MIB, gib

# Only for types: a plan does without the classes of running engines.
if TYPE_CHECKING:
    from gateway.domain import Attempt

# Difference of two readings of unchanged memory.
_NOISE_BYTES = 256 * MIB
# CUDA's context: memory outside its share that an engine uses before it compares the free memory.
_CONTEXT_BYTES = 512 * MIB
# Disturbed starts in a row that cost nothing; later ones are failures like any other.
_MAX_EXCUSES = 3

EnginePhase = Literal["loading", "capturing_graphs", "settled", "stopping"]
_ACTIVITIES: Mapping[EnginePhase, str] = {
    "loading": "loads its weights",
    "capturing_graphs": "captures its graphs",
    "settled": "made its KV cache",
    "stopping": "is being stopped",
}
# Engines in these phases block no start: graphs and workspaces are small, and complete before the
# next engine has imported its code.
_HARMLESS_PHASES = ("capturing_graphs", "settled")

# Logs round measured bytes to hundredths of a GiB.
_ROUNDING_BYTES = 16 * MIB
# A plan with at most this part of its GPUs shares them, and so does a plan with a cap.
_SHARED_PART = 0.85
# An engine with a KV cache in bytes leaves one of this many parts of its GPU free: estimates were
# off by 0.1 to 0.7 % of the KV cache on real GPUs.
KEPT_BACK = 100


class PlacedEngine(FrozenRecord, frozen=True):
    """An engine that starts, serves or stops.

    phase: "loading" before its KV cache exists; "capturing_graphs" while graphs and workspaces are
        made; "settled" once its memory no longer changes; "stopping" once it was ordered to stop.
    phase_since: begin of the phase, in seconds.
    is_measuring: a start that has imported its code, and so reads the memory of its GPUs.
    is_proved: it has generated tokens.
    is_sized: its KV cache was given in bytes.
    """

    instance: str
    model: str
    gpus: frozenset[str]
    shape: str
    phase: EnginePhase
    phase_since: float = 0.0
    is_measuring: bool = True
    is_proved: bool = False
    is_sized: bool = False


class PendingStart(FrozenRecord, frozen=True):
    """An engine that waits for its start.

    order: the smaller starts first.
    is_proved: exactly this plan has generated tokens before.
    is_sized: its KV cache will be given in bytes.
    """

    instance: str
    model: str
    gpus: frozenset[str]
    shape: str
    order: int
    is_proved: bool
    is_sized: bool = False


class StartObstacle(FrozenRecord, frozen=True):
    """The model that a start waits for, its activity, and the GPU; None: any GPU."""

    model: str
    activity: str
    gpu: str | None = None


def build_pending_start(attempt: Attempt, *, is_sized: bool = False) -> PendingStart:
    """The start of an attempt, in the order of attempts: the longest wait is first.

    After a boot the oldest model is first.
    """
    plan = attempt.plan
    is_proved = plan.grade == "verified"
    return PendingStart(
        instance=attempt.instance_name,
        model=attempt.model,
        gpus=frozenset(plan.gpus),
        shape=shape(plan),
        order=attempt.id,
        is_proved=is_proved,
        is_sized=is_sized,
    )


def cache_bytes(plan: Plan) -> int | None:
    """Bytes of KV cache on each GPU for an engine that does not measure.

    None: it was not measured, and shares its GPUs with no other engine; or these bytes would hold
    no whole context.
    """
    memory = plan.memory
    if not plan.gpus or not memory.kv_bytes_per_token:
        return None
    if plan.grade == "verified" and memory.measured_bytes is not None:
        kv_bytes = memory.budget_bytes - memory.measured_bytes - _ROUNDING_BYTES
    elif plan.cap is None and memory.promised_bytes > _SHARED_PART * memory.gpu_bytes:
        return None
    else:
        kv_bytes = memory.kv_bytes - memory.gpu_bytes // KEPT_BACK
    whole_bytes = plan.max_model_len.value * memory.kv_bytes / max(1, memory.kv_tokens)
    return kv_bytes if kv_bytes >= max(whole_bytes, memory.kv_bytes / 2) else None


def shape(plan: Plan) -> str:
    """A text that is equal for copies of a plan, which differ only in their GPUs."""
    return repr(
        (
            plan.model.source,
            plan.model.revision,
            str(plan.engine),
            plan.engine.image,
            plan.argv,
            sorted(plan.env.items()),
        )
    )


def start_block(
    start: PendingStart,
    waiting_starts: Iterable[PendingStart],
    running_engines: Iterable[PlacedEngine],
    time_s: float,
    limit_s: float,
) -> StartObstacle | None:
    """Why the start has to wait, at `time_s`. An engine that loads or ends for limit_s no longer
    blocks."""
    neighbours = [
        engine
        for engine in running_engines
        if engine.instance != start.instance
        and (engine.phase in _HARMLESS_PHASES or time_s - engine.phase_since < limit_s)
    ]
    for engine in neighbours:
        side_by_side = start.is_sized and engine.is_sized and engine.phase == "loading"
        if engine.phase in _HARMLESS_PHASES or side_by_side:
            continue
        if shared_uuids := engine.gpus & start.gpus:
            return StartObstacle(engine.model, _ACTIVITIES[engine.phase], min(shared_uuids))
    # The first of several copies proves the plan, so a plan that fails, fails once.
    copies = [
        copy
        for copy in neighbours
        if (copy.model, copy.shape) == (start.model, start.shape) and copy.phase != "stopping"
    ]
    if copies and not start.is_proved and not any(copy.is_proved for copy in copies):
        return StartObstacle(start.model, "is started for the first time with this plan")
    for earlier_start in sorted(waiting_starts, key=lambda start: start.order):
        if earlier_start.order >= start.order:
            break
        if earlier_start.is_sized and start.is_sized:
            continue
        if shared_uuids := earlier_start.gpus & start.gpus:
            return StartObstacle(earlier_start.model, "starts first", min(shared_uuids))
    return None


def disturbances(
    former_engines: Iterable[PlacedEngine], new_engines: Iterable[PlacedEngine]
) -> Iterator[tuple[str, str]]:
    """Instances that a neighbour disturbed between two looks, and how.

    A neighbour disturbs while it loads or ends, and when it comes, goes or changes its phase.
    """
    old_by_name = {engine.instance: engine for engine in former_engines}
    new_by_name = {engine.instance: engine for engine in new_engines}
    names_by_gpu: dict[str, list[str]] = {}
    for new_engine in new_by_name.values():
        for uuid in new_engine.gpus:
            names_by_gpu.setdefault(uuid, []).append(new_engine.instance)
    for instance, engine in {**old_by_name, **new_by_name}.items():
        former_phase = old_by_name[instance].phase if instance in old_by_name else None
        phase = new_by_name[instance].phase if instance in new_by_name else None
        if former_phase == phase == "settled":
            continue
        is_small = phase == "capturing_graphs" or (former_phase, phase) == (
            "capturing_graphs",
            "settled",
        )
        activity = _ACTIVITIES[phase] if phase is not None else "came to its end"
        neighbours = {name for uuid in engine.gpus for name in names_by_gpu.get(uuid, ())}
        for neighbour in (new_by_name[name] for name in sorted(neighbours - {instance})):
            is_disturbed = (neighbour.is_measuring or not is_small) and not (
                neighbour.is_sized and engine.is_sized
            )
            if is_disturbed:
                yield neighbour.instance, f"{engine.model} {activity} on the same GPU"


def undisturbed_attempts(history: Iterable[Attempt]) -> Iterator[Attempt]:
    """The attempts without those that a neighbour disturbed or that were withdrawn.

    The later ones of many such attempts in a row count: a wait is due.
    """
    row = 0
    for attempt in history:
        row = row + 1 if attempt.failure is not None and attempt.failure.disturbed else 0
        if not 0 < row <= _MAX_EXCUSES:
            yield attempt


# --- the memory of GPUs as NVML reads it, with foreign processes ---


class MemoryReading(FrozenRecord, frozen=True):
    """The memory of one GPU at one moment. processes: bytes by pid; None: the driver hides them."""

    uuid: str
    index: int
    free_bytes: int
    processes: Mapping[int, int | None] | None


def readings(machine: Hardware, gpus: Iterable[str]) -> dict[str, MemoryReading]:
    """The readings by GPU UUID, without GPUs of unreadable or host memory."""
    uuids = set(gpus)
    result = {}
    for gpu in machine.gpus:
        if gpu.uuid in uuids and gpu.free_bytes is not None and gpu.memory_kind == "dedicated":
            processes = (
                None
                if gpu.processes is None
                else {process.pid: process.used_bytes for process in gpu.processes}
            )
            result[gpu.uuid] = MemoryReading(gpu.uuid, gpu.index, gpu.free_bytes, processes)
    return result


def memory_change(
    former_readings: Mapping[str, MemoryReading], new_readings: Mapping[str, MemoryReading]
) -> str:
    """The earlier process that took or freed memory since, in words; "" if none did."""
    for uuid, old_reading in former_readings.items():
        for pid, used_bytes in (old_reading.processes or {}).items():
            new_bytes = (
                (new_readings[uuid].processes or {}).get(pid, 0)
                if uuid in new_readings
                else used_bytes
            )
            if (
                used_bytes is not None
                and new_bytes is not None
                and abs(new_bytes - used_bytes) > _NOISE_BYTES
            ):
                return (
                    f"process {pid} on GPU {old_reading.index} had {gib(used_bytes)} and has"
                    f" {gib(new_bytes)}"
                )
    return ""


def memory_shortage(plan: Plan, readings: Mapping[str, MemoryReading]) -> str:
    """Why the free memory is too little for a start of the plan; "" if it is not."""
    needed_bytes = plan.memory.budget_bytes + min(plan.memory.beside_bytes, _CONTEXT_BYTES)
    short_reading = min(readings.values(), key=lambda reading: reading.free_bytes, default=None)
    if short_reading is None or short_reading.free_bytes >= needed_bytes:
        return ""
    return (
        f"GPU {short_reading.index} has {gib(short_reading.free_bytes)} free, and the plan takes"
        f" {gib(needed_bytes)}: something took it since the plan was made."
    )


def bytes_taken(
    former_readings: Mapping[str, MemoryReading], new_readings: Mapping[str, MemoryReading]
) -> int | None:
    """The most bytes that one new engine took of a GPU. None: not one new process on each GPU."""
    sizes = []
    for uuid, old_reading in former_readings.items():
        new_reading = new_readings.get(uuid)
        added = (
            set(new_reading.processes or ()) - set(old_reading.processes or ())
            if new_reading
            else set()
        )
        if new_reading is None or len(added) != 1:
            return None
        sizes.append(old_reading.free_bytes - new_reading.free_bytes)
    return max(sizes, default=None)
