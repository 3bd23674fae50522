"""Each row of profiles/failures has examples, and each example is diagnosed as its own row."""

import re

import pytest

from gateway.diagnosis.diagnose import diagnose
from gateway.diagnosis.lines.log_lines import clean, parse
from gateway.diagnosis.remedy import Case
from gateway.diagnosis.signature import StructuralSignature, TextSignature
from gateway.profiles.profiles import Profiles
from tests.support.engine_logs import BEGINS, shape_of, split_example, traceback

SIGNATURES = Profiles().signatures
TEXTS = SIGNATURES.rows.texts
STRUCTURES = SIGNATURES.rows.structures
PHASES = {
    word.kind: word.phases
    for word in SIGNATURES.rows.words
    if word.phases and word.kind != "unknown"
}


def texts() -> list[object]:
    return [
        pytest.param(row, text, id=f"{row.kind}: {text[:60]}")
        for row in TEXTS
        for text in row.examples
    ]


def structures() -> list[object]:
    return [
        pytest.param(row, text, id=f"{row.kind}: {text[:60]}")
        for row in STRUCTURES
        for text in row.examples
    ]


def first_text(example: str) -> str:
    return parse(clean(example.partition("\n")[0].encode())).text


def alternatives(pattern: str) -> list[str]:
    """The parts of a pattern between the `|` that stand in no group."""
    parts, depth, start = [], 0, 0
    for token in re.finditer(r"\\.|\[\^?\]?(?:\\.|[^\]])*\]|[()|]", pattern):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if token[0] == "|" and depth == 0:
            parts.append(pattern[start : token.start()])
            start = token.end()
    return [*parts, pattern[start:]]


def test_every_row_has_an_example() -> None:
    assert not [row for row in (*TEXTS, *STRUCTURES) if not row.examples]


@pytest.mark.parametrize(("row", "example"), texts())
def test_no_row_above_takes_the_example_of_a_text(row: TextSignature, example: str) -> None:
    frames = frozenset((row.frame,) if row.frame else ())
    for engine in (None, *(row.engines or ("vllm", "sglang"))):
        text_row = SIGNATURES.match_text(
            first_text(example), engine, frames, is_line=row.line_start
        )
        assert text_row is not None
        assert text_row[0] is row, text_row[0]


@pytest.mark.parametrize(("row", "example"), texts())
def test_a_log_with_the_example_of_a_text_is_diagnosed_as_its_row(
    row: TextSignature, example: str
) -> None:
    lines = traceback([f"engine/module.py:{row.frame}"], example) if row.frame else [example]
    failure, reader = diagnose(
        ["\n".join(lines).encode()], SIGNATURES, next(iter(row.engines), None)
    )
    case = Case(row.kind, failure.phase, None, reader.progress.settings | failure.culprit)
    message = SIGNATURES.cures.describe(row, case)[0]
    assert (failure.kind, failure.proven_subject) == (row.kind, row.proves)
    # A circumstance of the case can add a sentence.
    assert failure.message.startswith(message)


@pytest.mark.parametrize("row", TEXTS, ids=lambda row: f"{row.kind}: {row.examples[0][:60]}")
def test_every_alternative_of_a_text_has_an_example(row: TextSignature) -> None:
    first_texts = [first_text(example) for example in row.examples]
    search = re.match if row.line_start else re.search
    assert not [
        part
        for part in alternatives(row.pattern)
        if not any(search(part, text) for text in first_texts)
    ]


def circumstance_lines(row: StructuralSignature) -> tuple[str, ...]:
    """The lines of a start that show the circumstance of a row."""
    return next(
        (
            circumstance.examples
            for circumstance in SIGNATURES.cures.rows.circumstances
            if circumstance.name == row.circumstance
        ),
        (),
    )


def test_a_row_of_a_circumstance_needs_its_line() -> None:
    rows = [row for row in SIGNATURES.rows.structures if row.circumstance]
    assert rows
    for row in rows:
        assert circumstance_lines(row), row
        shape = shape_of(row.examples[0], "profile")
        without_line = SIGNATURES.match_structure(shape, None)
        assert without_line is None or without_line[0] is not row


@pytest.mark.parametrize(("row", "example"), structures())
def test_no_row_above_takes_the_example_of_a_structure(
    row: StructuralSignature, example: str
) -> None:
    phases = row.phases or PHASES.get(row.kind, ("starting", "load", "serving"))
    for phase in phases[:3]:
        structure_row = SIGNATURES.match_structure(
            shape_of(example, phase), next(iter(row.engines), None), {row.circumstance}
        )
        assert structure_row is not None
        assert structure_row[0] is row, structure_row[0]


@pytest.mark.parametrize(("row", "example"), structures())
def test_a_log_with_the_example_of_a_structure_names_its_kind(
    row: StructuralSignature, example: str
) -> None:
    phases = row.phases or PHASES.get(row.kind, ("starting",))
    phase = next(
        each_phase for each_phase in phases if BEGINS[each_phase] or each_phase == "starting"
    )
    frames, exception_text = split_example(example)
    lines = (
        [BEGINS[phase], *traceback(frames, exception_text)]
        if phase != "serving"
        else traceback(frames, exception_text)
    )
    lines = [*circumstance_lines(row), *lines]
    kind = diagnose(["\n".join(lines).encode()], SIGNATURES, next(iter(row.engines), None))[0].kind
    assert (
        kind == row.kind
        or row.yields_to_words
        or (row.phases == ("serving",) and kind == "unknown")
    )
