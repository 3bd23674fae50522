"""The question for structures: what vLLM builds of an architecture, as terms of config fields.

Asked by scripts/engine-structures, which writes gateway/models/structures.
In the environment, ARCHITECTURES names some (default: all that the engine lists), and CONFIGS a
folder of further config.json files. An architecture is asked with a published config.json of that
folder or of tests/models, or with the defaults of its configuration class.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.conformance.structures.document import Unlearned, document
from tests.conformance.structures.facts import facts_of, read_config
from tests.conformance.structures.learn import learn
from tests.conformance.structures.observation import observe
from tests.conformance.structures.variations import fewer_layers, variations
from tests.support.paths import MODELS

_LISTS = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_EMBEDDING_MODELS")
_MAX_MISSING = 12
_STUCK = "another error"
_QUANTIZATION = ("quantization_config", "compression_config")


def answers(version: str) -> dict[str, dict[str, str]]:
    """By architecture {"structure": text} or {"unlearned": reason}."""
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    named = os.environ.get("ARCHITECTURES", "").split()
    found: dict[str, dict[str, str]] = {}
    for listed in _LISTS:
        arguments = {"runner": "pooling"} if "EMBEDDING" in listed else {}
        for architecture in getattr(registry, listed):
            if architecture not in found and (not named or architecture in named):
                began = time.monotonic()
                found[architecture] = _answer(architecture, f"vllm=={version}", arguments)
                reason = found[architecture].get("unlearned", "learned")
                took_s = time.monotonic() - began
                sys.stderr.write(f"{architecture}: {reason}, {took_s:.0f} s\n")
    return found


def _answer(architecture: str, engine: str, arguments: dict[str, Any]) -> dict[str, str]:
    reason = "no configuration class"
    for config in _configs(architecture):
        try:
            asked = variations(_completed(config, arguments), **arguments)
            rows = learn(asked.observed)
            facts = facts_of(asked.base, asked.observed[0][1], rows, **arguments)
            return {"structure": document(architecture, engine, asked.fixed, rows, facts)}
        except Unlearned as error:
            reason = f"no term for {error}"
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
    return {"unlearned": reason}


def _completed(config: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The config with the fields that the model class reads and the configuration class lacks.

    The engine's error names each. Any value that takes the build further will do: it is varied.
    """
    for _ in range(_MAX_MISSING):
        name = _missing_field(config, arguments)
        if name is None or name in config:
            break
        values = (1, config.get("hidden_size"), False, "sigmoid", [1] * 64)
        config = next(
            (
                longer
                for longer in ({**config, name: value} for value in values)
                if _missing_field(longer, arguments) != _STUCK
            ),
            config | {name: 1},
        )
    return config


def _missing_field(config: dict[str, Any], arguments: dict[str, Any]) -> str | None:
    """The attribute that a build of the config lacks; None: the build ends; _STUCK: otherwise."""
    try:
        observe(fewer_layers(config, 4), **arguments)
    except AttributeError as error:
        return error.name or _STUCK
    except Exception:
        return _STUCK
    return None


def _merged(defaults: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The config with the fields of its configuration class that it does not state."""
    merged = {**defaults, **config}
    for name, value in config.items():
        if isinstance(value, dict) and isinstance(defaults.get(name), dict):
            merged[name] = _merged(defaults[name], value)
    return merged


def _configs(architecture: str) -> Iterator[dict[str, Any]]:
    """Published configs of the architecture without quantization, then defaults."""
    folders = [Path(name) for name in os.environ.get("CONFIGS", "").split()]
    for path in (path for folder in [*folders, MODELS] for path in sorted(folder.glob("*.json"))):
        config: dict[str, Any] = json.loads(path.read_text())
        if config.get("architectures") == [architecture]:
            plain = {name: value for name, value in config.items() if name not in _QUANTIZATION}
            defaults = json.loads(read_config(plain).to_json_string(use_diff=False))
            yield _merged(defaults, plain)
    transformers: Any = importlib.import_module("transformers")
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    for name in dir(auto):
        if not name.endswith("_MAPPING_NAMES"):
            continue
        for model_type, classes in getattr(auto, name).items():
            if architecture in ([classes] if isinstance(classes, str) else classes):
                made = transformers.AutoConfig.for_model(model_type)
                fields = json.loads(made.to_json_string(use_diff=False))
                yield fields | {"architectures": [architecture]}
                return
