"""The admin API of downloads: pull a repository's weights into the cache of this machine, without
a model that serves them."""

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

router = APIRouter(prefix="/admin", tags=["admin"])


class PullRequest(Value):
    # Built now: FastAPI looks at the model of a body before anything is validated with it.
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
    """Download a repository: lines of JSON with the bytes that are here (`done`, `total`;
    `checking`: that were looked at), and at the end `commit`, or
    `error`. A download that was cut off goes on where it was; one whose client leaves is cut off.
    """
    lines = pull_repository(request.app.state.hub, body.source, body.revision)
    try:
        first = await anext(lines)
    except FitserveError:
        await lines.aclose()
        raise
    return StreamingResponse(_as_lines(first, lines), media_type="application/x-ndjson")


async def _as_lines(
    first: DownloadProgress, rest: AsyncGenerator[DownloadProgress, None]
) -> AsyncGenerator[bytes, None]:
    async with aclosing(rest) as lines:
        yield _line(first)
        try:
            async for said in lines:
                yield _line(said)
        except FitserveError as error:
            yield _as_json(error.envelope())


def _line(said: DownloadProgress) -> bytes:
    told: dict[str, Any] = {"done": said.done, "total": said.total, "checking": said.checking}
    return _as_json(told | ({"commit": said.commit} if said.ended else {}))


def _as_json(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"
