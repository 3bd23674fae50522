"""What stands before each line of a log and that no program known here puts there: told by the
first line behind it that nothing but an engine
begins so. Pure.

Every launcher, orchestrator and collector of logs has its own: `[worker-1] `, `[1,2]<stderr>:`,
`10.0.0.1: `. A frame begins with two spaces and `File "`, a record of vLLM with its level and time,
a traceback with its name; what goes before it goes before the other lines as well, with other
digits.
"""

from __future__ import annotations

import re

from gateway.diagnosis.lines.line_forms import FRAME, TRACEBACK
from gateway.diagnosis.lines.log_lines import LogLine, parse

# More than any cluster's log has in one file, and bounded.
_MOST = 32
_BEFORE = re.compile(
    r'(?P<carrier>(?=.*\S)(?:(?!Traceback|File ").){1,120}?)'
    r'(?:  File "[^"]{1,300}", line \d+|Traceback \(most recent call last\):$'
    r"|\(\w{1,40} pid=\d+|(?:ERROR|WARNING|INFO) \d\d-\d\d \d\d:\d\d:\d\d |\[\d{4}-\d\d-\d\d"
    r" \d\d:\d\d:\d\d(?: [A-Z]+\d+)*\] )"
)
_TELLS = re.compile(r'File "|Traceback \(most|pid=|\d\d-\d\d \d\d:\d\d:')
_DIGITS = re.compile(r"\d+")
_STAMP = re.compile(r"\d+(?:[:.,/T-]\d+)+Z?")


class Carriers:
    """Parses lines, and leaves out what was seen before a frame."""

    def __init__(self) -> None:
        self._seen: dict[str, None] = {}
        self._known: re.Pattern[str] | None = None

    def parse(self, text: str) -> LogLine:
        """What a cleaned line says. Whoever carried it counts as a process of its own, without the
        time."""
        carried = self._known.match(text) if self._known is not None else None
        if carried is None:
            line = parse(text)
            begins = (
                line.header or line.process or FRAME.match(line.text) or TRACEBACK.match(line.text)
            )
            if begins or not _TELLS.search(text) or not self._learn(text) or self._known is None:
                return line
            carried = self._known.match(text)
            if carried is None:
                return line
        line = parse(text[carried.end() :])
        return line._replace(process=_STAMP.sub("", carried[0]) + line.process)

    def _learn(self, text: str) -> bool:
        before = _BEFORE.match(text)
        if before is None or len(self._seen) >= _MOST:
            return False
        self._seen[r"\d+".join(re.escape(part) for part in _DIGITS.split(before["carrier"]))] = None
        self._known = re.compile("|".join(sorted(self._seen, key=len, reverse=True)))
        return True
