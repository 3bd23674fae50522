"""The facts that failures and successes prove, with scopes no wider than the evidence. Pure.

    judge          a failure with its proof, also by earlier failures
    learn          facts of a failed start of the gateway
    prove_success  facts of a start that generated tokens
    facts_of_log   facts of a log without a start

The facts of a failure always exclude the failed plan: by its limit, kernel or engine if the failure
names them, else by its fingerprint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from gateway.diagnosis.ending import is_environmental
from gateway.diagnosis.facts import peers
from gateway.diagnosis.facts.scope import FORK, batch_scope
from gateway.diagnosis.facts.sleep import sleep_scope
from gateway.diagnosis.lines.log_lines import parse
from gateway.domain import Attempt, Fact, FactKind, Failure, LayerKernel, Plan
from gateway.domain.running import FORGIVE_S
from gateway.domain.units import MIB, gib

# The cache does not exist yet in these phases: the memory in use is all that the engine needs
# besides the cache.
_CACHELESS_PHASES = ("starting", "load", "profile")
# Keys of a scope that affect an engine's memory besides its share.
_RANK_KEYS: tuple[str, ...] = ("engine", "device", "tensor_parallel", "pipeline_parallel")
# An engine reads and builds in these phases: sizes of the plan have no effect yet.
_SIZELESS_PHASES = ("starting", "download", "load")
# Smaller differences are not worth a fact.
_NOISE_BYTES = 64 * MIB
# The last lines of an engine before its ranks first connect. Source: vllm/distributed/
# parallel_state.py, device_communicators/pynccl.py and custom_all_reduce.py; the same files of
# sglang/srt/distributed.
_RANK_CONNECTION = re.compile(r"nccl|all_?reduce|parallel_state", re.IGNORECASE)


def judge(
    attempt: Attempt, failure: Failure, earlier_attempts: Iterable[Attempt], now_s: float
) -> Failure:
    """The failure with its proof, also by the `earlier_attempts` failures in a row.

    The machine may cause one hang. A second hang of the same plan is due to the plan: to its peers
    if it has several GPUs, else to all of it.
    """
    has_several_gpus = len(attempt.plan.gpus) > 1
    proof = failure.proven_subject
    if (
        failure.kind == "start_timeout"
        and has_several_gpus
        and _RANK_CONNECTION.search(failure.line or "")
    ):
        proof = "peers"
    has_served_well = attempt.ready_at is not None and now_s - attempt.ready_at >= FORGIVE_S
    hung_before = any(
        former_attempt.failure is not None and former_attempt.failure.kind == "hang"
        for former_attempt in earlier_attempts
        if former_attempt.fingerprint == attempt.fingerprint
    )
    is_hang = failure.kind == "hang" and failure.proven_subject == "nothing" and not has_served_well
    if is_hang and hung_before:
        proof = "peers" if has_several_gpus else "plan"
    return failure.evolve(proven_subject=proof)


def drop_disturbed_proof(attempt: Attempt, failure: Failure, disturbance: str) -> Failure:
    """The failure, without a proof if a neighbour disturbed the engine.

    A disturbed start proves nothing; a disturbed engine that serves proves nothing about memory.
    disturbance: the activity of the neighbour.
    """
    if not disturbance or not (attempt.state == "starting" or failure.proven_subject == "memory"):
        return failure
    return failure.evolve(proven_subject="nothing", disturbed=disturbance)


def learn(attempt: Attempt, failure: Failure, now_s: float) -> tuple[Fact, ...]:
    """The facts that the failure of this attempt proves; none for a cause outside the plan."""
    if is_environmental(failure):
        return ()
    plan = attempt.plan
    rows: list[tuple[FactKind, dict[str, str], int | None]] = []
    if failure.proven_subject == "context":
        limit = context_limit(failure)
        # A limit above the plan's context would change nothing.
        if limit and limit < plan.max_model_len.value:
            rows.append(("max_context", plan.scope, limit))
    elif failure.proven_subject == "kernel" or failure.culprit.get("kernel"):
        rows += [(kind, scope, None) for kind, scope in _kernels(plan, failure)]
    is_certain = bool(rows)
    if _is_of_fork(plan, failure):
        rows.append(("fork_fails", sleep_scope(plan.scope), None))
    if failure.proven_subject == "peers" and (scope := peers.peers_scope(plan)) is not None:
        rows.append(("peers_fail", scope, None))
    if failure.proven_subject == "engine" and not is_certain:
        scope = {**_engine_scope(plan), **_failed_feature(failure)}
        rows += [("engine_fails", scope, None)] if len(scope) > 1 else []
    if (
        failure.cure == "engine"
        and failure.proven_subject == "plan"
        and failure.phase in _SIZELESS_PHASES
    ):
        rows.append(("engine_fails", _model_scope(plan), None))
    if failure.proven_subject == "memory":
        rows += [
            (kind, _memory_scope(plan, kind, failure.phase), value)
            for kind, value in _memory(failure)
        ]
    if not is_certain:
        # Facts about memory, peers or the engine mostly change the next plan, but not always.
        rows.append(("plan_failed", {"fingerprint": attempt.fingerprint}, None))
    source = _source(failure)
    return tuple(
        Fact(
            kind=kind,
            scope=scope,
            value=value,
            grade="failed",
            software=plan.software,
            source=source,
            attempt=attempt.id,
            at=now_s,
        )
        for kind, scope, value in rows
    )


def prove_success(
    attempt: Attempt, now_s: float, cache_bytes: int | None = None, used_bytes: int | None = None
) -> tuple[Fact, ...]:
    """The facts of a verified start: its plan works with this driver and image. None if known.

    cache_bytes: memory for the KV cache as the engine measured it; the rest of the budget is the
        engine's need.
    used_bytes: memory of a GPU that the engine uses by NVML, to learn its use outside its share.
    """
    plan = attempt.plan
    if plan.grade == "verified":
        return ()
    source = f"{plan.engine} generated tokens with this plan"
    rows: list[tuple[FactKind, dict[str, str], int | None, str]] = [
        ("plan_verified", {"fingerprint": attempt.fingerprint}, None, source)
    ]
    if cache_bytes is not None and 0 < cache_bytes < plan.memory.budget_bytes:
        measurement = f"{plan.engine} had {gib(cache_bytes)} left for its KV cache"
        used_bytes_of_engine = plan.memory.budget_bytes - cache_bytes
        rows.append(
            (
                "needs_memory",
                _memory_scope(plan, "needs_memory", "kv"),
                used_bytes_of_engine,
                measurement,
            )
        )
    missing_bytes = 0 if used_bytes is None else used_bytes - plan.memory.promised_bytes
    if _NOISE_BYTES < missing_bytes < plan.memory.budget_bytes:
        scope = {key: plan.scope[key] for key in _RANK_KEYS if key in plan.scope}
        excess = (
            f"{plan.engine} took {gib(used_bytes or 0)} of its GPU, and"
            f" {gib(plan.memory.promised_bytes)} were planned"
        )
        rows.append(("beside_memory", scope, missing_bytes, excess))
    return tuple(
        Fact(
            kind=kind,
            scope=scope,
            value=value,
            software=plan.software,
            grade="verified",
            source=reason,
            attempt=attempt.id,
            at=now_s,
        )
        for kind, scope, value, reason in rows
    )


def facts_of_log(failure: Failure, scope: dict[str, str]) -> tuple[Fact, ...]:
    """The facts that a log proves without a start; none without the engine in its scope.

    scope: engine, model and tensor_parallel by the log. A log mostly does not name its GPU.
    Without a capability, which a user can add, the fact holds nowhere.
    """
    if is_environmental(failure) or "engine" not in scope:
        return ()
    culprit = failure.culprit
    engine = {"engine": scope["engine"]}
    gpu = {
        "capability": _capability_text(culprit["capability"])
        if "capability" in culprit
        else "unknown"
    }
    rows: list[tuple[FactKind, dict[str, str], int | None]] = []
    if (
        failure.proven_subject == "context"
        and "model" in scope
        and (limit := context_limit(failure))
    ):
        rows.append(("max_context", scope, limit))
    elif failure.proven_subject == "kernel" and culprit.get("kernel"):
        sizes = {name: str(culprit[name]) for name in ("kernel", "k", "n") if name in culprit}
        rows.append(("kernel_fails", engine | gpu | sizes, None))
    elif failure.proven_subject == "engine":
        feature = _failed_feature(failure)
        subject = feature if "architecture" in feature else gpu | feature
        rows.append(("engine_fails", engine | subject, None))
    elif failure.proven_subject == "memory" and "model" in scope:
        rows += [(kind, scope, value) for kind, value in _memory(failure)]
    source = _source(failure)
    return tuple(
        Fact(kind=kind, scope=subject, value=value, grade="failed", source=source)
        for kind, subject, value in rows
    )


def _source(failure: Failure) -> str:
    """The proof without time and process, so that equal failures have equal facts."""
    return parse(failure.line).text if failure.line else failure.message


def context_limit(failure: Failure) -> int | None:
    """The longest context that the engine itself said would fit."""
    limit = failure.culprit.get("engine_max_model_len")
    return limit if isinstance(limit, int) and limit > 0 else None


def _is_of_fork(plan: Plan, failure: Failure) -> bool:
    """Whether a fork may be the cause: the engine says so, or hangs in a start with forks.

    The next plan is without them. If that hangs too, the fault is the plan's.
    """
    if FORK not in plan.env.items() or failure.proven_subject == "peers":
        return False
    return "fork" in failure.culprit or failure.kind == "start_timeout"


def _engine_scope(plan: Plan) -> dict[str, str]:
    """Engine version, compute capability, and the operator's variables, which may be the cause."""
    optional = {name: plan.scope[name] for name in ("capability", "env") if name in plan.scope}
    return {"engine": f"{plan.engine.kind}=={plan.engine.version}"} | optional


