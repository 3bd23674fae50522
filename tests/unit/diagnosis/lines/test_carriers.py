"""The first frame behind a log names the program that carried it."""

import pytest

from gateway.diagnosis.diagnose import diagnose
from gateway.diagnosis.lines.carriers import Carriers
from gateway.profiles.profiles import Profiles

SIGNATURES = Profiles().signatures
TRACE = (
    "Traceback (most recent call last):",
    '  File "/app/sglang/srt/managers/scheduler.py", line 37, in run_scheduler_process',
    "    scheduler = Scheduler(",
    '  File "/app/sglang/srt/lora/x.py", line 479, in __init__',
    "    x()",
    "RuntimeError: boom",
)


@pytest.mark.parametrize(
    "carrier",
    [
        "",
        "[1,2]<stderr>:",
        "2026-03-14T10:22:05.123Z [worker-0] ",
        "E       ",
        "[0] ",
        "0: ",
        "12    ",
        "2026/02/25 16:17:27 ",
        "10.0.0.1: ",
        "[10.0.0.1] ",
        "[worker-1] [2026-03-14 10:22:05 TP3] ",
        "2026-03-14 10:22:05,123 INFO x.py:12 -- ",
        "[stderr] ",
        "03-14 10:22:05.784 ",
        "[2026-03-14 10:22:05] [/bin/sh]: (APIServer pid=26) ",
    ],
)
def test_frames_behind_any_carrier_are_read(carrier: str) -> None:
    # The adapter's file names it: without its frames the text is not known.
    assert (
        diagnose(["\n".join(carrier + line for line in TRACE).encode()], SIGNATURES)[0].kind
        == "lora"
    )


def test_each_machine_is_a_process_of_its_own() -> None:
    lines = Carriers()
    first_line, two = (lines.parse(f"node-{name}: 10:20:3{name} {TRACE[1]}") for name in "12")
    assert first_line.text == two.text == TRACE[1]
    assert first_line.process != two.process
    assert lines.parse(f"node-1: 11:00:00 {TRACE[5]}") == first_line._replace(text=TRACE[5])


@pytest.mark.parametrize(
    "line",
    [
        TRACE[0],
        "ERROR 03-14 10:22:05 [core.py:1] boom",
        "(EngineCore pid=7) INFO 03-14 10:22:05 [core.py:1] boom",
    ],
)
def test_a_record_or_a_traceback_reveals_its_carrier_too(line: str) -> None:
    lines = Carriers()
    assert lines.parse(f"frob/vllm-0 frob {TRACE[5]}").text != TRACE[5]
    assert "frob" not in lines.parse(f"frob/vllm-0 frob {line}").text
    assert lines.parse(f"frob/vllm-0 frob {TRACE[5]}").text == TRACE[5]


def test_an_engines_own_record_is_no_carrier() -> None:
    lines = Carriers()
    record = f"[2026-03-14 10:22:05 TP3] Scheduler hit an exception: {TRACE[0]}"
    assert lines.parse(f"{record} {TRACE[1]}").text.startswith("Scheduler hit")
    assert lines.parse(f"WARNING 11-21 02:22:44 [x.py:12] {TRACE[1]}").level == "WARNING"
    assert lines.parse("WARNING 11-21 02:22:44 [x.py:12] boom").level == "WARNING"
    # A program that writes into a record of the engine carries none of its lines.
    quoted_record = (
        "INFO 11-21 02:22:44 [logger.py:1] Received request: prompt: 'frob ERROR 11-21 02:22:44"
        " [core.py:1] boom'"
    )
    assert lines.parse(quoted_record).level == "INFO"
    assert lines.parse(quoted_record).text.startswith("Received request")


def test_no_more_carriers_are_remembered_than_a_cluster_has_machines() -> None:
    lines = Carriers()
    names = [f"<{chr(97 + number % 26)}{'x' * (number // 26)}>:" for number in range(100)]
    assert [lines.parse(f"{name}{TRACE[1]}").text == TRACE[1] for name in names].count(True) == 32
