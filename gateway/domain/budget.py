"""Budgets of keys and of groups of keys."""

from __future__ import annotations

from typing import Annotated

from gateway.domain.base import ConfigDict, Field
from gateway.domain.value import TextForm, Value

_MOST_COUNT, _MOST_AMOUNT = 10**15, 10.0**9

GroupName = Annotated[
    str,
    TextForm(
        r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$",
        "the name of a group has up to 64 letters, digits, `_`, `-` and `.`, and begins with a"
        " letter, a digit or `_`",
    ),
]


class Budget(Value):
    """The most that a key or a group may use in a day and in a month of UTC. None: no limit."""

    # FastAPI reads the model of a body before it validates anything.
    model_config = ConfigDict(defer_build=False)

    requests_per_day: int | None = Field(None, ge=1, le=_MOST_COUNT)
    requests_per_month: int | None = Field(None, ge=1, le=_MOST_COUNT)
    tokens_per_day: int | None = Field(
        None, ge=1, le=_MOST_COUNT, description="tokens of prompts and answers together"
    )
    tokens_per_month: int | None = Field(None, ge=1, le=_MOST_COUNT)
    gpu_seconds_per_day: float | None = Field(
        None,
        gt=0,
        le=_MOST_AMOUNT,
        allow_inf_nan=False,
        description="seconds at engines, times their GPUs, by the requests there at once",
    )
    gpu_seconds_per_month: float | None = Field(None, gt=0, le=_MOST_AMOUNT, allow_inf_nan=False)
    money_per_day: float | None = Field(
        None,
        gt=0,
        le=_MOST_AMOUNT,
        allow_inf_nan=False,
        description="by the prices of FITSERVE_PRICES",
    )
    money_per_month: float | None = Field(None, gt=0, le=_MOST_AMOUNT, allow_inf_nan=False)
    warn_percent: int = Field(
        80, ge=1, le=100, description="part of a limit from which on answers and events warn"
    )
    is_soft: bool = Field(
        False, description="whether a spent budget warns only, and refuses no request"
    )

    @property
    def needs_prices(self) -> bool:
        return self.money_per_day is not None or self.money_per_month is not None
