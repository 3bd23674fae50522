"""The state of a model for clients, with its reason, and its route."""

from __future__ import annotations

import time
from collections.abc import Mapping

from gateway.controller.fleet.managed_model import ManagedModel
from gateway.domain import Abilities, Attempt, Instance, Plan
from gateway.engines.common.chat.parsers import NO_PARSER
from gateway.engines.registry import engine_kind
from gateway.proxy.routing.model_route import ModelCard, ModelRoute, RoutedReplica

_SHOWN_ENDPOINTS_MAX = 3
# The state of the best replica or endpoint is the model's state, in this order.
_STATE_ORDER = (
    "ready",
    "verifying",
    "starting",
    "unreachable",
    "backing_off",
    "asleep",
    "stopped",
    "no_plan",
    "quarantined",
    "stopping",
)
# States that end without a request, and states that a request ends.
_RECOVERING_STATES = frozenset({"starting", "verifying", "backing_off", "unreachable", "ready"})
_LOADABLE_STATES = _RECOVERING_STATES | {"asleep", "stopped", "stopping", "no_plan"}
# Names of unquantized weights in Ollama's API: its file types of ggml.
_DTYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
# Seconds that a request waits for the next engine of a model that is changed in place.
_CHANGE_WAIT_S = 1800.0


def status(model: ManagedModel) -> tuple[str, str]:
    """The state of a model in a word, and why. A model is ready as soon as one replica is."""
    state, detail = _model_status(model)
    problems = [*model.problems]
    if not problems:
        return state, detail
    words = [detail.rstrip(".")] if detail else []
    return state, "; ".join([*words, *problems])


def _model_status(model: ManagedModel) -> tuple[str, str]:
    if model.is_deleting:
        return "stopping", "it is being removed"
    if model.wish.endpoints:
        return _endpoint_status(model)
    best_replica = min(model.replicas, key=lambda replica: _STATE_ORDER.index(replica.status.state))
    detail = best_replica.status.reason
    if best_replica.status.state == "ready":
        detail = _missing_copies(model)
    elif best_replica.status.state in ("starting", "verifying") and (
        best_replica.is_busy
        or (best_replica.attempt is not None and not best_replica.attempt.serves)
    ):
        detail = best_replica.phase
    elif best_replica.status.state == "backing_off" and best_replica.status.recheck_at is not None:
        pause_s = max(0, round(best_replica.status.recheck_at - time.time()))
        detail = f"{detail} Next start in {pause_s} s."
    return best_replica.status.state, detail


def _missing_copies(model: ManagedModel) -> str:
    """How many copies serve, and why the others cannot; "" if all do."""
    missing_replicas = [
        replica.status
        for replica in model.replicas
        if replica.status.state
        in ("no_plan", "quarantined", "backing_off", "unreachable", "stopping", "stopped", "asleep")
    ]
    ready_count = sum(replica.status.state == "ready" for replica in model.replicas)
    if not missing_replicas:
        return ""
    reason = missing_replicas[0].reason or "another copy sleeps"
    return f"{ready_count} of {len(model.replicas)} copies serve; {reason}"


def copies_text(model: ManagedModel) -> str:
    """How many copies serve, with the reason; "" where their number does not follow the load."""
    if model.wish.copies is None:
        return ""
    change = model.copy_change
    words = [f"{len(model.serving)} of {model.wish.copies} copies"]
    words += [change.reason] if change is not None else []
    words += [f"one more is needed: {model.copy_hold_reason}"] if model.copy_hold_reason else []
    return "; ".join(words)


def _endpoint_status(model: ManagedModel) -> tuple[str, str]:
    unreached = [endpoint for endpoint in model.endpoints if endpoint.replica is None]
    details = [endpoint.detail for endpoint in unreached[:_SHOWN_ENDPOINTS_MAX]] + (
        ["..."] if len(unreached) > _SHOWN_ENDPOINTS_MAX else []
    )
    states = [endpoint.state for endpoint in model.endpoints if endpoint.replica is not None]
    if states:
        best_state = min(states, key=_STATE_ORDER.index)
        remedies = {"ready": (), "asleep": ("the next request loads it there",)}
        remedy = remedies.get(best_state, (f"it is {best_state.replace('_', ' ')} there",))
        return best_state, "; ".join(
            [f"{len(states)} of {len(model.endpoints)} endpoints answer", *remedy, *details]
        )
    all_contacted = model.endpoints and all(endpoint.was_contacted for endpoint in model.endpoints)
    return "unreachable" if all_contacted else "starting", "; ".join(
        details
    ) or "its endpoints were not checked yet"


