"""The folder of a model that a person names by one of its files."""

from __future__ import annotations

from pathlib import Path


def model_folder(source: str) -> str:
    """The folder of the `config.json` that a source names; any other source as it is."""
    path = Path(source).expanduser()
    return str(path.parent) if path.name == "config.json" and path.is_file() else source
