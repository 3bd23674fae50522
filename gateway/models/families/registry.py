"""The table of model families: one function from config.json to a Blueprint for each family.

A family is a function `(fields, family, path) -> Blueprint`:

* `fields`: the config of the text model (`text_config`, else the whole config.json);
* `family`: its model_type;
* `path`: the engine's name of the module with the text model's layers and embeddings ("model", or
  "language_model.model").

Shared parts are in parts.py; no family imports another. A family raises only BadModel, for missing
or wrong fields. An output head that is not tied is part of the blueprint, under a name that ends in
`lm_head.weight`, also where pooling drops it.

    FAMILIES["llama"](Fields(config, "m"), "llama", "model") -> Blueprint

NESTED_FAMILIES has the models that nest their text model, by outer model_type: the path of the text
model, the function `(fields of the whole config.json) -> Blueprint` of the vision tower and
projector, and the module paths that differ between checkpoint and engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from gateway.domain.record import FrozenRecord
from gateway.errors import BadModel
from gateway.models.families import (
    decoder,
    dense,
    encoder,
    gemma,
    gemma_towers,
    hybrid,
    latent,
    mamba,
    mixture,
    sparse_moe,
    vision,
)
from gateway.models.families.blueprint import Blueprint
from gateway.models.families.config import Fields
from gateway.models.families.model_structure import ATTENTION, structure_blueprint
from gateway.models.families.text_config import read_text_config

Family = Callable[[Fields, str, str], Blueprint]
# Families that engine versions build differently. A trait of the engine version names the way.
Varied = Callable[[Fields, str, str, Collection[str]], Blueprint]
Renames = tuple[tuple[str, str], ...]


class NestedFamily(FrozenRecord, frozen=True):
    """A model that nests its text model.

    outer_ties: the outer config decides whether the output head is tied, as
        VllmConfig.with_hf_config does for most models.
    plain: a trait of engine versions that never quantize the modules around the text model.
    """

    path: str
    around: Callable[[Fields], Blueprint]
    renames: Renames = ()
    outer_ties: bool = True
    plain: str = ""


def qwen2_vl(fields: Fields, _: str, path: str) -> Blueprint:
    """The text model, with the tower where config.json does not nest the text model."""
    if "vision_config" not in fields.config:
        return dense.dense(fields, "qwen2", path)
    text = dense.dense(fields, "qwen2", "language_model.model")
    tower = vision.qwen2_tower(fields)
    return Blueprint(
        text.linears + tower.linears,
        text.attention + tower.attention,
        text.parameters + tower.parameters,
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
VARIED_FAMILIES: Mapping[str, Varied] = {
    **gemma.VARIED_FAMILIES,
    **latent.VARIED_FAMILIES,
    **encoder.VARIED_FAMILIES,
}
_PATH = "language_model.model"
NESTED_FAMILIES: Mapping[str, NestedFamily] = {
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_moe"),
        NestedFamily(_PATH, vision.qwen_vision, vision.QWEN3_PATHS, outer_ties=False),
    ),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe"), NestedFamily(_PATH, vision.qwen3_tower, vision.QWEN3_PATHS)
    ),
    "qwen2_5_vl": NestedFamily(_PATH, vision.qwen2_tower, vision.QWEN2_PATHS),
    "mistral3": NestedFamily(_PATH, vision.pixtral_tower, vision.MISTRAL_PATHS),
    "gemma3": NestedFamily(_PATH, vision.siglip, vision.SIGLIP_PATHS),
    "gemma4": NestedFamily(
        _PATH, gemma_towers.gemma_towers, gemma_towers.PATHS, plain=gemma_towers.PLAIN_TOWERS_TRAIT
    ),
}
# Module paths that differ between checkpoint and engine (hf_to_vllm_mapper).
RENAMES: Mapping[str, Renames] = {
    "gpt_oss": ((".self_attn.", ".attn."),),
    "nemotron_h": (("backbone.", "model."),),
    **{family: nested.renames for family, nested in NESTED_FAMILIES.items()},
}


# Architectures that engines build as one of these families, under any model_type. Source:
# vllm/model_executor/models/registry.py.
_CLASSES = {
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "InternLM3ForCausalLM": "llama",
    "IQuestCoderForCausalLM": "llama",
    "LLaMAForCausalLM": "llama",
    "LlamaForCausalLM": "llama",
    "Ministral3ForCausalLM": "mistral",
    "MistralForCausalLM": "mistral",
    "TeleChat3ForCausalLM": "llama",
}
_CLASSES |= {
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
# Text models within a larger one mostly name no class: their model_type decides, by the table
# MODEL_FOR_CAUSAL_LM_MAPPING_NAMES of transformers (models/auto/modeling_auto.py).
_TEXT_CLASSES = {"ministral3": "Ministral3ForCausalLM"}


def build_blueprint(
    config: Mapping[str, Any], source: str, traits: Collection[str] = (), structure: str = ""
) -> Blueprint:
    """The blueprint of this config.json for an engine of these traits.

    structure: JSON text of the layers that an engine builds, for families without a reader here. An
    unknown family gives a blueprint with `guessed` parts. Raises BadModel that names the missing or
    wrong field.
    """
    exact_blueprint = _exact_blueprint(config, source, traits)
    if exact_blueprint is not None:
        return exact_blueprint
    top = Fields(config, source)
    if structure:
        with suppress(BadModel):
            learned_blueprint = structure_blueprint(structure, top)
            if ATTENTION not in learned_blueprint.guessed:
                return learned_blueprint
            return learned_blueprint.evolve(attention=_guessed_blueprint(top, traits).attention)
    return _guessed_blueprint(top, traits)


def _guessed_blueprint(top: Fields, traits: Collection[str]) -> Blueprint:
    """A blueprint from the usual names of fields, with a text model of a known family inside."""
    from gateway.models.families import general  # Most models are of known families.

    fields, nested, _ = read_text_config(top)
    path = _PATH if nested else "model"
    # A text model of a known family is exact inside any outer model.
    inner_blueprint = None
    if nested:
        try:
            inner_blueprint = _family_blueprint(fields, fields.word("model_type"), path, traits)
        except BadModel:
            inner_blueprint = None  # fields of the family are missing
    text = inner_blueprint or general.decoder(fields, path)
    outer_blueprint = general.towers(top)
    return Blueprint(
        text.linears,
        text.attention + outer_blueprint.attention,
        text.parameters + outer_blueprint.parameters,
        text.guessed + outer_blueprint.guessed or ("its parts",),
    )


def _exact_blueprint(
    config: Mapping[str, Any], source: str, traits: Collection[str]
) -> Blueprint | None:
    """The blueprint of a known family; None: unknown."""
    top = Fields(config, source)
    outer_type = _family_name(top)
    if config.get("text_config") is None:
        return _family_blueprint(top, outer_type, "model", traits)
    text = top.mapping("text_config", {})
    nested = NESTED_FAMILIES.get(outer_type)
    if nested is None or "model_type" not in text:
        return None
    if nested.outer_ties and "tie_word_embeddings" in config:
        text = {**text, "tie_word_embeddings": config["tie_word_embeddings"]}
    fields = Fields(text, source)
    inner_blueprint = _family_blueprint(fields, _family_name(fields), nested.path, traits)
    if inner_blueprint is None:
        return None
    outer_blueprint = nested.around(top)
    linears = outer_blueprint.linears
    if nested.plain in traits:
        linears = tuple(layer.evolve(is_quantizable=False) for layer in linears)
    return Blueprint(
        inner_blueprint.linears + linears,
        inner_blueprint.attention + outer_blueprint.attention,
        inner_blueprint.parameters + outer_blueprint.parameters,
    )


def _family_name(fields: Fields) -> str:
    """The family whose reader these fields have, by their model_type or else by their class."""
    name = fields.word("model_type")
    if name in FAMILIES or name in VARIED_FAMILIES or name in NESTED_FAMILIES:
        return name
    if fields.config.get("architectures"):
        return _CLASSES.get(fields.first_word("architectures"), name)
    return _CLASSES.get(_TEXT_CLASSES.get(name, ""), name)


def depends_on_version(config: Mapping[str, Any]) -> bool:
    """Whether the blueprint of this config.json depends on traits of the engine version."""
    text = config.get("text_config")
    names = [fields.get("model_type") for fields in (config, text) if isinstance(fields, Mapping)]
    return any(
        isinstance(name, str)
        and (name in VARIED_FAMILIES or (name in NESTED_FAMILIES and NESTED_FAMILIES[name].plain))
        for name in names
    )


def add_defaults(fields: Fields) -> Fields:
    """The fields, add_defaults by the defaults of transformers' configuration classes."""
    family = fields.config.get("model_type")
    defaults = gemma.DEFAULTS.get(family) if isinstance(family, str) else None
    if defaults is None:
        return fields
    fields_named = {
        name: value
        for name, value in fields.config.items()
        if value is not None or name not in defaults
    }
    return Fields({**defaults, **fields_named}, fields.source)


def _family_blueprint(
    config: Fields, family: str, path: str, traits: Collection[str]
) -> Blueprint | None:
    fields = add_defaults(config)
    if family in VARIED_FAMILIES:
        return VARIED_FAMILIES[family](fields, family, path, traits)
    build = FAMILIES.get(family)
    return None if build is None else build(fields, family, path)
