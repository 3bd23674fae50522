"""The pool of a sparse attention in SGLang: rows of latents, keys of the index, its dtype."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain import AttentionGroup
from gateway.engines.sglang.attention import describe_model
from gateway.engines.sglang.kv_dtype import adopted_dtype
from gateway.engines.sglang.sparse_index import shared_indices, stored_groups
from tests.support.published import published_model
from tests.support.token_pools import PROFILES, pool
from tests.support.versions import NEWEST_SGLANG, SGLANG

GIB = 1024**3
LATENT = AttentionGroup(
    kind="mla", layers=78, heads=64, kv_heads=1, head_dim=576, value_dim=512, index_dim=128
)
GLM = "GlmMoeDsaForCausalLM"


def token_bytes(
    capability: str,
    kv_dtype: str = "fp8_e4m3",
    architecture: str = GLM,
    version: str = NEWEST_SGLANG,
    config: dict[str, Any] | None = None,
) -> int:
    rules = pool("llama-3.1-8b", version).rules
    model = describe_model((LATENT,), architecture, kv_dtype, capability, 80 * GIB)
    groups = stored_groups(rules, (LATENT,), model, config or {})
    element = 1 if kv_dtype.startswith("fp8") else 2
    keys = sum(group.layers * (132 if group.index_dim else 0) for group in groups)
    return keys + sum(group.layers * group.head_dim * element for group in groups)


def test_glm_5_2_keeps_fp8_latents_without_scales_on_blackwell_workstations() -> None:
    """464,768 tokens in 23.91 GiB on each of eight RTX PRO 6000 (SemiAnalysisAI/InferenceX pull
    request 2335): FP8 latents without scales."""
    bytes_of_token = 23.91 * GIB / 464_768
    assert token_bytes("12.0", version="0.5.10.post1") == 78 * (576 + 132) == 55_224
    assert abs(bytes_of_token / 55_224 - 1) < 0.001


def test_fp8_latents_have_scales_where_the_kernel_reads_them() -> None:
    assert token_bytes("10.0") == 78 * (576 + 132)
    assert token_bytes("9.0") == 78 * (512 + 4 * 4 + 64 * 2 + 132)
    assert token_bytes("12.0") == token_bytes("9.0")
    assert token_bytes("12.0", architecture="DeepseekV32ForCausalLM") == token_bytes("10.0")
    assert token_bytes("9.0", "bfloat16") == 78 * (2 * 576 + 132)


@pytest.mark.parametrize(
    ("config", "shared"),
    [
        ({}, 0),
        ({"index_topk_freq": 4}, 57),  # 0, 1, 5, 9, ... choose anew
        ({"index_topk_freq": 4, "index_skip_topk_offset": 1}, 58),  # 0, 4, 8, ...
        ({"index_topk_pattern": "FS" * 39}, 39),
        ({"indexer_types": ["full", "shared", "shared"] * 26}, 52),
        ({"index_topk_freq": 0, "indexer_types": 5}, 0),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 0}, 57),  # as absent
        ({"cli_factor": 2, "index_topk_pattern": "F" * 78}, 39),
        ({"cli_factor": None, "indexer_types": "shared"}, 0),
    ],
)
def test_layers_that_reuse_an_index_keep_no_keys(config: dict[str, Any], shared: int) -> None:
    assert shared_indices(config, range(78)) == shared
    assert token_bytes("10.0", config=config) == 78 * 576 + (78 - shared) * 132
    assert token_bytes("10.0", config=config, version="0.5.10.post1") == 78 * (576 + 132)


@pytest.mark.parametrize("version", SGLANG)
def test_a_sparse_model_has_the_cache_of_its_gpu(version: str) -> None:
    engine, spec = PROFILES.engine(f"sglang=={version}"), published_model("deepseek-v3.2")
    assert adopted_dtype(spec, engine, "9.0") == "bfloat16"
    assert adopted_dtype(spec, engine, "10.0") == adopted_dtype(spec, engine, "12.0") == "fp8_e4m3"
    assert adopted_dtype(published_model("deepseek-v3"), engine, "10.0") == "auto"
