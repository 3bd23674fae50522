"""The images of vLLM's profile run: the memory of a vision tower, and the part that stays.

The engine encodes as many of the largest items as its budget of tokens holds, and keeps their
embeddings during the pass through the language model. Sources: compute_mm_encoder_budget in
vllm/v1/core/encoder_cache_manager.py, MultiModalBudget in vllm/multimodal/encoder_budget.py,
profile_run of both model runners; the sizes of items from the processing class of each model
(vllm/model_executor/models), 0.18.0 to 0.33.0. The largest image is stated in a file of the
processor, which is not read here: the published values of each family count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gateway.domain import ModelSpec, Scalar
from gateway.engines.common.flag_object import flag_object
from gateway.engines.common.media_limits import MEDIA_FLAGS, media_limit
from gateway.engines.common.memory.kv_cache import ITEM_BYTES
from gateway.models.media import read_media
from gateway.models.workload import Workload

# A trait of engine versions: the second model runner profiles encoders as the first does.
PROFILED_ENCODERS = "profiled_encoders"
# Published max_pixels and size of Qwen2-VL to Qwen3.6: 12845056 of patches of 14 pixels, 16777216
# of 16.
_QWEN_TOKENS = 16384
_QWEN_VIDEO_PIXELS = 25165824
# Pairs of frames of a video: half of _MAX_FRAMES_PER_VIDEO in qwen2_vl.py.
_QWEN_FRAME_PAIRS = 7
# The length that videos are counted for where nobody names one.
_USUAL_LENGTH = 32768
_QWEN_VIDEOS = ("qwen2_vl", "qwen2_5_vl")
_QWEN_IMAGES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
# _VIDEO_MAX_FRAMES and _VIDEO_MAX_SOFT_TOKENS in gemma4_mm.py; each frame has 8 more tokens.
_GEMMA_FRAMES = 32
_GEMMA_FRAME_TOKENS = 70
_GEMMA_FRAME_MARKS = 8
# Towers whose MLP has a gate.
_GATED_TOWERS = ("qwen2_5_vl", "gemma4_vision", "pixtral")
_ITEM_LIMIT = 999  # the engine's limit of items in a prompt
# No field of a tower has a larger value.
_FIELD_LIMIT = 10**6


class _Item(NamedTuple):
    """The largest item: tokens of the language model, at least 1, and patches of the tower."""

    tokens: int
    patches: int


class EncoderRun(NamedTuple):
    """Bytes of the encoder's pass, and those that its embeddings keep afterwards. is_known: False
    for a family whose largest item is not known here."""

    peak_bytes: int
    kept_bytes: int
    is_known: bool = True


def leaves_towers(spec: ModelSpec, args: Mapping[str, Scalar]) -> bool:
    """Whether flags give up all media, for which towers are not built: _mark_tower_model in
    vllm/model_executor/models/interfaces.py."""
    if not any(flag in args for flag in MEDIA_FLAGS):
        return False
    media = read_media(spec.config)
    return bool(media) and not any(_media_item_limit(args, kind) for kind in media)


def encoder_run(spec: ModelSpec, args: Mapping[str, Scalar], load: Workload) -> EncoderRun | None:
    """The encoder's part of the profile run; None: it runs none."""
    vision = spec.config.get("vision_config")
    if not isinstance(vision, Mapping) or leaves_towers(spec, args):
        return None
    if str(args.get("skip-mm-profiling", False)).lower() == "true":
        return None
    family = str(spec.config.get("model_type"))
    images = _media_item_limit(args, "image")
    videos = _media_item_limit(args, "video")
    item = _find_item(
        spec=spec, family=family, vision=vision, args=args, images=images, videos=videos
    )
    largest_item = item or _Item(load.batched_tokens, load.batched_tokens * 4)
    budget = max(load.batched_tokens, largest_item.tokens)
    prompt_items = max(1, min(images or videos, _length(spec, args) // largest_item.tokens))
    items = max(1, min(budget // largest_item.tokens, load.seqs * prompt_items))
    outputs = _integer_field(vision, "out_hidden_size", spec.hidden)
    deep_indexes = vision.get("deepstack_visual_indexes")
    layers = 1 + (len(deep_indexes) if isinstance(deep_indexes, list) else 0)
    size = ITEM_BYTES[load.rank.dtype]
    embedding_bytes = items * largest_item.tokens * outputs * layers * size
    is_whole = args.get("mm-encoder-tp-mode") == "data"
    patch_bytes = _patch_values(family, vision, 1 if is_whole else load.rank.tp) * size
    peak_bytes = items * largest_item.patches * patch_bytes + embedding_bytes
    return EncoderRun(peak_bytes, embedding_bytes, item is not None)


def _find_item(
    spec: ModelSpec,
    family: str,
    vision: Mapping[str, Any],
    args: Mapping[str, Scalar],
    images: int,
    videos: int,
) -> _Item | None:
    """The item with the most tokens of the media that the engine takes; None: not known."""
    patch = _integer_field(vision, "patch_size", 14)
    tower = str(vision.get("model_type"))
    if family in (*_QWEN_VIDEOS, *_QWEN_IMAGES):
        merge = _integer_field(vision, "spatial_merge_size", 2)
        token_pixels = (patch * merge) ** 2
        tokens = max(1, _pixels(args, _QWEN_TOKENS * token_pixels) // token_pixels)
        if family in _QWEN_VIDEOS and videos:
            tokens *= max(1, min(_QWEN_FRAME_PAIRS, _length(spec, args) // tokens))
        elif not images:
            tokens = max(1, _QWEN_VIDEO_PIXELS // 2 // token_pixels)
        return _Item(tokens, tokens * merge**2)
    if tower == "gemma4_vision":
        pool = _integer_field(vision, "pooling_kernel_size", 3) ** 2
        if videos:
            frames = _GEMMA_FRAMES
            tokens = frames * (_GEMMA_FRAME_TOKENS + _GEMMA_FRAME_MARKS)
            return _Item(tokens, frames * _GEMMA_FRAME_TOKENS * pool)
        tokens = _integer_field(vision, "default_output_length", 280)
        return _Item(tokens, tokens * pool)
    side = _integer_field(vision, "image_size", 0) // patch
    if family == "gemma3" and side:
        return _Item(_integer_field(spec.config, "mm_tokens_per_image", 256), side**2)
    if tower == "pixtral":
        side = _integer_field(vision, "image_size", 1024) // _integer_field(
            vision, "patch_size", 16
        )
        # Models without the field, such as Llava's, merge nothing: pixtral.py.
        merge = _integer_field(spec.config, "spatial_merge_size", 2 if family == "mistral3" else 1)
        rows = max(1, side // merge)
        return _Item(rows * (rows + 1), max(1, side) ** 2)
    return None


def _patch_values(family: str, vision: Mapping[str, Any], tp: int) -> int:
    """Values for each patch at the widest point of a layer: pixels, the input with its norm and
    positions, and the attention's or the MLP's.

    Public starts, from the rest of their budget: Qwen3.5-9B 13,500 values on an L40S, Qwen2.5-VL-7B
    16,900 on an A100; counted 13,600 and 16,556. The latter's windows reorder the input.
    """
    hidden = _integer_field(vision, "embed_dim", 0) or _integer_field(vision, "hidden_size", 1152)
    inner_size = _integer_field(vision, "intermediate_size", 4 * hidden)
    is_gated = family in _GATED_TOWERS or str(vision.get("model_type")) in _GATED_TOWERS
    pixels = (
        3
        * _integer_field(vision, "patch_size", 14) ** 2
        * _integer_field(vision, "temporal_patch_size", 1)
    )
    inputs = (4 if "window_size" in vision else 3) * hidden
    return inputs + max(6 * hidden, (3 if is_gated else 2) * inner_size) // tp + pixels


def _length(spec: ModelSpec, args: Mapping[str, Scalar]) -> int:
    """Tokens of the longest request, as far as it is named."""
    named_length = args.get("max-model-len")
    return int(named_length) if named_length is not None else min(spec.max_position, _USUAL_LENGTH)


def _media_item_limit(args: Mapping[str, Scalar], kind: str) -> int:
    """Items of this kind in a prompt."""
    limit = media_limit(args, kind)
    return _ITEM_LIMIT if limit is None else limit


def _pixels(args: Mapping[str, Scalar], usual_pixels: int) -> int:
    """Pixels of the largest image."""
    options = flag_object(args.get("mm-processor-kwargs"))
    image_options = options.get("images_kwargs")
    options |= image_options if isinstance(image_options, Mapping) else {}
    size = options.get("size")
    named_pixels = options.get(
        "max_pixels", size.get("longest_edge") if isinstance(size, dict) else None
    )
    return named_pixels if type(named_pixels) is int and named_pixels > 0 else usual_pixels


def _integer_field(fields: Mapping[str, Any], name: str, default: int) -> int:
    value = fields.get(name)
    return value if type(value) is int and 0 < value <= _FIELD_LIMIT else default
