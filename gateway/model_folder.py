"""The folder or repository of a model, by one of its files, its cache or its page."""

from __future__ import annotations

import re
from pathlib import Path

_FILE = re.compile(r"config\.json|.*\.safetensors(\.index\.json)?")
_PAGE = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]{1,96}/[\w.-]{1,96})"
    r"(?:/tree/main)?/?",
    re.ASCII,
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def model_folder(source: str) -> str:
    """The folder of the file of a model that a source names, of the main commit in a folder of the
    Hub's cache, or the repository of a page; any other source as it is."""
    if page := _PAGE.fullmatch(source):
        return page[1]
    path = Path(source).expanduser()
    if path.name.startswith("models--"):
        return _cached_commit(path) or source
    return str(path.parent) if _FILE.fullmatch(path.name) and path.is_file() else source


def _cached_commit(repository: Path) -> str | None:
    """The folder of the main branch's commit in the Hub's cache; None: it is not there."""
    try:
        commit = (repository / "refs/main").read_text()[:41].strip()
    except (OSError, ValueError):
        return None
    folder = repository / "snapshots" / commit
    return str(folder) if _COMMIT.fullmatch(commit) and folder.is_dir() else None
