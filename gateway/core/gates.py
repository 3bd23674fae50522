"""The gates that a candidate passes before anything is sized: code trust, architecture, devices, legality, dtype. Pure.

The first gate that refuses names the verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.core.kernels import Rules, layer_kernels
from gateway.core.layers import Linear, linear_layers
from gateway.core.parallel import best_group, illegal
from gateway.domain import Choice, Engine, Fact, Gpu, Hardware, LayerKernel, ModelSpec, Scalar, Wish
from gateway.errors import BadModel


class Refused(Exception):
    """A gate said no."""

    def __init__(
        self, verdict: str, reason: str, source: str, *, layer: str | None = None, kernels: tuple[LayerKernel, ...] = ()
    ) -> None:
        super().__init__(reason)
        self.verdict, self.reason, self.source, self.layer, self.kernels = verdict, reason, source, layer, kernels


@dataclass(frozen=True)
class Inputs:
    """What every candidate shares."""

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


def gate_quantization(given: Inputs, engine: Engine, rules: Rules | None) -> tuple[Linear, ...]:
    """The linear layers of a quantized model as this engine version builds them; none for one that is not quantized."""
    spec = given.spec
    if spec.quant is None:
        return ()
    source = f"profile {engine.ref}"
    if rules is None:
        reason = f"the weights are quantized ({spec.quant.method}), and which kernel {engine.ref} would use for them is not known here"
        raise Refused("unsupported_quantization", reason, source)
    if spec.tensors_from == "config":
        reason = f"the weights are quantized ({spec.quant.method}), and their size is only known from their files"
        raise Refused("unsupported_quantization", reason, "config.json")
    try:
        return linear_layers(spec, rules.traits)
    except BadModel as error:
        raise Refused("unsupported_quantization", error.message, source) from None


def gate_kernels(
    given: Inputs,
    engine: Engine,
    rules: Rules | None,
    layers: tuple[Linear, ...],
    tp: int,
    dtype: str,
    group: tuple[Gpu, ...],
    args: Mapping[str, Scalar],
) -> tuple[LayerKernel, ...]:
    """The kernel of every one of these layers on one rank."""
    if rules is None or not layers:
        return ()
    source = f"profile {engine.ref}"
    capability = group[0].capability if group else None
    if capability is None:
        raise Refused("unknown_capability", "the compute capability, which decides the kernels, could not be read", "probe")
    disabled = frozenset(given.wish.env.get("VLLM_DISABLED_KERNELS", "").split(",")) - {""}
    backend = args.get("linear-backend")
    found = layer_kernels(layers, rules, tp, dtype, capability, disabled, str(backend) if backend else None)
    for row in found:
        if row.status == "none":
            why = "; ".join(f"{refusal.kernel}: {refusal.reason}".removeprefix(": ") for refusal in row.refused)
            size = f" (K={row.k}, N={row.n} per rank)" if row.k else ""
            raise Refused("no_kernel", f"no kernel for {row.layer}{size}: {why}", source, layer=row.layer, kernels=found)
    return found


def gate_devices(given: Inputs, engine: Engine, tp: int) -> tuple[Gpu, ...]:
    gpus = given.hardware.gpus
    if engine.device == "cpu":
        if tp > 1:
            raise Refused("illegal_parallelism", "tensor parallelism on a CPU is not planned", "planner")
        return ()
    if len(gpus) < tp:
        raise Refused("no_device", f"{tp} GPUs are needed and {len(gpus)} are here", "probe")
    if reason := illegal(given.spec, tp):
        raise Refused("illegal_parallelism", reason, "vllm/config/model.py, vllm/model_executor/layers/linear.py")
    group = best_group(given.hardware, tp, given.claims)
    if group is None:
        raise Refused("no_device", f"there are no {tp} GPUs of one kind", "probe")
    if group[0].total_bytes is None:
        raise Refused("unknown_memory", f"the memory of {group[0].name} could not be read", "probe")
    capability = group[0].capability
    if engine.min_capability and capability and _number(capability) < _number(engine.min_capability):
        raise Refused(
            "no_kernel",
            f"{engine.ref} needs compute capability {engine.min_capability}, {group[0].name} has {capability}",
            f"profile {engine.ref}",
        )
    return group


def gate_dtype(given: Inputs, group: tuple[Gpu, ...], args: Mapping[str, Scalar]) -> Choice[str]:
    wanted = args.get("dtype", given.wish.dtype)
    wanted = {"half": "float16", "float": "float32"}.get(str(wanted), str(wanted))
    capability = group[0].capability if group else None
    old = capability is not None and _number(capability) < 8.0
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


def _number(capability: str) -> float:
    return float(capability)
