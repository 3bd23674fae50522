"""Work that every gateway repeats with the same result, done once a process of tests.

A run of tests has hundreds of gateways, each with an empty data folder. Processes that are forked
(fork_server.py) have the work that the process before them kept.
"""

from __future__ import annotations

import functools
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gateway.diagnosis.lines import pattern_index
from gateway.errors import SettingsError
from gateway.profiles import yaml_cache


def keep() -> None:
    """Patterns of failures are compiled and split once, and a YAML file is parsed once while it
    stays as it is: together 0.3 s for each gateway."""
    # Python keeps a third of them, so that each gateway would compile them anew.
    setattr(re, "_MAXCACHE", 1 << 13)  # noqa: B010
    pattern_index.needles = functools.cache(pattern_index.needles)
    yaml_cache._parse = _KeptFiles(yaml_cache._parse)


class _KeptFiles:
    """The documents of YAML files."""

    def __init__(self, parse: Callable[[Path], Iterator[Any]]) -> None:
        self._parse = parse
        self._files: dict[tuple[Path, int, int], list[bytes]] = {}

    def __call__(self, path: Path) -> Iterator[Any]:
        state = path.stat()
        stamp = path, state.st_mtime_ns, state.st_size
        if stamp not in self._files:
            try:
                self._files[stamp] = [pickle.dumps(document) for document in self._parse(path)]
            except SettingsError:
                # The documents before the mistake are read.
                yield from self._parse(path)
                return
        # Each reader has a copy of its own.
        yield from map(pickle.loads, self._files[stamp])
