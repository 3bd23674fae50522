"""Which engine may start now, of all that want to; and which starts were disturbed, so that nothing
is learned from them. Pure.

    holdup(start, waiting, holders)  why this start has to wait, or None
    disturbances(before, now)        which engines a neighbour has just disturbed, and how
    undisturbed(history)             the attempts that count

An engine measures the free memory of its GPUs while it starts, and takes for its own use whatever
changes meanwhile: vLLM from `request_memory` to the end of `determine_available_memory`, SGLang
from `init_torch_distributed` to the end of `init_memory_pool`. So of the engines that measure on a
GPU one at a time is before its KV cache stands; on different GPUs they start side by side.

A vLLM that is given its KV cache in bytes (`--kv-cache-memory-bytes`) measures nothing: it compares
the free memory with its share once (request_memory, vllm/v1/worker/utils.py:425 of 0.26.0, :716 of
0.33.0), which holds because the plans of a GPU never promise more than there is, and then takes
these bytes (vllm/v1/worker/gpu_worker.py:462 of 0.26.0, :656 of 0.33.0). So engines that are
`sized` start side by side on one GPU too. What the estimate lacks would be missing while the engine
serves, so the bytes are what the plan leaves with its own band of error, and a part of the GPU
less; a model whose engine failed so measures from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from gateway.domain import Attempt, Hardware, Plan
from gateway.domain.units import MIB, gib

# What two readings of the same memory differ by, though nobody does anything.
_STEADY = 256 * MIB
# Of what an engine takes beside its share, this is there before the engine compares what is free:
# CUDA's context.
_FIRST = 512 * MIB
# So many disturbed starts in a row cost nothing; from then on they are failures like any other.
_EXCUSED = 3

Stage = Literal["loads", "warms", "stands", "ends"]
_WORDS: Mapping[Stage, str] = {
    "loads": "loads its weights",
    "warms": "captures its graphs",
    "stands": "made its KV cache",
    "ends": "is being stopped",
}
# Whoever is as far as this holds nobody up: graphs and workspaces are small, and made before the
# next engine has imported its code.
_STILL = ("warms", "stands")

# A plan that takes no more of its GPUs expects others there, as one does that keeps to what it has
# beside them.
_OTHERS_SHARE = 0.85
# One of so many parts of its GPU is kept back from an engine that is given its KV cache in bytes:
# estimates were off by 0.1 to 0.7 % of the KV cache on real GPUs.
KEPT_BACK = 100


@dataclass(frozen=True)
class Holder:
    """An engine that is there. loads: its KV cache does not stand yet. warms: that stands, and
        graphs and workspaces are still to come.
    ends: it was told to stop. since: when that stage began, in seconds. measures: a start that has
    imported its code, and so looks at its GPUs. proved: it has generated tokens. sized: it was
    given its KV cache in bytes."""

    instance: str
    model: str
    gpus: frozenset[str]
    shape: str
    stage: Stage
    since: float = 0.0
    measures: bool = True
    proved: bool = False
    sized: bool = False


@dataclass(frozen=True)
class Start:
    """An engine that wants to start. order: the smaller goes first. proven: its very plan has
    generated tokens before. sized: it would be given its
    KV cache in bytes."""

    instance: str
    model: str
    gpus: frozenset[str]
    shape: str
    order: int
    proven: bool
    sized: bool = False


@dataclass(frozen=True)
class Holdup:
    """What a start waits for: a model, what that model does, and on which GPU; None: whichever."""

    model: str
    doing: str
    gpu: str | None = None


def start_of(attempt: Attempt, *, sized: bool = False) -> Start:
    """Attempts are numbered as they are made: who has waited longest goes first, and after a boot
    the oldest model."""
    plan = attempt.plan
    proven = plan.grade == "verified"
    return Start(
        attempt.instance_name,
        attempt.model,
        frozenset(plan.gpus),
        shape(plan),
        attempt.id,
        proven,
        sized,
    )


def cache_bytes(plan: Plan) -> int | None:
    """Bytes of KV cache on each GPU for an engine that is not to measure. None where it has its
    GPUs for itself, or where what would be left is
    no whole context."""
    memory = plan.memory
    alone = plan.cap is None and memory.promised_bytes > _OTHERS_SHARE * memory.gpu_bytes
    if not plan.gpus or alone or not memory.kv_bytes_per_token:
        return None
    count = memory.kv_bytes - memory.gpu_bytes // KEPT_BACK
    whole = plan.max_model_len.value * memory.kv_bytes / max(1, memory.kv_tokens)
    return count if count >= max(whole, memory.kv_bytes / 2) else None


def shape(plan: Plan) -> str:
    """The same for copies of a plan, which differ in their GPUs."""
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


def holdup(
    start: Start, waiting: Iterable[Start], holders: Iterable[Holder], now: float, limit_s: float
) -> Holdup | None:
    """Why the start has to wait. limit_s: who loads or ends for longer than that holds nobody up
    any more."""
    fresh = [
        one
        for one in holders
        if one.instance != start.instance and (one.stage in _STILL or now - one.since < limit_s)
    ]
    for one in fresh:
        beside = start.sized and one.sized and one.stage == "loads"
        if one.stage not in _STILL and not beside and (shared := one.gpus & start.gpus):
            return Holdup(one.model, _WORDS[one.stage], min(shared))
    # Of copies whose plan nobody has seen work the first start proves it: a plan that fails, fails
    # once.
    copies = [
        one
        for one in fresh
        if (one.model, one.shape) == (start.model, start.shape) and one.stage != "ends"
    ]
    if copies and not start.proven and not any(one.proved for one in copies):
        return Holdup(start.model, "is started for the first time with this plan")
    for earlier in sorted(waiting, key=lambda one: one.order):
        if earlier.order >= start.order:
            break
        if earlier.sized and start.sized:
            continue
        if shared := earlier.gpus & start.gpus:
            return Holdup(earlier.model, "starts first", min(shared))
    return None


def disturbances(before: Iterable[Holder], now: Iterable[Holder]) -> Iterator[tuple[str, str]]:
    """Instances beside which another engine loads, ends, or has come, gone or changed its stage
    between two looks; and how."""
    old, new = {one.instance: one for one in before}, {one.instance: one for one in now}
    for instance, one in {**old, **new}.items():
        was, stage = (seen[instance].stage if instance in seen else None for seen in (old, new))
        if was == stage == "stands":
            continue
        small = stage == "warms" or (was, stage) == ("warms", "stands")
        done = (
            f"{one.model} {_WORDS[stage] if stage is not None else 'came to its end'} on the"
            " same GPU"
        )
        for other in new.values():
            heeds = (other.measures or not small) and not (other.sized and one.sized)
            if other.instance != instance and one.gpus & other.gpus and heeds:
                yield other.instance, done


def undisturbed(history: Iterable[Attempt]) -> Iterator[Attempt]:
    """The attempts without those that a neighbour disturbed, or that were taken back before their
    start. Of many such in a row the
    later ones count: a wait is due."""
    row = 0
    for attempt in history:
        row = row + 1 if attempt.failure is not None and attempt.failure.disturbed else 0
        if not 0 < row <= _EXCUSED:
            yield attempt


# --- the memory of GPUs, as NVML reads it, also of what is not ours ---


@dataclass(frozen=True)
class Reading:
    """One GPU at one moment. processes: bytes by pid, as far as the driver tells; None: it does
    not."""

    uuid: str
    index: int
    free: int
    processes: Mapping[int, int | None] | None


def readings(machine: Hardware, gpus: Iterable[str]) -> dict[str, Reading]:
    """By UUID; without those whose memory cannot be read, or is the host's."""
    wanted, found = set(gpus), {}
    for gpu in machine.gpus:
        if gpu.uuid in wanted and gpu.free_bytes is not None and gpu.memory_kind == "dedicated":
            processes = (
                None
                if gpu.processes is None
                else {one.pid: one.used_bytes for one in gpu.processes}
            )
            found[gpu.uuid] = Reading(gpu.uuid, gpu.index, gpu.free_bytes, processes)
    return found


