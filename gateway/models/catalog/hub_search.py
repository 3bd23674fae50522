"""Searches of a Hub, of its cache on this machine, and of folders for models.

Source of the Hub's parameters and fields: `HfApi.list_models` of huggingface_hub 2.4.0.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from gateway.errors import BadRequest
from gateway.models.catalog.folder_reach import is_readable
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
    # General models write code too, so they are asked for in addition to those made for it.
    "code": (
        {"pipeline_tag": "text-generation", "filter": ("code", *_CHAT["filter"])},
        {"pipeline_tag": "text-generation", "search": "code", **_CHAT},
        {"pipeline_tag": "text-generation", **_CHAT},
        {"pipeline_tag": "image-text-to-text", **_CHAT},
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
# The Hub counts the downloads of the last 30 days. Source: its page "Models Download Stats".
_COUNT_DAYS = 30.0
_DAY_S = 86400.0
# Releases of one size differ by their heads for drafts, if at all.
_SIZE_TOLERANCE = 0.01
# Models of each listing of which the most used are read, and the fields of their rows.
_POOL_SIZE = 100
_ROW_FIELDS = ("createdAt", "downloads", "pipeline_tag", "safetensors", "tags", "trendingScore")
# Folders below a given one that are looked into, and folders in all.
_DEPTH = 3
_MAX_FOLDERS = 2000


class FoundModel(NamedTuple):
    """A model that a search found.

    name: the name of its repository, or its folder.
    source: the value of `source` in a wish.
    base: the repository whose weights are quantized here; "": unknown, or none.
    downloads: a day, of the last 30 days or since the repository is there.
    parameters: 0: unknown.
    created: the date in ISO 8601; "": unknown.
    is_for_code: whether its name or tags say that the model writes code.
    """

    name: str
    source: str
    base: str = ""
    downloads: float = 0.0
    parameters: int = 0
    created: str = ""
    is_for_code: bool = False

    @property
    def is_remote(self) -> bool:
        return self.source == self.name and REPOSITORY.fullmatch(self.name) is not None

    def is_older_than(self, release: FoundModel) -> bool:
        """Whether `release` is a later one, of the same owner, purpose and size."""
        return (
            self.name.partition("/")[0] == release.name.partition("/")[0]
            and self.is_for_code == release.is_for_code
            and self.parameters > 0
            and abs(self.parameters - release.parameters) <= _SIZE_TOLERANCE * self.parameters
            and "" < self.created < release.created
        )


def search_hub(
    hub: Hub, words: str, use: Use | None, limit: int, parameters: tuple[int, int] | None = None
) -> list[FoundModel]:
    """Models of the Hub with these words in their names, for a use, at most `limit`.

    With words, the most downloaded first. Without, trending and downloaded ones by the bytes that
    users download of all their forms. parameters: the fewest and the most of a model; None: any.
    Raises BadModel, HubUnreachable.
    """
    sizes = f"min:{parameters[0]},max:{parameters[1]}" if parameters is not None else ""
    queries = _QUERIES[use] if use is not None else ({"filter": "safetensors"},)
    orders = ("downloads",) if words else _ORDERS
    lists = [
        _models(
            hub.list_models(
                {**query, "search": " ".join(filter(None, (words, query.get("search"))))}
                | {
                    "sort": order,
                    "limit": limit if words else _POOL_SIZE,
                    "num_parameters": sizes,
                    "expand": _ROW_FIELDS,
                }
            )
        )
        for order in orders
        for query in queries
    ]
    models = _interleave(lists)
    if words:
        return models[:limit]
    models = _sort_by_usage(models)
    if use == "code":  # those made for code are few among the most used
        general_models = [model for model in models if not model.is_for_code]
        models = _interleave([[model for model in models if model.is_for_code], general_models])
    return models[:limit]


def daily_downloads(models: Iterable[FoundModel]) -> dict[str, float]:
    """Downloads a day of all forms of each base model."""
    downloads: dict[str, float] = {}
    for model in models:
        base = model.base or model.name
        downloads[base] = downloads.get(base, 0.0) + model.downloads
    return downloads


def _sort_by_usage(models: Sequence[FoundModel]) -> list[FoundModel]:
    """The models by the parameters that users download a day, of all forms of their base model. A
    base model stands for its forms."""
    downloads = daily_downloads(models)
    names = {model.name for model in models}
    bases = [model for model in models if model.base not in names]
    return sorted(bases, key=lambda model: -downloads[model.base or model.name] * model.parameters)


def quantized_variants(hub: Hub, name: str) -> list[FoundModel]:
    """Quantized variants of a repository, the most downloaded first. Raises BadModel."""
    return [_parse_row(row, name) for row in hub.quantized_rows(name)]


def cached_models(hub: Hub, words: str) -> list[FoundModel]:
    """Models in the cache of the Hub on this machine, with all these words in their names."""
    models = (FoundModel(name, str(folder)) for name, folder in hub.disk.newest_folders())
    return [model for model in models if _has_words(model, words)]


def models_in(folders: Iterable[Path], words: str) -> list[FoundModel]:
    """Models in these folders or below, with all these words in their paths. Raises BadRequest for
    a folder that is not there."""
    folder_paths = [_absolute(folder) for folder in folders]
    if missing_paths := [path for path in folder_paths if not _is_folder(path)]:
        raise BadRequest(
            f"There is no folder {str(missing_paths[0])[:200]}.",
            hint="Name a folder of this machine that contains models.",
        )
    if foreign_names := [str(start) for start in folder_paths if not is_readable(str(start))]:
        raise BadRequest(
            f"{foreign_names[0][:200]!r} cannot be named in a request: it has control characters,"
            " or bytes that are not text.",
            hint="Rename the folder with printable characters.",
        )
    found_models = (
        FoundModel(str(folder), str(folder))
        for start in folder_paths
        for folder in _model_folders(start)
    )
    return [model for model in found_models if _has_words(model, words)]


def _absolute(folder: Path) -> Path:
    with suppress(RuntimeError):  # `~name` of an unknown user
        folder = folder.expanduser()
    return folder.absolute()


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # too long, or with a null byte
        return False


def _has_words(model: FoundModel, words: str) -> bool:
    return all(word in model.name.lower() for word in words.lower().split())


def _models(rows: Sequence[Mapping[str, Any]]) -> list[FoundModel]:
    """The rows of a listing that are models for our engines."""
    return [
        _parse_row(row, _base_model(row["tags"]))
        for row in rows
        if isinstance(row.get("id"), str) and REPOSITORY.fullmatch(row["id"])
    ]


def _parse_row(row: Mapping[str, Any], base: str) -> FoundModel:
    name = row["id"]
    downloads = row.get("downloads")
    return FoundModel(
        name=name,
        source=name,
        base=base,
        downloads=downloads / _counted_days(row.get("createdAt"))
        if isinstance(downloads, int)
        else 0.0,
        parameters=_count_parameters(row.get("safetensors")),
        created=str(row.get("createdAt", "")),
        is_for_code="code" in name.lower() or "code" in row["tags"],
    )


def _count_parameters(safetensors: object) -> int:
    total = safetensors.get("total") if isinstance(safetensors, dict) else None
    return total if isinstance(total, int) else 0


def _counted_days(created_at: object) -> float:
    """The days that the Hub's count of downloads covers: 30, fewer for a new repository."""
    try:
        age = datetime.now(UTC) - datetime.fromisoformat(str(created_at))
    except (ValueError, TypeError):
        return _COUNT_DAYS
    return min(_COUNT_DAYS, max(1.0, age.total_seconds() / _DAY_S))


def _base_model(tags: Sequence[str]) -> str:
    bases = [tag.removeprefix(_QUANTIZED_TAG) for tag in tags if tag.startswith(_QUANTIZED_TAG)]
    return bases[0] if bases and REPOSITORY.fullmatch(bases[0]) else ""


def _interleave(lists: Sequence[Sequence[FoundModel]]) -> list[FoundModel]:
    """The firsts of all lists, then the seconds, each model once."""
    max_length = max(map(len, lists), default=0)
    turns = (
        models[position]
        for position in range(max_length)
        for models in lists
        if position < len(models)
    )
    return list({model.name: model for model in turns}.values())


def _model_folders(start: Path) -> Iterator[Path]:
    """Folders with a config.json, at most three levels below `start`, in the order of names."""
    for folder_path, names, files in islice(os.walk(start), _MAX_FOLDERS):
        depth = len(Path(folder_path).relative_to(start).parts)
        names[:] = sorted(filter(is_readable, names)) if depth < _DEPTH else []
        if "config.json" in files:
            names[:] = []
            yield Path(folder_path)
