"""The memory of the encoder in vLLM's profile run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.engines.vllm.encoder_profile import EncoderRun, encoder_run, leaves_towers
from gateway.models.rank import Rank
from gateway.models.workload import Workload
from tests.support.published import published_model


def run_of(name: str, batched: int = 2048, tp: int = 1, **args: Any) -> EncoderRun | None:
    flags = {flag.replace("_", "-"): value for flag, value in args.items()}
    load = Workload("cuda", Rank(tp=tp), batched, 256, graphs=True)
    return encoder_run(published_model(name), flags, load)


def tokens_of(name: str, batched: int = 2048, **args: Any) -> float:
    """Kept embeddings in tokens."""
    run, spec = run_of(name, batched, **args), published_model(name)
    assert run is not None
    assert run.is_known
    deep = spec.config["vision_config"].get("deepstack_visual_indexes", ())
    return run.kept_bytes / (spec.hidden * 2 * (1 + len(deep)))


@pytest.mark.parametrize(
    ("name", "batched", "tokens"),
    [
        ("qwen3-vl-8b", 2048, 16384),  # one image, beyond the budget
        ("qwen3.5-9b", 2048, 16384),
        ("qwen2.5-vl-7b", 2048, 32768),  # a video of the usual length
        ("gemma-3-27b", 2048, 8 * 256),
        ("gemma-3-27b", 8192, 32 * 256),
        ("gemma-4-31b", 2048, 32 * 78),  # a video
        ("mistral-small-3.2-24b", 2048, 55 * 56),
        ("mistral-small-3.2-24b", 8192, 2 * 55 * 56),
    ],
)
def test_the_profile_run_encodes_the_largest_items(name: str, batched: int, tokens: int) -> None:
    assert tokens_of(name, batched) == tokens


def test_flags_change_the_items() -> None:
    assert tokens_of("qwen2.5-vl-7b", max_model_len=128000) == 7 * 16384
    assert tokens_of("qwen2.5-vl-7b", max_model_len=8192) == 16384
    no_video = json.dumps({"video": 0})
    assert tokens_of("qwen2.5-vl-7b", max_model_len=128000, limit_mm_per_prompt=no_video) == 16384
    assert tokens_of("gemma-4-31b", limit_mm_per_prompt=no_video) == 7 * 280
    small = json.dumps({"max_pixels": 1024 * 32 * 32})
    assert tokens_of("qwen3-vl-8b", mm_processor_kwargs=small) == 2 * 1024
    sizes = json.dumps({"images_kwargs": {"size": {"longest_edge": 4096 * 32 * 32}}})
    assert tokens_of("qwen3-vl-8b", mm_processor_kwargs=sizes) == 4096
    assert run_of("qwen3-vl-8b", skip_mm_profiling=True) is None


def test_ranks_share_the_tower_but_not_the_patches() -> None:
    single_run, two = run_of("qwen3-vl-8b"), run_of("qwen3-vl-8b", tp=2)
    assert single_run is not None
    assert two is not None
    assert single_run.peak_bytes / 2 < two.peak_bytes < single_run.peak_bytes
    assert run_of("qwen3-vl-8b", tp=2, mm_encoder_tp_mode="data") == single_run


def test_the_largest_image_of_a_foreign_family_is_not_known() -> None:
    config = published_model("gemma-3-27b").config
    spec = published_model("gemma-3-27b").evolve(config=config | {"model_type": "unheard"})
    run = encoder_run(spec, {}, Workload("cuda", Rank(), 2048, 256, graphs=True))
    assert run is not None
    assert not run.is_known


def test_media_are_given_up_by_flags() -> None:
    spec = published_model("qwen3-vl-8b")
    nothing = json.dumps({"image": 0, "video": {"count": 0}})
    assert leaves_towers(spec, {"limit-mm-per-prompt": nothing})
    assert leaves_towers(spec, {"language-model-only": True})
    assert not leaves_towers(spec, {"limit-mm-per-prompt": json.dumps({"image": 0})})
    assert not leaves_towers(published_model("qwen3-8b"), {"language-model-only": True})
    assert run_of("qwen3-vl-8b", language_model_only=True) is None
    assert run_of("qwen3-8b") is None


@pytest.mark.parametrize(
    ("name", "outer", "vision"),
    [
        ("mistral-small-3.2-24b", {}, {"image_size": 16, "patch_size": 14}),
        ("mistral-small-3.2-24b", {"spatial_merge_size": 1000}, {}),
        ("mistral-small-3.2-24b", {"spatial_merge_size": 10**400}, {}),
        ("mistral-small-3.2-24b", {}, {"image_size": 10**400, "patch_size": None}),
        ("gemma-3-27b", {"mm_tokens_per_image": 10**400}, {"image_size": "896"}),
        ("qwen3-vl-8b", {}, {"patch_size": 4000, "spatial_merge_size": 10**300}),
    ],
)
@pytest.mark.parametrize("limit", [None, {"image": 0}])
def test_odd_fields_give_a_finite_run(
    name: str, outer: dict[str, Any], vision: dict[str, Any], limit: dict[str, int] | None
) -> None:
    spec = published_model(name)
    tower = spec.config["vision_config"] | vision
    spec = spec.evolve(config={**spec.config, **outer, "vision_config": tower})
    args = {"limit-mm-per-prompt": json.dumps(limit)} if limit else {}
    run = encoder_run(spec, args, Workload("cuda", Rank(), 2048, 256, graphs=True))
    assert run is None or 0 < run.kept_bytes <= run.peak_bytes < 2**100


def test_a_pixtral_tower_of_llava_merges_no_patches() -> None:
    """Its config.json has no `spatial_merge_size`."""
    spec = published_model("mistral-small-3.2-24b")
    config = {name: value for name, value in spec.config.items() if name != "spatial_merge_size"}
    tower = {"model_type": "pixtral"}
    spec = spec.evolve(config={**config, "model_type": "llava", "vision_config": tower})
    run = encoder_run(spec, {}, Workload("cuda", Rank(), 2048, 256, graphs=True))
    assert run is not None
    assert run.is_known
    assert run.kept_bytes == 64 * 65 * spec.hidden * 2
