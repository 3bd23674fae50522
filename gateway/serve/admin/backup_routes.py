"""The admin API of backups: the data folder as one file, while the gateway works on it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse
from starlette.background import BackgroundTask

from gateway.api.error_bodies import errors
from gateway.errors import StoreError
from gateway.store.backup import write_backup
from gateway.version import __version__

router = APIRouter(prefix="/admin", tags=["admin"])


@router.get(
    "/backup",
    response_class=FileResponse,
    responses={200: {"content": {"application/gzip": {}}, "description": "A .tar.gz"}, **errors(StoreError)},
)
async def backup(request: Request) -> FileResponse:
    """Models, facts, measurements and digests of keys, of one moment, as a .tar.gz for `fitserve restore`. Weights and engines are not in it."""
    data: Path = request.app.state.settings.data
    request.app.state.store.changeable()
    file = data / f"backup-{time.time_ns()}.tar.gz"
    try:
        await asyncio.to_thread(_write, data, file)
    except BaseException:
        file.unlink(missing_ok=True)
        raise
    name = f"fitserve-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.tar.gz"
    return FileResponse(
        file, media_type="application/gzip", filename=name, background=BackgroundTask(file.unlink, missing_ok=True)
    )


def _write(data: Path, file: Path) -> None:
    with file.open("xb") as into:
        write_backup(data, into, __version__)
