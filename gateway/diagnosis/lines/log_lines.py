"""A line of an engine's log: its process, level and text. Pure.

engines             colours, `(EngineCore_DP0 pid=68)` (repeated when a process copies the
                    output of another), `[rank0]:`
vLLM                `ERROR 11-21 02:22:44 [core.py:1330]`
SGLang              `[2026-11-21 02:22:44 TP0]`
glog                `[W1121 02:22:46.357 file.cpp:1575]`
Docker, Kubernetes  a time
compose, Ray        a name
syslog, journald    a host
users               quotes, fences of code, HTML of a page
"""

from __future__ import annotations

import re
from typing import NamedTuple

# The length to which a line is read: enough for the reasons of all attention backends.
MAX_LINE = 4000

# Longer than any useful name or path. Patterns search from each character of a word, so a word as
# long as a line would take a second.
_WORD = re.compile(r"([\w./-]{256})[\w./-]+")
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?)")
_HTML = {"gt": ">", "lt": "<", "amp": "&", "quot": '"', "nbsp": " ", "#39": "'", "#x27": "'"}
_ENTITY = re.compile(rf"&({'|'.join(_HTML)});")
# A progress bar before a line of another process.
_BAR = re.compile(r"^.{0,300}?\d{1,3}%\|.{0,300}?\| *\d+/\d+ \[[^\]]{0,80}(?:it/s|s/it)\](?=\S)")
# A fence around code, and the marks of a bold exception.
_FENCE = re.compile(
    r"^ {0,3}(?:(?:> ?)+)?`{1,3}(?=\S)|`{3}$|^\*\*(?=[\w.]+(?:Error|Exception)\b)|(?<=\S)\*\*$"
)
# Characters that pages use for a space, or between letters.
_PAGE_CHARACTERS = {0xA0: " ", 0x200B: None, 0xFEFF: None}
# The other side of a frame around the line.
_FRAME_END = " \t│┃║"
_REPETITION_SUFFIX = re.compile(r" \[repeated \d+x across cluster\].{0,120}$")
_TAGS = re.compile(r"(?:</(?:p|li|td|tr|div|pre|code|span|strong|b)>)+$")
_LEVELS = "DEBUG|INFO|WARNING|ERROR|CRITICAL"
_TIME = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z| ?[+-]\d\d:?\d\d(?: [A-Z]{2,5}(?= ))?)?"
# Prefixes of carriers before the engine's line, which can follow each other.
_CARRIER_PREFIX = re.compile(
    r"(?:[>|│┃║] ?)+(?=\S|$)|> (?=\s+\S)"
    r"|[-*] (?=\w+(?:Error|Exception):)"
    rf"|(?:\w{{3}} [ \d]\d \d\d:\d\d:\d\d|{_TIME}) [\w.-]{{1,64}} [\w./@-]{{1,40}}(?:\[\d+\])?: "
    r"|\w{3} [ \d]\d \d\d:\d\d:\d\d [\w./@-]{1,64}\[\d+\]: "
    rf"|\d{{10,19}}[ \t]+(?={_TIME})"
    r"|\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (?= +File \"|    |Traceback"
    r" \(most|(?:\w+\.)*\w+(?:Error|Exception)(?::|$))"
    rf"|\[{_TIME}\] \[[\w./-]{{1,60}}\]: ?"
    # A program that logs each line of the engine as its own information.
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
_LINE_PREFIX = re.compile(
    r"(?P<process>(?:\([\w ./=:,-]{0,80}?pid=\d+[^)]{0,80}\) ?)*(?:\[rank\d+\]: ?)?)"
    rf"(?P<header>(?P<level>{_LEVELS}) (?:\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?"
    r" (?:\[[^\]]*\]|[\w./]{1,60}:\d+\])|\.\.\.) ?"
    rf"|(?P<plain>{_LEVELS}): +"
    rf"|\| (?P<loguru>{_LEVELS}) +\| [\w.:<>-]{{1,100}} \| ?"
    rf"|- (?:[\w.]{{1,80}} - (?P<named>{_LEVELS}) - |(?P<logging>{_LEVELS}) - [\w.]{{1,60}}:(?:\d+"
    r" - (?:[a-z][\w.]{0,60}: )?| ))"
    # Programs in Rust, as of Dynamo and routers.
    r"| *(?P<rust>ERROR|WARN|INFO|DEBUG|TRACE) [a-z]\w{0,40}(?:::\w{1,60}){0,8}: "
    r"|\[?(?:\d{4}-)?(?:\d\d-\d\d )?\d\d:\d\d:\d\d(?:[.,]\d+)?(?P<rank>(?: [A-Z]+\d+)*)\] ?"
    rf"(?:(?:[A-Z]\w{{1,20}} )?(?P<inner>{_LEVELS})(?::? +[\w./]{{1,60}}:\d+:?|:) +)?"
    r"|\[?(?P<glog>[IWEF])\d{3,4} \d\d:\d\d:\d\d[^\]]{0,80}\] ?)?"
)
_MAX_CARRIERS = 6
_LEVEL_LETTERS = {
    "I": "INFO",
    "W": "WARNING",
    "E": "ERROR",
    "F": "CRITICAL",
    "WARN": "WARNING",
    "TRACE": "DEBUG",
}
_LEVEL_LETTERS |= {level: level for level in ("DEBUG", "INFO", "ERROR")}
_QUIET_LEVELS = ("DEBUG", "INFO", "WARNING")


class LogLine(NamedTuple):
    """A parsed line.

    process: "" if the line does not name it.
    is_header: whether a record begins.
    level: None if the engine prints none.
    is_native: printed by compiled code of a library (glog), maybe from another thread or during the
        exit.
    """

    process: str
    is_header: bool
    level: str | None
    text: str
    is_native: bool = False

    @property
    def is_quiet(self) -> bool:
        """Whether the engine goes on after such a line."""
        return self.level in _QUIET_LEVELS


def clean(raw: bytes) -> str:
    """A log line as text of limited length, without colours and overwritten parts.

    Undecodable bytes are replaced.
    """
    if b"\r" in raw:
        raw = raw.rstrip(b"\r\n").rpartition(b"\r")[2]
    text = raw[: 2 * MAX_LINE].decode("utf-8", "replace")
    for escape in ("#033[", "^[["):  # by rsyslog and `cat -v`
        if escape in text:
            text = text.replace(escape, "\x1b[")
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    if "it/s]" in text or "s/it]" in text:
        text = _BAR.sub("", text)
    if not text.isascii():
        text = text.translate(_PAGE_CHARACTERS)
    text = _WORD.sub(r"\1", text)
    # Some consoles write the end of each line as text.
    return text.rstrip().removesuffix("\\n").rstrip(_FRAME_END)[:MAX_LINE]


def parse(text: str) -> LogLine:
    """Parse a cleaned line."""
    if "&" in text:
        text = _ENTITY.sub(lambda match: _HTML[match[1]], text)
    if "`" in text or "**" in text:
        text = _FENCE.sub("", text)
    start = 0
    for _ in range(_MAX_CARRIERS):
        carrier_match = _CARRIER_PREFIX.match(text, start)
        if carrier_match is None or carrier_match.end() == start:
            break
        start = carrier_match.end()
    match = _LINE_PREFIX.match(text, start)
    if match is None:
        return LogLine("", False, None, text[start:])
    level = (
        match["level"]
        or match["plain"]
        or match["loguru"]
        or match["logging"]
        or match["named"]
        or match["inner"]
        or _LEVEL_LETTERS.get(match["glog"] or match["rust"] or "")
    )
    process = match["process"].strip() or (match["rank"] or "").strip()
    message = text[match.end() :]
    if "[repeated " in message:
        message = _REPETITION_SUFFIX.sub("", message)
    if message.endswith(">") and "</" in message:
        message = _TAGS.sub("", message)
    return LogLine(process, match["header"] is not None, level, message, match["glog"] is not None)
