"""The structures of architectures, as scripts/engine-structures wrote them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parents[1] / "structures"
# The name of a class, which cannot leave the folder.
_NAME = re.compile(r"[\w-]{1,60}", re.ASCII)


def structure_text(config: Mapping[str, Any]) -> str:
    """The JSON text of the structure of this config's architecture; "": none is known."""
    for stem in stems(config):
        with suppress(FileNotFoundError):
            return (_FOLDER / f"{stem}.json").read_text()
    return ""


def stems(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the files that may hold the structure: one for the config's own combination of
    nested models, and the architecture's."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return ()
    types = [types for _, types in nested_types(config)]
    if not types or not all(map(_NAME.fullmatch, types)):
        return (name,)
    return (".".join([name, *types]), name)


def nested_types(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(field, model_type) of the nested models."""
    parts = ((field, value) for field, value in config.items() if isinstance(value, Mapping))
    types = ((field, value.get("model_type")) for field, value in parts)
    return sorted((field, word) for field, word in types if isinstance(word, str) and word)
