"""A line of a log is as long as its part that can be read at once."""

from __future__ import annotations

import re

import pytest

from gateway.diagnosis.lines.log_lines import LogLine, clean, parse


@pytest.mark.parametrize("word", ["7", "a.", "a_", "/", "a-b/c.d_"])
def test_an_endless_word_is_cut_and_the_rest_of_its_line_is_read(word: str) -> None:
    """A writer of an engine's log could hold up the gateway: each of a hundred patterns began anew
    at each character of such a word."""
    long = word * (3900 // len(word))
    text = clean(f"ERROR {long} torch.OutOfMemoryError: CUDA out of memory {long}".encode())
    assert max(map(len, re.findall(r"[\w./-]+", text))) == 256
    assert " torch.OutOfMemoryError: CUDA out of memory " in text
    path = "/usr/lib/python3.12/site-packages/" + "vllm/" * 30
    assert path in clean(f'File "{path}x.py", line 3'.encode())


@pytest.mark.parametrize(
    "carried",
    [
        "Apr  3 10:22:05 host vllm[41]: #033[1;36m(VllmWorker rank=3 pid=41)#033[0;0m ",
        "Mar 18 11:23:46 vllm-serve[41]: (VllmWorker rank=3 pid=41) ",
        "2026-03-14T10:22:05.363544040 +08:00 CST (VllmWorker rank=3 pid=41) ",
    ],
)
def test_the_speaker_of_a_line_is_known_behind_its_carrier(carried: str) -> None:
    line = parse(clean(f"{carried}ERROR 03-14 10:22:05 [core.py:718] it failed".encode()))
    assert line == LogLine(
        "(VllmWorker rank=3 pid=41)", is_header=True, level="ERROR", text="it failed"
    )


@pytest.mark.parametrize(
    ("line", "level", "text"),
    [
        ("2026-03-14T10:22:05.695813Z  INFO hf_hub: Using token file", "INFO", "Using token file"),
        ("2026-03-14T10:22:05.390990Z  WARN dynamo_llm::engines::worker: slow", "WARNING", "slow"),
        ("[2026-03-14 10:22:05,123] LMCache DEBUG: no memory", "DEBUG", "no memory"),
        ("^[[36m(RayWorkerWrapper pid=4823)^[[0m boom", None, "boom"),
    ],
)
def test_programs_beside_the_engine_have_levels_of_their_own(
    line: str, level: str | None, text: str
) -> None:
    line_parts = parse(clean(line.encode()))
    assert (line_parts.level, line_parts.text) == (level, text)


def test_the_level_that_python_prints_behind_a_loggers_name_is_read() -> None:
    line = parse(
        "2026-03-14 10:22:05,455 - vllm.v1.engine.core_client - CRITICAL - Got fatal signal from"
        " worker processes"
    )
    assert (line.level, line.text) == ("CRITICAL", "Got fatal signal from worker processes")
