"""Which kernel does each dense linear layer get? The questions, and how the engine is asked.

A question has the input of the planner's evaluator and of the engine's own chooser. An answer is
[kernels, padded]: every kernel that accepts the layer, in order of preference (found by disabling
one after the other), and the [k, n] that the first pads to, or null. No kernel at all: the engine
refuses the layer. ["unknown"]: the version has no path for the scheme.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from gateway.engines.inside.meta import fit
from gateway.engines.vllm.inside.answers import block_fp8
from gateway.engines.vllm.inside.boot import configure
from tests.support.versions import since

# A capability, then the installed optional packages where they are not those of the image.
CAPABILITIES = (
    "7.5",
    "8.0",
    "8.6",
    "8.9",
    "9.0",
    "10.0",
    "10.3",
    "12.0",
    "12.1",
    "8.6 all",
    "9.0 all",
    "10.0 all",
    "12.0 all",
    "8.6 none",
    "9.0 none",
    "10.0 none",
    "12.0 none",
    "7.0",
)


class Question(NamedTuple):
    kind: str
    bits: int
    group: int
    symmetric: bool
    act_order: bool
    static: bool  # activations quantized with scales of the checkpoint
    weight_only: bool
    dtype: str
    k: int
    n: int
    full_k: int  # before sharding
    disabled: str = ""  # VLLM_DISABLED_KERNELS
    forced: str = ""  # --linear-backend


ODD = (32, 64, 96, 100, 128, 192, 576, 704, 1088, 1440, 2048, 2112, 2816, 2880, 4096, 11008)
SHAPES = (
    (2048, 32),
    (2112, 4096),
    (576, 4096),
    (4096, 4096),
    (2880, 2880),
    (96, 100),
    (128, 704),
    (704, 64),
    (11008, 2112),
    (100, 704),
)
DTYPES = ("bfloat16", "float16")
REFUSALS = (
    "Failed to find a kernel",
    "was requested but no",
    "desc_act=True) is no longer supported",
    "No NVFP4 GEMM backend selected",
    "Forced NVFP4 kernel",
    "not supported for",  # the current GPU
)
FP8 = ("fp8_tensor", "fp8_token", "fp8_block")


def questions(version: str) -> Iterator[Question]:
    """Every question that this version is asked, in the order of its answers."""

    def wna16(
        k: int, n: int, group: int, bits: int = 4, dtype: str = "bfloat16", **more: Any
    ) -> Question:
        base = Question("wna16", bits, group, True, False, False, True, dtype, k, n, k)
        return base._replace(**more)

    for position, (k, n) in enumerate(product(ODD, ODD)):
        if position % 3 == 0:  # of all pairs a third, with each group size and dtype
            yield wna16(
                k,
                n,
                (-1, 32, 64, 128)[(position + position // 16) % 4],
                dtype=DTYPES[position // 4 % 2],
            )
    for k, n in SHAPES:
        for group, bits, dtype, symmetric in product((-1, 32, 128), (4, 8), DTYPES, (True, False)):
            yield wna16(k, n, group, bits, dtype, symmetric=symmetric)
        yield wna16(k, n, 64, 4, "float16", full_k=2 * k)
        yield wna16(k, n, 128, 4, "bfloat16", full_k=4 * k)
        yield wna16(k, n, 256)
        for group, dtype in product((64, 128), DTYPES):
            yield Question("w4a8", 4, group, True, False, False, False, dtype, k, n, k)
        for group, bits, dtype, parts in product((-1, 32), (4, 8), DTYPES, (1, 2)):
            yield wna16(k, n, group, bits, dtype, act_order=True, full_k=k * parts)
        for kind, static, dtype in product(FP8, (False, True), DTYPES):
            if not (kind == "fp8_block" and static):
                yield Question(
                    kind,
                    8,
                    128 if kind == "fp8_block" else -1,
                    True,
                    False,
                    static,
                    False,
                    dtype,
                    k,
                    n,
                    k,
                )
        yield Question("mxfp8", 8, 32, True, False, False, False, "bfloat16", k, n, k)
    for symmetric, static in product((True, False), (True, False)):
        yield Question("int8", 8, -1, symmetric, False, static, False, "bfloat16", 4096, 4096, 4096)
    for kind, weight_only in product(("nvfp4", "mxfp4"), (True, False)):
        yield Question(
            kind,
            4,
            16 if kind == "nvfp4" else 32,
            True,
            False,
            False,
            weight_only,
            "bfloat16",
            4096,
            4096,
            4096,
        )
    yield wna16(4096, 4096, 128, disabled="MarlinLinearKernel")
    yield wna16(4096, 4096, 128, disabled="MacheteLinearKernel,MarlinLinearKernel")
    fp8 = Question("fp8_token", 8, -1, True, False, False, False, "bfloat16", 4096, 4096, 4096)
    yield fp8._replace(disabled="CutlassFP8ScaledMMLinearKernel")
    yield fp8._replace(kind="fp8_tensor", static=True, disabled="CutlassFP8ScaledMMLinearKernel")
    for kind in ("fp8_tensor", "fp8_token"):
        yield fp8._replace(kind=kind, weight_only=True)
        yield fp8._replace(kind=kind, weight_only=True, disabled="HummingFP8ScaledMMLinearKernel")
    if since(version, "0.26"):
        for forced_backend in (
            "marlin",
            "triton",
            "machete",
            "exllama",
            "cutlass",
            "torch",
            "humming",
            "flashinfer_b12x",
        ):
            yield wna16(4096, 4096, 128, forced=forced_backend)
            yield fp8._replace(forced=forced_backend)
            yield fp8._replace(kind="fp8_block", group=128, forced=forced_backend)
            yield fp8._replace(kind="nvfp4", bits=4, group=16, forced=forced_backend)


def answers(version: str) -> list[list[Any]]:
    """Ask the engine that this process has booted."""
    return [_accepting(question) for question in questions(version)]


def _accepting(question: Question) -> list[Any]:
    kernels: list[str] = []
    first: list[Any] = []
    while True:
        names = ",".join(filter(None, [question.disabled, *kernels]))
        answer = _answer(question._replace(disabled=names))
        kernel, first = answer[0], first or answer
        # A path that does not heed disabled kernels repeats itself.
        if kernel is None or kernel in kernels:
            return [kernels, first[1]]
        kernels.append(kernel)


def _answer(question: Question) -> list[Any]:
    environment: Any = importlib.import_module("vllm.envs")
    environment.VLLM_DISABLED_KERNELS = question.disabled.split(",") if question.disabled else []
    torch: Any = importlib.import_module("torch")
    torch.set_default_dtype(getattr(torch, question.dtype))
    ask = {
        "wna16": _wna16,
        "w4a8": _wna16,
        "int8": _int8,
        "nvfp4": _nvfp4,
        "mxfp4": _mxfp4,
        "mxfp8": _mxfp8,
    }
    option = {"linear_backend": question.forced} if question.forced else {}
    try:
        with configure(question.dtype, **option):
            return ask.get(question.kind, _fp8)(question)
    except (ValueError, RuntimeError) as error:
        if any(refusal in str(error) for refusal in REFUSALS):
            return [None, None]
        raise
    except _NoPath:
        return ["unknown", None]


class _NoPath(Exception):
    """This version has no code path for the scheme."""


def _linear() -> Any:
    return importlib.import_module("vllm.model_executor.kernels.linear")


def _quantization(name: str) -> Any:
    return importlib.import_module(f"vllm.model_executor.layers.quantization.{name}")


def _wna16(q: Question) -> list[Any]:
    torch: Any = importlib.import_module("torch")
    types: Any = importlib.import_module("vllm.scalar_type").scalar_types
    config: Any = importlib.import_module(
        "vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel"
    )
    if q.act_order and importlib.util.find_spec(
        "vllm.model_executor.layers.quantization.auto_gptq"
    ):
        refuse = getattr(_quantization("auto_gptq"), "normalize_and_validate_gptq_desc_act", None)
        if refuse:
            refuse(q.act_order, q.group, {})
    symmetric = {4: types.uint4b8, 8: types.uint8b128}
    asymmetric = {4: types.uint4, 8: types.uint8}
    dense = fit(
        config.MPLinearLayerConfig,
        full_weight_shape=(q.full_k, q.n),
        partition_weight_shape=(q.k, q.n),
        weight_type=(
            types.int4 if q.kind == "w4a8" else (symmetric if q.symmetric else asymmetric)[q.bits]
        ),
        act_type=torch.float8_e4m3fn if q.kind == "w4a8" else getattr(torch, q.dtype),
        group_size=q.group,
        zero_points=not q.symmetric,
        has_g_idx=q.act_order,
        out_type=getattr(torch, q.dtype),
    )
    kernel = _linear().choose_mp_linear_kernel(dense).__name__
    marlin = _quantization("utils.marlin_utils")
    if kernel == "MarlinLinearKernel" and hasattr(marlin, "marlin_padded_nk"):
        n, k = marlin.marlin_padded_nk(q.n, q.k, q.group)
        if (k, n) != (q.k, q.n):
            return [kernel, [k, n]]
    return [kernel, None]


def _fp8(q: Question) -> list[Any]:
    """As Fp8LinearMethod (fp8_tensor, fp8_block) and the compressed-tensors scheme (fp8_token)
    ask."""
    torch: Any = importlib.import_module("torch")
    keys, method = _quantization("utils.quant_utils"), _quantization("fp8")
    dtype = getattr(torch, q.dtype)
    if (
        not hasattr(_linear(), "MarlinFP8ScaledMMLinearKernel")
        and not hasattr(_linear(), "_POSSIBLE_FP8_BLOCK_KERNELS")
        and not q.weight_only
    ):
        marlin = _marlin_before_the_list(q, method)
        if marlin:
            return [marlin, None]
    channel = getattr(keys, "kFp8StaticChannelSym", None) or keys.kFp8StaticTokenSym
    weight = {
        "fp8_tensor": keys.kFp8StaticTensorSym,
        "fp8_token": channel,
        "fp8_block": keys.kFp8Static128BlockSym,
    }[q.kind]
    if q.kind == "fp8_block":
        activation = keys.kFp8Dynamic128Sym
    elif q.static:
        activation = keys.kFp8StaticTensorSym
    elif q.kind == "fp8_token" or method.cutlass_fp8_supported():
        activation = keys.kFp8DynamicTokenSym
    else:
        activation = keys.kFp8DynamicTensorSym
    if q.weight_only and not hasattr(_linear(), "_POSSIBLE_WFP8A16_KERNELS"):
        raise _NoPath
    config = fit(
        _linear().FP8ScaledMMLinearLayerConfig, activation_quant_key=activation,
        weight_quant_key=weight,
        input_dtype=dtype, out_dtype=dtype, weight_shape=(q.n, q.k),
    )  # fmt: skip
    block = q.kind == "fp8_block" and hasattr(_linear(), "_POSSIBLE_FP8_BLOCK_KERNELS")
    kernels = _linear()._POSSIBLE_FP8_BLOCK_KERNELS if block else _linear()._POSSIBLE_FP8_KERNELS
    quantization = "fp8_block_w8a8" if block else "fp8_w8a8"
    if q.weight_only:
        kernels, quantization = _linear()._POSSIBLE_WFP8A16_KERNELS, "w8a16_fp8"
    choose = _linear().choose_scaled_mm_linear_kernel
    kernel = fit(
        choose, config=config, possible_kernels=kernels, quantization=quantization
    ).__name__
    if q.kind == "fp8_block" and not block and "Marlin" not in kernel:
        return [block_fp8(q.k, q.n, q.dtype), None]
    return [kernel, None]


def _marlin_before_the_list(q: Question, method: Any) -> str:
    """0.18: which layers are computed with Marlin is decided outside the list of kernels."""
    if q.kind == "fp8_token":
        ct = _quantization("compressed_tensors.compressed_tensors").CompressedTensorsConfig
        if ct._check_scheme_supported(89, error=False):
            return ""
        ct._check_scheme_supported(
            _quantization(
                "compressed_tensors.schemes"
            ).CompressedTensorsW8A16Fp8.get_min_capability()
        )
        return "Marlin"
    config = method.Fp8Config(
        is_checkpoint_fp8_serialized=True,
        activation_scheme="static" if q.static else "dynamic",
        weight_block_size=[128, 128] if q.kind == "fp8_block" else None,
    )
    platform: Any = importlib.import_module("vllm.platforms").current_platform
    if platform.get_device_capability().to_int() < config.get_min_capability():
        # VllmConfig raises this error.
        raise ValueError("The quantization method is not supported for the current GPU")
    return "Marlin" if method.Fp8LinearMethod(config).use_marlin else ""


def _int8(q: Question) -> list[Any]:
    config = fit(
        _linear().Int8ScaledMMLinearLayerConfig, is_channelwise=True,
        is_static_input_scheme=q.static,
        input_symmetric=q.symmetric, is_fused_module=False,
    )  # fmt: skip
    choose = _linear().choose_scaled_mm_linear_kernel
    kernels = _linear()._POSSIBLE_INT8_KERNELS
    return [
        fit(choose, config=config, possible_kernels=kernels, quantization="int8_w8a8").__name__,
        None,
    ]


def _nvfp4(q: Question) -> list[Any]:
    if not hasattr(_linear(), "init_nvfp4_linear_kernel"):
        if q.weight_only:  # the compressed-tensors scheme for it knows Marlin only
            raise _NoPath
        return [_quantization("utils.nvfp4_utils").select_nvfp4_linear_backend().value, None]
    return [type(_linear().init_nvfp4_linear_kernel(use_a16=q.weight_only)).__name__, None]


def _mxfp4(q: Question) -> list[Any]:
    if not hasattr(_linear(), "init_mxfp4_linear_kernel"):
        raise _NoPath
    init = _linear().init_mxfp4_linear_kernel
    if q.weight_only and "activation_quant_key" not in inspect.signature(init).parameters:
        raise _NoPath  # 0.26 calls it for MXFP4 activations alone
    activation = None if q.weight_only else _quantization("utils.quant_utils").kMxfp4Dynamic
    return [type(fit(init, activation_quant_key=activation)).__name__, None]


def _mxfp8(q: Question) -> list[Any]:
    if not hasattr(_linear(), "init_mxfp8_linear_kernel"):
        raise _NoPath
    return [type(fit(_linear().init_mxfp8_linear_kernel, weight_shape=(q.n, q.k))).__name__, None]