def capacity(plan: Plan) -> int:
    """The most requests to send to an engine concurrently: its sequences, and a quarter to follow
    immediately."""
    seqs = plan.at_once
    return seqs + max(1, seqs // 4)


def route(
    model: ManagedModel,
    running_instances: Mapping[str, Instance],
    load_wait_s: float = 0.0,
    keep_alive_s: float = -1.0,
) -> ModelRoute:
    """The route of the model now.

    running_instances: the instances that run, by name.
    load_wait_s: the wait for a model that is loaded on request.
    keep_alive_s: time until it is unloaded without a request; below 0: for ever.
    """
    replicas, frozen_names = _routed_replicas(model, running_instances)
    attempts = sorted(
        (replica.attempt for replica in model.replicas if replica.attempt is not None),
        key=lambda attempt: not attempt.serves,
    )
    plan = attempts[0].plan if attempts else None
    abilities = model.abilities
    state, detail = status(model)
    if state == "ready" and not replicas and not frozen_names:
        leaves = next((replica.eviction for replica in model.replicas if replica.eviction), None)
        state, detail = (
            ("stopping", leaves.reason)
            if leaves is not None
            else ("starting", "none of its engines takes requests now")
        )
    # No request fails during a change: requests between two engines wait for the next one.
    is_between = model.has_pending_changes or any(
        replica.succession.awaits_successor or replica.succession.unrouted_at is not None
        for replica in model.replicas
    )
    wait_s = max(model.wish.policy.wait_s, _CHANGE_WAIT_S if is_between else 0.0)
    return ModelRoute(
        name=model.wish.name,
        state=state,
        detail=detail,
        created=int(model.created_at),
        replicas=() if model.is_deleting else tuple(replicas),
        frozen=tuple(sorted(frozen_names)),
        task=plan.model.task if plan else None,
        wait_s=_wait_s(model, state, wait_s, load_wait_s),
        card=_card(
            [attempt.plan for attempt in attempts],
            abilities or Abilities(),
            -1.0 if model.wish.policy.pinned else keep_alive_s,
        ),
        toolless=(
            plan.tool_parser.reason
            if plan and abilities and plan.tool_parser.value == NO_PARSER
            else ""
        ),
    )


def _card(plans: list[Plan], abilities: Abilities, keep_alive_s: float) -> ModelCard:
    """The facts of a model by the plans of its engines, the first of which serves."""
    states = {name: ability.state for name, ability in abilities}
    if not plans:
        return ModelCard(**states, keep_alive_s=keep_alive_s)
    plan = plans[0]
    method = plan.quantization.value
    return ModelCard(
        max_model_len=plan.max_model_len.value,
        inputs=plan.model.inputs,
        **states,
        family=plan.model.family,
        parameters=plan.model.parameters,
        quantization=_DTYPE_NAMES.get(plan.dtype.value, "") if method == "none" else method,
        weights_bytes=plan.memory.weights_bytes * len(plan.devices),
        memory_bytes=sum(
            shown_plan.memory.promised_bytes * len(shown_plan.devices) for shown_plan in plans
        ),
        is_on_gpu=bool(plan.gpus),
        keep_alive_s=keep_alive_s,
    )


def _routed_replica(attempt: Attempt, url: str, instance: Instance) -> RoutedReplica:
    plan = attempt.plan
    kind = engine_kind(plan.engine.kind)
    return RoutedReplica(
        url=url,
        id=instance.name,
        served_name=attempt.served_name,
        capacity=capacity(plan),
        key=instance.key,
        adapters=tuple(
            (adapter.name, kind.adapter_name(attempt.model, adapter.name))
            for adapter in plan.adapters
        ),
        thoughts=kind.thoughts,
        priority_factor=kind.priority_factor(plan.argv),
        has_default_priority=kind.has_default_priority(plan.argv),
        gpus=len(plan.gpus),
        engine=str(plan.engine),
    )


def _routed_replicas(
    model: ManagedModel, running_instances: Mapping[str, Instance]
) -> tuple[list[RoutedReplica], set[str]]:
    """The replicas that get requests, and the names of frozen instances, which get none."""
    serving_replicas = [
        (replica, instance)
        for replica in model.replicas
        if replica.attempt is not None
        and replica.attempt.serves
        and replica.succession.unrouted_at is None
        and replica.eviction is None
        and (instance := running_instances.get(replica.attempt.instance_name)) is not None
        and instance.url
    ]
    frozen_names = {
        instance.name
        for replica, instance in serving_replicas
        if replica.watcher is not None and replica.watcher.observation.freeze_reason
    }
    replicas = [
        _routed_replica(replica.attempt, instance.url, instance)
        for replica, instance in serving_replicas
        if replica.attempt is not None and instance.url and instance.name not in frozen_names
    ]
    endpoints = [
        (endpoint.replica, endpoint.state == "ready")
        for endpoint in model.endpoints
        if endpoint.replica is not None
    ]
    # Ready endpoints are preferred. Endpoints that load on request are used where none is ready.
    replicas += [replica for replica, ready in endpoints if ready] or [
        replica for replica, _ in endpoints
    ]
    return replicas, frozen_names


def _wait_s(model: ManagedModel, state: str, wait_s: float, load_wait_s: float) -> float:
    """How long a request waits for the first replica.

    `wait_s` holds for a model that recovers without a request, `load_wait_s` for one that is loaded
    on request.
    """
    if model.is_stopped:
        return 0.0
    if model.waits_for_request and not model.is_deleting and state in _LOADABLE_STATES:
        return wait_s or load_wait_s
    return wait_s if state in _RECOVERING_STATES else 0.0
