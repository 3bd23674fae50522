"""Gates of number formats: quantization, dtype of activations, KV cache. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.domain import Choice, Engine, Gpu, ModelSpec, Scalar, str_choice
from gateway.domain.choice import WEIGHTS_DTYPE
from gateway.engines.common.candidate import EngineRules
from gateway.engines.common.planning_input import PlanningInput
from gateway.engines.common.refusal import RefusalError
from gateway.engines.common.variant import Variant
from gateway.engines.registry import engine_kind
from gateway.planner.quantization_methods import check, resolve

# KV cache dtypes without rules of backends: their size follows from the name.
_SIZED_DTYPES = ("auto", "bfloat16", "bf16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")

# Tensors that belong to quantized layers of every format.
_PACKED_SUFFIXES = (
    ".qweight",
    ".qzeros",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_2",
    ".weight_scale_inv",
)


def gate_kv(spec: ModelSpec, engine: Engine, rules: EngineRules, kv_dtype: str) -> None:
    """Refuse a KV cache dtype that the version lacks, or refuses for such weights, or whose
    backends and size are unknown."""
    flag = engine.flags.get(engine.spelling.get("kv-cache-dtype", "kv-cache-dtype"))
    if kv_dtype != "auto" and flag is not None and flag.choices and kv_dtype not in flag.choices:
        reason = (
            f"--kv-cache-dtype of {engine.ref} cannot be {kv_dtype}; it is one of"
            f" {', '.join(flag.choices)}"
        )
        raise RefusalError("bad_flag", reason, f"profile {engine.ref}")
    if reason := rules.kv_refusal(spec.quant, engine, kv_dtype):
        raise RefusalError("bad_flag", reason, f"profile {engine.ref}")
    described_dtypes = rules.kv_dtypes
    if kv_dtype not in (_SIZED_DTYPES if described_dtypes is None else described_dtypes):
        reason = (
            f"which attention backend takes a KV cache in {kv_dtype}, and how large it is, is not"
            " known here"
        )
        raise RefusalError("no_backend", reason, f"profile {engine.ref}")


def gate_method(
    inputs: PlanningInput,
    engine: Engine,
    args: Mapping[str, Scalar],
    variant: Variant,
    dtype: str,
    capability: str | None,
) -> str:
    """The quantization method by the engine's name.

    Raises RefusalError if the version lacks the method, or the method does not take this GPU or
    these activations.
    """
    spec = inputs.spec
    source = f"profile {engine.ref}"
    if spec.quant is None and "quantization" not in args:
        _check_quantization(spec)
    is_deprecated = bool(args.get("allow-deprecated-quantization", False))
    resolution = resolve(
        engine,
        spec.quant,
        variant.quantization,
        spec.model_type,
        capability,
        allow_deprecated=is_deprecated,
    )
    check(engine, resolution, capability, dtype)
    if spec.quant is None and variant.quantization not in ("", "fp8"):
        reason = (
            f"what --quantization {variant.quantization} makes of weights that are not quantized is"
            " not known here"
        )
        raise RefusalError("unsupported_quantization", reason, source)
    return resolution.method


def _check_quantization(spec: ModelSpec) -> None:
    """Refuse packed weights without a word about their quantization: engines take them for plain
    ones, and fail on their tensors. Raises RefusalError."""
    packed_name = next(
        (group.name for group in spec.tensors if group.name.endswith(_PACKED_SUFFIXES)), None
    )
    if packed_name is not None:
        reason = (
            f"the weights are quantized ({packed_name}), and neither config.json nor"
            " hf_quant_config.json says how: take the missing file from where the model was"
            " published"
        )
        raise RefusalError("unsupported_quantization", reason, "headers of the weights")


def gate_dtype(
    inputs: PlanningInput,
    engine: Engine,
    gpus: tuple[Gpu, ...],
    args: Mapping[str, Scalar],
    variant: Variant,
) -> Choice[str]:
    """The dtype of activations: of a change, of the user, or by default. Raises RefusalError."""
    capability = gpus[0].capability if gpus else None
    impossible_dtypes = _impossible_dtypes(inputs.spec, engine, gpus)
    wish_dtype = variant.dtype or str(args.get("dtype", inputs.wish.dtype))
    wish_dtype = {"half": "float16", "float": "float32"}.get(wish_dtype, wish_dtype)
    if wish_dtype in impossible_dtypes:
        reason, source = impossible_dtypes[wish_dtype]
        raise RefusalError("no_kernel", reason, source)
    if variant.dtype:
        reason, source = variant.reasons["dtype"]
        return str_choice(variant.dtype, reason, source)
    if wish_dtype != "auto":
        return str_choice(wish_dtype, "set by the user", "user")
    stored_dtype = inputs.spec.dtype
    first = ("bfloat16", "float16") if inputs.spec.generates else ("float16", "bfloat16")
    preferred = next(dtype for dtype in (*first, "float32") if dtype not in impossible_dtypes)
    if stored_dtype == "float32" != preferred:
        source = inputs.spec.sources.get("dtype", "")
        reason = (
            "no file names a dtype, and the engine itself would choose this"
            if "default" in source
            else "half the bytes of the float32 weights, as the engine itself would choose"
        )
        return str_choice(preferred, reason, engine_kind(engine.kind).code_sources.auto_dtype)
    if stored_dtype in impossible_dtypes:
        reason = (
            f"the weights are {stored_dtype}, which compute capability {capability} cannot compute"
        )
        source = engine_kind(engine.kind).code_sources.other_dtype
        if stored_dtype == "float16" or preferred == "float32":
            reason, source = impossible_dtypes["float16"]
            reason += "; it takes twice the memory and time" if preferred == "float32" else ""
        return str_choice(preferred, reason, source)
    return str_choice(stored_dtype, WEIGHTS_DTYPE, inputs.spec.sources.get("dtype", ""))


def _impossible_dtypes(
    spec: ModelSpec, engine: Engine, gpus: tuple[Gpu, ...]
) -> dict[str, tuple[str, str]]:
    """Dtypes that the engine cannot compute on these GPUs: the reason and its source."""
    dtypes = {}
    if old_gpu := next(
        (gpu for gpu in gpus if gpu.capability is not None and float(gpu.capability) < 8.0), None
    ):
        reason = f"bfloat16 needs compute capability 8.0, {old_gpu.name} has {old_gpu.capability}"
        dtypes["bfloat16"] = reason, engine_kind(engine.kind).code_sources.bfloat16
    if spec.model_type in engine.no_float16:
        reason = f"{engine.ref} refuses float16 for {spec.model_type}: it is numerically unstable"
        dtypes["float16"] = reason, engine.sources.get("no_float16", f"profile {engine.ref}")
    return dtypes
