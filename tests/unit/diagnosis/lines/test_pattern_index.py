"""The index finds each expression that matches, and few others."""

import itertools
import re
from collections.abc import Iterator

import pytest

from gateway.diagnosis.diagnose import diagnose
from gateway.diagnosis.lines import pattern_index
from gateway.diagnosis.lines.pattern_index import IndexedPattern, PatternIndex, needles
from gateway.diagnosis.signatures import Signatures
from gateway.profiles.profiles import Profiles
from tests.support.paths import LOGS

ROWS = Profiles().signatures.rows
PATTERNS = [
    *(row.pattern for row in ROWS.texts),
    *(row.pattern for row in ROWS.progress),
    *(row.pattern for row in ROWS.cures.circumstances if row.pattern),
]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("Frob failed", ("frob failed",)),
        (r"a frob|\d+ jobs? done", ("a frob", " done")),
        (r"(?:frob|job) \w+ (?i:Cannot Start)", ("cannot start",)),
        (r"(?P<x>frobs|jobs) \d", ("frobs", "jobs")),
        (r"(?:frob)?job{2}s*\.py", ("job",)),
        (r"(?!frob)(?<=job)x[frob|]+\d", ()),
        (r"frob(?:s(?:alad)*|bed)end", ("frob",)),
        (r"frob|\w+", ()),
        (r"x{,3}frobs{0,2}", ("frob",)),
        (r"(?i)Frob\[7\]", ("frob[7]",)),
    ],
)
def test_each_match_contains_the_needle_of_its_pattern(
    pattern: str, expected: tuple[str, ...]
) -> None:
    assert needles(pattern) == expected


def lines() -> Iterator[str]:
    for log in sorted(LOGS.glob("*.log")):
        yield from dict.fromkeys(log.read_text(errors="replace").splitlines())


def test_no_expression_that_matches_is_left_out() -> None:
    several = [re.compile(pattern) for pattern in PATTERNS]
    index = PatternIndex(PATTERNS)
    # Many logs have the same line.
    texts = [*{*lines()}, *(example for row in ROWS.texts for example in row.examples)]
    match_count = 0
    for text in sorted(texts)[::3]:
        matching = {at for at, pattern in enumerate(several) if pattern.search(text)}
        assert matching <= set(index.possible_matches(text)), text
        match_count += len(matching)
    assert match_count > len(texts) / 2


def test_an_indexed_pattern_matches_like_its_pattern() -> None:
    pattern = IndexedPattern(r"frob|job (?P<at>\d)", re.IGNORECASE)
    match = pattern.search("a JOB 7")
    assert match is not None
    assert match["at"] == "7"
    assert pattern.search("a task") is None


class CountedPattern:
    """An expression that counts its searches."""

    searches = 0

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern

    def search(self, text: str) -> re.Match[str] | None:
        CountedPattern.searches += 1
        return self._pattern.search(text)

    def match(self, text: str) -> re.Match[str] | None:
        CountedPattern.searches += 1
        return self._pattern.match(text)


@pytest.mark.parametrize(
    "line",
    [
        "(EngineCore pid=7) ERROR 03-14 10:22:05 [core.py:13] job {} has failed, and that is bad",
        "ERROR: job number {} cannot be done",
        "ValueError: job {} is not what was wanted",
    ],
)
def test_a_line_is_searched_for_few_of_all_texts(line: str) -> None:
    signatures = Signatures(ROWS)
    texts = signatures._texts
    patterns = [(row, CountedPattern(pattern)) for row, pattern in texts._rows]
    object.__setattr__(texts, "_rows", patterns)
    searches = []
    for number in (500, 1000):
        CountedPattern.searches = 0
        diagnose(["\n".join(map(line.format, range(number))).encode()], signatures)
        searches.append(CountedPattern.searches)
    assert searches[1] <= 8 * 1000 < len(patterns) * 1000 / 20
    assert searches[1] <= 2.1 * searches[0] + 100


def test_a_line_is_read_once_for_all_indexes(monkeypatch: pytest.MonkeyPatch) -> None:
    readings: list[str] = []

    def read(text: str) -> list[memoryview]:
        readings.append(text)
        return windows(text)

    windows = pattern_index._windows
    signatures = Profiles().signatures
    monkeypatch.setattr(pattern_index, "_windows", read)
    words = ["".join(word) for word in itertools.permutations("kqvzj", 4)]
    lines = [
        f"(EngineCore pid=7) ERROR 03-14 10:22:05 [core.py:1330] {first} {second}"
        for first, second in itertools.pairwise(words)
    ]
    diagnose(["\n".join(lines).encode()], signatures)
    assert {readings.count(line.lower()) for line in lines} == {1}
    assert len(readings) < 1.2 * len(lines)
