"""The progress of a start and the settings of its engine, by its log. Pure."""

from __future__ import annotations

from collections import deque

from gateway.diagnosis.signature import ProgressLine
from gateway.domain import Scalar
from gateway.domain.phases import PHASE_LABELS

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
        self._step = self._activity = ""
        """The last step that began within a phase, and its words."""

    def step_values(self, phase: str) -> dict[str, Scalar]:
        """The last step of a start, as values for its cure.

        `doing`: the activity that a start of this phase was last seen at. `during_` with the
        name of a step: that step, within the phase.
        """
        if self.phase == "serving":
            return {}
        doing = self._activity or PHASE_LABELS.get(phase, "")
        values: dict[str, Scalar] = {f"during_{self._step}": "yes"} if self._step else {}
        return values | ({"doing": doing} if doing else {})

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
        if row.step is not None or row.phase is not None:
            self._step, self._activity = row.step or "", row.activity
        return row.phase is not None
