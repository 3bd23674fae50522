"""Unknown prefixes of log lines, learned from lines that only an engine begins so. Pure.

Launchers, orchestrators and collectors of logs have prefixes such as `[worker-1] `,
`[1,2]<stderr>:`, `10.0.0.1: `. A frame begins with two spaces and `File "`, a record of vLLM with
its level and time, a traceback with its name. The text before it is a prefix of other lines too,
with other digits.
"""

from __future__ import annotations

import re

from gateway.diagnosis.lines.line_forms import FRAME, TRACEBACK
from gateway.diagnosis.lines.log_lines import LogLine, parse

# More than the log of any cluster has in one file, and bounded.
_MAX_PREFIXES = 32
_CARRIER_PREFIX = re.compile(
    r'(?P<carrier>(?=.*\S)(?:(?!Traceback|File ").){1,120}?)'
    r'(?:  File "[^"]{1,300}", line \d+|Traceback \(most recent call last\):$'
    r"|\(\w{1,40} pid=\d+|(?:ERROR|WARNING|INFO) \d\d-\d\d \d\d:\d\d:\d\d |\[\d{4}-\d\d-\d\d"
    r" \d\d:\d\d:\d\d(?: [A-Z]+\d+)*\] )"
)
_ENGINE_TEXT = re.compile(r'File "|Traceback \(most|pid=|\d\d-\d\d \d\d:\d\d:')
_DIGITS = re.compile(r"\d+")
_STAMP = re.compile(r"\d+(?:[:.,/T-]\d+)+Z?")


class Carriers:
    """Parses lines without the prefixes that it has learned."""

    def __init__(self) -> None:
        self._prefixes: dict[str, None] = {}
        self._pattern: re.Pattern[str] | None = None

    def parse(self, text: str) -> LogLine:
        """The parsed line. The prefix of a line without the time counts as the name of a
        process."""
        carrier_match = self._pattern.match(text) if self._pattern is not None else None
        if carrier_match is None:
            line = parse(text)
            begins = (
                line.is_header
                or line.process
                or FRAME.match(line.text)
                or TRACEBACK.match(line.text)
            )
            if (
                begins
                or not _ENGINE_TEXT.search(text)
                or not self._learn(text)
                or self._pattern is None
            ):
                return line
            carrier_match = self._pattern.match(text)
            if carrier_match is None:
                return line
        line = parse(text[carrier_match.end() :])
        return line._replace(process=_STAMP.sub("", carrier_match[0]) + line.process)

    def _learn(self, text: str) -> bool:
        match = _CARRIER_PREFIX.match(text)
        if match is None or len(self._prefixes) >= _MAX_PREFIXES:
            return False
        parts = (re.escape(part) for part in _DIGITS.split(match["carrier"]))
        self._prefixes[r"\d+".join(parts)] = None
        self._pattern = re.compile("|".join(sorted(self._prefixes, key=len, reverse=True)))
        return True