def _model_scope(plan: Plan) -> dict[str, str]:
    """This engine version with this model, and with the operator's variables."""
    names = ("engine", "model", "env")
    return {name: plan.scope[name] for name in names if name in plan.scope}


def _kernels(plan: Plan, failure: Failure) -> Iterator[tuple[FactKind, dict[str, str]]]:
    """The facts about kernels of the plan that the failure names, by size if it has sizes.

    The engine would choose a failed kernel again. A kernel that the engine refused for
    a dense layer only disproves the rules for layers of this size.
    """
    culprit = failure.culprit
    base = _engine_scope(plan)
    sizes = {key: culprit[key] for key in ("k", "n") if isinstance(culprit.get(key), int)}
    # An engine without a kernel of this size disproves the planned one, also of another name.
    name = (
        None
        if failure.kind == "no_kernel" and sizes
        else culprit.get("kernel") or culprit.get("backend")
    )
    scopes: list[dict[str, str]] = []
    for layer_kernel in plan.kernels:
        if layer_kernel.kernel is None or not all(
            getattr(layer_kernel, key) == size for key, size in sizes.items()
        ):
            continue
        if not (_is_same_kernel(str(name), layer_kernel.kernel) if name else sizes):
            continue
        scope = {**base, "kernel": layer_kernel.kernel} | (
            _row_scope(layer_kernel) if sizes else {}
        )
        if scope not in scopes:
            scopes.append(scope)
            turned_away = (
                failure.kind == "no_kernel" and sizes and ".experts" not in layer_kernel.layer
            )
            yield "kernel_refuses" if turned_away else "kernel_fails", scope
    for layer_attention in plan.attention:
        scope = {
            **base,
            "kernel": layer_attention.backend or "",
            "head_dim": str(layer_attention.head_dim),
        }
        is_named = (
            layer_attention.backend and name and _is_same_kernel(str(name), layer_attention.backend)
        )
        if is_named and scope not in scopes:
            scopes.append(scope)
            yield "kernel_fails", scope


