"""One layer as SGLang builds and computes it on the meta device, up to the multiplying function.

`configured` resolves an engine's arguments for a config.json. `product` prepares the weights of a
dense layer, calls it, and returns the function of DENSE that it reaches. `experts` returns the
runner of a model's experts.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...inside.crashes import is_of_this_package
from .model import EngineConfiguration, build_model, configure_engine

# Functions that multiply, of either version.
DENSE = (
    "fp8_scaled_mm",
    "triton_scaled_mm",
    "flashinfer_bmm_fp8",
    "_apply_fallback_scaled_mm",
    "_scaled_mm",
    "int8_scaled_mm",
    "w8a8_block_fp8_matmul_deepgemm",
    "triton_w8a8_block_fp8_linear",
    "gemm_fp8_nt_groupwise",
    "fp8_blockwise_scaled_mm",
    "apply_fp8_marlin_linear",
    "apply_gptq_marlin_linear",
    "apply_awq_marlin_linear",
    "apply_fp4_marlin_linear",
    "awq_dequantize",
    "gptq_gemm",
    "fp4_gemm",
    "mm_bf16_fp4",
    "try_sm120_fp8_linear",
    "flashinfer_mxfp8_blockscaled_linear",
    "deepgemm_w8a8_mxfp8_linear_with_fallback",
    "triton_mxfp8_blockscaled_linear",
)
# Modules that define or import them, and are themselves imported only when a layer needs them.
LATE_MODULES = (
    "srt.hardware_backend.gpu.quantization.awq_kernels",
    "srt.hardware_backend.gpu.quantization.gptq_kernels",
    "srt.layers.quantization.marlin_utils_fp4",
    "srt.layers.quantization.marlin_utils_fp8",
    "kernels.ops.gemm",
)


class LayerFunctionCall(BaseException):
    """The function that a layer's computation came to."""


def _raise_at_call(name: str) -> Callable[..., Any]:
    def stop_at_kernel(*_: Any, **__: Any) -> Any:
        if name != "fp4_gemm":
            raise LayerFunctionCall(name)
        backend = importlib.import_module(
            "sglang.srt.layers.quantization.fp4_utils"
        ).get_fp4_gemm_runner_backend()
        raise LayerFunctionCall(f"fp4_gemm {backend.value}")

    return stop_at_kernel


