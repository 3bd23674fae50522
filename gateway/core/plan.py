"""The planner: hardware, model, engines, wish and facts in; ranked plans and reasons out. Pure.

Every candidate (engine version x tensor parallel size) goes through the same gates; the first gate that refuses it
names the verdict. What passes becomes a Plan whose every field says why. A failure met in the field comes back as
a Fact, so the next call yields the next best plan: there is no other fallback code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gateway.core.command import check_args, check_env
from gateway.core.gates import Inputs, Refused, gate_devices, gate_dtype, gate_kernels, gate_model, gate_quantization
from gateway.core.kernels import Rules
from gateway.core.layers import Linear
from gateway.core.parallel import SIZES
from gateway.core.sizing import COMFORTABLE_CONTEXT, Sizing
from gateway.domain import Decision, Engine, EngineRef, Fact, Hardware, ModelSpec, Plan, Rejected, Scalar, Wish
from gateway.errors import BadFlag


def decide(
    spec: ModelSpec,
    hardware: Hardware,
    engines: Sequence[Engine],
    wish: Wish,
    facts: Iterable[Fact] = (),
    claims: Mapping[str, int] | None = None,
    hardware_name: str = "this machine",
    rules: Mapping[str, Rules] | None = None,
) -> Decision:
    """All plans, best first, and all refusals. `claims` are bytes per GPU UUID promised to engines that run or start,
    `rules` are by engine ("kind==version").

    Raises BadFlag when the wish names a flag that none of the engines has.
    """
    given = Inputs(spec, hardware, wish, tuple(facts), claims or {})
    plans: list[Plan] = []
    rejected: list[Rejected] = []
    wrong_flags: list[BadFlag] = []
    for engine in engines:
        try:
            args, env = check_args(engine, wish.args), check_env(engine, wish.env)
        except BadFlag as error:
            wrong_flags.append(error)
            rejected.append(
                _rejected(engine, wish.tensor_parallel or 1, Refused("bad_flag", str(error), f"profile {engine.ref}"))
            )
            continue
        known = (rules or {}).get(engine.ref)
        try:
            gate_model(given, engine)
            layers = gate_quantization(given, engine, known)
        except Refused as refusal:
            rejected.append(_rejected(engine, int(args.get("tensor-parallel-size", wish.tensor_parallel) or 1), refusal))
            continue
        for tp in _sizes(given, engine, args):
            for conservative in (False, True):
                try:
                    plans.append(_candidate(given, engine, known, layers, tp, args, env, conservative=conservative))
                    break
                except Refused as refusal:
                    rejected.append(_rejected(engine, tp, refusal))
                    # What failed as planned gets one careful try; any other refusal would only be repeated.
                    if refusal.verdict != "known_bad":
                        break
    if wrong_flags and len(wrong_flags) == len(engines):
        raise wrong_flags[0]
    order = {engine.ref: index for index, engine in enumerate(engines)}
    plans.sort(key=lambda plan: _preference(given, plan, order))
    ranked = tuple(plan.evolve(rank=index) for index, plan in enumerate(plans, start=1))
    return Decision(model=spec.source, hardware=hardware_name, plans=ranked, rejected=tuple(rejected))


def _preference(given: Inputs, plan: Plan, order: Mapping[str, int]) -> tuple[Any, ...]:
    """Smaller is better: enough context, no degradation, fewest GPUs, newest engine."""
    wanted = min(COMFORTABLE_CONTEXT, given.spec.max_position, given.wish.max_context or given.spec.max_position)
    return (
        plan.max_model_len.value < (given.wish.min_context or wanted),
        plan.verdict == "degraded",
        plan.tensor_parallel.value,
        order.get(str(plan.engine), 0),
    )


def _sizes(given: Inputs, engine: Engine, args: Mapping[str, Scalar]) -> tuple[int, ...]:
    wanted = args.get("tensor-parallel-size", given.wish.tensor_parallel)
    if wanted is not None:
        return (int(wanted),)
    if engine.device == "cpu":
        return (1,)
    return tuple(size for size in SIZES if size <= max(1, len(given.hardware.gpus)))


def _rejected(engine: Engine, tp: int, refusal: Refused) -> Rejected:
    ref = EngineRef(kind=engine.kind, version=engine.version, image=engine.image)
    return Rejected(
        engine=ref,
        tensor_parallel=tp,
        verdict=refusal.verdict,
        layer=refusal.layer,
        reasons=(str(refusal),),
        source=refusal.source,
        kernels=refusal.kernels,
    )


def _candidate(
    given: Inputs,
    engine: Engine,
    rules: Rules | None,
    layers: tuple[Linear, ...],
    tp: int,
    args: Mapping[str, Scalar],
    env: dict[str, str],
    *,
    conservative: bool,
) -> Plan:
    """One engine version with one tensor parallel size, through all gates. Raises Refused."""
    if args.get("pipeline-parallel-size", 1) != 1:
        raise Refused("illegal_parallelism", "pipeline parallelism is not planned", "planner")
    group = gate_devices(given, engine, tp)
    dtype = gate_dtype(given, group, args)
    kernels = gate_kernels(given, engine, rules, layers, tp, dtype.value, group, args)
    plan: Plan = Sizing(given, engine, tp, group, dtype, args, conservative).plan(env).evolve(kernels=kernels)
    if unknown := [row.layer for row in kernels if row.status == "unknown"]:
        warning = f"Which kernel computes {', '.join(unknown[:3])} is not known; the start will tell."
        plan = plan.evolve(verdict="degraded", warnings=(*plan.warnings, warning))
    bad = next(
        (fact for fact in given.facts if fact.kind == "plan_failed" and fact.scope.get("fingerprint") == plan.fingerprint), None
    )
    if bad is not None:
        raise Refused("known_bad", f"this exact plan failed here before: {bad.source}", "fact")
    return plan
