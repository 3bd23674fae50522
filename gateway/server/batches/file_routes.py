"""OpenAI's Files API: uploads of inputs for batches, and downloads of results."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse
from starlette.requests import ClientDisconnect

from gateway.errors import (
    BadRequest,
    Busy,
    Conflict,
    NotFound,
    QuotaReachedError,
    StoreError,
    TooLarge,
)
from gateway.proxy.api.error_bodies import errors
from gateway.server.batches.batches import Batches
from gateway.server.batches.file_form import FileForm
from gateway.server.batches.file_store import NewFile
from gateway.server.batches.owner import owner_of
from gateway.server.batches.page import page
from gateway.server.batches.records import (
    DeletedFile,
    FileList,
    FilePurpose,
    FileRecord,
    FileView,
    file_view,
)
from gateway.server.gateway_parts import gateway_of

router = APIRouter(prefix="/v1/files", tags=["batches"])

# Bytes of an upload that go to the disk together.
_PIECE_BYTES = 1024 * 1024
_HOUR_S = 3600
_DAY_S = 86_400
_MAX_LIFETIME_S = 30 * _DAY_S
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"const": "batch"},
                        "expires_after[anchor]": {"const": "created_at"},
                        "expires_after[seconds]": {"type": "integer"},
                    },
                }
            }
        },
    }
}


@router.post(
    "",
    responses=errors(BadRequest, TooLarge, QuotaReachedError, Busy, StoreError),
    openapi_extra=_FORM,
)
async def upload_file(request: Request) -> FileView:
    """Upload the input of a batch: a line of JSON for each request. The answer comes once all of it
    is on the disk."""
    batches = gateway_of(request).batches
    owner = owner_of(request.scope["caller"])
    with batches.upload_place(owner):
        return file_view(await _receive(request, batches, owner))


async def _receive(request: Request, batches: Batches, owner: str) -> FileRecord:
    run = batches.threads.run
    new_file = await run(NewFile, batches.store, owner)
    try:
        form = FileForm(request.headers.get("content-type", ""), new_file.write)
        pieces = list[bytes]()
        size = 0
        async for piece in request.stream():
            pieces.append(piece)
            size += len(piece)
            if size >= _PIECE_BYTES:
                await run(form.feed, b"".join(pieces))
                pieces = []
                size = 0
        await run(form.feed, b"".join(pieces))
        lifetime_s = _lifetime_s(form, batches.store.quotas.days)
        return await run(new_file.store, form.filename or "", "batch", lifetime_s)
    except ClientDisconnect:
        raise BadRequest("The upload broke off.", hint="Send the file again.") from None
    finally:
        await run(new_file.close)


def _lifetime_s(form: FileForm, most_days: int) -> float:
    """The seconds that an upload is kept, after a check of the whole form. Raises BadRequest."""
    if not form.is_complete or form.filename is None:
        raise BadRequest(
            "The form has no whole file.", hint="Send the field `file` with a file.", param="file"
        )
    if form.fields.get("purpose") != "batch":
        raise BadRequest(
            "Files are kept as inputs of batches alone.",
            hint="Send the field `purpose` with the text batch.",
            param="purpose",
        )
    text = form.fields.get("expires_after[seconds]")
    if text is None:
        return float(most_days * _DAY_S)
    is_number = text.isdecimal() and len(text) < 10
    anchor = form.fields.get("expires_after[anchor]", "created_at")
    if not is_number or anchor != "created_at" or not _HOUR_S <= int(text) <= _MAX_LIFETIME_S:
        raise BadRequest(
            "`expires_after` is not a time after created_at from an hour to 30 days.",
            hint=f"Send seconds from {_HOUR_S} to {_MAX_LIFETIME_S}.",
            param="expires_after",
        )
    return float(min(int(text), most_days * _DAY_S))


@router.get("", responses=errors(BadRequest))
async def list_files(
    request: Request,
    purpose: FilePurpose | None = None,
    after: str | None = Query(None, max_length=100),
    limit: int = Query(10_000, ge=1, le=10_000),
    order: Literal["asc", "desc"] = "desc",
) -> FileList:
    """The files of the caller's key. after: the last id of the page before."""
    batches = gateway_of(request).batches
    records = await batches.threads.run(batches.store.files, owner_of(request.scope["caller"]))
    if purpose is not None:
        records = [record for record in records if record.purpose == purpose]
    records, has_more = page(records if order == "asc" else records[::-1], after=after, limit=limit)
    views = tuple(map(file_view, records))
    return FileList(
        data=views,
        first_id=views[0].id if views else None,
        last_id=views[-1].id if views else None,
        has_more=has_more,
    )


@router.get("/{file_id}", responses=errors(NotFound))
async def show_file(request: Request, file_id: str) -> FileView:
    """The facts of a file."""
    store = gateway_of(request).batches.store
    return file_view(store.file(owner_of(request.scope["caller"]), file_id))


@router.get(
    "/{file_id}/content",
    response_class=FileResponse,
    responses={
        200: {"content": {"application/octet-stream": {}}, "description": "The bytes of the file"},
        **errors(NotFound),
    },
)
async def file_content(request: Request, file_id: str) -> FileResponse:
    """The bytes of a file."""
    store = gateway_of(request).batches.store
    record = store.file(owner_of(request.scope["caller"]), file_id)
    return FileResponse(
        store.path(record.id), media_type="application/octet-stream", filename=record.filename
    )


@router.delete("/{file_id}", responses=errors(NotFound, Conflict, StoreError))
async def delete_file(request: Request, file_id: str) -> DeletedFile:
    """Delete a file. The input of a batch that runs is kept until its end."""
    batches = gateway_of(request).batches
    await batches.threads.run(batches.store.delete_file, owner_of(request.scope["caller"]), file_id)
    return DeletedFile(id=file_id)
