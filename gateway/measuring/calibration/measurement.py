"""What a child is asked to measure, what it says, read strictly, and the facts that follow. Pure.
measuring/inside/ranks.py is the other side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from gateway.diagnosis.facts.peers import P2P
from gateway.domain import Fact, Value
from gateway.domain.units import MIB
from gateway.engines.common.speed.measured import SECONDS, cards, reach, uuids
from gateway.errors import HostError
from gateway.measuring.calibration.gpu_set import GpuSet

LIMIT_S = 90.0
"""Of one set of GPUs. One takes ten seconds, eight take half a minute; most of it an engine's
Python imports torch."""
# Twice this much is copied: more than any cache holds.
_COPY_BYTES = 384 * MIB
_MATMUL = 8192
# What a token of a large model takes, some tokens, a prompt.
_REDUCE_BYTES = (16 * 1024, MIB, 64 * MIB)
_SAMPLE_S = 0.02
# An engine's Python imports torch in seconds, from a cold disk in half a minute.
_PART_S = 45.0
# Samples of an idle GPU are within a hundredth of each other; short waits are within a few.
_MOST_SPREAD = 0.1
_MOST_SPREAD_OF_SECONDS = 0.3

What = Literal[
    "memory",
    "launch",
    "bfloat16",
    "float16",
    "fp8",
    "int8",
    "peer_access",
    "peer_broken",
    "peer_latency",
    "peer",
    "all_reduce",
]
Text = Annotated[str, Field(max_length=600)]


class MeasuredNumber(Value):
    """value: bytes/s, FLOP/s or seconds; 0 or 1 of peer_access and peer_broken. gpus: of the set,
    by position."""

    what: What
    gpus: tuple[Annotated[int, Field(ge=0, lt=64)], ...] = Field(min_length=1, max_length=64)
    value: float = Field(ge=0, lt=2**62, allow_inf_nan=False)
    spread: float = Field(ge=0, allow_inf_nan=False)
    bytes: int = Field(0, ge=0, lt=2**40)

    @property
    def steady(self) -> bool:
        return self.spread <= (_MOST_SPREAD_OF_SECONDS if self.what in SECONDS else _MOST_SPREAD)


class Measurement(Value):
    software: Text | None
    numbers: tuple[MeasuredNumber, ...] = Field(max_length=1000)
    problems: tuple[Text, ...] = Field(max_length=200)


class _Line(Value):
    measured: Measurement


def document(one: GpuSet, by: Literal["torch", "driver"]) -> bytes:
    """What the child reads. by: torch of an engine's Python, or the driver alone."""
    asked = {
        "kind": "measure",
        "by": by,
        "device": "cuda",
        "gpus": [gpu.uuid for gpu in one.gpus],
        "count": len(one.gpus),
        "groups": [] if by == "driver" else one.groups,
        "pairs": [group for group in one.groups if len(group) == 2],
        "copy_bytes": _COPY_BYTES,
        "matmul": _MATMUL,
        "reduce_bytes": _REDUCE_BYTES,
        "sample_s": _SAMPLE_S,
        "part_s": _PART_S,
        "limit_s": LIMIT_S - 10,
    }
    return json.dumps(asked).encode()


def read(lines: Iterable[bytes], count: int) -> Measurement:
    """Of the first line, for `count` GPUs. Raises HostError for what is no measurement."""
    try:
        found = _Line.model_validate_json(next(iter(lines), b"")).measured
    except ValidationError as error:
        raise _nonsense(
            str(error.errors(include_url=False, include_input=False)[0]["msg"])
        ) from None
    if any(index >= count for number in found.numbers for index in number.gpus):
        raise _nonsense("it speaks of GPUs that it was not asked about")
    return found


def _nonsense(why: str) -> HostError:
    return HostError(
        f"What measured the GPUs answered nonsense: {why}.",
        hint="See whether the engine's image or environment is what it says it is.",
    )


def facts_of(
    found: Measurement, one: GpuSet, by: str, driver: str | None, at: float
) -> tuple[list[Fact], list[str]]:
    """What is kept, and in words what is not: numbers that vary too much tell more of whoever used
    the GPU meanwhile. by: the engine or
    program that measured."""
    # An all-reduce of one size is timed twice, at last in a graph, as engines have it.
    last = {(number.what, number.gpus, number.bytes): number for number in found.numbers}
    facts: list[Fact] = []
    problems = [*found.problems]
    for number in sorted(last.values(), key=lambda one: (len(one.gpus), one.gpus)):
        if not number.steady:
            who = ", ".join(str(one.gpus[index].index) for index in number.gpus)
            problems.append(
                f"GPU {who}, {number.what}: it varied by {number.spread:.0%}, so that nothing is"
                " kept of it"
            )
            continue
        facts += _facts(
            number, one, f"{by}, {found.software}, varied by {number.spread:.1%}", driver, at
        )
    return facts, problems


def _facts(
    number: MeasuredNumber, one: GpuSet, source: str, driver: str | None, at: float
) -> Iterator[Fact]:
    group = [one.gpus[index] for index in number.gpus]
    under = {"driver": driver} if driver else {}
    if number.what == "peer_broken":
        if not number.value:
            return  # they go through the host's memory, and have no P2P that could be left off
        scope = {"gpus": uuids(group), "by": P2P}
        wrong = (
            "a copy between them arrived wrong, though the driver says that they reach each other"
        )
        yield Fact(
            kind="peers_fail",
            scope=scope,
            grade="failed",
            under=under,
            source=f"{source}: {wrong}",
            at=at,
        )
        return
    scope = {"what": number.what, "gpus": uuids(group)}
    if len(group) > 1:
        scope |= {"cards": cards(group), "links": reach(group, one.links)}
    if number.bytes:
        scope["bytes"] = str(number.bytes)
    value = number.value * 1e9 if number.what in SECONDS else number.value
    yield Fact(
        kind="machine_speed",
        scope=scope,
        value=round(value),
        grade="verified",
        under=under,
        source=source,
        at=at,
    )
