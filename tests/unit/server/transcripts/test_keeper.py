"""Messages to the keeper: complete, in parts, and of another program."""

from __future__ import annotations

import pytest

from gateway.proxy.transcripts.exchange_copy import DECODER, MAX_FRAME_BYTES, frame_copy
from gateway.server.transcripts.keeper import split_frames
from tests.support.transcripts import exchange_copy


def test_complete_messages_are_taken_and_a_part_waits() -> None:
    copies = [exchange_copy(id=f"req_{number}") for number in range(3)]
    stream = b"".join(map(frame_copy, copies))
    buffer = bytearray(stream[:-1])
    assert [DECODER.decode(frame) for frame in split_frames(buffer)] == copies[:2]
    buffer += stream[-1:]
    assert [DECODER.decode(frame) for frame in split_frames(buffer)] == copies[2:]
    assert not buffer


def test_a_message_of_another_program_is_refused() -> None:
    with pytest.raises(ValueError, match="too long"):
        split_frames(bytearray((MAX_FRAME_BYTES + 1).to_bytes(4, "big")))
