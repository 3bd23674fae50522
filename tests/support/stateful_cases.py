"""Models with states for each request, with engines and machines."""

from __future__ import annotations

from typing import Any

from gateway.domain import ModelSpec
from gateway.profiles.profile_tables import shipped_profiles
from gateway.profiles.profiles import Profiles
from tests.conformance.layer_cases import QUANTS
from tests.support.paths import MODELS
from tests.support.published import config, model_from_config
from tests.support.versions import SGLANG, VLLM
from tests.unit.models.families.test_general import shape

PROFILES = Profiles()


REFS = [*(f"vllm=={version}" for version in VLLM), *(f"sglang=={version}" for version in SGLANG)]


ENGINES = [PROFILES.engine(ref) for ref in REFS]


RULES = PROFILES.rules(ENGINES)


MACHINES = {
    path.stem: PROFILES.hardware(path.stem)
    for path in sorted((shipped_profiles() / "hardware").glob("*.json"))
}


_TEXT = config("qwen3.5-9b")["text_config"]


QWEN_27B: dict[str, Any] = config(
    "qwen3.5-9b",
    text_config=_TEXT
    | {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "linear_num_value_heads": 48,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 16,
        "mamba_ssm_dtype": "float32",
    },
    vision_config=config("qwen3.5-9b")["vision_config"] | {"out_hidden_size": 5120},
)


# Families that are read by the names of fields alone.
ARCHITECTURES = {
    "kimi-linear-48b": "KimiLinearForCausalLM",
    "lfm2-1.2b": "Lfm2ForCausalLM",
    "lfm2-8b-a1b": "Lfm2MoeForCausalLM",
}


def spec_of(name: str, config: dict[str, Any]) -> ModelSpec:
    return model_from_config(config, source=name)


def cases() -> dict[str, ModelSpec]:
    """All models with recurrent layers: published ones, some of them quantized, and those of
    families without a reader of their own."""
    specs = [spec_of(path.stem, config(path.stem)) for path in sorted(MODELS.glob("*.json"))]
    specs += [
        spec_of(name, {"architectures": [ARCHITECTURES[name]], **shape(name)})
        for name in ARCHITECTURES
    ]
    specs.append(spec_of("qwen-27b", QWEN_27B))
    for quant in ("fp8-block", "modelopt-nvfp4", "w4a16"):
        block = {"quantization_config": QUANTS[quant]}
        specs.append(spec_of(f"qwen-27b {quant}", QWEN_27B | block))
        specs.append(spec_of(f"qwen3.6-35b {quant}", config("qwen3.6-35b-a3b", **block)))
    return {
        spec.source: spec
        for spec in specs
        if any(group.kind == "recurrent" for group in spec.attention)
    }


CASES = cases()
