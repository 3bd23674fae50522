"""The folder of a component where a path lies, and the variable that moves the folder. Pure.

The rows are data (profiles/failures/folders.yaml).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from gateway.diagnosis.signature import ComponentFolder
from gateway.domain import Scalar

# Paths below the home of the engine's user. Without a home it is the root of the file system.
_HOME = re.compile(r"\A(?:~|/root|/home/[^/]+)?/\.\w|\A(?:~|/root|/home/[^/]+)(?:/|\Z)")
_PATH = re.compile(r"(?<![\w.])~?/[\w.@+-]+(?:/[\w.@+-]+)*")


class ComponentFolders:
    """The rows of folders, compiled."""

    def __init__(self, rows: Iterable[ComponentFolder]) -> None:
        self._rows = [
            (row, re.compile(row.path) if row.path else None, re.compile(row.frames))
            for row in rows
        ]

    def locate(self, message: str, frames: Sequence[str]) -> dict[str, Scalar]:
        """The `folder_variable` of the component whose folder a message or traceback names.

        A path in the message decides before the traceback. `beyond_home`: the path is in no home,
        so that another HOME does not move it. `local_copy`: the files that a machine without
        internet needs in the folder.
        """
        paths = _PATH.findall(message)
        values: dict[str, Scalar] = {}
        if paths and not any(map(_HOME.search, paths)):
            values["beyond_home"] = "yes"
        row = next(
            (row for row, path, _ in self._rows if path and any(map(path.search, paths))), None
        ) or next(
            (
                row
                for row, _, pattern in self._rows
                if row.frames and any(pattern.search(frame) for frame in frames)
            ),
            None,
        )
        if row is not None:
            values["folder_variable"] = row.variable
            if row.local_copy:
                values["local_copy"] = row.local_copy
        return values
