"""Reading of transcripts, the newest first. Nothing of them is held in memory between two calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from gateway.decoding import DECODE_ERRORS
from gateway.errors import BadRequest, NotFound
from gateway.server.transcripts.segments import (
    Line,
    Segment,
    list_segments,
    read_line,
    read_lines,
)
from gateway.server.transcripts.transcript_views import (
    TranscriptList,
    TranscriptRow,
    TranscriptView,
    transcript_row,
    transcript_view,
)

if TYPE_CHECKING:
    from gateway.server.transcripts.transcript_cipher import TranscriptCipher

# Bytes of lines that one call looks through, so that a search takes a bounded time.
_SEARCHED_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class TranscriptQuery:
    """Conditions that a transcript fulfils. Empty: any. text: words of request or answer."""

    text: str = ""
    model: str = ""
    key: str = ""
    request_id: str = ""

    @property
    def is_empty(self) -> bool:
        return self == TranscriptQuery()

    def fits(self, view: TranscriptView) -> bool:
        if view.is_locked:
            return self.is_empty
        return (
            self.model in ("", view.model)
            and self.key in ("", view.key)
            and self.request_id in ("", view.request_id)
            and (not self.text or self.text.casefold() in _text_of(view).casefold())
        )


class _Place(NamedTuple):
    """The place of a line: the name of its file, and its offset there."""

    name: str
    offset: int

    @property
    def id(self) -> str:
        return f"{self.name}-{self.offset}"


class TranscriptArchive:
    """Blocks for the time of its work, so call it in a thread."""

    def __init__(self, folder: Path, cipher: TranscriptCipher) -> None:
        self._folder = folder
        self._cipher = cipher

    def page(self, query: TranscriptQuery, last_id: str | None, limit: int) -> TranscriptList:
        """The next transcripts that fit. Raises BadRequest for a `last_id` of
        another form."""
        rows: list[TranscriptRow] = []
        searched_bytes = 0
        last_place: _Place | None = None
        for segment, line in self._lines(None if last_id is None else _place(last_id)):
            if len(rows) == limit or searched_bytes > _SEARCHED_BYTES:
                return TranscriptList(
                    data=tuple(rows), last_id=None if last_place is None else last_place.id
                )
            last_place = _Place(segment.name, line.offset)
            searched_bytes += len(line.token)
            view = self._view(segment, line)
            if query.fits(view):
                rows.append(transcript_row(view))
        return TranscriptList(data=tuple(rows), last_id=None)

    def find(self, id_: str) -> TranscriptView:
        """The transcript of that id. Raises NotFound, BadRequest."""
        place = _place(id_)
        token = read_line(self._folder, place.name, place.offset)
        if token is None:
            raise NotFound(
                "There is no transcript of this id.",
                hint="It may have been deleted. `fitserve transcripts ls` lists those that exist.",
            )
        path = self._folder / place.name
        segment = Segment(path, int(place.name.partition("-")[0]) / 1000, 0)
        return self._view(segment, Line(place.offset, token))

    def views(self, query: TranscriptQuery) -> Iterator[TranscriptView]:
        """All transcripts that fit."""
        for segment, line in self._lines(None):
            view = self._view(segment, line)
            if query.fits(view):
                yield view

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(segment.size for segment in list_segments(self._folder))

    def delete_all(self) -> int:
        """Delete all files. Returns their bytes."""
        size = 0
        for segment in list_segments(self._folder):
            segment.path.unlink(missing_ok=True)
            size += segment.size
        return size

    def _lines(self, last_place: _Place | None) -> Iterator[tuple[Segment, Line]]:
        for segment in reversed(list_segments(self._folder)):
            if last_place is not None and segment.name > last_place.name:
                continue
            for line in reversed(read_lines(segment)):
                if last_place is None or (segment.name, line.offset) < last_place:
                    yield segment, line

    def _view(self, segment: Segment, line: Line) -> TranscriptView:
        data = self._cipher.decrypt(line.token)
        fields: dict[str, Any] | None = None
        if data is not None:
            try:
                fields = msgspec.json.decode(data)
            except DECODE_ERRORS:
                fields = None
        return transcript_view(_Place(segment.name, line.offset).id, segment.started_at, fields)


def _place(id_: str) -> _Place:
    """The place in an id. Raises BadRequest."""
    name, _, offset = id_.rpartition("-")
    if not (name[:13].isascii() and name[:13].isdecimal() and name[13:14] == "-"):
        raise _id_error()
    if not (offset.isascii() and offset.isdecimal() and len(offset) < 12):
        raise _id_error()
    return _Place(name, int(offset))


def _id_error() -> BadRequest:
    return BadRequest(
        "This is not the id of a transcript.",
        hint="`fitserve transcripts ls` lists the ids.",
        param="id",
    )


def _text_of(view: TranscriptView) -> str:
    return f"{msgspec.json.encode(view.request).decode()}\n{view.answer}"
