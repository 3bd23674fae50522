"""One line of an engine's log: who printed it, how loudly, and what it says. Pure.

Engines put much before the text: colours, `(EngineCore_DP0 pid=68)` (several of them when one
process copies another's output), `[rank0]:`, vLLM's `ERROR 11-21 02:22:44 [core.py:1330]`, SGLang's
`[2026-11-21 02:22:44 TP0]`, glog's `[W1121 02:22:46.357 file.cpp:1575]`. What carried the log to
its reader puts more before that: Docker and Kubernetes their times, compose and Ray a name, syslog
and journald a host; and whoever pastes it quotes it, fences it, or copies it from a page as HTML.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# A line is read this far: reasons of every attention backend fit; a megabyte without an end of line
# does not.
MAX_LINE = 4000

# Longer than any name or path that counts. Patterns look for a word from each of its characters on,
# so a word of a whole line would take a second.
_WORD = re.compile(r"([\w./-]{256})[\w./-]+")
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?)")
_HTML = {"gt": ">", "lt": "<", "amp": "&", "quot": '"', "nbsp": " ", "#39": "'", "#x27": "'"}
_ENTITY = re.compile(rf"&({'|'.join(_HTML)});")
# A progress bar that another process wrote into: what follows it is a line of its own.
_BAR = re.compile(r"^.{0,300}?\d{1,3}%\|.{0,300}?\| *\d+/\d+ \[[^\]]{0,80}(?:it/s|s/it)\](?=\S)")
# A fence around code, and what makes an exception bold.
_FENCE = re.compile(
    r"^ {0,3}(?:(?:> ?)+)?`{1,3}(?=\S)|`{3}$|^\*\*(?=[\w.]+(?:Error|Exception)\b)|(?<=\S)\*\*$"
)
# What pages put for a space, and between letters.
_PAGE = {0xA0: " ", 0x200B: None, 0xFEFF: None}
# The other side of a frame around the line.
_FRAME_END = " \t│┃║"
_AFTER = re.compile(r" \[repeated \d+x across cluster\].{0,120}$")
_TAGS = re.compile(r"(?:</(?:p|li|td|tr|div|pre|code|span|strong|b)>)+$")
_LEVELS = "DEBUG|INFO|WARNING|ERROR|CRITICAL"
_TIME = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z| ?[+-]\d\d:?\d\d(?: [A-Z]{2,5}(?= ))?)?"
# What others put before the engine's own line. It says nothing, and any number of them may follow
# each other.
_CARRIED = re.compile(
    r"(?:[>|│┃║] ?)+(?=\S|$)|> (?=\s+\S)"
    r"|[-*] (?=\w+(?:Error|Exception):)"
    rf"|(?:\w{{3}} [ \d]\d \d\d:\d\d:\d\d|{_TIME}) [\w.-]{{1,64}} [\w./@-]{{1,40}}(?:\[\d+\])?: "
    r"|\w{3} [ \d]\d \d\d:\d\d:\d\d [\w./@-]{1,64}\[\d+\]: "
    rf"|\d{{10,19}}[ \t]+(?={_TIME})"
    r"|\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (?= +File \"|    |Traceback"
    r" \(most|(?:\w+\.)*\w+(?:Error|Exception)(?::|$))"
    rf"|\[{_TIME}\] \[[\w./-]{{1,60}}\]: ?"
    # A program that logs each line of the engine's as information of its own.
    r"|(?:- [\w.]{1,80} - (?:INFO|DEBUG) - |- (?:INFO|DEBUG) - [\w.]{1,80}: )(?=\s*File"
    r" \"|\s{4}\S|Traceback \(most|\[\d{4}-|(?:ERROR|WARNING|INFO) \d\d-\d\d"
    r" |(?:\w+\.)*\w+(?:Error|Exception)(?::|$))"
    rf"|{_TIME}(?: (?:std(?:out|err) [FP]|\d+))?[ \t](?!(?:[A-Z]+\d+ ?)+\])"
    r"|std(?:out|err) [FP] "
    r"|\s+(?=\[\d{4}-\d\d-\d\d |\[rank\d+\]:\[)"
    rf"|\[{_TIME}\] (?=\[rank\d+\]:)"
    r"|\[\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z\] "
    rf"|- (?:{_LEVELS}) - [\w.]{{1,40}}: (?=(?:{_LEVELS}) \d\d-\d\d )"
    r"|\[(?:INFO|WARN|ERROR) *\] \S{1,80}(?: \S{1,40})? - "
    r"|[\w.-]{1,64}\[(?:debug|info|warn|warning|error)\] ?"
    r"|\[?[\w./-]{0,64}\]? +\| "
    r"|\[(?:pod/)?[\w.-]{1,64}/[\w.-]{1,64}(?:/[\w.-]{1,64})?\] (?=\S)"
    r"|\[[A-Z][A-Za-z]*(?: [A-Za-z]+)+\] (?=\S)"
    r"|\[[\w.-]{1,40}\] (?=Traceback \(most|(?:\w+\.)*\w+(?:Error|Exception): |\(\w+ pid=\d)"
    r"|</?(?:p|br|li|td|tr|div|pre|code|span|strong|b)\b[^>]{0,80}>"
    rf"|\s+(?=(?:\([\w ./=:,-]{{0,80}}pid=\d+[^)]{{0,80}}\) ?)*(?:{_LEVELS}) \d\d-\d\d )"
)
_PREFIX = re.compile(
    r"(?P<process>(?:\([\w ./=:,-]{0,80}?pid=\d+[^)]{0,80}\) ?)*(?:\[rank\d+\]: ?)?)"
    rf"(?P<header>(?P<level>{_LEVELS}) (?:\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?"
    r" (?:\[[^\]]*\]|[\w./]{1,60}:\d+\])|\.\.\.) ?"
    rf"|(?P<plain>{_LEVELS}): +"
    rf"|\| (?P<loguru>{_LEVELS}) +\| [\w.:<>-]{{1,100}} \| ?"
    rf"|- (?:[\w.]{{1,80}} - (?P<named>{_LEVELS}) - |(?P<logging>{_LEVELS}) - [\w.]{{1,60}}:(?:\d+"
    r" - (?:[a-z][\w.]{0,60}: )?| ))"
    # Programs in Rust, as those of Dynamo and routers are.
    r"| *(?P<rust>ERROR|WARN|INFO|DEBUG|TRACE) [a-z]\w{0,40}(?:::\w{1,60}){0,8}: "
    r"|\[?(?:\d{4}-)?(?:\d\d-\d\d )?\d\d:\d\d:\d\d(?:[.,]\d+)?(?P<rank>(?: [A-Z]+\d+)*)\] ?"
    rf"(?:(?:[A-Z]\w{{1,20}} )?(?P<inner>{_LEVELS})(?::? +[\w./]{{1,60}}:\d+:?|:) +)?"
    r"|\[?(?P<glog>[IWEF])\d{3,4} \d\d:\d\d:\d\d[^\]]{0,80}\] ?)?"
)
_MOST_CARRIERS = 6
_OTHERS = {
    "I": "INFO",
    "W": "WARNING",
    "E": "ERROR",
    "F": "CRITICAL",
    "WARN": "WARNING",
    "TRACE": "DEBUG",
}
_OTHERS |= {level: level for level in ("DEBUG", "INFO", "ERROR")}
_QUIET = ("DEBUG", "INFO", "WARNING")


class LogLine(NamedTuple):
    """process: "" where the line does not say; header: it begins a record; level: None where the
    engine prints none; native: a library's
    compiled code printed it (glog), from a thread of its own or on the way out, and not the engine.
    """

    process: str
    header: bool
    level: str | None
    text: str
    native: bool = False

    @property
    def quiet(self) -> bool:
        """Printed by an engine that goes on."""
        return self.level in _QUIET


def clean(raw: bytes) -> str:
    """A log line as text: no colours, what a progress bar overwrote left out, cut, undecodable
    bytes replaced."""
    if b"\r" in raw:
        raw = raw.rstrip(b"\r\n").rpartition(b"\r")[2]
    text = raw[: 2 * MAX_LINE].decode("utf-8", "replace")
    for written in ("#033[", "^[["):  # as rsyslog and `cat -v` write it
        if written in text:
            text = text.replace(written, "\x1b[")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if "it/s]" in text or "s/it]" in text:
        text = _BAR.sub("", text)
    if not text.isascii():
        text = text.translate(_PAGE)
    text = _WORD.sub(r"\1", text)
    # Some consoles write out the end of each line.
    return text.rstrip().removesuffix("\\n").rstrip(_FRAME_END)[:MAX_LINE]


def parse(text: str) -> LogLine:
    """What a cleaned line says."""
    if "&" in text:
        text = _ENTITY.sub(lambda found: _HTML[found[1]], text)
    if "`" in text or "**" in text:
        text = _FENCE.sub("", text)
    at = 0
    for _ in range(_MOST_CARRIERS):
        carried = _CARRIED.match(text, at)
        if carried is None or carried.end() == at:
            break
        at = carried.end()
    found = _PREFIX.match(text, at)
    if found is None:
        return LogLine("", False, None, text[at:])
    level = (
        found["level"]
        or found["plain"]
        or found["loguru"]
        or found["logging"]
        or found["named"]
        or found["inner"]
        or _OTHERS.get(found["glog"] or found["rust"] or "")
    )
    process = found["process"].strip() or (found["rank"] or "").strip()
    said = text[found.end() :]
    if "[repeated " in said:
        said = _AFTER.sub("", said)
    if said.endswith(">") and "</" in said:
        said = _TAGS.sub("", said)
    return LogLine(process, found["header"] is not None, level, said, found["glog"] is not None)
