"""Copies of answers: all bytes for the client, and a bound for the copy."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.proxy.transcripts.answer_copy import AnswerCopy
from gateway.proxy.transcripts.exchange_copy import MAX_ANSWER_BYTES
from gateway.proxy.upstream_connection import Data


class Client:
    def __init__(self) -> None:
        self.received = b""

    def write(self, data: Data, /) -> None:
        self.received += data

    def writelines(self, data: Iterable[Data], /) -> None:
        self.received += b"".join(data)


def test_a_client_gets_all_bytes_and_the_copy_has_them_too() -> None:
    client = Client()
    copy = AnswerCopy(client)
    copy.write(b"head")
    copy.writelines(iter((b"one", memoryview(b"two"))))
    assert client.received == copy.content() == b"headonetwo"
    assert not copy.is_cut


def test_a_copy_ends_at_its_bound_and_the_client_gets_the_rest() -> None:
    client = Client()
    copy = AnswerCopy(client)
    copy.write(b"a" * (MAX_ANSWER_BYTES - 1))
    copy.write(b"bc")
    copy.write(b"d")
    assert copy.is_cut
    assert copy.content().endswith(b"ab")
    assert len(copy.content()) == MAX_ANSWER_BYTES
    assert client.received.endswith(b"abcd")
