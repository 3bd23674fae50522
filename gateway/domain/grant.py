"""The rights and limits of a key."""

from __future__ import annotations

from datetime import date
from typing import Annotated

from gateway.domain.base import ConfigDict, Field
from gateway.domain.budget import Budget, GroupName
from gateway.domain.value import TextForm, Value
from gateway.domain.wish import ModelName
from gateway.keys import FIRST_PRIORITY, LAST_PRIORITY, PriorityClass, Scope

_MAX_LIMIT = 10**9


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
    budget: Budget | None = Field(
        None,
        exclude_if=lambda budget: budget is None,
        description="the most it may use in a day and in a month",
    )
    expires: date | None = Field(
        None, description="the last day of UTC on which it is valid; None: no end"
    )
