"""Logs as an engine prints them, written from facts: exception, frames, message and phase."""

from __future__ import annotations

import re
from typing import Any

from gateway.diagnosis.lines.line_forms import EXCEPTION
from gateway.diagnosis.structure import ExceptionShape

SITE = "/opt/venv/lib/python3.12/site-packages"
# Lines that begin a phase, in the words of both engines.
BEGINS = {
    "starting": "",
    "download": "",
    "load": "Starting to load model /models/frob...",
    "profile": "Model loading took 14.2 GiB and 9.1 seconds",
    "kv": "GPU KV cache size: 65,536 tokens",
    "compile": "Dynamo bytecode transform time: 4.1 s",
    "graphs": "Capturing CUDA graphs",
    "serving": "Application startup complete.",
}
_FRAME = re.compile(r"\S+\.(?:py|pxi):\S+")


def traceback(frames: list[str], raised: str, code: str = "") -> list[str]:
    """The lines of a traceback.

    frames: `file:function`, the innermost last. code: the line of code that failed.
    """
    lines = ["Traceback (most recent call last):"] if frames else []
    for frame in frames:
        file, _, function = frame.rpartition(":")
        path = file if file.startswith("/") else f"{SITE}/{file}"
        lines += [f'  File "{path}", line 7, in {function}', "    run()"]
    if code:
        lines = [*lines[:-1], f"    {code}"]
    return [*lines, raised]


def fatal(engine: str, lines: list[str]) -> list[str]:
    """The lines as an engine prints them that served and ends."""
    if engine == "sglang":
        return [f"[2026-03-14 10:22:05 TP0] Scheduler hit an exception: {lines[0]}", *lines[1:]]
    head = "(EngineCore_DP0 pid=4242) ERROR 03-14 10:22:05 [core.py:844] "
    return [head + line for line in ("EngineCore encountered a fatal error.", *lines)]


def log_of_row(fact: dict[str, Any]) -> bytes:
    """The log of a row of tests/logs/failures.yaml or cure_reports.yaml.

    A row has its whole log as `log`, or the parts of which one is made.
    """
    if "log" in fact:
        return str(fact["log"]).encode()
    exception_text = fact.get("raises", "")
    lines = (
        traceback(fact.get("frames", []), exception_text, fact.get("code", ""))
        if exception_text
        else []
    )
    phase = "serving" if fact.get("served") else fact.get("phase", "starting")
    begins = [*fact.get("before", []), *([BEGINS[phase]] if BEGINS[phase] else [])]
    ends = fatal(fact["engine"].partition("==")[0], lines) if fact.get("served") else lines
    return "\n".join([*begins, *ends]).encode()


def split_example(example: str) -> tuple[list[str], str]:
    """The frames with which an example begins, and the exception that follows."""
    words = example.split(" ")
    frames = [
        word for number, word in enumerate(words) if all(map(_FRAME.fullmatch, words[: number + 1]))
    ]
    return frames, " ".join(words[len(frames) :])


def shape_of(example: str, phase: str) -> ExceptionShape:
    """The example of a structural row as the failure that the reader makes of it."""
    frames, exception_text = split_example(example)
    name = EXCEPTION.match(exception_text)
    return ExceptionShape(
        name["name"] if name else "",
        exception_text[name.end() :] if name else exception_text,
        tuple(frames),
        phase,
    )
