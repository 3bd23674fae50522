"""The pipes of a child that reads foreign models: requests on stdin, answers on stdout."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import BinaryIO

from gateway.planner.service.messages import LENGTH


def claim_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes of requests and answers.

    The pipes are copies, so that no print mixes with answers and no input reads requests.
    """
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return requests, answers


def read_request_frame(requests: BinaryIO) -> bytes:
    """The next frame. The end of the gateway, a reset or half a message, ends the process."""
    (size,) = LENGTH.unpack(_read_exactly(requests, LENGTH.size))
    return _read_exactly(requests, size)


def _read_exactly(requests: BinaryIO, size: int) -> bytes:
    received_bytes = b""
    with suppress(OSError):
        received_bytes = requests.read(size)
    if len(received_bytes) < size:
        os._exit(0)
    return received_bytes