def changed(before: Mapping[str, Reading], now: Mapping[str, Reading]) -> str:
    """Which process, of those that were there before, took or gave back memory since; "" where none
    did."""
    for uuid, old in before.items():
        for pid, used in (old.processes or {}).items():
            new = (now[uuid].processes or {}).get(pid, 0) if uuid in now else used
            if used is not None and new is not None and abs(new - used) > _STEADY:
                return f"process {pid} on GPU {old.index} had {gib(used)} and has {gib(new)}"
    return ""


def lacking(plan: Plan, now: Mapping[str, Reading]) -> str:
    """Why the plan cannot be started with what its GPUs have now; "" where they have enough."""
    needed = plan.memory.budget_bytes + min(plan.memory.beside_bytes, _FIRST)
    short = min(now.values(), key=lambda one: one.free, default=None)
    if short is None or short.free >= needed:
        return ""
    return (
        f"GPU {short.index} has {gib(short.free)} free, and the plan takes {gib(needed)}: something"
        " took it since the plan was made."
    )


def taken(before: Mapping[str, Reading], now: Mapping[str, Reading]) -> int | None:
    """Bytes that one engine took of the GPU of which it took most. None where not just one process
    came to each GPU."""
    found = []
    for uuid, old in before.items():
        new = now.get(uuid)
        came = set(new.processes or ()) - set(old.processes or ()) if new else set()
        if new is None or len(came) != 1:
            return None
        found.append(old.free - new.free)
    return max(found, default=None)
