"""Searches of a Hub, of its cache on this machine, and of folders for models.

Source of the Hub's parameters and fields: `HfApi.list_models` of huggingface_hub 2.4.0.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from gateway.errors import BadRequest
from gateway.models.catalog.hub import REPOSITORY, Hub

Use = Literal["chat", "code", "vision", "embed"]
USES: tuple[Use, ...] = get_args(Use)

# Chat templates make a repository "conversational"; engines load safetensors.
_CHAT = {"filter": ("conversational", "safetensors")}
_QUERIES: dict[Use, tuple[dict[str, Any], ...]] = {
    "chat": (
        {"pipeline_tag": "text-generation", **_CHAT},
        {"pipeline_tag": "image-text-to-text", **_CHAT},
    ),
    "code": (
        {"pipeline_tag": "text-generation", "filter": ("code", *_CHAT["filter"])},
        {"pipeline_tag": "text-generation", "search": "code", **_CHAT},
    ),
    "vision": ({"pipeline_tag": "image-text-to-text", **_CHAT},),
    "embed": (
        {"pipeline_tag": "feature-extraction", "filter": "safetensors"},
        {"pipeline_tag": "sentence-similarity", "filter": "safetensors"},
    ),
}
# Models that people try now, and models in use.
_ORDERS = ("trendingScore", "downloads")
_QUANTIZED_TAG = "base_model:quantized:"
# Folders below a given one that are looked into, and folders in all.
_DEPTH, _MAX_FOLDERS = 3, 2000


class FoundModel(NamedTuple):
    """A model that a search found.

    name: of its repository, or its folder. source: for a wish. base: the repository whose weights
    are quantized here; "": unknown, or none.
    """

    name: str
    source: str
    base: str = ""

    @property
    def is_remote(self) -> bool:
        return self.source == self.name and REPOSITORY.fullmatch(self.name) is not None


def search_hub(hub: Hub, words: str, use: Use | None, limit: int) -> list[FoundModel]:
    """Models of the Hub with these words in their names, for a use, at most `limit`.

    With words, the most downloaded first; without, trending and downloaded ones in turns. Raises
    BadModel, HubUnreachable.
    """
    queries = _QUERIES[use] if use is not None else ({"filter": "safetensors"},)
    orders = ("downloads",) if words else _ORDERS
    lists = [
        _models(
            hub.list_models(
                {**query, "search": " ".join(filter(None, (words, query.get("search"))))}
                | {"sort": order, "limit": limit}
            )
        )
        for order in orders
        for query in queries
    ]
    return _interleave(lists)[:limit]


def quantized_variants(hub: Hub, name: str, limit: int) -> list[FoundModel]:
    """Quantized variants of a repository, the most downloaded first. Raises BadModel."""
    return [
        FoundModel(variant, variant, name) for variant in hub.quantized_repositories(name)[:limit]
    ]


def cached_models(hub: Hub, words: str) -> list[FoundModel]:
    """Models in the cache of the Hub on this machine, with all these words in their names."""
    candidates = (FoundModel(name, str(folder)) for name, folder in hub.disk.newest_folders())
    return [model for model in candidates if _has_words(model, words)]


def models_in(folders: Iterable[Path], words: str) -> list[FoundModel]:
    """Models in these folders or below, with all these words in their paths. Raises BadRequest for
    a folder that is not there."""
    starts = [start.expanduser().absolute() for start in folders]
    if missing := [start for start in starts if not start.is_dir()]:
        raise BadRequest(f"There is no folder {missing[0]}.", hint="Correct --folder.")
    candidates = (
        FoundModel(str(folder), str(folder)) for start in starts for folder in _model_folders(start)
    )
    return [model for model in candidates if _has_words(model, words)]


def _has_words(model: FoundModel, words: str) -> bool:
    return all(word in model.name.lower() for word in words.lower().split())


def _models(rows: Sequence[Mapping[str, Any]]) -> list[FoundModel]:
    """The rows of a listing that are models for our engines."""
    return [
        FoundModel(row["id"], row["id"], _base(row["tags"]))
        for row in rows
        if isinstance(row.get("id"), str) and REPOSITORY.fullmatch(row["id"])
    ]


def _base(tags: Sequence[str]) -> str:
    bases = [tag.removeprefix(_QUANTIZED_TAG) for tag in tags if tag.startswith(_QUANTIZED_TAG)]
    return bases[0] if bases and REPOSITORY.fullmatch(bases[0]) else ""


def _interleave(lists: Sequence[Sequence[FoundModel]]) -> list[FoundModel]:
    """The firsts of all lists, then the seconds, each model once."""
    longest = max(map(len, lists), default=0)
    turns = (models[place] for place in range(longest) for models in lists if place < len(models))
    return list({model.name: model for model in turns}.values())


def _model_folders(start: Path) -> Iterator[Path]:
    """Folders with a config.json, at most three levels below `start`, in the order of names."""
    for place, names, files in islice(os.walk(start), _MAX_FOLDERS):
        depth = len(Path(place).relative_to(start).parts)
        names[:] = sorted(names) if depth < _DEPTH else []
        if "config.json" in files:
            names[:] = []
            yield Path(place)
