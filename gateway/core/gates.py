"""The gates that a way passes before anything is sized: code trust, architecture, driver, devices, legality, dtype. Pure.

The first gate that refuses names the verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.core.layers import Body
from gateway.core.parallel import best_group, illegal
from gateway.core.ways import Refused, Way
from gateway.domain import Choice, Engine, Fact, Gpu, Hardware, LayerAttention, LayerKernel, Memory, ModelSpec, Scalar, Wish


@dataclass
class Found:
    """What was computed of a way, also of one that is refused."""

    kernels: tuple[LayerKernel, ...] = ()
    attention: tuple[LayerAttention, ...] = ()
    memory: Memory | None = None


@dataclass(frozen=True)
class Inputs:
    """What every way shares."""

    spec: ModelSpec
    hardware: Hardware
    wish: Wish
    facts: tuple[Fact, ...] = ()
    claims: Mapping[str, int] = field(default_factory=dict)


def gate_model(given: Inputs, engine: Engine) -> None:
    spec = given.spec
    if spec.remote_code and not given.wish.policy.allow_remote_code:
        raise Refused(
            "untrusted_code",
            f"the repository would run its own code: {', '.join(spec.remote_code)}",
            "policy.allow_remote_code",
        )
    if engine.architectures and spec.architecture not in engine.architectures:
        raise Refused("unsupported_architecture", f"{engine.ref} does not know {spec.architecture}", f"profile {engine.ref}")
    unfit = {group.head_dim for group in spec.attention} - set(engine.head_dims) if engine.head_dims else set()
    if unfit:
        raise Refused(
            "no_backend", f"no attention of {engine.ref} computes heads of size {min(unfit)}", f"profile {engine.ref}"
        )


def gate_kernels(found: Found, engine: Engine, facts: tuple[Fact, ...], capability: str | None) -> None:
    """Every layer has a kernel and a backend, and none that is known to fail."""
    source = f"profile {engine.ref}"
    for row in found.kernels:
        size = f" (K={row.k}, N={row.n} per rank)" if row.k else ""
        if row.status == "none":
            why = "; ".join(f"{refusal.kernel}: {refusal.reason}".removeprefix(": ") for refusal in row.refused)
            raise Refused("no_kernel", f"no kernel for {row.layer}{size}: {why}", source, layer=row.layer)
        if row.status == "crash":
            reason = f"it loads, but {row.kernel} would crash at the first request in {row.layer}{size}: {row.note}"
            raise Refused("runtime_fail", reason, source, layer=row.layer, kernel=row.kernel)
        if row.kernel is not None and (fact := _failing(row, engine, facts, capability)):
            reason = f"{row.kernel}, which {row.layer}{size} would get, is known to fail here: {fact.source}"
            raise Refused("known_bad", reason, "fact", layer=row.layer, kernel=row.kernel)
    for layers in found.attention:
        if layers.status == "none":
            why = "; ".join(f"{refusal.kernel}: {refusal.reason}".removeprefix(": ") for refusal in layers.refused)
            reason = f"no attention backend for the {layers.layers} {layers.kind} layers of head size {layers.head_dim}: {why}"
            raise Refused("no_backend", reason, source)


def _failing(row: LayerKernel, engine: Engine, facts: tuple[Fact, ...], capability: str | None) -> Fact | None:
    about = {"kernel": row.kernel, "engine": engine.ref, "capability": capability, "scheme": row.scheme}
    about |= {"k": str(row.k), "n": str(row.n)}
    failing = (fact for fact in facts if fact.kind == "kernel_fails" and "kernel" in fact.scope)
    return next((fact for fact in failing if all(about.get(key) == value for key, value in fact.scope.items())), None)


def gate_driver(given: Inputs, engine: Engine) -> None:
    """The driver can run the CUDA version that the engine is built with, and the image is built for this processor."""
    source = f"profile {engine.ref}"
    if engine.machines and given.hardware.arch not in engine.machines:
        built = " and ".join(engine.machines)
        raise Refused("unsupported_platform", f"its image is built for {built}, this machine is {given.hardware.arch}", source)
    driver, least = given.hardware.driver, engine.min_driver
    if driver and least and _version(driver) < _version(least):
        reason = f"CUDA {engine.cuda} needs driver {least} or newer, this machine has {driver}"
        raise Refused("driver_too_old", reason, source)


def _version(text: str) -> list[int]:
    return [int(part) if part.isdecimal() else 0 for part in text.split(".")]


def gate_devices(given: Inputs, engine: Engine, body: Body, tp: int, pp: int, *, ep: bool) -> tuple[Gpu, ...]:
    gpus = given.hardware.gpus
    if engine.device == "cpu":
        if tp * pp > 1:
            raise Refused("illegal_parallelism", "parallelism on a CPU is not planned", "planner")
        return ()
    if len(gpus) < tp * pp:
        raise Refused("no_device", f"{tp * pp} GPUs are needed and {len(gpus)} are here", "probe")
    if problem := illegal(given.spec, body, tp, ep=ep):
        reason, layer = problem
        source = "vllm/config/model.py, vllm/model_executor/layers/linear.py"
        raise Refused("illegal_parallelism", reason, source, layer=layer)
    layers = sum(group.layers for group in given.spec.attention if group.kind != "vision")
    if pp > layers:
        raise Refused("illegal_parallelism", f"{layers} layers cannot be shared by {pp} stages", "vllm/distributed/utils.py")
    group = best_group(given.hardware, tp * pp, given.claims)
    if group is None:
        raise Refused("no_device", f"there are no {tp * pp} GPUs of one kind", "probe")
    if group[0].total_bytes is None:
        raise Refused("unknown_memory", f"the memory of {group[0].name} could not be read", "probe")
    capability = group[0].capability
    if engine.min_capability and capability and float(capability) < float(engine.min_capability):
        raise Refused(
            "no_kernel",
            f"{engine.ref} needs compute capability {engine.min_capability}, {group[0].name} has {capability}",
            f"profile {engine.ref}",
        )
    return group


def gate_dtype(given: Inputs, group: tuple[Gpu, ...], args: Mapping[str, Scalar], way: Way) -> Choice[str]:
    if way.dtype:
        reason, source = way.because["dtype"]
        return Choice[str](value=way.dtype, reason=reason, source=source)
    wanted = args.get("dtype", given.wish.dtype)
    wanted = {"half": "float16", "float": "float32"}.get(str(wanted), str(wanted))
    capability = group[0].capability if group else None
    old = capability is not None and float(capability) < 8.0
    if wanted != "auto":
        if wanted == "bfloat16" and old:
            raise Refused(
                "no_kernel",
                f"bfloat16 needs compute capability 8.0, {group[0].name} has {capability}",
                "vllm/platforms/cuda.py check_if_supports_dtype",
            )
        return Choice[str](value=wanted, reason="set by the user", source="user")
    if given.spec.dtype == "bfloat16" and old:
        return Choice[str](
            value="float16",
            reason=f"the weights are bfloat16, which compute capability {capability} cannot compute",
            source="vllm/platforms/cuda.py",
        )
    if given.spec.dtype == "float32":
        value = "float16" if old or given.spec.task == "embed" else "bfloat16"
        return Choice[str](
            value=value,
            reason="half the bytes of the float32 weights, as the engine itself would choose",
            source="vllm/config/model.py _resolve_auto_dtype",
        )
    return Choice[str](value=given.spec.dtype, reason="the dtype of the weights", source="config.json")
