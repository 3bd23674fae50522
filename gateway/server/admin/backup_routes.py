"""The admin API of backups: the data folder as one file, from a running gateway."""

from __future__ import annotations

import asyncio
import tempfile
import time
from functools import partial
from typing import IO

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.errors import StoreError
from gateway.proxy.api.error_bodies import errors
from gateway.server.gateway_parts import gateway_of
from gateway.store.backup import write_backup
from gateway.version import __version__

_PIECE = 256 * 1024

router = APIRouter(prefix="/admin", tags=["admin"])


@router.get(
    "/backup",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"application/gzip": {}}, "description": "A .tar.gz"},
        **errors(StoreError),
    },
)
async def backup(request: Request) -> StreamingResponse:
    """Models, facts, measurements and digests of keys at one moment, as a .tar.gz for `fitserve
    restore`. Weights and engines are not included."""
    gateway = gateway_of(request)
    gateway.store.changeable()
    # A file without a name disappears however the download ends.
    file = tempfile.TemporaryFile(dir=gateway.serving.settings.data)  # noqa: SIM115
    try:
        await asyncio.to_thread(write_backup, gateway.serving.settings.data, file, __version__)
        return Download(file)
    except BaseException:
        file.close()
        raise


class Download(StreamingResponse):
    """A complete file, which is closed with the answer, even if the client reads only part of
    it."""

    def __init__(self, file: IO[bytes]) -> None:
        name = f"fitserve-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.tar.gz"
        headers = {
            "content-length": str(file.tell()),
            "content-disposition": f'attachment; filename="{name}"',
        }
        file.seek(0)
        super().__init__(
            iter(partial(file.read, _PIECE), b""), headers=headers, media_type="application/gzip"
        )
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)
