"""The question to a measuring child, its answer, and the facts from it. Pure.

measuring/inside/ranks.py is the other side.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from gateway.diagnosis.facts.peers import P2P
from gateway.domain import Fact, Value
from gateway.domain.units import MIB
from gateway.engines.common.speed.gpu_measurements import SECONDS, cards, link_class, uuids
from gateway.errors import HostError
from gateway.measuring.calibration.gpu_set import GpuSet

LIMIT_S = 90.0
"""Time limit of a set. A GPU takes 10 s, eight take 30 s, mostly for the import of torch."""
# Twice this size is copied, more than any cache holds.
_COPY_BYTES = 384 * MIB
_MATMUL = 8192
# The all-reduces of one token of a large model, some tokens, a prompt.
_REDUCE_BYTES = (16 * 1024, MIB, 64 * MIB)
_SAMPLE_S = 0.02
# Time limit of a part. The import of torch takes seconds, half a minute from a cold disk.
_PART_S = 45.0
# Samples of an idle GPU differ by about 1 %, short waits by a few percent.
_MAX_SPREAD_SHARE = 0.1
_MAX_SPREAD_SHARE_OF_SECONDS = 0.3

Quantity = Literal[
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
    """A measured number. value: bytes/s, FLOP/s or seconds; 0 or 1 for peer_access and peer_broken.
    gpus: positions in the set."""

    quantity: Quantity = Field(alias="what")
    gpus: tuple[Annotated[int, Field(ge=0, lt=64)], ...] = Field(min_length=1, max_length=64)
    value: float = Field(ge=0, lt=2**62, allow_inf_nan=False)
    spread: float = Field(ge=0, allow_inf_nan=False)
    bytes: int = Field(0, ge=0, lt=2**40)

    @property
    def is_steady(self) -> bool:
        return self.spread <= (
            _MAX_SPREAD_SHARE_OF_SECONDS if self.quantity in SECONDS else _MAX_SPREAD_SHARE
        )


class Measurement(Value):
    software: Text | None
    numbers: tuple[MeasuredNumber, ...] = Field(max_length=1000)
    problems: tuple[Text, ...] = Field(max_length=200)


class _Line(Value):
    measured: Measurement


def document(gpu_set: GpuSet, tool: Literal["torch", "driver"]) -> bytes:
    """The question to the child. tool: torch of an engine's Python, or only the driver."""
    fields = {
        "kind": "measure",
        "by": tool,
        "device": "cuda",
        "gpus": [gpu.uuid for gpu in gpu_set.gpus],
        "count": len(gpu_set.gpus),
        "groups": [] if tool == "driver" else gpu_set.groups,
        "pairs": [group for group in gpu_set.groups if len(group) == 2],
        "copy_bytes": _COPY_BYTES,
        "matmul": _MATMUL,
        "reduce_bytes": _REDUCE_BYTES,
        "sample_s": _SAMPLE_S,
        "part_s": _PART_S,
        "limit_s": LIMIT_S - 10,
    }
    return json.dumps(fields).encode()


def read_measurement(lines: Iterable[bytes], count: int) -> Measurement:
    """The measurement of `count` GPUs in the first line. Raises HostError for an invalid line."""
    try:
        measurement = _Line.model_validate_json(next(iter(lines), b"")).measured
    except ValidationError as error:
        raise _invalid_answer_error(
            str(error.errors(include_url=False, include_input=False)[0]["msg"])
        ) from None
    if any(index >= count for number in measurement.numbers for index in number.gpus):
        raise _invalid_answer_error("it names GPUs outside the question")
    return measurement


def _invalid_answer_error(reason: str) -> HostError:
    return HostError(
        f"The GPU measurement returned an invalid answer: {reason}.",
        hint="Check the engine's image or environment.",
    )


def build_facts(
    measurement: Measurement, gpu_set: GpuSet, source: str, driver: str | None, time_s: float
) -> tuple[list[Fact], list[str]]:
    """The facts, and sentences about numbers that vary too much: another program used the GPU.
    source: the engine or program that measured."""
    # An all-reduce of one size is timed twice, the second time in a graph, as in engines.
    last = {(number.quantity, number.gpus, number.bytes): number for number in measurement.numbers}
    facts: list[Fact] = []
    problems = [*measurement.problems]
    for number in sorted(last.values(), key=lambda number: (len(number.gpus), number.gpus)):
        if not number.is_steady:
            gpus = ", ".join(str(gpu_set.gpus[index].index) for index in number.gpus)
            problems.append(
                f"GPU {gpus}, {number.quantity}: it varied by {number.spread:.0%} and is not stored"
            )
            continue
        facts += _number_facts(
            number,
            gpu_set,
            f"{source}, {measurement.software}, varied by {number.spread:.1%}",
            driver,
            time_s,
        )
    return facts, problems


def _number_facts(
    number: MeasuredNumber, gpu_set: GpuSet, source: str, driver: str | None, time_s: float
) -> Iterator[Fact]:
    """The facts that a measured number proves about its GPUs."""
    group = [gpu_set.gpus[index] for index in number.gpus]
    conditions = {"driver": driver} if driver else {}
    if number.quantity == "peer_broken":
        if not number.value:
            return  # copies go through host memory, so there is no P2P to switch off
        scope = {"gpus": uuids(group), "by": P2P}
        problem = "a copy between them was corrupted, although the driver reports peer access"
        yield Fact(
            kind="peers_fail",
            scope=scope,
            grade="failed",
            software=conditions,
            source=f"{source}: {problem}",
            at=time_s,
        )
        return
    scope = {"what": number.quantity, "gpus": uuids(group)}
    if len(group) > 1:
        scope |= {"cards": cards(group), "links": link_class(group, gpu_set.links)}
    if number.bytes:
        scope["bytes"] = str(number.bytes)
    value = number.value * 1e9 if number.quantity in SECONDS else number.value
    yield Fact(
        kind="machine_speed",
        scope=scope,
        value=round(value),
        grade="verified",
        software=conditions,
        source=source,
        at=time_s,
    )
