"""Installed versions other than the engine's: Python, packages, torch, CUDA, and classes of
transformers."""

from __future__ import annotations

import importlib
import pkgutil
import platform
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distributions
from typing import Any


def installed_packages() -> dict[str, Any]:
    torch: Any = importlib.import_module("torch")
    result: dict[str, str] = {}
    for distribution in distributions():
        if distribution.metadata["Name"]:  # of two, Python imports the first on the search path
            result.setdefault(
                str(distribution.metadata["Name"]).lower().replace("_", "-"), distribution.version
            )
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "packages": dict(sorted(result.items())),
    }


def engine() -> dict[str, str] | None:
    """Kind and version of the engine that is installed here, without importing it; None: no engine.

    Each kind's folder has an `inside/identity.py`.
    """
    engines = importlib.import_module("..", __package__)
    modules = []
    for _, name, is_package in pkgutil.iter_modules(engines.__path__):
        if is_package:
            with suppress(ModuleNotFoundError):
                modules.append(importlib.import_module(f"..{name}.inside.identity", __package__))
    for module in sorted(modules, key=lambda module: module.ORDER):
        with suppress(PackageNotFoundError):
            result: dict[str, str] = module.identity()
            return result
    return None


def config_classes(registered: Mapping[str, str]) -> dict[str, list[str]]:
    """Model types with a configuration class of the engine or of transformers, and those with such
    a tokenizer too: these need no code of a repository.

    registered: the engine's own, by the names of their classes.

    Source: AutoConfig.from_pretrained and AutoTokenizer.from_pretrained, which prefer code of their
    own (`has_local_code`).
    """
    auto: Any = importlib.import_module("transformers.models.auto.configuration_auto")
    tokenizers: Any = importlib.import_module("transformers.models.auto.tokenization_auto")
    classes: dict[str, str] = {**auto.CONFIG_MAPPING_NAMES, **registered}
    text_classes = {
        auto.CONFIG_MAPPING_NAMES.get(name) for name in tokenizers.TOKENIZER_MAPPING_NAMES
    }
    # Published tokenizers of these are known to be wrong, so their code is not read.
    wrong_names = getattr(tokenizers, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", ())
    return {
        "config_classes": sorted(classes),
        "tokenizers": sorted(
            name for name, item in classes.items() if item in text_classes or name in wrong_names
        ),
    }
