"""OpenAI's Batches API: requests of a file that run when engines are free."""

from __future__ import annotations

from fastapi import APIRouter, Query, Request

from gateway.errors import BadRequest, Conflict, NotFound, QuotaReachedError, StoreError
from gateway.proxy.api.error_bodies import errors
from gateway.server.batches.owner import owner_of
from gateway.server.batches.page import page
from gateway.server.batches.records import BatchList, BatchView, NewBatch, batch_view
from gateway.server.gateway_parts import gateway_of

router = APIRouter(prefix="/v1/batches", tags=["batches"])


@router.post("", responses=errors(BadRequest, NotFound, QuotaReachedError, StoreError))
async def make_batch(request: Request, body: NewBatch) -> BatchView:
    """Run the requests of a file in the name of the caller's key. All lines are checked first."""
    batches = gateway_of(request).batches
    return batch_view(await batches.create(request.scope["caller"], body))


@router.get("", responses=errors(BadRequest))
async def list_batches(
    request: Request,
    after: str | None = Query(None, max_length=100),
    limit: int = Query(20, ge=1, le=100),
) -> BatchList:
    """The batches of the caller's key, the newest first. after: the last id of the page before."""
    batches = gateway_of(request).batches
    records = await batches.threads.run(batches.store.batches, owner_of(request.scope["caller"]))
    records, has_more = page(records[::-1], after=after, limit=limit)
    views = tuple(map(batch_view, records))
    return BatchList(
        data=views,
        first_id=views[0].id if views else None,
        last_id=views[-1].id if views else None,
        has_more=has_more,
    )


@router.get("/{batch_id}", responses=errors(NotFound))
async def show_batch(request: Request, batch_id: str) -> BatchView:
    """A batch with its counts."""
    store = gateway_of(request).batches.store
    return batch_view(store.batch(owner_of(request.scope["caller"]), batch_id))


@router.post("/{batch_id}/cancel", responses=errors(NotFound, Conflict, StoreError))
async def cancel_batch(request: Request, batch_id: str) -> BatchView:
    """Cancel a batch. Lines at engines are ended, and answers so far are kept."""
    batches = gateway_of(request).batches
    return batch_view(await batches.cancel(owner_of(request.scope["caller"]), batch_id))
