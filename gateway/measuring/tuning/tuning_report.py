"""The bounds of a search for a better plan, and its report as the admin API shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gateway.domain import Speed, Value, Wish
from gateway.domain.base import Field

TuningState = Literal["running", "done", "stopped", "failed"]


@dataclass(frozen=True)
class SearchOptions:
    """The bounds of a search for a better plan.

    seconds: the longest time.
    may_be_away: the model may be away meanwhile.
    allows_lossy: a KV cache of less precision is allowed.
    is_automatic: begun by the gateway for an idle model, so measurements of earlier searches count.
    """

    seconds: float
    may_be_away: bool = False
    allows_lossy: bool = False
    is_automatic: bool = False


class TriedPlan(Value):
    """A plan of the search, with its measured figures."""

    change: str = Field(description="the difference to the plan that was the best before it")
    reason: str = ""
    fingerprint: str = ""
    argv: tuple[str, ...] = ()
    speed: Speed | None = Field(None, description="None: not measured, and `problem` says why")
    relative_score: float | None = Field(
        None,
        description="relative to the served plan, by the model's goal; None: not measured",
        alias="worth",
    )
    problem: str = ""


class TuningReport(Value):
    """A search, from its beginning to its last trial."""

    model: str
    state: TuningState
    phase: str = Field("", description="the step under way, or the reason of the end")
    is_offline: bool = Field(
        False, description="the model is away while its plans are measured", alias="offline"
    )
    is_automatic: bool = Field(
        False, description="the gateway began it, as FITSERVE_AUTO_TUNE says", alias="automatic"
    )
    seconds: float = Field(description="longest time of the search")
    elapsed_s: float = 0.0
    tried: tuple[TriedPlan, ...] = Field(
        (), description="trials in their order; the first one serves"
    )
    best: int = Field(0, description="the best measured plan, by its place in `tried`")
    wish: Wish | None = Field(
        None, description="the wish that starts the best plan; None: no plan is clearly better"
    )
    is_applied: bool = Field(False, alias="applied")
