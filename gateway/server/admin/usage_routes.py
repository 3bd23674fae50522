"""The admin API of usage: requests and tokens by day, key and model, as JSON or CSV."""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from pydantic import Field

from gateway.domain import Value
from gateway.errors import BadRequest
from gateway.keys import UsageRow
from gateway.server.gateway_parts import gateway_of
from gateway.store.usage_table import PARTS, Part

router = APIRouter(prefix="/admin/usage", tags=["admin"])

_EPOCH = date(1970, 1, 1)
_DAYS = 30


class UsageView(Value):
    """A row of usage. Fields that `by` does not name are None."""

    day: date | None = Field(description="a day in UTC")
    key: str | None = Field(description="name of the key; empty: no key")
    model: str | None
    requests: int = Field(description="requests that an engine answered or received")
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = Field(description="prompt tokens found in a cache, if engines report them")
    requests_without_usage: int = Field(
        description=(
            "requests with unknown tokens: mostly streams without `include_usage`, and answers"
            " whose client left"
        )
    )
    estimated_tokens: int = Field(
        description=(
            "the gateway's estimate of the missing tokens of `requests_without_usage`, from the"
            " bytes of requests and answers; in no other sum"
        )
    )


class UsageList(Value):
    data: tuple[UsageView, ...]
    first: date
    last: date


def _period(
    first: Annotated[
        date | None, Query(alias="from", description="a day in UTC; default: 30 days ago")
    ] = None,
    last: Annotated[
        date | None, Query(alias="to", description="a day in UTC; default: today")
    ] = None,
) -> tuple[date, date]:
    """The first and the last day of the query."""
    last = last or datetime.now(UTC).date()
    return first or last - timedelta(days=min(_DAYS, (last - date.min).days)), last


@router.get(
    "",
    response_model=UsageList,
    responses={
        200: {"content": {"text/csv": {"schema": {"type": "string"}}}, "description": "JSON or CSV"}
    },
)
async def usage(
    request: Request,
    period: Annotated[tuple[date, date], Depends(_period)],
    by: Annotated[
        str,
        Query(
            max_length=40,
            description="columns of a row: day, key, model, separated by commas",
        ),
    ] = "day,key,model",
    key: Annotated[str | None, Query(max_length=200)] = None,
    model: Annotated[str | None, Query(max_length=200)] = None,
    as_format: Annotated[Literal["json", "csv"] | None, Query(alias="format")] = None,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
) -> UsageList | Response:
    """Requests and tokens by day, key and model. Counts of the last second of a worker may be
    missing."""
    first, last = period
    columns = _named_columns(by)
    gateway = gateway_of(request)
    await gateway.usage.flush()
    table = gateway.store.usage
    rows = await asyncio.to_thread(
        table.sums, (first - _EPOCH).days, (last - _EPOCH).days, columns, key, model
    )
    used_rows = [_used_view(row, columns) for row in rows]
    format_ = as_format or (
        "csv" if accept.partition(",")[0].partition(";")[0].strip() == "text/csv" else "json"
    )
    if format_ == "json":
        return UsageList(data=tuple(used_rows), first=first, last=last)
    headers = {"content-disposition": f'attachment; filename="usage-{first}-{last}.csv"'}
    return Response(
        _csv_text(used_rows, columns), media_type="text/csv; charset=utf-8", headers=headers
    )


def _named_columns(columns: str) -> tuple[Part, ...]:
    """The columns that `columns` names. Raises BadRequest."""
    names = {part.strip() for part in columns.split(",") if part.strip()}
    if unknown_names := sorted(names - set(PARTS)):
        raise BadRequest(
            f"Usage is not counted by {unknown_names[0]!r}.",
            hint=f"Use {', '.join(PARTS)}.",
            param="by",
        )
    return tuple(part for part in PARTS if part in names)


def _used_view(row: UsageRow, columns: tuple[Part, ...]) -> UsageView:
    return UsageView(
        day=_EPOCH + timedelta(days=row.day) if "day" in columns else None,
        key=row.key if "key" in columns else None,
        model=row.model if "model" in columns else None,
        **dict(zip(UsageRow._fields[3:], row[3:], strict=True)),
    )


def _csv_text(usage_rows: Iterable[UsageView], columns: tuple[Part, ...]) -> str:
    file = io.StringIO()
    names = [*columns, *UsageRow._fields[3:]]
    writer = csv.writer(file)
    writer.writerow(names)
    writer.writerows([getattr(row, column) for column in names] for row in usage_rows)
    return file.getvalue()
