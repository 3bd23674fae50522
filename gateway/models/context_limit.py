"""The longest input of a model, as each engine reads it from config.json. Pure.

    context_limit({"model_type": "whisper", "max_target_positions": 448})
        -> ContextLimit(448, "max_target_positions in config.json")

Sources: derive_max_model_len_and_key of vllm/transformers_utils/model_arch_config_convertor.py and
_get_and_verify_max_len of vllm/config/model.py (0.33.0; YaRN also 0.26.0); get_context_length of
sglang/srt/utils/hf_transformers/common.py (0.5.23).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from gateway.domain import ModelSpec
from gateway.models.default_lengths import DEFAULTS, OUTER_LENGTHS
from gateway.models.families import text_config
from gateway.models.families.config import Fields

# Traits of engine versions. SGLang takes the first of its fields, vLLM the smallest of all.
FIRST_LENGTH = "first_length"
# vLLM up to 0.26.0: YaRN multiplies the original length.
YARN_SCALES = "yarn_scales"

# The field that wins over the others in vLLM.
_OVERRIDE = "model_max_length"
_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    _OVERRIDE,
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
    "max_trained_positions",
)
_ORDERED_FIELDS = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    _OVERRIDE,
    "max_position_embeddings",
)
# Both engines take this length where no field names one.
_DEFAULT_LENGTH = 2048
_ENDLESS_LENGTH = 10**12
# Kinds of RoPE whose factor is part of the length already.
_SCALED_ROPE_KINDS = {"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"}
# Larger factors are mistakes, and infinity is not a length.
_MAX_FACTOR = 10**6
# Positions begin after that of the padding token, which shortens the context. Source:
# vllm/model_executor/models/roberta.py.
_OFFSETS = {"roberta": 2, "xlm-roberta": 2, "mpnet": 2}


class ContextLimit(NamedTuple):
    """Tokens, and where the number comes from. is_open: the engine takes a longer context if
    given."""

    tokens: int
    source: str
    is_open: bool = False


def context_limit(
    config: Mapping[str, Any], source: str = "", traits: Collection[str] = ()
) -> ContextLimit:
    """The limit for an engine version of these traits; without traits for the newest vLLM.

    source: the model, for errors. Raises BadModel for a length that is not a positive number.
    """
    top = Fields(config, source)
    text = text_config.read_text_config(top)
    family = str(config.get("model_type"))
    named_lengths = _lengths(text, family)
    if not named_lengths:
        return ContextLimit(
            _DEFAULT_LENGTH,
            "the engine's default; no file names a limit",
            FIRST_LENGTH not in traits,
        )
    if FIRST_LENGTH in traits:
        ordered_lengths = [
            named_lengths[field] for field in _ORDERED_FIELDS if field in named_lengths
        ]
        limit = ordered_lengths[0] if ordered_lengths else min(named_lengths.values())
        limit = _scale_for_sglang(limit, text.fields)
    else:
        limit = named_lengths.get(_OVERRIDE) or min(named_lengths.values())
        limit = _scale_for_vllm(limit, text.fields, traits)
    if offset := _OFFSETS.get(family, 0):
        source_text = f"{limit.source}, less {offset} positions of padding"
        limit = ContextLimit(max(1, limit.tokens - offset), source_text)
    return limit


def add_context_limit(spec: ModelSpec, traits: Collection[str]) -> ModelSpec:
    """The model with the context limit that an engine version of these traits reads."""
    limit = context_limit(spec.config, spec.source, traits) if spec.config else None
    if limit is None or (spec.sentence_limit or limit.tokens) < limit.tokens:
        return spec
    source_text = limit.source.replace("config.json", spec.sources.get("config", "config.json"))
    if (limit.tokens, source_text, limit.is_open) == (
        spec.max_position,
        spec.sources.get("max_position"),
        spec.has_open_limit,
    ):
        return spec
    return spec.evolve(
        max_position=limit.tokens,
        has_open_limit=limit.is_open,
        sources={**spec.sources, "max_position": source_text},
    )


def _lengths(text: text_config.Text, family: str) -> dict[str, ContextLimit]:
    """The lengths by field: of the text model's part of config.json, of transformers' class of that
    part, or of the rest of the file."""
    inner_fields = text.inner_fields
    kind = (
        inner_fields.get("model_type")
        if isinstance(inner_fields.get("model_type"), str)
        else family
    )
    default_lengths = DEFAULTS.get(str(kind), {})
    if text.is_nested and family in OUTER_LENGTHS:
        kind = family
        default_lengths = OUTER_LENGTHS[family]
    defaults = {
        field: length for field, length in default_lengths.items() if field not in inner_fields
    }
    lengths = _configured_limits(Fields(inner_fields, text.fields.source))
    lengths |= {
        field: ContextLimit(length, f"transformers' default of {field} for {kind}")
        for field, length in defaults.items()
    }
    return lengths or _configured_limits(text.fields)


def _configured_limits(fields: Fields) -> dict[str, ContextLimit]:
    lengths = {field: value for field in _FIELDS if (value := fields.config.get(field)) is not None}
    return {
        field: ContextLimit(fields.integer(field), f"{field} in config.json")
        for field, value in lengths.items()
        # Tokenizers write such a number where they know no limit.
        if not (isinstance(value, int) and value > _ENDLESS_LENGTH)
    }


def _scale_for_sglang(limit: ContextLimit, fields: Fields) -> ContextLimit:
    """The length times the factor of the model's RoPE, where SGLang multiplies them."""
    rope = _rope(fields)
    if rope is None:
        return limit
    name, block = rope
    kind = block.get("rope_type", block.get("type"))
    if "original_max_position_embeddings" in block or kind == "llama3":
        return limit
    return _multiplied_limit(limit, _positive_number(block.get("factor")) or 1.0, name)


def _scale_for_vllm(limit: ContextLimit, fields: Fields, traits: Collection[str]) -> ContextLimit:
    """The length times the factor of the model's RoPE, where vLLM multiplies them."""
    rope = _rope(fields)
    if rope is None:
        return limit
    name, block = rope
    blocks = [
        layer_block for layer_block in block.values() if isinstance(layer_block, Mapping)
    ] or [block]
    for layer_block in blocks:
        kind = str(layer_block.get("rope_type", layer_block.get("type")))
        factor = _positive_number(layer_block.get("factor")) or 1.0
        original = layer_block.get("original_max_position_embeddings")
        if kind == "yarn" and YARN_SCALES in traits and type(original) is int and original > 0:
            return _multiplied_limit(ContextLimit(original, f"{name} in config.json"), factor, "")
        if kind not in _SCALED_ROPE_KINDS and factor != 1.0:
            return _multiplied_limit(limit, factor, name)
    return limit


def _rope(fields: Fields) -> tuple[str, Mapping[str, Any]] | None:
    """The field that holds the model's RoPE, and its content; None: nothing that scales."""
    if "gemma3" in str(fields.config.get("model_type")):
        return None
    return next(
        (
            (name, block)
            for name in ("rope_parameters", "rope_scaling")
            if isinstance(block := fields.config.get(name), Mapping) and block
        ),
        None,
    )


def _multiplied_limit(limit: ContextLimit, factor: float, name: str) -> ContextLimit:
    if factor == 1.0:
        return limit
    source_text = f"{limit.source}, times {factor:g}" + (f" of {name}" if name else "")
    return ContextLimit(max(1, int(limit.tokens * factor)), source_text)


def _positive_number(value: object) -> float | None:
    """The value, if it is a number that a context can be multiplied with."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value < _MAX_FACTOR else None
