"""A place in an engine's source that raises an error, and the file of all of them. Pure.

scripts/engine-checks reads the places from published wheels. A place is known by file, function,
exception, the constant parts of its message, and the settings that its conditions read.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

HEADER = "fitserve engine checks 1"
# The place of a value in a message.
HOLE = "{}"
_WORD = re.compile(r"[A-Za-z_]{3,}")
_FIELDS = 6
_ORDER = re.compile(r"(?P<name>[\w.-]+)(?P<relation>==|!=|<=|>=|<|>|%|~|!~|=|!|\?)(?P<value>.*)\Z")


class CheckCondition(NamedTuple):
    """A comparison that must hold for the error.

    name: a flag without dashes, a variable of the environment, or a topic: `gpu.capability`,
        `gpu.cuda`, `model.FIELD` of config.json, `package.NAME`.
    relation: `==`, `!=`, `<`, `<=`, `>`, `>=`; `%`: no multiple of the value; `~`, `!~`: one, or
        none, of the values; `=`: set; `!`: not set; `?`: some other relation.
    value: a constant, or the name of another setting.
    """

    name: str
    relation: str
    value: str = ""

    def __str__(self) -> str:
        return f"{self.name}{self.relation}{self.value}"


class CheckSite(NamedTuple):
    """A place that raises an error.

    path: the path below the folder of packages.
    name: the function, as a traceback prints it.
    template: the message, with `{}` for values.
    conditions: those that hold there, the innermost last.
    """

    path: str
    name: str
    exception: str
    template: str = ""
    conditions: tuple[CheckCondition, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """The constant parts of the message with at least one word."""
        return tuple(part for part in self.template.split(HOLE) if _WORD.search(part))


class CheckBook(NamedTuple):
    """The places of an engine's versions.

    versions: those that were read, the oldest first.
    rows: each place, with a mask that has a bit for each version with it.
    """

    versions: tuple[str, ...]
    rows: tuple[tuple[CheckSite, int], ...]

    def add_version(
        self, version: str, sites: Iterable[CheckSite], order: Callable[[str], Any]
    ) -> CheckBook:
        """The book with the places of one more version, or with new ones of a known version.

        order: the key by which versions are sorted.
        """
        versions = sorted({*self.versions, version}, key=order)
        masks: dict[CheckSite, int] = {}
        for site, mask in self.rows:
            masks[site] = sum(
                1 << versions.index(known_version)
                for bit, known_version in enumerate(self.versions)
                if mask >> bit & 1 and known_version != version
            )
        for site in sites:
            masks[site] = masks.get(site, 0) | 1 << versions.index(version)
        rows = sorted((site, mask) for site, mask in masks.items() if mask)
        return CheckBook(tuple(versions), tuple(rows))


def parse_condition(text: str) -> CheckCondition:
    """The condition of its text. Raises ValueError for another form."""
    match = _ORDER.match(text)
    if match is None:
        raise ValueError(f"not a condition: {text}")
    return CheckCondition(match["name"], match["relation"], match["value"])


def encode(book: CheckBook) -> bytes:
    """The bytes of a book's file: a header, then compressed lines.

    A line leaves out the fields that it shares with the line before.
    """
    lines = []
    former_fields = ("", "", "", "", "", "")
    for site, mask in book.rows:
        conditions = " & ".join(map(str, site.conditions))
        fields = (site.path, site.name, site.exception, site.template, conditions, f"{mask:x}")
        lines.append(
            "\t".join(
                "" if field == former_field and at < _FIELDS - 1 else field or "-"
                for at, (field, former_field) in enumerate(zip(fields, former_fields, strict=True))
            )
        )
        former_fields = fields
    header = f"{HEADER} {' '.join(book.versions)}\n".encode()
    return header + zlib.compress("\n".join(lines).encode(), 9)


def decode(data: bytes) -> CheckBook:
    """The book of a file. Raises ValueError for another form."""
    header, _, body = data.partition(b"\n")
    text = header.decode("utf-8", "replace")
    if not text.startswith(f"{HEADER} "):
        raise ValueError("not a book of an engine's checks")
    try:
        lines = zlib.decompress(body).decode().split("\n")
    except (zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"a damaged book of an engine's checks: {error}") from None
    versions = tuple(text[len(HEADER) + 1 :].split(" "))
    return CheckBook(versions, tuple(_read_rows(lines)))


def _read_rows(lines: Sequence[str]) -> Iterable[tuple[CheckSite, int]]:
    former_fields: list[str] = ["-"] * _FIELDS
    conditions_by_text: dict[str, tuple[CheckCondition, ...]] = {"": ()}
    for line in lines:
        fields = line.split("\t")
        if len(fields) != _FIELDS:
            if not line:
                continue
            raise ValueError(f"{len(fields)} fields instead of {_FIELDS}")
        former_fields = [
            field or former_field for field, former_field in zip(fields, former_fields, strict=True)
        ]
        path, name, exception, template, conditions = (
            "" if field == "-" else field for field in former_fields[:-1]
        )
        if conditions not in conditions_by_text:
            parts = conditions.split(" & ")
            conditions_by_text[conditions] = tuple(map(parse_condition, parts))
        site = CheckSite(path, name, exception, template, conditions_by_text[conditions])
        yield site, int(former_fields[-1], 16)
