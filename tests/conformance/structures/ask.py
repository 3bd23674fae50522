"""The question for structures: vLLM's layers of an architecture, as terms of config fields.

Asked by scripts/engine-structures, which writes gateway/models/structures.
In the environment, ARCHITECTURES names some (default: all that the engine lists), and CONFIGS a
folder of further config.json files. An architecture is asked with a config.json of that folder, of
tests/models or of family_configs.json, or with the defaults of its configuration class.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from gateway.engines.vllm.inside.model import set_tokenizer
from gateway.models.catalog.structure_files import nested_types, stems
from tests.conformance.forecast_cases import family_configs
from tests.conformance.structures.document import Unlearned, document
from tests.conformance.structures.facts import facts_of, read_config
from tests.conformance.structures.learn import learn, one_shape
from tests.conformance.structures.observation import observe
from tests.conformance.structures.proof import proven
from tests.conformance.structures.variations import (
    Variations,
    fewer_layers,
    shape_fields,
    variations,
)
from tests.support.paths import MODELS

_LISTS = (
    "_TEXT_GENERATION_MODELS",
    "_MULTIMODAL_MODELS",
    "_EMBEDDING_MODELS",
    "_TRANSFORMERS_SUPPORTED_MODELS",
)
_MAX_MISSING = 12
_STUCK: Literal["another error"] = "another error"
_UNREAD = ("_name_or_path", "output_attentions")
_QUANTIZATION = ("quantization_config", "compression_config")


def answers(version: str) -> dict[str, dict[str, str]]:
    """By name of the file {"structure": text} or {"unlearned": reason}."""
    _prepare()
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    names = os.environ.get("ARCHITECTURES", "").split()
    structures: dict[str, dict[str, str]] = {}
    for list_name in _LISTS:
        arguments = {"runner": "pooling"} if "EMBEDDING" in list_name else {}
        for architecture in getattr(registry, list_name):
            if architecture not in structures and (not names or architecture in names):
                structures |= _answers(architecture, f"vllm=={version}", arguments)
    for architecture in _unlisted_architectures(registry, names):
        structures |= _answers(architecture, f"vllm=={version}", {})
    return structures


def _unlisted_architectures(registry: Any, named: Sequence[str]) -> list[str]:
    """Architectures with a known config that the engine builds by transformers' class."""
    architectures = {config["architectures"][0] for config in family_configs().values()}
    other_names = (architectures | {*named}) - {*registry.ModelRegistry.get_supported_archs()}
    return sorted(other_names if not named else other_names & {*named})


def _prepare() -> None:
    """Spare the engine's waits before it reads a refused config.json a second time, and give model
    classes a tokenizer."""
    set_tokenizer()
    utils: Any = importlib.import_module("vllm.transformers_utils.repo_utils")
    utils.time = SimpleNamespace(sleep=lambda _: None, time=time.time)


def _answers(
    architecture: str, engine: str, arguments: dict[str, Any]
) -> dict[str, dict[str, str]]:
    """The answer for the architecture, and for other models that it nests."""
    structures: dict[str, dict[str, str]] = {architecture: {"unlearned": "no configuration class"}}
    stems_with_answer: set[str] = set()
    published_configs = [*_published_configs(architecture)]
    for config in (*published_configs, *_defaults(architecture)):
        stem = stems(config)[0]
        if stem in stems_with_answer or (
            "structure" in structures[architecture] and config not in published_configs
        ):
            continue
        began = time.monotonic()
        answer = _answer(architecture, config, engine, arguments)
        took_s = time.monotonic() - began
        sys.stderr.write(f"{stem}: {answer.get('unlearned', 'learned')}, {took_s:.0f} s\n")
        if "unlearned" not in answer:
            structures[stem if stems_with_answer else architecture] = answer
            stems_with_answer.add(stem)
        elif not stems_with_answer and "structure" not in structures[architecture]:
            structures[architecture] = answer
    return structures


def _answer(
    architecture: str, config: dict[str, Any], engine: str, arguments: dict[str, Any]
) -> dict[str, str]:
    full_config = _complete(config, arguments)
    types = {f"{field}.model_type": word for field, word in nested_types(config)}
    variation_list: Variations | None = None
    try:
        variation_list = variations(full_config, **arguments)
        rows = learn(variation_list.observed)
        facts = facts_of(variation_list.base, variation_list.observed[0][1], rows, **arguments)
        text = document(architecture, engine, types | variation_list.fixed, rows, facts)
        reason = "" if proven(text, full_config, **arguments) else "more layers are built otherwise"
    except Unlearned as error:
        reason = f"no term for {error}"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
    if not reason:
        return {"structure": text}
    with suppress(Exception):
        text = _one_shape(architecture, full_config, engine, types, variation_list, arguments)
        if proven(text, full_config, **arguments):
            return {"structure": text, "unlearned": f"for one shape: {reason}"}
    return {"unlearned": reason}


