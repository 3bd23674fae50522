"""The admin API of usage: requests and tokens by day, key and model, as JSON or CSV."""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import Field

from gateway.domain import Value
from gateway.errors import BadRequest
from gateway.keys import UsageRow
from gateway.store.usage_table import PARTS, Part, UsageTable

router = APIRouter(prefix="/admin/usage", tags=["admin"])

_EPOCH = date(1970, 1, 1)
_DAYS = 30


class Used(Value):
    """What is not asked for `by` is None."""

    day: date | None = Field(description="of UTC")
    key: str | None = Field(description="the name of the key; empty: without one")
    model: str | None
    requests: int = Field(description="that an engine has answered, or was asked")
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = Field(
        description="of the prompt tokens those that were in a cache, where engines tell that"
    )
    untold_requests: int = Field(
        description=(
            "whose tokens are not known, and are in no sum: most are streams without"
            " `include_usage`"
        )
    )


class UsageList(Value):
    data: tuple[Used, ...]
    first: date
    last: date


@router.get(
    "",
    response_model=UsageList,
    responses={
        200: {"content": {"text/csv": {"schema": {"type": "string"}}}, "description": "JSON or CSV"}
    },
)
async def usage(
    request: Request,
    first: Annotated[
        date | None, Query(alias="from", description="a day of UTC; default: 30 days ago")
    ] = None,
    last: Annotated[
        date | None, Query(alias="to", description="a day of UTC; default: today")
    ] = None,
    by: Annotated[
        str,
        Query(
            max_length=40,
            description="what there is a row for: day, key, model, with commas between",
        ),
    ] = "day,key,model",
    key: Annotated[str | None, Query(max_length=200)] = None,
    model: Annotated[str | None, Query(max_length=200)] = None,
    as_format: Annotated[Literal["json", "csv"] | None, Query(alias="format")] = None,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
) -> UsageList | Response:
    """Who used what. What was counted in the last second of a worker may lack."""
    last = last or datetime.now(UTC).date()
    first = first or last - timedelta(days=min(_DAYS, (last - date.min).days))
    parts = _parts(by)
    await request.app.state.usage.flush()
    table: UsageTable = request.app.state.store.usage
    rows = await asyncio.to_thread(
        table.sums, (first - _EPOCH).days, (last - _EPOCH).days, parts, key, model
    )
    used = [_used(row, parts) for row in rows]
    wanted = as_format or (
        "csv" if accept.partition(",")[0].partition(";")[0].strip() == "text/csv" else "json"
    )
    if wanted == "json":
        return UsageList(data=tuple(used), first=first, last=last)
    headers = {"content-disposition": f'attachment; filename="usage-{first}-{last}.csv"'}
    return Response(_csv(used, parts), media_type="text/csv; charset=utf-8", headers=headers)


def _parts(by: str) -> tuple[Part, ...]:
    """Raises BadRequest."""
    named = {part.strip() for part in by.split(",") if part.strip()}
    if unknown := sorted(named - set(PARTS)):
        raise BadRequest(
            f"Usage is not counted by {unknown[0]!r}.",
            hint=f"There are {', '.join(PARTS)}.",
            param="by",
        )
    return tuple(part for part in PARTS if part in named)


def _used(row: UsageRow, parts: tuple[Part, ...]) -> Used:
    return Used(
        day=_EPOCH + timedelta(days=row.day) if "day" in parts else None,
        key=row.key if "key" in parts else None,
        model=row.model if "model" in parts else None,
        **dict(zip(UsageRow._fields[3:], row[3:], strict=True)),
    )


def _csv(used: Iterable[Used], parts: tuple[Part, ...]) -> str:
    file = io.StringIO()
    columns = [*parts, *UsageRow._fields[3:]]
    writer = csv.writer(file)
    writer.writerow(columns)
    writer.writerows([getattr(one, column) for column in columns] for one in used)
    return file.getvalue()
