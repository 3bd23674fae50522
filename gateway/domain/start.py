"""Starts of engines: their conditions, measured phases, and expected time."""

from __future__ import annotations

from typing import Literal

from gateway.domain.base import ConfigDict, Field
from gateway.domain.value import Value

StartOrigin = Literal["container", "process", "fork"]
"""A container, a new process of this machine, or a fork of a prepared process."""


class StartConditions(Value):
    """Conditions by which starts of one plan differ in time. None: unknown."""

    origin: StartOrigin | None = None
    is_cache_empty: bool | None = Field(
        None, description="whether nothing compiled is kept for such a start"
    )


class MeasuredStart(Value):
    """A start that succeeded. The record of a start outlives the model."""

    # Rows of a later version may say more.
    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    model: str = Field(description="folder or repository")
    engine: str = Field(description='"kind==version"')
    gpus: int
    fingerprint: str = Field(description="digest of the plan")
    conditions: StartConditions = StartConditions()
    phases: dict[str, float] = Field(description="seconds of each phase")


class PreparedView(Value):
    """A process that has imported an engine, and forks the next ones."""

    engine: str
    pid: int
    since: float = Field(description="begin of the process, in Unix seconds")
    modules: int = Field(description="number of imported modules")
    refused: dict[str, str] = Field(description="modules that are left to the fork, with reasons")
    pss_bytes: int | None = Field(description="bytes of memory; shared pages count in parts")


class StartTime(Value):
    """The expected time of a start."""

    phases: dict[str, float] = Field(description="seconds by phase, in their order")
    low_s: float = Field(description="seconds of the shortest start of the estimate")
    high_s: float = Field(description="seconds of the longest start of the estimate")
    starts: int = Field(description="the number of starts that it is from")
    grade: Literal["measured", "estimate", "elsewhere"] = Field(
        description=(
            "measured: of starts by the same plan under the same conditions; estimate: of other"
            " starts of the model; elsewhere: of other models on another machine, without reading"
            " weights"
        )
    )


class ExpectedStart(Value):
    """The next start of a plan.

    time: expected time; None if unknown.
    """

    conditions: StartConditions
    time: StartTime | None = None