def _one_shape(
    architecture: str,
    config: dict[str, Any],
    engine: str,
    types: dict[str, str],
    variations: Variations | None,
    arguments: dict[str, Any],
) -> str:
    """The structure of this config, for configs of the same shape. Raises the engine's errors."""
    rows = observe(config, **arguments)
    rows_of_shape = one_shape(config, rows)
    size_fields = shape_fields(config, variations)
    facts = facts_of(config, rows, rows_of_shape, {*size_fields}, **arguments)
    return document(architecture, engine, types | size_fields, rows_of_shape, facts)


def _complete(config: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The config with the fields that the model class reads and the configuration class lacks.

    The engine's error names each. Any value that takes the build further will do: it is varied.
    """
    for _ in range(_MAX_MISSING):
        missing = _missing_field(config, arguments)
        if missing is None or missing == _STUCK:
            break
        name, owner = missing
        part = _part_of(config, owner)
        if name in part:
            break
        values = (part.get("patch_size", 1), part.get("hidden_size"), False, "sigmoid", [1] * 64)
        variants = (_with_field(config, owner, name, value) for value in values)
        config = next(
            (longer for longer in variants if _missing_field(longer, arguments) != _STUCK),
            _with_field(config, owner, name, 1),
        )
    return config


_Missing = tuple[str, str]


def _missing_field(
    config: dict[str, Any], arguments: dict[str, Any]
) -> _Missing | Literal["another error"] | None:
    """The attribute that a build of the config lacks, and the model_type of the config that lacks
    it; None: the build ends; _STUCK: otherwise."""
    try:
        observe(fewer_layers(config, 4), **arguments)
    except AttributeError as error:
        return (error.name, getattr(error.obj, "model_type", "")) if error.name else _STUCK
    except Exception:
        return _STUCK
    return None


def _part_of(config: dict[str, Any], owner: str) -> dict[str, Any]:
    """The nested config of this model_type; else the whole."""
    for value in config.values():
        if isinstance(value, dict):
            if value.get("model_type") == owner:
                return value
            inner = _part_of(value, owner)
            if inner is not value:
                return inner
    return config


def _with_field(config: dict[str, Any], owner: str, name: str, value: Any) -> dict[str, Any]:
    longer = copy.deepcopy(config)
    _part_of(longer, owner)[name] = value
    return longer


def _merge(defaults: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The config with the fields of its configuration class that it does not state."""
    full_config = {**defaults, **config}
    for name, value in config.items():
        if isinstance(value, dict) and isinstance(defaults.get(name), dict):
            full_config[name] = _merge(defaults[name], value)
    return full_config


def _published_configs(architecture: str) -> Iterator[dict[str, Any]]:
    """Published configs of the architecture without quantization."""
    folders = [Path(name) for name in os.environ.get("CONFIGS", "").split()]
    files = (path for folder in [*folders, MODELS] for path in sorted(folder.glob("*.json")))
    config_list: Iterable[dict[str, Any]] = (
        *(json.loads(path.read_text()) for path in files),
        *family_configs().values(),
    )
    for config in config_list:
        if config.get("architectures") == [architecture]:
            plain = {name: value for name, value in config.items() if name not in _QUANTIZATION}
            with suppress(Exception):
                defaults = json.loads(read_config(plain).to_json_string(use_diff=False))
                yield _merge(_plain(defaults), plain)
            yield plain  # where a default hides its origin


def _defaults(architecture: str) -> Iterator[dict[str, Any]]:
    """The defaults of the architecture's configuration class."""
    transformers: Any = importlib.import_module("transformers")
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    for name in dir(auto):
        if not name.endswith("_MAPPING_NAMES"):
            continue
        for model_type, classes in getattr(auto, name).items():
            if architecture in ([classes] if isinstance(classes, str) else classes):
                config = transformers.AutoConfig.for_model(model_type)
                fields = _plain(json.loads(config.to_json_string(use_diff=False)))
                yield fields | {"architectures": [architecture]}
                return


def _plain(defaults: dict[str, Any]) -> dict[str, Any]:
    """Without the fields that some configuration classes write and refuse to read."""
    return {
        name: _plain(value) if isinstance(value, dict) else value
        for name, value in defaults.items()
        if name not in _UNREAD
    }
