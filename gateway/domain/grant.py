"""The rights, limits and budget of a key, and the budget of a group of keys."""

from __future__ import annotations

from datetime import date
from typing import Annotated

from gateway.domain.base import ConfigDict, Field
from gateway.domain.value import TextForm, Value
from gateway.domain.wish import ModelName
from gateway.keys import FIRST_PRIORITY, LAST_PRIORITY, PriorityClass, Scope

_MAX_LIMIT = 10**9
_MAX_COUNT = 10**15
_MAX_AMOUNT = 10.0**9

GroupName = Annotated[
    str,
    TextForm(
        r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$",
        "the name of a group has up to 64 letters, digits, `_`, `-` and `.`, and begins with a"
        " letter, a digit or `_`",
    ),
]


class Allowance(Value):
    """The most that a key or a group may use in a day and in a month of UTC. None: no limit."""

    # FastAPI reads the model of a body before it validates anything.
    model_config = ConfigDict(defer_build=False)

    requests_per_day: int | None = Field(None, ge=1, le=_MAX_COUNT)
    requests_per_month: int | None = Field(None, ge=1, le=_MAX_COUNT)
    tokens_per_day: int | None = Field(
        None, ge=1, le=_MAX_COUNT, description="tokens of prompts and answers together"
    )
    tokens_per_month: int | None = Field(None, ge=1, le=_MAX_COUNT)
    gpu_seconds_per_day: float | None = Field(
        None,
        gt=0,
        le=_MAX_AMOUNT,
        allow_inf_nan=False,
        description="seconds at engines, times their GPUs, by the concurrent requests there",
    )
    gpu_seconds_per_month: float | None = Field(None, gt=0, le=_MAX_AMOUNT, allow_inf_nan=False)
    money_per_day: float | None = Field(
        None,
        gt=0,
        le=_MAX_AMOUNT,
        allow_inf_nan=False,
        description="money of a day, by the prices of FITSERVE_PRICES",
    )
    money_per_month: float | None = Field(None, gt=0, le=_MAX_AMOUNT, allow_inf_nan=False)
    warn_percent: int = Field(
        80, ge=1, le=100, description="part of a limit from which on answers and events warn"
    )
    is_soft: bool = Field(
        False, description="whether a spent budget warns only, and refuses no request"
    )

    @property
    def needs_prices(self) -> bool:
        return self.money_per_day is not None or self.money_per_month is not None


class Grant(Value):
    """The rights and limits of the key of that name. None: no limit."""

    # FastAPI reads the model of a body before it validates anything.
    model_config = ConfigDict(defer_build=False)

    name: Annotated[
        str,
        TextForm(
            r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$",
            "a name has up to 64 letters, digits, `_`, `-` and `.`, and begins with a letter, a"
            " digit or `_`",
        ),
    ] = Field(description="name by which the key is listed and revoked")
    scopes: tuple[Scope, ...] = Field(("inference",), min_length=1, max_length=3)
    models: tuple[ModelName, ...] | None = Field(
        None, min_length=1, max_length=1000, description="the models it may ask; None: all"
    )
    requests_per_minute: int | None = Field(None, ge=1, le=_MAX_LIMIT)
    tokens_per_minute: int | None = Field(
        None, ge=1, le=_MAX_LIMIT, description="tokens of prompts and answers together"
    )
    max_in_flight: int | None = Field(None, ge=1, le=_MAX_LIMIT, description="concurrent requests")
    priority_class: (
        PriorityClass | Annotated[int, Field(ge=FIRST_PRIORITY, le=LAST_PRIORITY, strict=True)]
    ) = Field(
        "normal", description="order of its waiting requests: interactive, normal, batch, a number"
    )
    group: GroupName | None = Field(
        None,
        exclude_if=lambda name: name is None,
        description="group whose budget the key shares",
    )
    budget: Allowance | None = Field(
        None,
        exclude_if=lambda budget: budget is None,
        description="the most it may use in a day and in a month",
    )
    is_recorded: bool = Field(
        False,
        exclude_if=lambda is_recorded: not is_recorded,
        description="whether transcripts of its requests are kept: docs/transcripts.md",
    )
    expires: date | None = Field(
        None, description="the last day of UTC on which it is valid; None: no end"
    )
