"""YAML files of tests, read as profiles are: by libyaml, and once a process (kept_work.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gateway.profiles.yaml_cache import Documents


def read_yaml(path: Path) -> Any:
    """The only document of the file."""
    (document,) = Documents().read(path)
    return document
