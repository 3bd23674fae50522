"""A MessagePack cache of YAML files, because YAML takes twenty times as long to read.

The cache is one file that may be deleted at any time. Without it, and for a file that has
changed since, the YAML file is read. A lookup decodes only its own file's part of the cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from gateway.decoding import DECODE_ERRORS
from gateway.errors import SettingsError


class Documents:
    """The documents of YAML files. `cache`: where to keep them between commands."""

    def __init__(self, cache: Path | None = None) -> None:
        self._cache = cache
        # path, also with " (first document)" -> [mtime_ns, size, documents] in MessagePack
        self._parsed: dict[str, msgspec.Raw] = {}
        self._has_news = False
        if cache is not None:
            with suppress(OSError, *DECODE_ERRORS):
                self._parsed = msgspec.msgpack.decode(
                    cache.read_bytes(), type=dict[str, msgspec.Raw]
                )

    def read(self, path: Path) -> list[Any]:
        """All documents of the file. Raises SettingsError for a text that is not YAML."""
        return self._documents(path, str(path), None)

    def first(self, path: Path) -> Any:
        """The first document of a file whose others are large."""
        is_read = str(path) in self._parsed
        return next(
            iter(
                self.read(path) if is_read else self._documents(path, f"{path} (first document)", 1)
            ),
            None,
        )

    def _documents(self, path: Path, name: str, limit: int | None) -> list[Any]:
        """The documents of the file, or the first of them, which the cache knows by `name`."""
        state = path.stat()
        stamp = [state.st_mtime_ns, state.st_size]
        if name in self._parsed:
            with suppress(*DECODE_ERRORS):
                match msgspec.msgpack.decode(self._parsed[name]):
                    case [mtime, size, list(documents)] if [mtime, size] == stamp:
                        return documents
        documents = list(islice(_parse(path), limit))
        if self._cache is not None:
            self._store(name, [*stamp, documents])
        return documents

    def _store(self, name: str, entry: list[Any]) -> None:
        """Documents that MessagePack would change (a date) are left out."""
        with suppress(TypeError, ValueError, RecursionError):
            text = msgspec.msgpack.encode(entry)
            if msgspec.msgpack.decode(text) == entry:
                self._parsed[name] = msgspec.Raw(text)
                self._has_news = True

    def save(self) -> None:
        """Write the cache."""
        if self._cache is None or not self._has_news:
            return
        draft = self._cache.with_name(f"{self._cache.name}.{os.getpid()}")
        with suppress(OSError):
            self._cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft.write_bytes(msgspec.msgpack.encode(self._parsed))
            draft.replace(self._cache)


def _parse(path: Path) -> Iterator[Any]:
    import yaml  # not before it is needed

    # libyaml where it was built in: ten times faster, same result.
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        yield from yaml.load_all(path.read_bytes(), loader)
    except yaml.YAMLError as error:
        raise SettingsError(
            f"The profile {path} is not YAML: {error}",
            hint="Correct the file at the line that the error names.",
        ) from None
