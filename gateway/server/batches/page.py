"""Pages of a list, as OpenAI's API has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from gateway.errors import BadRequest
from gateway.server.batches.records import BatchRecord, FileRecord

Record = TypeVar("Record", FileRecord, BatchRecord)


def page(records: Sequence[Record], *, after: str | None, limit: int) -> tuple[list[Record], bool]:
    """The records behind `after`, at most `limit`, and whether there are more. Raises
    BadRequest."""
    start = 0
    if after is not None:
        places = (place for place, record in enumerate(records, 1) if record.id == after)
        start = next(places, 0)
        if not start:
            raise BadRequest(
                f"The list has no {after[:100]}.",
                hint="Send `last_id` of the page before as `after`.",
                param="after",
            )
    return list(records[start : start + limit]), len(records) > start + limit
