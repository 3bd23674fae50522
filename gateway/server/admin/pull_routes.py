"""The admin API of downloads: fetch weights into this machine's cache without serving them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from pydantic import ConfigDict, Field

from gateway.domain import Value
from gateway.domain.wish import Revision
from gateway.errors import BadModel, BadRequest, FitserveError, StoreError
from gateway.models.catalog.download import DownloadProgress, pull_repository
from gateway.proxy.api.error_bodies import errors
from gateway.server.gateway_parts import gateway_of

router = APIRouter(prefix="/admin", tags=["admin"])


class PullRequest(Value):
    # Built now, because FastAPI inspects the model of a body before any validation.
    model_config = ConfigDict(defer_build=False)

    source: str = Field(max_length=200, description="Hugging Face repository, org/name")
    revision: Revision | None = Field(
        None, description="branch, tag or commit; None: the default branch"
    )


@router.post(
    "/pull",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"application/x-ndjson": {}}, "description": "Lines of JSON"},
        **errors(BadRequest, BadModel, StoreError),
    },
)
async def pull(request: Request, body: PullRequest) -> StreamingResponse:
    """Download a repository. The answer is lines of JSON with the bytes present (`done`, `total`;
    `checking`: bytes verified), and at the end `commit` or `error`. An interrupted download is
    resumed; it is interrupted when its client leaves."""
    lines = pull_repository(gateway_of(request).hub, body.source, body.revision)
    try:
        first = await anext(lines)
    except FitserveError:
        await lines.aclose()
        raise
    return StreamingResponse(_json_lines(first, lines), media_type="application/x-ndjson")


async def _json_lines(
    first: DownloadProgress, further_progress: AsyncGenerator[DownloadProgress, None]
) -> AsyncGenerator[bytes, None]:
    async with aclosing(further_progress) as lines:
        yield _progress_line(first)
        try:
            async for progress in lines:
                yield _progress_line(progress)
        except FitserveError as error:
            yield _json_line(error.envelope())


def _progress_line(progress: DownloadProgress) -> bytes:
    fields: dict[str, Any] = {
        "done": progress.done,
        "total": progress.total,
        "checking": progress.checking,
    }
    return _json_line(fields | ({"commit": progress.commit} if progress.ended else {}))


def _json_line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"
