"""The progress of a start and the settings of its engine, by its log. Pure."""

from __future__ import annotations

from collections import deque

from gateway.diagnosis.signature import ProgressLine
from gateway.domain import Scalar

# Kernels that are remembered: more than any engine needs, and bounded.
_MAX_KERNELS = 64


class StartProgress:
    """The progress of a start. phase: load, profile, kv, compile, graphs, serving."""

    def __init__(self) -> None:
        self.phase = "starting"
        self.settings: dict[str, Scalar] = {}
        self.reported_values: dict[str, str] = {}
        self.is_kv_cache_made = self.are_graphs_made = False
        """A made KV cache: the engine has measured its memory. Made graphs: workspaces are made
        too."""
        self.cache_bytes: int | None = None
        """The memory for the KV cache of the rank with the least, as the engine measured it."""
        self.kernels: deque[str] = deque(maxlen=_MAX_KERNELS)
        """The kernels that the engine chose, the last one last."""
        self._is_sized = False

    def learn(self, row: ProgressLine, groups: dict[str, Scalar]) -> bool:
        """Note the values of a line that a row matches. Returns whether another phase begins."""
        if row.is_setting:
            self.settings = groups | self.settings
            return False
        if kernel := groups.get("kernel"):
            self.kernels.append(str(kernel))
        if isinstance(size := groups.pop("cache_bytes", None), int):
            self.cache_bytes = size if self.cache_bytes is None else min(self.cache_bytes, size)
        self.reported_values |= {
            name: str(value) for name, value in groups.items() if name != "kernel"
        }
        self._is_sized = self._is_sized or row.phase == "kv"
        self.is_kv_cache_made = (
            self.is_kv_cache_made or (row.shows_cache and self._is_sized) or row.phase == "serving"
        )
        self.are_graphs_made = self.are_graphs_made or row.shows_warmup or row.phase == "serving"
        self.phase = row.phase or self.phase
        return row.phase is not None
