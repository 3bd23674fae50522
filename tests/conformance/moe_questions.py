"""Which backend do a layer's experts get? The questions, and how the engine is asked.

The engine's own layer is built on the meta device from the quantization block that a checkpoint
would have, for one rank of a group of which only the size is real. An answer is [method, backend,
padded]: the class of the quantization method that took the layer, the backend it chose (its own
name for it; null: the method is the kernel), and the [hidden, intermediate] that a rank's weights
are made for, or null. ["none", reason]: the engine refuses the layer.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gateway.engines.inside.meta import fit, meta_mode
from gateway.engines.vllm.inside.answers import stand_in_for_packages
from gateway.engines.vllm.inside.boot import configure
from gateway.engines.vllm.inside.model import group_up
from tests.conformance.moe_blocks import block as quantization_block
from tests.support.versions import since

# A capability, then the installed optional packages where they are not those of the image.
CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1", "9.0 none")


class Question(NamedTuple):
    origin: str  # quantizer: the quant_method of the checkpoint; "online": --quantization fp8
    kind: str
    bits: int = 16
    group: int = -1
    symmetric: bool = True
    act_order: bool = False
    static: bool = False
    weight_only: bool = False
    dtype: str = "bfloat16"
    hidden: int = 2048
    intermediate: int = 768  # before the cut
    experts: int = 128
    per_token: int = 8
    activation: str = "silu"
    bias: bool = False
    tp: int = 1
    ep: bool = False
    routing: str = "renormalize"
    family: str = "qwen3_moe"
    forced: str = ""  # --moe-backend


# (hidden, intermediate, experts, per_token, tp, ep)
SIZES = (
    (2048, 768, 128, 8, 1, False),  # Qwen3-30B-A3B
    (2048, 768, 128, 8, 2, False),
    (2048, 768, 128, 8, 4, False),
    (2048, 768, 128, 8, 8, False),
    (2048, 768, 128, 8, 4, True),
    (2816, 704, 128, 8, 1, False),  # Gemma 4 26B-A4B
    (2816, 704, 128, 8, 2, False),
    (2880, 2880, 32, 4, 1, False),  # gpt-oss-20b
    (2880, 2880, 32, 4, 2, False),
    (2880, 2880, 32, 4, 4, False),
    (2880, 2880, 32, 4, 2, True),
    (4096, 14336, 8, 2, 2, False),  # Mixtral
    (2048, 512, 256, 8, 8, False),  # Qwen3.5
    (7168, 2048, 256, 8, 8, False),  # DeepSeek V3
    (2112, 1088, 16, 2, 1, False),
)


def _weights() -> list[Question]:
    base = Question("none", "unquantized")
    shapes = [base]
    for origin, bits, group in itertools.product(
        ("gptq", "auto-round", "compressed-tensors"), (4, 8), (32, 128, -1)
    ):
        shapes.append(base._replace(origin=origin, kind="wna16", bits=bits, group=group))
    shapes += [
        base._replace(origin="gptq", kind="wna16", bits=4, group=128, act_order=True),
        base._replace(origin="compressed-tensors", kind="wna16", bits=4, group=128, act_order=True),
        base._replace(origin="gptq", kind="wna16", bits=4, group=128, symmetric=False),
        base._replace(origin="auto-round", kind="wna16", bits=4, group=128, symmetric=False),
        base._replace(
            origin="compressed-tensors", kind="wna16", bits=4, group=128, symmetric=False
        ),
        base._replace(origin="gptq", kind="wna16", bits=4, group=64),
        base._replace(origin="compressed-tensors", kind="wna16", bits=4, group=64),
        base._replace(origin="awq", kind="wna16", bits=4, group=128, symmetric=False),
        base._replace(origin="awq", kind="wna16", bits=4, group=32, symmetric=False),
        base._replace(origin="awq", kind="wna16", bits=4, group=64, symmetric=False),
        base._replace(origin="online", kind="fp8_tensor", bits=8),
        base._replace(origin="fp8", kind="fp8_tensor", bits=8),
        base._replace(origin="fp8", kind="fp8_tensor", bits=8, static=True),
        base._replace(origin="fp8", kind="fp8_block", bits=8, group=128),
        base._replace(origin="compressed-tensors", kind="fp8_tensor", bits=8, static=True),
        base._replace(origin="compressed-tensors", kind="fp8_tensor", bits=8),
        base._replace(origin="compressed-tensors", kind="fp8_token", bits=8),
        base._replace(origin="compressed-tensors", kind="fp8_block", bits=8, group=128),
        base._replace(origin="modelopt", kind="fp8_tensor", bits=8, static=True),
        base._replace(origin="compressed-tensors", kind="fp8_token", bits=8, weight_only=True),
        base._replace(origin="modelopt", kind="fp8_token", bits=8),
        base._replace(origin="modelopt", kind="fp8_block", bits=8, group=128),
        base._replace(origin="modelopt", kind="nvfp4", bits=4, group=16, weight_only=True),
        base._replace(origin="awq", kind="wna16", bits=4, group=128),
        base._replace(origin="compressed-tensors", kind="nvfp4", bits=4, group=16),
        base._replace(
            origin="compressed-tensors", kind="nvfp4", bits=4, group=16, weight_only=True
        ),
        base._replace(origin="modelopt", kind="nvfp4", bits=4, group=16),
        base._replace(origin="modelopt", kind="mxfp8", bits=8, group=32),
        base._replace(origin="mxfp4", kind="mxfp4", bits=4, group=32, weight_only=True),
        base._replace(
            origin="compressed-tensors", kind="mxfp4", bits=4, group=32, weight_only=True
        ),
        base._replace(origin="compressed-tensors", kind="mxfp4", bits=4, group=32),
        base._replace(origin="compressed-tensors", kind="mxfp8", bits=8, group=32),
        base._replace(origin="compressed-tensors", kind="int8", bits=8),
        base._replace(origin="compressed-tensors", kind="w4a8", bits=4, group=128),
    ]
    return shapes


def questions(version: str) -> Iterator[Question]:
    """Every question that this version is asked, in the order of its answers."""
    for weights in _weights():
        for hidden_size, intermediate, experts, per_token, tp, ep in SIZES:
            question = weights._replace(
                hidden=hidden_size,
                intermediate=intermediate,
                experts=experts,
                per_token=per_token,
                tp=tp,
                ep=ep,
            )
            if weights.kind == "mxfp4" or hidden_size == 2880:
                yield question._replace(activation="swigluoai", bias=True, family="gpt_oss")
            if weights.origin != "mxfp4":
                yield question
        yield weights._replace(dtype="float16")
        for routing in ("default", "sigmoid", "minimax", "deepseek"):
            yield weights._replace(routing=routing)
        yield weights._replace(family="qwen3_5_moe_text")
        yield weights._replace(activation="gelu", family="gemma4")
        yield weights._replace(
            activation="relu2_no_mul", family="nemotron_h", intermediate=1856, hidden=2688
        )
        for forced_backend in (
            "marlin",
            "triton",
            "flashinfer_cutlass",
            "flashinfer_trtllm",
            "cutlass",
            "deep_gemm",
            "humming",
        ):
            if since(version, "0.19") and weights.group != 32:
                yield weights._replace(forced=forced_backend)


def answers(version: str) -> list[list[Any]]:
    """Ask the engine that this process has booted. The reason of a refusal is in its words, which
    only repeat the rules."""
    return [
        answer[:1] if answer[0] == "none" else answer for answer in map(_answer, questions(version))
    ]


REFUSALS = (
    ValueError,
    NotImplementedError,
    AssertionError,
    RuntimeError,
    KeyError,
    AttributeError,
    ModuleNotFoundError,
)


def _answer(q: Question) -> list[Any]:
    torch: Any = importlib.import_module("torch")
    torch.set_default_dtype(getattr(torch, q.dtype))
    _expert_map()
    group_up(q.tp)
    stand_in_for_packages()
    current = _configuration(q.dtype, q.forced)
    try:
        with (
            importlib.import_module("vllm.config").set_current_vllm_config(current),
            meta_mode(),
            torch.device("meta"),
        ):
            return _build(q, current)
    except REFUSALS as error:
        return ["none", re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:300]]
    finally:
        torch.set_default_dtype(torch.float32)


@functools.cache
def _configuration(dtype: str, forced: str) -> Any:
    with configure(dtype, **({"moe_backend": forced} if forced else {})):
        return importlib.import_module("vllm.config").get_current_vllm_config()


def _expert_map() -> None:
    """Which experts a rank holds is printed from a tensor, and those on the meta device have no
    values."""
    layer: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.layer")
    layer.get_compressed_expert_map = lambda _: ""
    with contextlib.suppress(ImportError):
        manager: Any = importlib.import_module(
            "vllm.model_executor.layers.fused_moe.expert_map_manager"
        ).ExpertMapManager
        manager.get_compressed_map_string = lambda _: ""


def _build(q: Question, current: Any) -> list[Any]:
    torch: Any = importlib.import_module("torch")
    current.parallel_config.enable_expert_parallel = q.ep
    current.parallel_config.tensor_parallel_size = q.tp
    current.model_config.hf_config.model_type = current.model_config.hf_text_config.model_type = (
        q.family
    )
    current.compilation_config.static_forward_context.clear()
    module: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.layer")
    make = getattr(module, "FusedMoEFactory", None) or module.FusedMoE
    has_bias = q.routing in ("minimax", "deepseek")
    group_options = (
        {"use_grouped_topk": True, "num_expert_group": 8, "topk_group": 4}
        if q.routing == "deepseek"
        else {}
    )
    layer = fit(
        make, num_experts=q.experts, top_k=q.per_token, hidden_size=q.hidden,
        intermediate_size=q.intermediate,
        params_dtype=getattr(torch, q.dtype), renormalize=q.routing != "default", **group_options,
        scoring_func="softmax" if q.routing in ("renormalize", "default") else "sigmoid",
        e_score_correction_bias=torch.nn.Parameter(torch.empty(q.experts,
            dtype=torch.float32)) if has_bias else None, quant_config=_quant_config(q, current),
        prefix="model.layers.0.mlp.experts", activation=q.activation, has_bias=q.bias,
        is_act_and_mul="no_mul" not in q.activation,
        ckpt_names=("up_proj", "down_proj", None) if "no_mul" in q.activation else ("gate_proj",
            "down_proj", "up_proj"),
    )  # fmt: skip
    method = next(
        m.quant_method for m in layer.modules() if getattr(m, "quant_method", None) is not None
    )
    backend = _backend(method)
    return [type(method).__name__, backend, _pad(q, method, backend)]


def _backend(method: Any) -> str | None:
    enums = [
        value
        for name, value in vars(method).items()
        if "backend" in name and hasattr(type(value), "__members__")
    ]
    return enums[0].name if enums else None


def _pad(q: Question, method: Any, backend: str | None) -> list[int] | None:
    ranks = 1 if q.ep else q.tp
    sizes = [method.moe.hidden_dim, method.moe.intermediate_size_per_partition]
    if q.kind == "mxfp4" and isinstance(getattr(method, "intermediate_size", None), int):  # 0.18.0
        sizes = [method.hidden_size, method.intermediate_size]
    marlin: Any = importlib.import_module(
        "vllm.model_executor.layers.quantization.utils.marlin_utils"
    )
    if (
        q.kind == "wna16"
        and backend == "MARLIN"
        and hasattr(marlin, "marlin_moe_padded_intermediate")
    ):
        # The engine does this once the weights are loaded.
        sizes[1] = marlin.marlin_moe_padded_intermediate(sizes[1], q.group)
    return sizes if sizes != [q.hidden, q.intermediate // ranks] else None


def _quant_config(q: Question, current: Any) -> Any:
    """As a model's loading does: the block names its method, another may take it over, and the GPU
    and dtype are checked."""
    if q.origin == "none":
        return None
    model_config: Any = importlib.import_module("vllm.config.model").ModelConfig
    torch: Any = importlib.import_module("torch")
    model = current.model_config
    block = quantization_block(q)
    model.quantization, model.quantization_config, model.hf_overrides = None, None, {}
    # The folder has no weights.
    model.model = str(Path(__file__).parent)
    model.revision = None
    model.allow_deprecated_quantization = False
    model.model_arch_config = types.SimpleNamespace(
        quantization_config=block,
        total_num_attention_heads=32,
        total_num_kv_heads=8,
        model_type=q.family,
    )
    model.hf_config.quantization_config = block
    if q.origin == "online":
        model.quantization = "fp8"
    else:
        model_config._verify_quantization(model)
    cls: Any = importlib.import_module("vllm.config").VllmConfig
    weights: Any = importlib.import_module("vllm.config.load").LoadConfig
    quantization_config = cls._get_quantization_config(model, weights())
    quantization_config.packed_modules_mapping = {}
    model.dtype = getattr(torch, q.dtype)
    return quantization_config
