#!/usr/bin/env python3
"""Wrap the lines of YAML files at 100 columns. The loaded values stay equal.

python scripts/wrap_yaml.py FILE...
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections import defaultdict
from pathlib import Path

import yaml

COLUMNS = 100
# A break behind a comma may leave this many columns unused, before one within a text is taken.
_SPARE = 40
_INDENT = 2


class Breaks:
    """Where a YAML text may break, by line: columns behind commas, of spaces within texts, and
    before values; and the indentation of the next line."""

    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        self.entries: defaultdict[int, list[int]] = defaultdict(list)
        self.spaces: defaultdict[int, list[int]] = defaultdict(list)
        self.values: defaultdict[int, list[int]] = defaultdict(list)
        self.indents: dict[int, int] = {}
        self.comments: dict[int, int] = {}
        self.joints: set[int] = set()  # lines whose end stands for one space
        token_ends: dict[int, int] = {}  # the last column of a token
        open_collections: list[bool] = []  # whether each open collection is a sequence
        previous_token: yaml.Token | None = None
        for token in yaml.scan(text, Loader=yaml.CSafeLoader):
            start, end = token.start_mark, token.end_mark
            if end.index > start.index:
                token_ends[end.line] = end.column
            if isinstance(token, yaml.FlowMappingStartToken | yaml.FlowSequenceStartToken):
                open_collections.append(isinstance(token, yaml.FlowSequenceStartToken))
            elif isinstance(token, yaml.FlowMappingEndToken | yaml.FlowSequenceEndToken):
                open_collections.pop()
            elif isinstance(token, yaml.FlowEntryToken):
                self.entries[end.line].append(end.column)
            elif isinstance(token, yaml.BlockEntryToken):
                self.indents[start.line] = start.column + 2 * _INDENT
            elif isinstance(token, yaml.KeyToken) and not open_collections:
                self.indents[start.line] = start.column + _INDENT
            elif (
                isinstance(token, yaml.ScalarToken)
                and token.style != "|"
                and not isinstance(previous_token, yaml.KeyToken)
            ):
                self._add_text(token)
            if (
                isinstance(previous_token, yaml.ValueToken)
                and previous_token.start_mark.line == start.line
                and not (isinstance(token, yaml.ScalarToken) and token.style in ("|", ">"))
            ):
                self.values[start.line].append(start.column)
            if (
                isinstance(previous_token, yaml.FlowEntryToken)
                and isinstance(token, yaml.ScalarToken)
                and open_collections[-1]
                and previous_token.start_mark.line == start.line - 1
            ):
                self.joints.add(start.line - 1)
            previous_token = token
            if isinstance(token, yaml.ScalarToken):
                # A `#` within a text begins no comment.
                token_ends.update(
                    (line, len(self.lines[line])) for line in range(start.line, end.line)
                )
        for number, line in enumerate(self.lines):
            if (column := line.find("#", token_ends.get(number, 0))) >= 0 and line[:3] != "---":
                self.comments[number] = column
                self.joints.discard(number)

    def _add_text(self, token: yaml.ScalarToken) -> None:
        start, end = token.start_mark, token.end_mark
        for number in range(start.line + (token.style == ">"), end.line + 1):
            line = self.lines[number]
            first = start.column if number == start.line else 0
            last = end.column if number == end.line else len(line)
            self.spaces[number] += [
                match.start()
                for match in re.finditer(r"(?<=[^\s]) (?=[^\s#])", line)
                if first < match.start() < last - 1
            ]
            if number < end.line and token.style != ">":
                following = self.lines[number + 1].strip()
                if line.strip() and following and not line.endswith("\\"):
                    self.joints.add(number)

    def join_texts(self) -> str:
        """The text with each text or list of words on one line that has a line too long."""
        rows: list[list[str]] = []
        for number, line in enumerate(self.lines):
            if number - 1 in self.joints:
                rows[-1].append(line)
            else:
                rows.append([line])
        return "\n".join(
            " ".join([row[0].rstrip(), *(line.strip() for line in row[1:])])
            if any(len(line) > COLUMNS for line in row)
            else "\n".join(row)
            for row in rows
        )

    def pieces_of_line(self, number: int) -> list[str]:
        """A line in pieces that fit, as far as it can break."""
        line = self.lines[number]
        if len(line) <= COLUMNS:
            return [line]
        comment = self.comments.get(number)
        own_indent = len(line) - len(line.lstrip())
        comment_lines: list[str] = []
        if comment is not None:
            prefix = " " * (own_indent if line[:comment].strip() else comment) + "# "
            comment_lines = _fill(line[comment + 1 :].split(), prefix)
            line = line[:comment].rstrip()
            if not line:
                return comment_lines
        indent = self.indents.get(number, own_indent)
        pieces, start, used_columns = [], 0, 0
        while len(line) - start + used_columns > COLUMNS:
            limit = start + COLUMNS - used_columns
            column = self._last(self.entries[number], start, limit)
            if column < limit - _SPARE:
                column = max(column, self._last(self.spaces[number], start, limit))
            if column <= start:
                column = self._last(self.values[number], start, limit)
            if column <= start:
                column = self._next(number, limit)
            if column <= start:
                break
            pieces.append(" " * used_columns + line[start:column].rstrip())
            start = column + len(line[column:]) - len(line[column:].lstrip())
            used_columns = indent
        return [*comment_lines, *pieces, " " * used_columns + line[start:]]

    @staticmethod
    def _last(columns: list[int], begin: int, limit: int) -> int:
        """The last column to break at between these two; -1: none."""
        index = bisect_right(columns, limit)
        return columns[index - 1] if index and columns[index - 1] > begin else -1

    def _next(self, number: int, limit: int) -> int:
        """The first column to break at behind a piece that cannot fit; -1: none."""
        line = self.lines[number].rstrip()
        later_columns = [
            column
            for column in (*self.entries[number], *self.spaces[number])
            if limit < column < len(line)
        ]
        return min(later_columns, default=-1)


def _fill(words: list[str], prefix: str) -> list[str]:
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + 1 + len(word) <= COLUMNS:
            lines[-1] += f" {word}"
        else:
            lines.append(prefix + word)
    return lines


def wrap(text: str) -> str:
    """The YAML text with wrapped lines. Raises YAMLError; ValueError: its value would change."""
    if all(len(line) <= COLUMNS for line in text.split("\n")):
        return text
    breaks = Breaks(Breaks(text).join_texts())
    pieces = (breaks.pieces_of_line(number) for number in range(len(breaks.lines)))
    result = "\n".join(piece for line in pieces for piece in line)
    if _values(result) != _values(text):
        raise ValueError("a wrapped line changes the value")
    return result


def _values(text: str) -> list[object]:
    return list(yaml.load_all(text, Loader=yaml.CSafeLoader))


def main() -> None:
    for name in sys.argv[1:]:
        path = Path(name)
        text = path.read_text()
        try:
            result = wrap(text)
        except (ValueError, yaml.YAMLError) as error:
            raise SystemExit(f"{name}: {error}") from None
        if result != text:
            path.write_text(result)
            print(name)


if __name__ == "__main__":
    main()
