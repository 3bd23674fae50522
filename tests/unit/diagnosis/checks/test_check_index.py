"""The place of an engine's source that raised a failure."""

from __future__ import annotations

import pytest

from gateway.diagnosis.checks import check_index
from gateway.diagnosis.checks.check_index import CheckIndex
from gateway.diagnosis.checks.check_site import CheckBook, CheckCondition, CheckSite
from gateway.diagnosis.diagnose import diagnose
from gateway.diagnosis.structure import ExceptionShape
from gateway.profiles.profiles import Profiles

SIGNATURES = Profiles().signatures
SITE = "/opt/venv/lib/python3.12/site-packages"
PATH = "vllm/frob/run.py"
WORDED = CheckSite(PATH, "run", "ValueError", "{} frobs cannot be split over {} ranks of a table")
OTHER = CheckSite(PATH, "run", "ValueError", "no frob is left")
BARE = CheckSite(PATH, "stop", "AssertionError", "", (CheckCondition("frob-size", "<", "4"),))
LINE_CONDITION = CheckCondition("row-size", "%", "8")
SECOND_BARE = CheckSite(
    PATH, "stop", "AssertionError", "", (CheckCondition("frob-size", "="), LINE_CONDITION)
)
BOOK = CheckBook(("1.0", "1.1"), ((WORDED, 0b11), (OTHER, 0b01), (BARE, 0b11), (SECOND_BARE, 0b10)))
INDEX = CheckIndex(lambda: BOOK)
MESSAGE = "7 frobs cannot be split over 3 ranks of a table"


def shape(exception: str, message: str, *frames: str, source: str = "") -> ExceptionShape:
    return ExceptionShape(
        exception, message, tuple(f"{SITE}/{frame}" for frame in frames), "load", source
    )


def test_a_frame_and_the_message_name_the_place() -> None:
    check = INDEX.check(shape("ValueError", MESSAGE, f"{PATH}:run"), "1.1")
    assert check is not None
    assert (check.site, check.is_sure, check.is_own_version) == (WORDED, True, True)


def test_a_message_without_a_traceback_names_the_place() -> None:
    check = INDEX.check(shape("ValueError", MESSAGE), "")
    assert check is not None
    assert (check.site, check.is_sure) == (WORDED, True)


def test_the_place_of_another_version_is_marked() -> None:
    check = INDEX.check(shape("ValueError", "no frob is left", f"{PATH}:run"), "1.1")
    assert check is not None
    assert (check.site, check.is_own_version) == (OTHER, False)


@pytest.mark.parametrize("version", ["1.0.post1", "1.0"])
def test_a_version_that_was_not_read_has_the_places_of_the_next_older_one(version: str) -> None:
    check = INDEX.check(shape("ValueError", "no frob is left", f"{PATH}:run"), version)
    assert check is not None
    assert check.is_own_version


def test_the_failing_line_decides_between_places_without_a_message() -> None:
    failing = shape("AssertionError", "", f"{PATH}:stop", source="assert self.row_size % 8")
    check = INDEX.check(failing, "1.1")
    assert check is not None
    assert not check.is_sure
    assert check.site.conditions == (LINE_CONDITION,)


@pytest.mark.parametrize(
    "failing",
    [
        shape("ValueError", "a message of something else", f"{PATH}:run"),
        shape("KeyError", MESSAGE, f"{PATH}:run"),
        shape("ValueError", "3 ranks of a table cannot be split over 7 frobs"),
        shape("ValueError", "no frob is left"),
        shape("AssertionError", "", f"{PATH}:stop", source="assert other"),
        shape("AssertionError", "", "frob/other.py:stop", source="assert self.row_size"),
    ],
    ids=["text", "exception", "order", "few words", "line", "file"],
)
def test_another_failure_has_no_place(failing: ExceptionShape) -> None:
    assert INDEX.check(failing, "1.1") is None


def test_the_search_reads_few_places_however_long_the_message_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = [
        CheckSite(
            PATH, f"run{at}", "ValueError", f"row{'xyz' * (at % 7)} of a table with frobs lost"
        )
        for at in range(2_000)
    ]
    index = CheckIndex(lambda: CheckBook(("1.0",), tuple((site, 1) for site in places)))
    compared = 0
    has_parts = check_index._has_parts

    def count(text: str, site: CheckSite, exception: str) -> bool:
        nonlocal compared
        compared += 1
        return has_parts(text, site, exception)

    monkeypatch.setattr(check_index, "_has_parts", count)
    assert index.check(shape("ValueError", "table with frobs lost " * 4_000), "1.0") is None
    assert compared <= 10 * check_index._MAX_PLACES
    compared = 0
    for _ in range(1_000):
        index.check(shape("ValueError", "table with frobs lost " * 4_000), "1.0")
    assert compared == 0


def test_a_book_is_read_only_when_a_failure_is_looked_up() -> None:
    reads: list[int] = []

    def read() -> CheckBook:
        reads.append(1)
        return BOOK

    index = CheckIndex(read)
    assert not reads
    index.check(shape("ValueError", MESSAGE), "1.0")
    index.check(shape("ValueError", "no frob is left"), "1.0")
    assert len(reads) == 1


def test_released_tables_are_read_by_the_next_new_search() -> None:
    reads: list[int] = []

    def read() -> CheckBook:
        reads.append(1)
        return BOOK

    index = CheckIndex(read)
    first = index.check(shape("ValueError", MESSAGE), "1.0")
    index.release()
    assert index._tables is None
    assert index.check(shape("ValueError", MESSAGE), "1.0") is first
    assert len(reads) == 1
    second = index.check(shape("ValueError", MESSAGE), "1.1")
    assert second is not None
    assert (second.site, len(reads)) == (WORDED, 2)


def test_a_long_log_asks_for_few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[str] = []

    def search(self: CheckIndex, failing: ExceptionShape, version: str) -> None:
        searches.append(failing.message)

    monkeypatch.setattr(CheckIndex, "check", search)
    lines = (f"FrobError: frob {at} of table {at * 7} is lost\n".encode() for at in range(80_000))
    failure, _ = diagnose(lines, SIGNATURES, "vllm==0.33.0")
    assert failure.kind == "unknown"
    assert 0 < len(searches) < 200
