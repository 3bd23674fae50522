"""What the gateway and the process that plans say to each other, and the limits of both. A message is frames, each after its length."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from gateway.domain.units import GIB, MIB

# Headers of 500,000 tensors, more than any model has, take less than half of it.
MEMORY_BYTES = 2 * GIB
# Of the processor, not of the clock: a Hub that is far away and a machine that is busy are no fault of the model.
PROCESSOR_S = 60
# The plan of a real model takes 10 KB, the longest decision of the published models on all machines 1 MB.
PLAN_BYTES = MIB
DECISION_BYTES = 8 * MIB

LENGTH = struct.Struct(">I")


class Start(NamedTuple):
    """The first message: what all requests have in common. It comes on stdin, so that the token shows in no process list.

    roots: folders of profiles, as `Profiles.roots`. data: the gateway's data folder, with installed engines and caches.
    installed_only: engines run as processes here, so only an engine that is installed can be planned.
    """

    roots: tuple[str, ...]
    data: str
    hf_endpoint: str | None
    hf_token: str | None
    installed_only: bool


class Request(NamedTuple):
    """JSON of the wish, of the claims and of the name of a snapshot; of the machine, where no snapshot is named; of facts, one a line."""

    wish: bytes
    machine: bytes
    facts: bytes


class Answer(NamedTuple):
    """The head of an answer, before the best plan and the whole decision. `error` is a FitserveError: its class and fields. `reason`: why
    there is no plan. `last`: the process ends after it."""

    error: dict[str, str | None] | None = None
    reason: str = ""
    last: bool = False


def packed(frames: Sequence[bytes]) -> bytes:
    return b"".join(part for frame in frames for part in (LENGTH.pack(len(frame)), frame))
