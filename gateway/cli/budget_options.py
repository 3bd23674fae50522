"""Options of budgets, and budgets in the words of listings."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gateway.cli.options import drop_none
from gateway.domain.record import FrozenRecord

_MEASURES = {
    "requests": "requests",
    "tokens": "tokens",
    "gpu_seconds": "GPU seconds",
    "money": "money",
}


class BudgetOptions(FrozenRecord, frozen=True):
    """The most that a key or a group may use in a day and in a month of UTC."""

    requests_per_day: Annotated[int | None, typer.Option(min=1, help="Requests of a day.")] = None
    requests_per_month: Annotated[int | None, typer.Option(min=1, help="Requests of a month.")] = (
        None
    )
    tokens_per_day: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a day, prompts and answers together.")
    ] = None
    tokens_per_month: Annotated[int | None, typer.Option(min=1, help="Tokens of a month.")] = None
    gpu_seconds_per_day: Annotated[
        float | None, typer.Option(min=0, help="Seconds of GPUs of a day.")
    ] = None
    gpu_seconds_per_month: Annotated[
        float | None, typer.Option(min=0, help="Seconds of GPUs of a month.")
    ] = None
    money_per_day: Annotated[
        float | None, typer.Option(min=0, help="Money of a day, by FITSERVE_PRICES.")
    ] = None
    money_per_month: Annotated[float | None, typer.Option(min=0, help="Money of a month.")] = None
    warn_at: Annotated[
        int | None,
        typer.Option(min=1, max=100, help="Percent of a limit that warn. Default: 80."),
    ] = None
    soft: Annotated[
        bool, typer.Option("--soft", help="Warn only: a spent budget refuses no request.")
    ] = False

    def fields(self) -> dict[str, Any]:
        """The given fields of the budget."""
        limits = {
            f"{measure}_per_{period}": getattr(self, f"{measure}_per_{period}")
            for measure in _MEASURES
            for period in ("day", "month")
        }
        return drop_none({**limits, "warn_percent": self.warn_at, "is_soft": self.soft or None})


def describe_use(rows: list[dict[str, Any]]) -> list[str]:
    """The used part of each limit: `1,200 of 5,000 tokens/day`."""
    return [
        f"{_amount(row['used'])} of {_amount(row['limit'])} {_MEASURES[row['measure']]}"
        f"/{row['period']}"
        for row in rows
    ]


def _amount(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"
