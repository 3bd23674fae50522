"""One line of an engine's log: who printed it, how loudly, and what it says. Pure.

Engines put much before the text: Docker's time, a compose service, colours, `(EngineCore_DP0 pid=68)` (several of them when
one process copies another's output), `[rank0]:`, vLLM's `ERROR 11-21 02:22:44 [core.py:1330]`, SGLang's `[2026-11-21 02:22:44 TP0]`,
glog's `[W1121 02:22:46.357 file.cpp:1575]`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# A line is read this far: reasons of every attention backend fit; a megabyte without an end of line does not.
MAX_LINE = 4000

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?)")
_PREFIX = re.compile(
    r"(?:\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d) )?(?:std(?:out|err) [FP] )?"
    r"(?:[\w.-]{1,64} +\| )?"
    r"(?P<process>(?:\([\w ./=:,-]{0,80}?pid=\d+[^)]{0,80}\) ?)*(?:\[rank\d+\]: ?)?)"
    r"(?P<header>(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?:\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[[^\]]*\]|\.\.\.) ?"
    r"|(?P<plain>DEBUG|INFO|WARNING|ERROR|CRITICAL): +"
    r"|\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?(?P<rank>(?: [A-Z]+\d+)*)\] ?"
    r"|\[?(?P<glog>[IWEF])\d{4} \d\d:\d\d:\d\d[^\]]{0,80}\] ?)?"
)
_GLOG = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
_QUIET = ("DEBUG", "INFO", "WARNING")


class LogLine(NamedTuple):
    """process: "" where the line does not say; header: it begins a record; level: None where the engine prints none."""

    process: str
    header: bool
    level: str | None
    text: str

    @property
    def quiet(self) -> bool:
        """Printed by an engine that goes on."""
        return self.level in _QUIET


def clean(raw: bytes) -> str:
    """A log line as text: no colours, what a progress bar overwrote left out, cut, undecodable bytes replaced."""
    if b"\r" in raw:
        raw = raw.rstrip(b"\r\n").rpartition(b"\r")[2]
    text = raw[: 2 * MAX_LINE].decode("utf-8", "replace")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    return text.rstrip()[:MAX_LINE]


def parse(text: str) -> LogLine:
    """What a cleaned line says."""
    found = _PREFIX.match(text)
    if found is None:
        return LogLine("", False, None, text)
    level = found["level"] or found["plain"] or _GLOG.get(found["glog"] or "")
    process = found["process"].strip() or (found["rank"] or "").strip()
    return LogLine(process, found["header"] is not None, level, text[found.end() :])
