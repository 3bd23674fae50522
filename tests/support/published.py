"""Published model configs (tests/models/*.json, reduced to fields that decide shapes), and odd ones
for property tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from gateway.domain import ModelSpec, Task
from gateway.models.spec import read_model
from gateway.models.tensor import Tensor
from gateway.profiles.profiles import Profiles
from tests.support.paths import MODELS
from tests.support.versions import VLLM

# Differences in the layers that each vLLM version builds, from its profile.
TRAITS = {version: Profiles().engine(f"vllm=={version}").traits for version in VLLM}


def config(name: str, **changes: Any) -> dict[str, Any]:
    """The config, with changes; a change to None removes the field."""
    document = json.loads((MODELS / f"{name}.json").read_text()) | changes
    return {
        key: value for key, value in document.items() if value is not None or key not in changes
    }


def model_from_config(
    fields: Mapping[str, Any],
    *,
    source: str = "m",
    tensors: Mapping[str, Tensor] | None = None,
    file_bytes: int | None = None,
    task: Task | None = None,
    structure: str = "",
) -> ModelSpec:
    """The model of a config.json.

    tensors: those of the headers of its files; None: the config alone is known.
    """
    return read_model(source, None, fields, tensors, file_bytes, (), task, structure)


def published_model(name: str, task: Task | None = None, **changes: Any) -> ModelSpec:
    """The model from its config alone."""
    return model_from_config(config(name, **changes), source=name, task=task)


def tensors(shapes: dict[str, tuple[int, ...]], dtype: str = "BF16") -> dict[str, Tensor]:
    return {name: Tensor(dtype, shape) for name, shape in shapes.items()}


# Fields that decide the kind of a model, besides those of the published ones.
OTHERS = """
compression_config dtype is_encoder_decoder kv_lora_rank layer_types mamba_d_state multi_query
n_embd n_head n_layer quantization_config sliding_window_pattern text_config
"""
FIELDS = [
    *sorted({key for path in MODELS.glob("*.json") for key in json.loads(path.read_text())}),
    *OTHERS.split(),
]
WORDS = [
    "llama",
    "qwen3_moe",
    "bert",
    "gemma3",
    "bfloat16",
    "torch.float16",
    "full_attention",
    "sliding_attention",
    "\ud800",
]
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 200)
    | st.sampled_from([0, -1, 2**31, 2**63, 10**400, 10**12])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(WORDS)
)
JSON = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), inner, max_size=5)
    ),
    max_leaves=8,
)
# Whole nonsense finds little, since reading stops at the first wrong field: mostly, a good config
# with a few fields changed.
_NEARLY = st.builds(
    lambda name, changes: config(name) | changes,
    st.sampled_from(sorted(path.stem for path in MODELS.glob("*.json"))),
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
)
CONFIGS = st.one_of(
    st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), JSON, max_size=20),
    _NEARLY,
    _NEARLY,
)
_MODULES = (
    "model layers 0 17 experts embed_tokens k_proj v_proj q_proj o_proj lm_head w1 down_proj bias"
    " weight"
)
_PARTS = st.sampled_from(_MODULES.split())
TENSORS = st.dictionaries(
    st.lists(_PARTS, max_size=6).map(".".join) | st.text(max_size=12),
    st.builds(
        Tensor,
        st.sampled_from(["BF16", "F32", "F16", "F8_E4M3", "I32", "U8", "F64"])
        | st.text(max_size=6),
        st.lists(st.integers(0, 70) | st.sampled_from([2**31, 2**62, 2**63 - 1]), max_size=5).map(
            tuple
        ),
    ),
    max_size=8,
)
