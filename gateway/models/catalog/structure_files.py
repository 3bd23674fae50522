"""The structures of architectures, as scripts/engine-structures wrote them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parents[1] / "structures"
# The name of a class, which cannot leave the folder.
_NAME = re.compile(r"\w{1,100}", re.ASCII)


def structure_text(config: Mapping[str, Any]) -> str:
    """The JSON text of the structure of this config's architecture; "": none is known."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return ""
    try:
        return (_FOLDER / f"{name}.json").read_text()
    except FileNotFoundError:
        return ""
