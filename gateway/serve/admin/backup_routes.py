"""The admin API of backups: the data folder as one file, while the gateway works on it."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from gateway.api.error_bodies import errors
from gateway.errors import StoreError
from gateway.store.backup import write_backup
from gateway.version import __version__

_PIECE = 256 * 1024

router = APIRouter(prefix="/admin", tags=["admin"])


@router.get(
    "/backup",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/gzip": {}}, "description": "A .tar.gz"}, **errors(StoreError)},
)
async def backup(request: Request) -> StreamingResponse:
    """Models, facts, measurements and digests of keys, of one moment, as a .tar.gz for `fitserve restore`. Weights and engines are not in it."""
    request.app.state.store.changeable()
    file = await asyncio.to_thread(_written, request.app.state.settings.data)
    name = f"fitserve-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.tar.gz"
    headers = {"content-length": str(file.tell()), "content-disposition": f'attachment; filename="{name}"'}
    file.seek(0)
    return StreamingResponse(_pieces(file), headers=headers, media_type="application/gzip")


def _written(data: Path) -> IO[bytes]:
    """A file without a name: however the download ends, nothing of it is left."""
    file = tempfile.TemporaryFile(dir=data)  # noqa: SIM115 - the answer has it
    try:
        write_backup(data, file, __version__)
    except BaseException:
        file.close()
        raise
    return file


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        while piece := file.read(_PIECE):
            yield piece
