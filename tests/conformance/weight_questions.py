"""How many bytes of parameters does one rank hold? The questions, and how the engine is asked.

A question is a model with a quantization; an answer is {layer: [bytes at each of TENSOR_PARALLEL]}:
of all layers of that name together, experts as `.w13` and `.w2`, and under "" of the whole model.
null: the engine refuses that many ranks; {}: it refuses the model, or was not asked: only sizes of
experts depend on the GPU. These are the parameters that the engine makes before it loads a
checkpoint; later padding is not among them.
"""

from __future__ import annotations

import collections
import importlib
import re
from collections.abc import Iterator
from typing import Any

from gateway.engines.vllm.inside.answers import pretend_bitsandbytes
from gateway.engines.vllm.inside.model import build_from_config
from tests.conformance.layer_cases import QUANTS, TENSOR_PARALLEL, case

CAPABILITIES = ("9.0", "8.6", "10.0", "12.0")


def _compress(
    weights: dict[str, Any], inputs: dict[str, Any] | None, form: str = "pack-quantized"
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    ignore_list = ["lm_head", "re:.*mlp.gate$"]
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ignore_list,
        "config_groups": {"group_0": group},
    }


def _numbers(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
    } | more


def _modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    block = {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "ignore": ["lm_head", "*mlp.gate"],
    } | more
    return block | {"producer": {"name": "modelopt", "version": "0.39.0"}}


_TOKEN8 = _numbers(8, "float", "token", dynamic=True)
# Fields that change bytes, in addition to those of layer_cases.
MORE: dict[str, dict[str, Any]] = {
    "gptq-8bit": QUANTS["gptq"] | {"bits": 8, "group_size": 32},
    "gptq-channel": QUANTS["gptq"] | {"group_size": -1},
    "gptq-asymmetric": QUANTS["gptq"] | {"sym": False},
    "auto-round-awq": QUANTS["auto-round"] | {"packing_format": "auto_round:auto_awq"},
    "w4a16-asymmetric": _compress(_numbers(4, "int", "group", group_size=128, symmetric=False),
        None),
    "w4a16-act-order": _compress(_numbers(4, "int", "group", group_size=128, actorder="group"),
        None),
    "w4a16-channel": _compress(_numbers(4, "int", "channel"), None),
    "w8a16-group": _compress(_numbers(8, "int", "group", group_size=32), None),
    "w4a8": _compress(_numbers(4, "int", "group", group_size=128), _TOKEN8),
    "int8-static": _compress(_numbers(8, "int", "tensor"), _numbers(8, "int", "tensor"),
        "int-quantized"),
    "fp8-weight-only": _compress(_numbers(8, "float", "channel"), None, "float-quantized"),
    "nvfp4-weight-only": _compress(_numbers(4, "float", "tensor_group", group_size=16), None,
        "nvfp4-pack-quantized"),
    "mxfp4-weight-only": _compress(_numbers(4, "float", "group", group_size=32), None,
        "mxfp4-pack-quantized"),
    "mxfp8-ct": _compress(
        _numbers(8, "float", "group", group_size=32),
        _numbers(8, "float", "group", group_size=32, dynamic=True),
        "mxfp8-quantized",
    ),
    "fp8-given-scales": {"quant_method": "fp8", "activation_scheme": "static"},
    "modelopt-mxfp8": _modelopt("MXFP8"),
    "modelopt-block": _modelopt("FP8_PB_WO"),
    "modelopt-channel": _modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
    "modelopt-nvfp4-weight-only": _modelopt("W4A16_NVFP4", group_size=16),
    "bitsandbytes-4bit": {"quant_method": "bitsandbytes", "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4"},
    "bitsandbytes-8bit": {"quant_method": "bitsandbytes", "load_in_8bit": True},
}  # fmt: skip
_DENSE = tuple(
    name for name in QUANTS if name not in ("mxfp4", "mxfp4-ct") and not name.endswith("-language")
)
_EXPERTS = (
    "gptq", "gptq-8bit", "gptq-asymmetric", "awq", "auto-round", "auto-round-awq", "w4a16",
    "w4a16-asymmetric",
    "w4a16-act-order", "w4a16-channel", "w8a16", "w8a16-group", "w4a8", "int8", "int8-static",
    "fp8", "fp8-dynamic",
    "fp8-static", "fp8-given-scales", "fp8-block", "fp8-ct-block", "fp8-weight-only", "nvfp4",
    "nvfp4-weight-only",
    "mxfp4-weight-only", "mxfp8-ct", "modelopt-fp8", "modelopt-nvfp4", "modelopt-mxfp8",
    "modelopt-block",
    "modelopt-channel", "bitsandbytes-4bit",
)  # fmt: skip
MODELS_UNQUANTIZED = (
    "deepseek-v2-lite", "deepseek-v3", "gemma-2-9b", "gemma-3-1b", "glm-4.5-air", "gpt-oss-20b",
    "granite-3.1-2b",
    "llama-3.1-8b", "llama-3.2-1b", "mistral-7b-v0.1", "mistral-7b-v0.3", "mixtral-8x7b", "phi-4",
    "phi-4-mini",
    "qwen1.5-moe-a2.7b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen3-30b-a3b", "qwen3-8b",
    "qwen3-embedding-0.6b",
    "qwen3-next-80b-a3b", "qwen3.6-35b-a3b",
)  # fmt: skip
ALL: tuple[tuple[str, str], ...] = (
    *((name, "none") for name in MODELS_UNQUANTIZED),
    *(("llama-3.1-8b", name) for name in (*_DENSE, *MORE)),
    *(("qwen3-30b-a3b", name) for name in _EXPERTS),
    *(("gpt-oss-20b", name) for name in ("mxfp4", "mxfp4-ct", "w8a16")),
    *(
        ("qwen3.6-35b-a3b", name)
        for name in ("auto-round-language", "gptq", "gptq-language", "fp8-block", "w4a16")
    ),
    *(("qwen3-next-80b-a3b", name) for name in ("fp8-block", "awq", "nvfp4")),
    *(("deepseek-v3", name) for name in ("fp8-block", "nvfp4", "w4a16")),
    *(("mixtral-8x7b", name) for name in ("awq", "gptq", "fp8")),
    *(("qwen2.5-7b", name) for name in ("gptq", "awq", "fp8-dynamic")),
    *(("glm-4.5-air", name) for name in ("fp8-dynamic", "nvfp4")),
    ("phi-4", "awq"),
    ("granite-3.1-2b", "int8"),
    ("mistral-7b-v0.3", "gptq"),
    ("gemma-3-1b", "bitsandbytes-4bit"),
)


