"""Where engines contradicted the rules, in DATA/answers/gaps/: one file for each gap, found once
however often it is met."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from gateway.domain import RuleGap
from gateway.store import atomic_file

# The oldest gaps beyond this number are deleted.
_MAX_FILES = 500


class RuleGapStore:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def store(self, gaps: Iterable[RuleGap]) -> None:
        """Never raises: a gap that cannot be kept will be met again."""
        try:
            for gap in gaps:
                text = gap.model_dump_json().encode()
                path = self._folder / f"{hashlib.sha256(text).hexdigest()[:40]}.json"
                if not path.exists():
                    atomic_file.write(path, text)
            for path in self._files()[:-_MAX_FILES]:
                path.unlink(missing_ok=True)
        except OSError:
            return

    def load(self) -> list[RuleGap]:
        """The oldest first; unreadable gaps are left out."""
        result = []
        for path in self._files():
            try:
                result.append(RuleGap.model_validate_json(path.read_bytes()))
            except (OSError, ValidationError):
                continue
        return result

    def _files(self) -> list[Path]:
        return sorted(
            self._folder.glob("*.json"), key=lambda path: (path.stat().st_mtime, path.name)
        )