def _row_scope(layer_kernel: LayerKernel) -> dict[str, str]:
    return {"scheme": layer_kernel.scheme, "k": str(layer_kernel.k), "n": str(layer_kernel.n)}


def _is_same_kernel(first: str, second: str) -> bool:
    """Whether two names mean the same kernel, as MarlinExperts and MARLIN."""
    if first == second:
        return True
    short_names = {
        name.lower().replace("_", "").removesuffix("linearkernel").removesuffix("experts")
        for name in (first, second)
    }
    return len(short_names) == 1


def _failed_feature(failure: Failure) -> dict[str, str]:
    """The feature that an engine version lacks: architecture, quantization, capability or task."""
    culprit = failure.culprit
    names = ("architecture", "quantization", "task")
    feature = {name: str(culprit[name]) for name in names if culprit.get(name)}
    return feature | (
        {"capability": _capability_text(culprit["capability"])} if "capability" in culprit else {}
    )


def _memory(failure: Failure) -> Iterator[tuple[FactKind, int]]:
    """Bytes per device that were needed besides the cache, or should have stayed free."""
    size = {name: value for name, value in failure.culprit.items() if isinstance(value, int)}
    tried_bytes = size.get("tried_bytes", 0)
    if failure.phase in _CACHELESS_PHASES:
        if process_bytes := size.get("process_bytes", 0):
            yield "needs_memory", process_bytes + tried_bytes
    elif tried_bytes:
        yield "spare_memory", max(tried_bytes - size.get("free_bytes", 0), 64 * MIB)


def _memory_scope(plan: Plan, kind: FactKind, phase: str) -> dict[str, str]:
    """The scope of a fact about memory. After the load, batch and graphs belong to it."""
    scope = {key: value for key, value in plan.scope.items() if key != "budget"}
    if kind == "needs_memory" and phase not in ("starting", "load"):
        scope |= batch_scope(
            plan.max_num_batched_tokens.value,
            plan.max_num_seqs.value,
            is_eager=plan.enforce_eager.value,
        )
    return scope


def _capability_text(capability: object) -> str:
    """86 -> 8.6"""
    digits = str(capability)
    return f"{digits[:-1]}.{digits[-1]}" if digits.isdigit() and len(digits) > 1 else digits
