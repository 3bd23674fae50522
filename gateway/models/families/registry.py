"""The table of model families: config.json -> what an engine builds, by one function for each
    family.

A family is a function `(fields, family, path) -> Blueprint`: `fields` are those of the text model
(`text_config`, else the whole config.json), `family` is its model_type, `path` is what the engine
calls the module that holds the text model's layers and embeddings ("model", or
"language_model.model"). Parts that families share are in parts.py; no family imports another. It
raises BadModel, and nothing else, for fields that are missing or cannot be. An output head is
always in it unless it is tied, under a name that ends in `lm_head.weight`: pooling, which drops it,
is not the family's concern.

    FAMILIES["llama"](Fields(config, "m"), "llama", "model") -> Blueprint(linears, attention,
    others)

A model that nests its text model is in NESTED by its outer model_type: where the text model is, the
function `(fields of the whole config.json) -> Blueprint` of what is around it (a vision tower, its
projector), and how the checkpoint's module paths differ from the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gateway.errors import BadModel
from gateway.models.families import (
    decoder,
    dense,
    encoder,
    gemma,
    gemma_towers,
    general,
    hybrid,
    latent,
    mamba,
    mixture,
    sparse_moe,
    vision,
)
from gateway.models.families.blueprint import Blueprint
from gateway.models.families.config import Fields

Family = Callable[[Fields, str, str], Blueprint]
# Engine versions build these differently: a trait names how, beside the family that knows it.
Varied = Callable[[Fields, str, str, Collection[str]], Blueprint]
Renames = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Nested:
    """`outer_ties`: whether the outer config says that the output head is tied
        (VllmConfig.with_hf_config does so for most).
    `plain`: a trait of engine versions that never quantize what is around the text model."""

    path: str
    around: Callable[[Fields], Blueprint]
    renames: Renames = ()
    outer_ties: bool = True
    plain: str = ""


def qwen2_vl(fields: Fields, _: str, path: str) -> Blueprint:
    """The text model, and in a config.json that does not nest it the tower too."""
    if "vision_config" not in fields.config:
        return dense.dense(fields, "qwen2", path)
    text, tower = dense.dense(fields, "qwen2", "language_model.model"), vision.qwen2_tower(fields)
    return Blueprint(
        text.linears + tower.linears, text.attention + tower.attention, text.others + tower.others
    )


FAMILIES: Mapping[str, Family] = {
    **dense.FAMILIES,
    **sparse_moe.FAMILIES,
    **hybrid.FAMILIES,
    **latent.FAMILIES,
    **dict.fromkeys(("qwen2_5_vl", "qwen2_5_vl_text"), qwen2_vl),
    **mamba.FAMILIES,
    **encoder.FAMILIES,
    **decoder.FAMILIES,
    **mixture.FAMILIES,
}
VARIED: Mapping[str, Varied] = {**gemma.VARIED, **latent.VARIED, **encoder.VARIED}
_PATH = "language_model.model"
NESTED: Mapping[str, Nested] = {
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_moe"),
        Nested(_PATH, vision.qwen_vision, vision.QWEN3_PATHS, outer_ties=False),
    ),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe"), Nested(_PATH, vision.qwen3_tower, vision.QWEN3_PATHS)
    ),
    "qwen2_5_vl": Nested(_PATH, vision.qwen2_tower, vision.QWEN2_PATHS),
    "mistral3": Nested(_PATH, vision.pixtral_tower, vision.MISTRAL_PATHS),
    "gemma3": Nested(_PATH, vision.siglip, vision.SIGLIP_PATHS),
    "gemma4": Nested(
        _PATH, gemma_towers.gemma_towers, gemma_towers.PATHS, plain=gemma_towers.PLAIN
    ),
}
# Module paths of the checkpoint that the engine's model class names otherwise (hf_to_vllm_mapper).
RENAMES: Mapping[str, Renames] = {
    "gpt_oss": ((".self_attn.", ".attn."),),
    **{family: nested.renames for family, nested in NESTED.items()},
}


# Classes of engines that build other model_types as one of these families. Source:
# vllm/model_executor/models/registry.py.
_CLASSES = {
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
}
_CLASSES |= {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


def blueprint_of(config: Mapping[str, Any], source: str, traits: Collection[str] = ()) -> Blueprint:
    """What an engine of these traits builds for this config.json; `guessed` where no reader knows
    the family.

    Raises BadModel naming the field that is missing or cannot be.
    """
    found = _known(config, source, traits)
    if found is not None:
        return found
    top = Fields(config, source)
    fields, nested = general.text_of(top)
    path = _PATH if nested else "model"
    # A text model of a known family is read exactly, whatever is around it.
    inner = None
    if nested:
        try:
            inner = _whole(fields, fields.word("model_type"), path, traits)
        except BadModel:
            inner = None  # not all that this family has
    text, around = inner or general.decoder(fields, path), general.towers(top)
    return Blueprint(
        text.linears,
        text.attention + around.attention,
        text.others + around.others,
        text.guessed + around.guessed or ("its parts",),
    )


def _known(config: Mapping[str, Any], source: str, traits: Collection[str]) -> Blueprint | None:
    top = Fields(config, source)
    outer = top.word("model_type")
    if outer not in FAMILIES and outer not in VARIED and outer not in NESTED:
        outer = _CLASSES.get(top.first_word("architectures"), outer)
    if config.get("text_config") is None:
        return _whole(top, outer, "model", traits)
    text, nested = top.mapping("text_config", {}), NESTED.get(outer)
    if nested is None or "model_type" not in text:
        return None
    if nested.outer_ties and "tie_word_embeddings" in config:
        text = {**text, "tie_word_embeddings": config["tie_word_embeddings"]}
    fields = Fields(text, source)
    inner = _whole(fields, fields.word("model_type"), nested.path, traits)
    if inner is None:
        return None
    around = nested.around(top)
    linears = around.linears
    if nested.plain in traits:
        linears = tuple(replace(layer, quantizable=False) for layer in linears)
    return Blueprint(
        inner.linears + linears, inner.attention + around.attention, inner.others + around.others
    )


def varied(config: Mapping[str, Any]) -> bool:
    """Whether engine versions may build this config.json differently: its family, or what nests it,
    asks for traits."""
    text = config.get("text_config")
    names = [fields.get("model_type") for fields in (config, text) if isinstance(fields, Mapping)]
    return any(
        isinstance(name, str) and (name in VARIED or (name in NESTED and NESTED[name].plain))
        for name in names
    )


def completed(fields: Fields) -> Fields:
    """With the sizes that a published config.json leaves to the configuration classes of
    transformers."""
    family = fields.config.get("model_type")
    defaults = gemma.DEFAULTS.get(family) if isinstance(family, str) else None
    if defaults is None:
        return fields
    named = {
        name: value
        for name, value in fields.config.items()
        if value is not None or name not in defaults
    }
    return Fields({**defaults, **named}, fields.source)


def _whole(given: Fields, family: str, path: str, traits: Collection[str]) -> Blueprint | None:
    fields = completed(given)
    if family in VARIED:
        return VARIED[family](fields, family, path, traits)
    build = FAMILIES.get(family)
    return None if build is None else build(fields, family, path)