@functools.cache
def _stand_ins() -> dict[str, Callable[..., Any]]:
    """The functions to replace: products raise; quantizing and repacking functions give a tensor of
    the right size."""
    torch: Any = importlib.import_module("torch")

    def eight(x: Any, scales: Any, dtype: Any = None) -> tuple[Any, Any]:
        return torch.empty_like(x, dtype=dtype or torch.float8_e4m3fn), torch.empty(
            scales, dtype=torch.float32
        )

    def quantize(
        x: Any, scale: Any = None, *_: Any, use_per_token_if_dynamic: bool = False, **__: Any
    ) -> tuple[Any, Any]:
        return eight(x, (x.shape[0], 1) if scale is None and use_per_token_if_dynamic else (1,))

    def group(x: Any, size: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        return eight(x, (x.shape[0], -(-x.shape[1] // size)))

    def four(x: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        scales = torch.empty(x.shape[0], x.shape[1] // 16, dtype=torch.float8_e4m3fn)
        return torch.empty(x.shape[0], x.shape[1] // 2, dtype=torch.uint8), scales

    def first_weight(*weights: Any, **named_tensors: Any) -> Any:
        return weights[0] if weights else named_tensors["b_q_weight"]

    return {name: _raise_at_call(name) for name in DENSE} | {
        "sglang_per_token_quant_fp8": lambda x, *_, **__: eight(x, (x.shape[0], 1)),
        "static_quant_fp8": lambda x, *_, repeat_scale=False, **__: eight(
            x, (x.shape[0], 1) if repeat_scale else (1,)
        ),
        "scaled_fp8_quant": quantize,
        "sglang_per_token_group_quant_fp8": group,
        "sglang_per_token_group_quant_fp8_row_padded": group,
        "per_token_group_quant_fp8": group,
        "per_token_quant_int8": lambda x, *_, **__: eight(x, (*x.shape[:-1], 1), torch.int8),
        "input_to_float8": lambda x, *_, **__: eight(x, ()),
        "fp4_quantize": four,
        "requantize_with_max_scale": lambda weight, weight_scale, logical_widths: (
            torch.empty(()),
            weight,
        ),
        "requant_block_scale_ue8m0_for_deepgemm": lambda *_, **__: None,
        "requant_weight_ue8m0_inplace": lambda *_, **__: None,
        "gptq_marlin_repack": first_weight,
        "awq_marlin_repack": first_weight,
        "marlin_zero_points": first_weight,
        "awq_to_marlin_zero_points": first_weight,
        "unpack_cols": first_weight,
    }


def watch() -> None:
    """Put the stand-ins in place wherever the engine has imported those functions so far."""
    torch: Any = importlib.import_module("torch")
    for name in LATE_MODULES:
        with suppress(ImportError):
            importlib.import_module(f"sglang.{name}")
    stand_ins = _stand_ins()
    for module in [module for name, module in sys.modules.items() if name.startswith("sglang.")]:
        for name in stand_ins.keys() & vars(module).keys():
            setattr(module, name, stand_ins[name])
    torch._scaled_mm = stand_ins["_scaled_mm"]
    flashinfer: Any = importlib.import_module("flashinfer")
    flashinfer.prepare_bf16_fp4_weights = lambda *weights, **_: weights
    flashinfer.mm_bf16_fp4 = stand_ins["mm_bf16_fp4"]
    for name in DENSE:
        torch.ops.sglang.__dict__[name] = stand_ins[name]


def product(layer: Any, inputs: int, dtype: str) -> str:
    """The product that a dense layer with its weights created comes to."""
    torch: Any = importlib.import_module("torch")
    watch()
    layer.quant_method.process_weights_after_loading(layer)
    watch()
    try:
        layer.quant_method.apply(layer, torch.empty(8, inputs, dtype=getattr(torch, dtype)))
    except LayerFunctionCall as reached:
        return str(reached)
    raise LookupError(
        f"{type(layer.quant_method).__name__} multiplies with a function that is not in the list"
    )


@functools.cache
def _folder(config: str) -> str:
    folder = tempfile.mkdtemp()
    Path(folder, "config.json").write_text(config)
    return folder


def configure(
    config: dict[str, Any],
    dtype: str,
    tp: int = 1,
    ep: int = 1,
    arguments: Mapping[str, Any] | None = None,
) -> EngineConfiguration:
    """Resolve and publish the arguments for this config.json, as a scheduler does. Raises the
    engine's errors."""
    server: Any = importlib.import_module("sglang.srt.server_args")
    server_args = server.ServerArgs(
        model_path=_folder(json.dumps(config)), tp_size=tp, ep_size=ep, dtype=dtype, device="cuda",
        skip_tokenizer_init=True, load_format="dummy", **(arguments or {}),
    )  # fmt: skip
    return configure_engine(server_args)


def model(configuration: EngineConfiguration) -> Any:
    """The model, with only its experts quantized."""
    linear: Any = importlib.import_module("sglang.srt.layers.linear").LinearBase
    if not hasattr(linear, "plain_init"):
        linear.plain_init = linear.__init__
        linear.__init__ = lambda self, *args, **kwargs: linear.plain_init(
            self, *args[:4], **{**kwargs, "quant_config": None}
        )
    return build_model(configuration)


def experts(layer: Any) -> list[str | None]:
    """[method, runner] of a layer's experts; without a runner the method multiplies itself."""
    method = layer.quant_method
    scheme = getattr(layer, "scheme", None) or getattr(method, "scheme", None)
    if getattr(method, "use_flashinfer", False):  # it does without the runner that it has
        runner = importlib.import_module("sglang.srt.layers.moe.utils").get_moe_runner_backend()
    elif hasattr(method, "get_moe_runner_backend"):
        runner = method.get_moe_runner_backend(layer)
    else:
        runner = getattr(getattr(scheme or method, "runner", None), "runner_backend", None)
    return [type(scheme or method).__name__, getattr(runner, "value", None)]


REFUSALS = (
    ValueError,
    AssertionError,
    RuntimeError,
    ImportError,
    TypeError,
    AttributeError,
    KeyError,
    NameError,
)


def is_of_stand_in(error: BaseException) -> bool:
    """Whether only a stand-in, or a tensor without values, causes this error, which is then not a
    refusal."""
    return "Anything" in str(error) or "meta" in str(error)


def refusal_text(answer: str, error: Exception) -> str:
    """The answer for a refusal of the engine."""
    if is_of_stand_in(error) or is_of_this_package(error):
        raise error
    return answer
