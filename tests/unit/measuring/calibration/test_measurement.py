"""A child's answer is read strictly, and varying numbers are not kept."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.engines.common.speed.gpu_measurements import MachineMeasurements
from gateway.errors import HostError
from gateway.measuring.calibration.gpu_set import GpuSet, gpu_sets
from gateway.measuring.calibration.measurement import build_facts, document, read_measurement
from tests.support.makers import machine

HARDWARE = machine("8xh100")
(WHOLE,) = gpu_sets(HARDWARE.gpus, HARDWARE.links)
TWO = GpuSet(WHOLE.gpus[:2], WHOLE.links, ((0, 1),))


def output_line(*numbers: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps(
        {"measured": {"software": "torch 2.11.0", "problems": [], "numbers": numbers, **changes}}
    ).encode()


def measurement_row(
    subject: str, gpus: list[int], value: float, spread: float = 0.01, **more: Any
) -> dict[str, Any]:
    return {"what": subject, "gpus": gpus, "value": value, "spread": spread, **more}


def test_the_document_asks_for_these_gpus() -> None:
    content = json.loads(document(TWO, "torch"))
    assert (content["gpus"], content["count"]) == ([gpu.uuid for gpu in TWO.gpus], 2)
    assert (content["groups"], content["pairs"]) == ([[0, 1]], [[0, 1]])
    assert json.loads(document(TWO, "driver"))["groups"] == []


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"nonsense",
        b'{"measured": {}}',
        output_line(measurement_row("memory", [2], 1.0)),
        output_line(measurement_row("memory", [-1], 1.0)),
        output_line(measurement_row("memory", [], 1.0)),
        output_line(measurement_row("memory", [0], -1.0)),
        output_line(measurement_row("secrets", [0], 1.0)),
        output_line(measurement_row("memory", [0], 1e300)),
        output_line(measurement_row("memory", [0], 1.0, more="x")),
        output_line(problems=["x" * 601]),
        output_line(*(measurement_row("memory", [0], 1.0) for _ in range(1001))),
        (
            b'{"measured": {"software": "x", "problems": [], "numbers": [{"what": "memory", "gpus":'
            b' [0], "value": NaN, "spread": 0}]}}'
        ),
    ],
)
def test_an_answer_in_another_form_is_refused(line: bytes) -> None:
    with pytest.raises(HostError, match="invalid answer"):
        read_measurement([line], 2)


def test_steady_numbers_become_facts_that_plans_read() -> None:
    numbers = (
        measurement_row("memory", [0], 4.1e12),
        measurement_row("all_reduce", [0, 1], 12.5e-6, bytes=16384),
        measurement_row("all_reduce", [0, 1], 400e-6, bytes=1 << 26),
    )
    measurement = read_measurement([output_line(*numbers)], 2)
    facts, problems = build_facts(measurement, TWO, "vllm==0.26.0", "580.1", 1.8e9)
    assert problems == []
    assert facts[0].scope == {"what": "memory", "gpus": TWO.gpus[0].uuid}
    assert (facts[0].value, facts[0].software, facts[0].grade) == (
        4_100_000_000_000,
        {"driver": "580.1"},
        "verified",
    )
    assert facts[0].source == "vllm==0.26.0, torch 2.11.0, varied by 1.0%"
    assert (facts[1].value, facts[1].scope["bytes"], facts[1].scope["links"]) == (
        12500,
        "16384",
        "18 NVLinks",
    )
    measurements = MachineMeasurements(facts)
    memory = measurements.number(TWO.gpus[0], "memory")
    reduce = measurements.all_reduce(TWO.gpus, TWO.links)
    assert memory is not None
    assert reduce is not None
    assert (memory.value, memory.day) == (4.1e12, "2027-01-15")
    assert reduce.latency_s == pytest.approx(12.5e-6)
    assert reduce.bytes_s == pytest.approx((1 << 26) / 387.5e-6)


def test_a_measurement_that_varies_is_not_kept_and_short_times_may_vary_more() -> None:
    measurement = read_measurement(
        [
            output_line(
                measurement_row("memory", [1], 4e12, 0.11),
                measurement_row("launch", [1], 4e-6, 0.2),
                measurement_row("launch", [0], 4e-6, 0.5),
            )
        ],
        2,
    )
    facts, problems = build_facts(measurement, TWO, "x", None, 0.0)
    assert [(fact.scope["what"], fact.scope["gpus"]) for fact in facts] == [
        ("launch", TWO.gpus[1].uuid)
    ]
    assert problems[-1] == "GPU 1, memory: it varied by 11% and is not stored"


def test_the_last_time_of_an_all_reduce_timed_twice_counts() -> None:
    twice = (
        measurement_row("all_reduce", [0, 1], 30e-6, bytes=16384),
        measurement_row("all_reduce", [0, 1], 12e-6, bytes=16384),
    )
    facts, _ = build_facts(read_measurement([output_line(*twice)], 2), TWO, "x", None, 0.0)
    assert [fact.value for fact in facts] == [12000]


@pytest.mark.parametrize(("can", "kinds"), [(1.0, ["peers_fail"]), (0.0, [])])
def test_broken_p2p_is_used_by_no_engine(can: float, kinds: list[str]) -> None:
    facts, _ = build_facts(
        read_measurement([output_line(measurement_row("peer_broken", [0, 1], can, 0.0))], 2),
        TWO,
        "x",
        None,
        0.0,
    )
    assert [fact.kind for fact in facts] == kinds
