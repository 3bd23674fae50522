"""The file of the places in an engine's source that raise an error."""

from __future__ import annotations

import pytest

from gateway.diagnosis.checks.check_site import (
    CheckBook,
    CheckCondition,
    CheckSite,
    decode,
    encode,
    parse_condition,
)
from gateway.domain.release import release
from gateway.profiles.profiles import Profiles
from tests.support.paths import ROOT

FIRST = CheckSite(
    "vllm/frob.py", "run", "ValueError", "{} frobs", (CheckCondition("frob-size", "%", "16"),)
)
SECOND = CheckSite("vllm/frob.py", "stop", "ValueError", "no frobs")
KINDS = ("vllm", "sglang")


def test_a_book_survives_its_file() -> None:
    book = CheckBook(("1.0", "1.1"), ((FIRST, 1), (SECOND, 3)))
    assert decode(encode(book)) == book
    assert decode(encode(CheckBook(("1.0",), ()))) == CheckBook(("1.0",), ())


@pytest.mark.parametrize("data", [b"", b"frob\n", b"fitserve engine checks 1 1.0\nfrob"])
def test_another_file_is_no_book(data: bytes) -> None:
    with pytest.raises(ValueError, match="engine's checks"):
        decode(data)


@pytest.mark.parametrize(
    "text", ["frob-size%16", "kv-cache-dtype!~auto,fp8", "enable-lora!", "frob-size>=row-size"]
)
def test_a_condition_survives_its_text(text: str) -> None:
    assert str(parse_condition(text)) == text


def test_a_version_between_two_keeps_the_places_of_both() -> None:
    book = CheckBook((), ()).add_version("1.0", [FIRST], release)
    book = book.add_version("1.2", [FIRST, SECOND], release)
    book = book.add_version("1.1", [SECOND], release)
    assert book.versions == ("1.0", "1.1", "1.2")
    assert dict(book.rows) == {FIRST: 0b101, SECOND: 0b110}


def test_a_version_that_is_read_again_replaces_its_places() -> None:
    book = CheckBook((), ()).add_version("1.0", [FIRST], release)
    assert book.add_version("1.0", [SECOND], release).rows == ((SECOND, 1),)


@pytest.mark.parametrize("kind", KINDS)
def test_every_described_version_has_its_places(kind: str) -> None:
    book = decode((ROOT / "profiles/engine_checks" / kind).read_bytes())
    assert {*Profiles().signatures.rows.cures.versions[kind]} <= {*book.versions}
    assert list(book.versions) == sorted(book.versions, key=release)
    newest = 1 << len(book.versions) - 1
    assert sum(bool(mask & newest) for _, mask in book.rows) > 3_000


def test_the_files_are_small() -> None:
    sizes = [(ROOT / "profiles/engine_checks" / kind).stat().st_size for kind in KINDS]
    assert sum(sizes) < 2 * 2**20
