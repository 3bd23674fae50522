"""Lines that a program carried in a record of its own are read as the engine's log."""

import json
from collections.abc import Callable

import pytest

from gateway.diagnosis.diagnose import diagnose
from gateway.diagnosis.lines.records import carried_lines
from gateway.profiles.profiles import Profiles

SIGNATURES = Profiles().signatures
LOG = (
    "INFO 11-21 02:22:40 [core.py:12] \x1b[32mInitializing\x1b[0m a V1 LLM engine",
    "Traceback (most recent call last):",
    '  File "/app/sglang/srt/managers/scheduler.py", line 37, in run_scheduler_process',
    '  File "/app/sglang/srt/lora/x.py", line 479, in __init__',
    'RuntimeError: "boom" in C:\\x ü',
)
RECORDS: dict[str, Callable[[str], str]] = {
    "docker": lambda line: json.dumps(
        {"log": line + "\n", "stream": "stderr", "time": "2026-03-14T10:22:05Z"}
    ),
    "collector": lambda line: json.dumps(
        {"@timestamp": "2025-11-02", "level": "info", "message": line}, ensure_ascii=False
    ),
    "logfmt": lambda line: (
        f'time="2026-03-14T10:22:05Z" level=info msg={json.dumps(line)} component=vllm'
    ),
    "go": lambda line: f"time=2026-03-14T10:22:05Z level=INFO msg={json.dumps(line)}".replace(
        "\\u001b", "\\x1b"
    ),
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_record_carries_its_line(record: Callable[[str], str]) -> None:
    for line in LOG:
        assert carried_lines(record(line).encode()) == [line.encode()]
    # Its file names it, and its text does not.
    failure = diagnose(["\n".join(map(record, LOG)).encode()], SIGNATURES)[0]
    assert failure.kind == diagnose(["\n".join(LOG).encode()], SIGNATURES)[0].kind == "lora"
    assert failure.line == LOG[-1]


def test_a_record_of_many_lines_is_a_log() -> None:
    record = RECORDS["collector"]("\n".join(LOG))
    assert carried_lines(record.encode()) == [line.encode() for line in LOG]
    assert diagnose([b"INFO: x\n" + record.encode()], SIGNATURES)[0].kind == "lora"


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: boom",
        '{"object": "error", "message": "The model `m` does not exist.", "code": 404}',
        'time=2026-03-14T10:22:05Z level=ERROR msg="cannot start" error="CUDA out of memory"',
        "time= 12 s",
        '{"time": 12}',
    ],
)
def test_a_line_that_is_no_record_stays_as_it_is(line: str) -> None:
    assert carried_lines(line.encode()) == (line.encode(),)


def test_a_record_that_was_cut_is_read_as_far_as_it_goes() -> None:
    assert carried_lines(b'{"time":"t","log":"RuntimeError: CUDA out of mem') == [
        b"RuntimeError: CUDA out of mem"
    ]
