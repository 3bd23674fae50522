"""What the gateway and the process that plans say to each other, and the limits of both. A message
is frames, each after its length."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pydantic import TypeAdapter

from gateway.domain import (
    EngineAnswer,
    Fact,
    Offer,
    OpenQuestions,
    Question,
    RuleGap,
    Served,
    Sharing,
)
from gateway.domain.units import GIB, MIB

# Headers of 500,000 tensors, more than any model has, take less than half of it.
MEMORY_BYTES = 2 * GIB
# Of the processor, not of the clock: a Hub that is far away and a machine that is busy are no fault
# of the model.
PROCESSOR_S = 60
# The plan of a real model takes 10 KB, the longest decision of the published models on all machines
# 1 MB.
PLAN_BYTES = MIB
DECISION_BYTES = 8 * MIB
# Names and shapes of the tensors of a quantized model: 100 bytes for each.
HEADER_BYTES = 64 * MIB

LENGTH = struct.Struct(">I")


class Start(NamedTuple):
    """The first message: what all requests have in common. It comes on stdin, so that the token
        shows in no process list.

    roots: folders of profiles, as `Profiles.roots`. data: the gateway's data folder, with installed
    engines and caches. models: the folder of downloads.
    installed_only: engines run as processes here, so only an engine that is installed can be
    planned. allowed_images: patterns of `AllowedImages`, where engines run in containers.
    engine_env: what the settings give to all engines.
    """

    roots: tuple[str, ...]
    data: str
    hf_endpoint: str | None
    hf_token: str | None
    installed_only: bool
    allowed_images: tuple[str, ...] | None = None
    engine_env: tuple[tuple[str, str], ...] = ()
    models: str | None = None


class Request(NamedTuple):
    """JSON of the wish, of the claims, of the name of a snapshot, of whether engines will be asked
    (`asking`), of whether
    those that are not here are told of (`others`), of the digests of images, by name
    (`pins`), of the plan that runs (`running`), of what its model has of each GPU (`held`) and gave
    its clients (`seen`), of the one plan that it is compared with (`against`), of how it shares its
    GPUs (`sharing`, `SHARING`); of the machine, where no snapshot is named; of facts, one a line;
    of what engines answered (`ANSWERS`).
    """

    wish: bytes
    machine: bytes
    facts: bytes
    answers: bytes


class Answer(NamedTuple):
    """The head of an answer, before its `Frames`. `error` is a FitserveError: its class and fields.
    `reason`: why there is no plan. `last`:
    the process ends after it. `commits`, `unasked`, `template`: as those of `Planned`."""

    error: dict[str, str | None] | None = None
    reason: str = ""
    last: bool = False
    commits: Mapping[str, str] = {}
    unasked: tuple[str, ...] = ()
    template: str = ""


class Frames(NamedTuple):
    """The best plan and the whole decision; what engines can be asked (`OPEN`), and where they
    contradicted the rules (`GAPS`); and what they
    are told of the model, where that was wanted: config.json, and a safetensors file without its
    data where there is one; the rival of the plan that runs; what others have to give for the best
    plan (`TAKES`); what is learned from what the plan that runs gave its clients (`FACTS`)."""

    plan: bytes = b""
    decision: bytes = b""
    open: bytes = b""
    gaps: bytes = b""
    config: bytes = b""
    headers: bytes = b""
    rival: bytes = b""
    takes: bytes = b""
    learned: bytes = b"[]"


ANSWERS = TypeAdapter(list[tuple[Question, EngineAnswer]])
OPEN = TypeAdapter(tuple[OpenQuestions, ...])
GAPS = TypeAdapter(tuple[RuleGap, ...])
TAKES = TypeAdapter(tuple[Offer, ...])
SHARING = TypeAdapter(Sharing)
FACTS = TypeAdapter(tuple[Fact, ...])
SEEN = TypeAdapter(tuple[Served, ...])


def packed(frames: Sequence[bytes]) -> bytes:
    return b"".join(part for frame in frames for part in (LENGTH.pack(len(frame)), frame))
