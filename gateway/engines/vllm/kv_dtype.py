"""KV cache dtype that a checkpoint declares and vLLM adopts under `--kv-cache-dtype auto`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.domain import Engine, ModelSpec, Quant
from gateway.engines.common.memory.cache_default import find_cache_default

AUTO = "auto"
# A trait of vLLM from 0.26.0 on: before, a compressed-tensors checkpoint's scheme was written over
# the flag. Source: Attention.__init__ in vllm/model_executor/layers/attention/attention.py
# (0.19.1:230, 0.26.0:285, 0.33.0:288).
FLAG_WINS = "flag_wins_over_kv_scheme"
# MODELOPT_TO_VLLM_KV_CACHE_DTYPE_MAP in vllm/utils/torch_utils.py (0.18.0:56, 0.33.0:78).
_MODELOPT = {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}


def adopted_dtype(spec: ModelSpec, engine: Engine, capability: str | None) -> str:
    """The dtype of the checkpoint, else that of the engine for such a model; `auto`: neither, or
    one that this version has not."""
    result = _declared_dtype(spec.quant)
    if result == AUTO:
        default = find_cache_default(spec, engine, capability)
        result = default.dtype if default else AUTO
    flag = engine.flags.get("kv-cache-dtype")
    return result if flag is None or not flag.choices or result in flag.choices else AUTO


def _declared_dtype(quant: Quant | None) -> str:
    if quant is None:
        return AUTO
    if quant.method.startswith("modelopt"):
        # Only the block of the whole model is looked at.
        return AUTO if quant.place.startswith("text_config") else _modelopt(quant.config)
    # Attention.__init__ in vllm/model_executor/layers/attention/attention.py (0.18.0:230,
    # 0.33.0:287).
    is_compressed = (
        quant.method == "compressed-tensors" and quant.config.get("kv_cache_scheme") is not None
    )
    return "fp8" if is_compressed else AUTO


def prefers_flag(quant: Quant | None, engine: Engine) -> bool:
    """Whether the flag overrides the checkpoint's dtype; it always overrides ModelOpt's
    (resolve_kv_cache_dtype_string)."""
    return quant is not None and (quant.method.startswith("modelopt") or FLAG_WINS in engine.traits)


def dtype_refusal(quant: Quant | None, engine: Engine, dtype: str) -> str:
    """Why the engine refuses a KV cache in `dtype` for the checkpoint; "": it takes it.

    Methods that have scales for the cache take no e5m2, which has none. Source: Attention in
    vllm/model_executor/layers/attention/attention.py (0.18.0:166, 0.26.0:199, 0.33.0:205).
    """
    if dtype != "fp8_e5m2" or quant is None:
        return ""
    is_scaled = quant.method == "fp8" or _declared_dtype(quant) != AUTO
    if quant.method == "compressed-tensors" and FLAG_WINS not in engine.traits:
        is_scaled = True
    if not is_scaled:
        return ""
    return f"{engine.ref} takes no KV cache in fp8_e5m2 for {quant.method} weights, but fp8_e4m3"


def _modelopt(config: Mapping[str, Any]) -> str:
    """get_kv_cache_quant_algo_string in vllm/utils/torch_utils.py."""
    quantization = config.get("quantization", config)
    quantization = quantization if isinstance(quantization, Mapping) else config
    named_blocks = [
        (block, name)
        for name in ("kv_cache_scheme", "kv_cache_quant_algo")
        for block in (quantization, config)
    ]
    algorithm = next((block[name] for block, name in named_blocks if block.get(name)), None)
    if isinstance(algorithm, Mapping):
        if (
            algorithm.get("dynamic") is False
            and algorithm.get("num_bits") == 8
            and algorithm.get("type") == "float"
        ):
            algorithm = "fp8"
        elif algorithm.get("num_bits") == 4 and algorithm.get("type") == "float":
            algorithm = "nvfp4"
    return _MODELOPT.get(algorithm.lower(), AUTO) if isinstance(algorithm, str) else AUTO
