"""Every message and every step, with and without each value that a case may have."""

import re

import pytest

from gateway.core.failures.remedy import DONE, filled, groups, steps
from gateway.core.failures.signature import Signature
from gateway.domain import Failure
from gateway.profiles import Profiles

SIGNATURES = Profiles().signatures
NAMED = [row for row in SIGNATURES.rows if row.kind is not None]
# An empty number, a word that is missing, punctuation after nothing.
_HOLE = re.compile(r"  |[{}\[]\[|\{|\( ?\)|: ?\.|: ?$| [.,;:](?: |$)|\bof  |\bNone\b")


def templates(row: Signature) -> list[str]:
    kind = next((one for one in NAMED if one.is_remedy and one.kind == row.kind), row)
    return [row.message, row.advice, *row.steps, kind.message, kind.advice, *kind.steps]


@pytest.mark.parametrize("row", NAMED, ids=lambda row: f"{row.kind}: {row.pattern[:40] or row.where[:40] or row.message[:40]}")
def test_every_text_is_whole_with_and_without_each_value(row: Signature) -> None:
    named = sorted(set().union(*(groups(text) for text in templates(row))))
    cases = [dict.fromkeys(named, 7), {}, *({name: 7 for name in named if name != left_out} for left_out in named)]
    for known in cases:
        message, advice, cure = SIGNATURES.words(row, dict(known))
        assert message != "The engine failed."
        assert advice
        assert cure
        for text in (message, advice, *cure):
            assert not _HOLE.search(text), (text, known)


def test_every_kind_of_a_row_has_a_cure() -> None:
    cured = {row.kind for row in NAMED if row.is_remedy}
    assert {row.kind for row in NAMED} <= cured


def test_a_part_is_left_out_and_a_sentence_is_not_used() -> None:
    assert filled("{n} of[[ {m}]] fit", {"n": 1, "m": 2}) == "1 of 2 fit"
    assert filled("{n} of[[ {m}]] fit", {"n": 1}) == "1 of fit"
    assert filled("{n} fit", {}) is None
    assert filled("{free_bytes} free", {"free_bytes": 3 * 2**29}) == "1.50 GiB free"
    assert steps(("a {n}", "b"), {}) == ("b",)


def test_what_the_gateway_did_is_told_of_everything_that_a_failure_proves() -> None:
    assert set(DONE) == set(Failure.model_fields["proves"].annotation.__args__)  # type: ignore[union-attr]
