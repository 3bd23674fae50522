"""The model as flags of the user change it: its config, its task and its limits. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.domain import ModelSpec, Scalar
from gateway.engines.common.flag_object import flag_object
from gateway.errors import BadModel, BadRequest
from gateway.models.families.config import Fields
from gateway.models.families.text_config import read_text_config
from gateway.models.spec import drop_head, read_model
from gateway.models.task import classifying_task

# Fields of config.json, as vLLM and SGLang take them.
_FLAT_FLAG = "json-model-override-args"
CONFIG_FLAGS = ("hf-overrides", _FLAT_FLAG)
# Fields of a ModelSpec that follow only from config.json.
_CONFIG_FIELDS = (
    "architecture",
    "model_type",
    "task",
    "dtype",
    "max_position",
    "has_open_limit",
    "guessed",
    "hidden",
    "vocab",
    "attention",
    "experts",
    "config",
)
_TASK_FLAGS = ("convert", "runner")


def apply_overrides(spec: ModelSpec, args: Mapping[str, Scalar]) -> ModelSpec:
    """The model under these flags of the user. Raises BadRequest for an override that is not a
    model.

    Exact sizes of the weight files stay.
    """
    flags = {name.removeprefix("--").replace("_", "-"): value for name, value in args.items()}
    for flag in CONFIG_FLAGS:
        config = flag_object(flags.get(flag))
        if config and flag == _FLAT_FLAG:
            # The outer fields of a nested config never reach its text model.
            if not read_text_config(Fields(spec.config, spec.source)).is_nested:
                spec = _replace_config(spec, {**spec.config, **config}, flag)
        elif config:
            spec = _replace_config(spec, _merge(spec.config, config), flag)
    for flag in _TASK_FLAGS:
        task = {
            "embed": "embed",
            "pooling": spec.task if not spec.generates else "embed",
            "classify": classifying_task(spec.config),
            "generate": "generate" if not spec.generates else spec.task,
        }.get(str(flags.get(flag)))
        if task is not None and task != spec.task:
            changed_spec = spec.evolve(task=task, sources={**spec.sources, "task": f"--{flag}"})
            return changed_spec if changed_spec.generates else drop_head(changed_spec)
    return spec


def _merge(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the changes; objects inside are merged too."""
    merged_config = dict(config)
    for name, value in changes.items():
        inner_config = merged_config.get(name)
        is_nested = isinstance(value, Mapping) and isinstance(inner_config, Mapping)
        merged_config[name] = _merge(inner_config, value) if is_nested else value  # type: ignore[arg-type]
    return merged_config


def _replace_config(spec: ModelSpec, config: dict[str, Any], flag: str) -> ModelSpec:
    """The model with a changed config. Raises BadRequest."""
    hint = spec.task if "sentence-transformers" in spec.sources.get("task", "") else None
    # Another architecture has another structure.
    has_same_class = config.get("architectures") == spec.config.get("architectures")
    facts = (spec.source, spec.revision, config, None, spec.file_bytes, spec.remote_code, hint)
    try:
        read = read_model(*facts, spec.structure if has_same_class else "")
    except BadModel as error:
        raise BadRequest(
            f"--{flag} makes no model of {spec.source}: {error.message}",
            hint="Correct the flag, or leave it out.",
            param="args",
        ) from None
    source_words = f"config.json or --{flag}"
    changed_spec = spec.evolve(
        **{name: getattr(read, name) for name in _CONFIG_FIELDS},
        quant=read.quant or spec.quant,
        sources={
            "config": source_words,
            **{
                name: source.replace("config.json", source_words)
                for name, source in read.sources.items()
            },
        },
    )
    return changed_spec if changed_spec.generates else drop_head(changed_spec)
