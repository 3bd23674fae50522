"""What a failure proves about future plans, with a scope no wider than the evidence. Pure.

    judged(attempt, failure, earlier, at)  the failure, with what it proves beside those before it
    learn(attempt, failure, at)  of a start that the gateway made: its plan says on what
    proved(attempt, at)          of one that generated tokens
    told(failure, scope)         of a log alone: only what stands in it

The facts of one failure always rule out the plan that failed: by its limit, its kernel or its
engine where the failure names them, and by its fingerprint where it does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from gateway.diagnosis.ending import environmental
from gateway.diagnosis.facts import peers
from gateway.diagnosis.facts.scope import batch_scope
from gateway.diagnosis.lines.log_lines import parse
from gateway.domain import Attempt, Fact, FactKind, Failure, LayerKernel, Plan
from gateway.domain.running import FORGIVE_S
from gateway.domain.units import MIB, gib

# Of an OOM in these phases the cache was not there yet: what was in use is what the engine needs
# beside it.
_BEFORE_CACHE = ("starting", "load", "profile")
# What decides what an engine takes beside its share, whatever model it serves.
_OF_RANKS: tuple[str, ...] = ("engine", "device", "tensor_parallel", "pipeline_parallel")
# Less than this is not worth a fact.
_NOISE = 64 * MIB
# The last that an engine says before its ranks first meet: vllm/distributed/parallel_state.py and
# device_communicators/pynccl.py and custom_all_reduce.py; the same files of sglang/srt/distributed.
_MEETING = re.compile(r"nccl|all_?reduce|parallel_state", re.IGNORECASE)


def judged(attempt: Attempt, failure: Failure, earlier: Iterable[Attempt], at: float) -> Failure:
    """The failure, with what it proves beside the `earlier` ones in a row.

    One hang may be the machine's; the second one of the same plan is the plan's: of ranks that wait
    for each other, else of all of it.
    """
    several, proves = len(attempt.plan.gpus) > 1, failure.proves
    if failure.kind == "start_timeout" and several and _MEETING.search(failure.line or ""):
        proves = "peers"
    served_well = attempt.ready_at is not None and at - attempt.ready_at >= FORGIVE_S
    if failure.kind == "hang" and failure.proves == "nothing" and not served_well:
        before = [one.failure for one in earlier if one.fingerprint == attempt.fingerprint]
        if any(one is not None and one.kind == "hang" for one in before):
            proves = "peers" if several else "plan"
    return failure.evolve(proves=proves)


def excused(attempt: Attempt, failure: Failure, disturbed: str) -> Failure:
    """The failure, which teaches nothing where a neighbour disturbed the engine: of a start it may
    be anything that was measured; of an
    engine that serves only what it says of memory. disturbed: what the neighbour did."""
    if not disturbed or not (attempt.state == "starting" or failure.proves == "memory"):
        return failure
    return failure.evolve(proves="nothing", disturbed=disturbed)


def learn(attempt: Attempt, failure: Failure, at: float) -> tuple[Fact, ...]:
    """The facts that the failure of this attempt proves; none where its cause lies outside the
    plan."""
    if environmental(failure):
        return ()
    plan = attempt.plan
    found: list[tuple[FactKind, dict[str, str], int | None]] = []
    if failure.proves == "context":
        limit = maximum(failure)
        # A limit that the plan keeps already changes nothing.
        found += (
            [("max_context", plan.scope, limit)]
            if limit and limit < plan.max_model_len.value
            else []
        )
    elif failure.proves == "kernel" or failure.culprit.get("kernel"):
        found += [(kind, scope, None) for kind, scope in _kernels(plan, failure)]
    certain = bool(found)
    if failure.proves == "peers" and (scope := peers.scope(plan)) is not None:
        found.append(("peers_fail", scope, None))
    if failure.proves == "engine" and not certain:
        scope = {**_where(plan), **_about(failure)}
        found += [("engine_fails", scope, None)] if len(scope) > 1 else []
    if failure.proves == "memory":
        found += [
            (kind, _memory_scope(plan, kind, failure.phase), value)
            for kind, value in _memory(failure)
        ]
    if not certain:
        # Also beside what was learned of memory, peers or the engine, which changes the next plan
        # mostly, but need not.
        found.append(("plan_failed", {"fingerprint": attempt.fingerprint}, None))
    source = _source(failure)
    return tuple(
        Fact(
            kind=kind,
            scope=scope,
            value=value,
            grade="failed",
            under=plan.under,
            source=source,
            attempt=attempt.id,
            at=at,
        )
        for kind, scope, value in found
    )


def proved(
    attempt: Attempt, at: float, cache_bytes: int | None = None, taken: int | None = None
) -> tuple[Fact, ...]:
    """What a start that was verified proves: this very plan works here, with this driver and image.
        Nothing where that is known.

    cache_bytes: what the engine measured as left for the KV cache, which tells what it needs beside
    it. taken: what NVML says that the engine has of a GPU, which tells what it takes beside its
    share.
    """
    plan = attempt.plan
    if plan.grade == "verified":
        return ()
    source = f"{plan.engine} generated tokens with this plan"
    found: list[tuple[FactKind, dict[str, str], int | None, str]] = [
        ("plan_verified", {"fingerprint": attempt.fingerprint}, None, source)
    ]
    if cache_bytes is not None and 0 < cache_bytes < plan.memory.budget_bytes:
        measured = f"{plan.engine} had {gib(cache_bytes)} left for its KV cache"
        used = plan.memory.budget_bytes - cache_bytes
        found.append(("needs_memory", _memory_scope(plan, "needs_memory", "kv"), used, measured))
    missing = 0 if taken is None else taken - plan.memory.promised_bytes
    if _NOISE < missing < plan.memory.budget_bytes:
        where = {key: plan.scope[key] for key in _OF_RANKS if key in plan.scope}
        told = (
            f"{plan.engine} took {gib(taken or 0)} of its GPU, and"
            f" {gib(plan.memory.promised_bytes)} were planned"
        )
        found.append(("beside_memory", where, missing, told))
    return tuple(
        Fact(
            kind=kind,
            scope=scope,
            value=value,
            under=plan.under,
            grade="verified",
            source=why,
            attempt=attempt.id,
            at=at,
        )
        for kind, scope, value, why in found
    )


def told(failure: Failure, scope: dict[str, str]) -> tuple[Fact, ...]:
    """The facts that a log proves by itself. scope: what it says of engine, model and
    tensor_parallel; none without the engine.

    On which GPU it was a log mostly does not say: such a fact holds nowhere until somebody fills
    its capability in.
    """
    if environmental(failure) or "engine" not in scope:
        return ()
    culprit = failure.culprit
    engine = {"engine": scope["engine"]}
    gpu = {"capability": _dotted(culprit["capability"]) if "capability" in culprit else "unknown"}
    found: list[tuple[FactKind, dict[str, str], int | None]] = []
    if failure.proves == "context" and "model" in scope and (limit := maximum(failure)):
        found.append(("max_context", scope, limit))
    elif failure.proves == "kernel" and culprit.get("kernel"):
        sizes = {name: str(culprit[name]) for name in ("kernel", "k", "n") if name in culprit}
        found.append(("kernel_fails", engine | gpu | sizes, None))
    elif failure.proves == "engine":
        about = _about(failure)
        found.append(
            ("engine_fails", engine | (about if "architecture" in about else gpu | about), None)
        )
    elif failure.proves == "memory" and "model" in scope:
        found += [(kind, scope, value) for kind, value in _memory(failure)]
    source = _source(failure)
    return tuple(
        Fact(kind=kind, scope=about, value=value, grade="failed", source=source)
        for kind, about, value in found
    )


def _source(failure: Failure) -> str:
    """What proves it, without the time and the process, so that two starts that ended alike read
    alike."""
    return parse(failure.line).text if failure.line else failure.message


def maximum(failure: Failure) -> int | None:
    """The longest context that the engine itself said would fit."""
    limit = failure.culprit.get("engine_max_model_len")
    return limit if isinstance(limit, int) and limit > 0 else None


def _where(plan: Plan) -> dict[str, str]:
    """Engine version and, of a GPU, its compute capability; and the operator's variables, which may
    be the cause."""
    known = {name: plan.scope[name] for name in ("capability", "env") if name in plan.scope}
    return {"engine": f"{plan.engine.kind}=={plan.engine.version}"} | known


def _kernels(plan: Plan, failure: Failure) -> Iterator[tuple[FactKind, dict[str, str]]]:
    """What it proves of kernels that the plan has and the failure names: by size where it tells
    sizes, else by name alone.

    A kernel that the engine chose and that failed would be chosen again. One that it turned a dense
    layer away from would not: there only our rules were wrong, and only about layers of this size.
    """
    culprit, where = failure.culprit, _where(plan)
    sizes = {key: culprit[key] for key in ("k", "n") if isinstance(culprit.get(key), int)}
    # An engine that found no kernel of this size disproves whichever the plan had for it.
    name = (
        None
        if failure.kind == "no_kernel" and sizes
        else culprit.get("kernel") or culprit.get("backend")
    )
    seen: list[dict[str, str]] = []
    for row in plan.kernels:
        if row.kernel is None or not all(getattr(row, key) == size for key, size in sizes.items()):
            continue
        if not (_same(str(name), row.kernel) if name else sizes):
            continue
        scope = {**where, "kernel": row.kernel} | (_row_scope(row) if sizes else {})
        if scope not in seen:
            seen.append(scope)
            turned_away = failure.kind == "no_kernel" and sizes and ".experts" not in row.layer
            yield "kernel_refuses" if turned_away else "kernel_fails", scope
    for layers in plan.attention:
        scope = {**where, "kernel": layers.backend or "", "head_dim": str(layers.head_dim)}
        if layers.backend and name and _same(str(name), layers.backend) and scope not in seen:
            seen.append(scope)
            yield "kernel_fails", scope


def _row_scope(row: LayerKernel) -> dict[str, str]:
    return {"scheme": row.scheme, "k": str(row.k), "n": str(row.n)}


def _same(one: str, other: str) -> bool:
    """Kernels and MoE backends are named alike, but not the same: MarlinExperts, MARLIN."""
    if one == other:
        return True
    short = {
        name.lower().replace("_", "").removesuffix("linearkernel").removesuffix("experts")
        for name in (one, other)
    }
    return len(short) == 1


def _about(failure: Failure) -> dict[str, str]:
    """What an engine version as a whole cannot do."""
    culprit = failure.culprit
    about = {
        name: str(culprit[name]) for name in ("architecture", "quantization") if culprit.get(name)
    }
    return about | (
        {"capability": _dotted(culprit["capability"])} if "capability" in culprit else {}
    )


def _memory(failure: Failure) -> Iterator[tuple[FactKind, int]]:
    """Bytes that were needed beside the cache, or that should have been left free, per device."""
    size = {name: value for name, value in failure.culprit.items() if isinstance(value, int)}
    tried = size.get("tried_bytes", 0)
    if failure.phase in _BEFORE_CACHE:
        if used := size.get("process_bytes", 0):
            yield "needs_memory", used + tried
    elif tried:
        yield "spare_memory", max(tried - size.get("free_bytes", 0), 64 * MIB)


def _memory_scope(plan: Plan, kind: FactKind, phase: str) -> dict[str, str]:
    """Once the engine computes, its batch and its graphs have their part in it; what the weights
    alone need, they need always."""
    scope = {key: value for key, value in plan.scope.items() if key != "budget"}
    if kind == "needs_memory" and phase not in ("starting", "load"):
        scope |= batch_scope(
            plan.max_num_batched_tokens.value,
            plan.max_num_seqs.value,
            eager=plan.enforce_eager.value,
        )
    return scope


def _dotted(capability: object) -> str:
    """86 -> 8.6"""
    digits = str(capability)
    return f"{digits[:-1]}.{digits[-1]}" if digits.isdigit() and len(digits) > 1 else digits
