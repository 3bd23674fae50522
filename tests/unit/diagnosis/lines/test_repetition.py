"""Copies of a line that a program repeats are kept back, and read again where they may matter."""

from __future__ import annotations

from random import Random

from gateway.diagnosis.diagnose import diagnose
from gateway.diagnosis.lines.line_filter import LineFilter
from gateway.profiles.profiles import Profiles

SIGNATURES = Profiles().signatures
HEAD = b"(EngineCore pid=7) ERROR 03-14 10:22:05 [core.py:1330] "
FLOOD = [HEAD + b"frob %d of request-%08x was lost" % (at, at * 40503) for at in range(80_000)]
FATAL = HEAD + b"EngineCore encountered a fatal error."
TRACEBACK = [
    HEAD + line
    for line in (
        b"Traceback (most recent call last):",
        b'  File "/x/site-packages/vllm/v1/worker/gpu_worker.py", line 7, in load_model',
        b"    self.run()",
        b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"
        b" capacity of 79.10 GiB of which 1.20 GiB is free.",
    )
]


def counts_of(lines: list[bytes]) -> list[int]:
    numbers: list[int] = []
    several = LineFilter(lambda _: numbers.append(several.number))
    several.feed(b"\n".join(lines))
    several.close()
    assert several.number == len(lines)
    return numbers


def test_few_lines_of_a_flood_are_read_and_its_last_ones() -> None:
    numbers = counts_of(FLOOD)
    assert len(numbers) < 4000
    assert numbers[:256] == [*range(1, 257)]
    assert numbers[-6:] == [*range(79_995, 80_001)]


def test_lines_before_another_line_are_read_before_it() -> None:
    numbers = counts_of([*FLOOD[:20_000], FATAL, *FLOOD[20_000:40_000]])
    at = numbers.index(20_001)
    assert numbers[at - 16 : at + 2] == [*range(19_985, 20_003)]


def test_each_figure_of_a_serving_engine_is_read() -> None:
    speed = b"INFO 03-14 10:22:05 [loggers.py:1] Avg generation throughput: %d.0 tokens/s"
    assert len(counts_of([speed % (at // 5_999) for at in range(6_000)])) == 6_000


def test_a_flood_hides_no_failure() -> None:
    lone_failure, _ = diagnose([b"\n".join(TRACEBACK)], SIGNATURES)
    assert lone_failure.kind == "gpu_oom"
    for before, after in ((FLOOD, []), ([], FLOOD), (FLOOD[:9_000], FLOOD[9_000:])):
        failure, _ = diagnose([b"\n".join([*before, *TRACEBACK, *after])], SIGNATURES)
        assert failure.line_number is not None
        assert failure.evolve(line_number=lone_failure.line_number) == lone_failure
        assert failure.line_number == len(before) + 4


def test_a_repeated_traceback_counts_at_its_first_line() -> None:
    failure, _ = diagnose([b"\n".join(TRACEBACK * 2_000)], SIGNATURES)
    assert (failure.kind, failure.line_number) == ("gpu_oom", 4)


def test_distinct_lines_that_can_prove_nothing_are_not_read_in_a_flood() -> None:
    chance = Random(7)
    flood = [HEAD + " ".join(chance.choices("gjkqvwxyz", k=20)).encode() for _ in range(20_000)]
    lines: list[bytes] = []
    reader = LineFilter(lines.append, lambda raw: b"CUDA" in raw)
    reader.feed(b"\n".join([*flood, *TRACEBACK]) + b"\n")
    reader.close()
    assert {TRACEBACK[0], TRACEBACK[1], TRACEBACK[3]} <= set(lines)
    assert len(lines) < 3000


def test_a_failure_after_a_flood_of_distinct_lines_is_found() -> None:
    flood = [HEAD + b"xq%dz jv%dk" % (at * 7919, at * 104729) for at in range(20_000)]
    failure, _ = diagnose([b"\n".join([*flood, *TRACEBACK, *flood])], SIGNATURES, "vllm")
    assert failure.kind == "gpu_oom"
    assert failure.line_number == len(flood) + len(TRACEBACK)
