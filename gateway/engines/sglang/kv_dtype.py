"""KV cache dtype under `--kv-cache-dtype auto` in SGLang: its own for a model, else that of the
checkpoint. Pure.

Sources: configure_kv_cache_dtype in srt/model_executor/model_runner.py:1902 of 0.5.10 and
srt/mem_cache/kv_cache_dtype.py:60 of 0.5.23; from_config of the classes in
srt/layers/quantization/modelopt_quant.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.domain import Engine, ModelSpec, Quant
from gateway.engines.common.memory.cache_default import find_cache_default
from gateway.models.quantization_block import FILE

AUTO = "auto"
_FP8 = "fp8_e4m3"
# A trait of SGLang 0.5.23: compressed-tensors checkpoints declare a cache dtype too
# (compressed_tensors.py:143).
COMPRESSED_TRAIT = "kv_of_compressed_tensors"


def adopted_dtype(spec: ModelSpec, engine: Engine, capability: str | None) -> str:
    """The version's own dtype for the model, else that of the checkpoint; `auto`: neither."""
    default = find_cache_default(spec, engine, capability)
    return default.dtype if default else declared_dtype(spec.quant, engine)


def declared_dtype(quant: Quant | None, engine: Engine) -> str:
    """`auto` where the checkpoint declares none, or none that this version adopts."""
    if quant is None:
        return AUTO
    method = quant.method.lower()
    if method.startswith("modelopt"):
        return _modelopt(quant)
    scheme = quant.config.get("kv_cache_scheme")
    if method == "compressed-tensors" and COMPRESSED_TRAIT in engine.traits:
        return _FP8 if isinstance(scheme, Mapping) and _is_static_fp8(scheme) else AUTO
    return AUTO


def _modelopt(quant: Quant) -> str:
    """A scheme in the block decides before the algorithm by name."""
    # Inside config.json the deeper form is not looked into.
    fields = quant.fields if quant.place == FILE else quant.config
    scheme = None if quant.place == FILE else fields.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return _FP8 if (scheme.get("type"), scheme.get("num_bits")) == ("float", 8) else AUTO
    if isinstance(scheme, str) and "FP4" in str(fields.get("quant_algo")):
        return _FP8 if scheme.strip().upper() in ("FP8", "FLOAT8") else AUTO
    return _FP8 if str(fields.get("kv_cache_quant_algo")).upper() == "FP8" else AUTO


def _is_static_fp8(scheme: Mapping[str, object]) -> bool:
    """CompressedTensorsKVCacheMethod.is_supported_scheme (compressed_tensors.py:1276)."""
    numbers = scheme.get("type"), scheme.get("num_bits"), scheme.get("strategy")
    return (
        numbers == ("float", 8, "tensor")
        and bool(scheme.get("symmetric", True))
        and not scheme.get("dynamic", False)
    )