# Questions on every GPU, not on the first only.
EVERYWHERE = (
    *(("gpt-oss-20b", name) for name in ("none", "mxfp4", "mxfp4-ct")),
    *(
        ("qwen3-30b-a3b", name)
        for name in ("none", "gptq", "w4a16", "fp8-block", "nvfp4", "modelopt-mxfp8")
    ),
    ("qwen1.5-moe-a2.7b", "none"),
    ("llama-3.1-8b", "modelopt-mxfp8"),
)


def config(model: str, quant: str) -> dict[str, Any]:
    """The config.json of this case."""
    if quant not in MORE:
        return case(model, quant)
    config_fields = case(model, "none") | {"quantization_config": MORE[quant]}
    # The only dtype that versions have for it which take it at all.
    return (
        config_fields | {"torch_dtype": "float16", "dtype": "float16"}
        if quant == "gptq-asymmetric"
        else config_fields
    )


def questions(_: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Every question, in the order of its answers."""
    for model, quant in ALL:
        yield model, quant, TENSOR_PARALLEL


def answers(version: str) -> list[dict[str, list[int | None]]]:
    """Ask the engine that this process has booted."""
    pretend_bitsandbytes()
    platform: Any = importlib.import_module("vllm.platforms").current_platform
    first = (
        f"{platform.get_device_capability().major}.{platform.get_device_capability().minor}"
        == CAPABILITIES[0]
    )
    return [
        _answer(*question) if first or question[:2] in EVERYWHERE else {}
        for question in questions(version)
    ]


def _answer(model: str, quant: str, ranks: tuple[int, ...]) -> dict[str, list[int | None]]:
    defaultdict: dict[str, list[int | None]] = collections.defaultdict(lambda: [None] * len(ranks))
    for position, tp in enumerate(ranks):
        try:
            with build_from_config(config(model, quant), tp) as (_, engine_model):
                sums = _bytes(engine_model)
        except Exception:  # an engine's refusal is an answer
            sums = collections.Counter()
        for name, size in sums.items():
            defaultdict[name][position] = size
    return dict(sorted(defaultdict.items()))


def _bytes(model: Any) -> collections.Counter[str]:
    plain: Any = importlib.import_module("torch").nn.Linear
    base: Any = importlib.import_module("vllm.model_executor.layers.linear").LinearBase
    sums: collections.Counter[str] = collections.Counter()
    for path, module in model.named_modules():
        name = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path).removesuffix(".routed_experts")
        for key, parameter in module.named_parameters(recurse=False):
            if "e_score_correction_bias" in key:
                continue
            size = parameter.numel() * parameter.element_size()
            if key.startswith(("w13_", "w2_")):
                sums[f"{name}.{key.partition('_')[0]}"] += size
            elif isinstance(module, base | plain):
                sums[name] += size
    sums[""] = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return sums
