"""A writer that keeps the bytes that it passes on to the client."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gateway.proxy.transcripts.exchange_copy import MAX_ANSWER_BYTES

if TYPE_CHECKING:
    from gateway.proxy.upstream_connection import Data, Writer


class AnswerCopy:
    """The bytes of an answer, up to `MAX_ANSWER_BYTES`.

    is_cut: there were more.
    """

    __slots__ = ("_pieces", "_size", "_writer", "is_cut")

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._pieces: list[bytes] = []
        self._size = 0
        self.is_cut = False

    def write(self, data: Data, /) -> None:
        self._writer.write(data)
        self._copy(data)

    def writelines(self, data: Iterable[Data], /) -> None:
        pieces = tuple(data)
        self._writer.writelines(pieces)
        for piece in pieces:
            self._copy(piece)

    def content(self) -> bytes:
        return b"".join(self._pieces)

    def _copy(self, data: Data) -> None:
        room = MAX_ANSWER_BYTES - self._size
        if len(data) > room:
            self.is_cut = True
        if room > 0:
            piece = bytes(data[:room])
            self._size += len(piece)
            self._pieces.append(piece)
