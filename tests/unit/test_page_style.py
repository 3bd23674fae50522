"""The style of the page's own files: width, and names of the field."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.style import hold, is_participle, vague_clause, word_list

STATIC = ROOT / "gateway/server/page/static"
MAX_COLUMNS = 100
FILES = [
    path
    for path in sorted(STATIC.rglob("*"))
    if path.suffix in (".js", ".css", ".html") and path.parent.name != "vendor"
]
MODULES = [path for path in FILES if path.suffix == ".js"]

NAME = r"[A-Za-z_$][\w$]*"
# Comments, and strings without the expressions of templates.
TEXT = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL)
FUNCTION = re.compile(rf"\bfunction\*?\s+({NAME})|\bclass\s+({NAME})")
VALUE = re.compile(rf"\b(?:const|let|var)\s+({NAME})")
# A list of parameters, of an arrow or a function, and a list of names that are taken apart.
PARAMETERS = re.compile(
    rf"\(([^()]*)\)\s*=>|\bfunction\*?\s*(?:{NAME})?\(([^()]*)\)|\bcatch\s*\(([^()]*)\)"
    rf"|\b(?:const|let)\s+[\[{{]([^=]*)[\]}}]\s*(?:=|of)"
)
ARROW = re.compile(rf"(?<![\w$.)])({NAME})\s*=>")
# A field of an object that is taken apart has the name that its API gives it, unless it is renamed.
PARAMETER = re.compile(rf"(?:^|[,\[{{:]|\.\.\.)\s*({NAME})\s*(?=[,\]}}=]|$)")


def declared_names(source: str) -> Iterator[tuple[str, str]]:
    """Kind (`function` or `value`) and name of everything that is declared."""
    bare = TEXT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), source)
    for match in FUNCTION.finditer(bare):
        yield "function", match[1] or match[2]
    for pattern in (VALUE, ARROW):
        for match in pattern.finditer(bare):
            yield "value", match[1]
    for match in PARAMETERS.finditer(bare):
        for name in PARAMETER.findall(next(filter(None, match.groups()), "")):
            yield "value", name


def is_vague(kind: str, name: str) -> bool:
    word = name.strip("_$").lower()
    if kind == "function":
        return word in word_list("vague") or is_participle(word)
    return word in word_list("vague_values") | word_list("page_vague") | word_list("short")


def vague_names(source: str) -> set[str]:
    return {name for kind, name in declared_names(source) if is_vague(kind, name)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(STATIC)))
def test_lines_of_the_page_are_narrow(path: Path) -> None:
    lines = enumerate(path.read_text().splitlines(), 1)
    hold("columns", [f"{path.name}:{number}" for number, line in lines if len(line) > MAX_COLUMNS])


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(STATIC)))
def test_no_text_of_the_page_spans_lines(path: Path) -> None:
    """The gateway leaves out comments by lines."""
    bare = TEXT.sub("", path.read_text())
    hold("page_text", [line for line in bare.splitlines() if line.count("`") % 2])


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(STATIC)))
def test_names_of_the_page_can_be_searched_for(path: Path) -> None:
    hold("value_name", vague_names(path.read_text()))


def comments(source: str) -> Iterator[str]:
    """The text of each comment; lines that follow each other are one."""
    block = re.compile(r"/\*(.*?)\*/|((?:^[ ]*//[^\n]*\n)+)", re.DOTALL | re.MULTILINE)
    for match in block.finditer(source):
        yield " ".join(
            re.sub(r"^[ ]*(?://|\*)", "", match[1] or match[2], flags=re.MULTILINE).split()
        )


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(STATIC)))
def test_comments_of_the_page_have_nouns_as_subjects(path: Path) -> None:
    hold(
        "clause_subject",
        [clause for text in comments(path.read_text()) if (clause := vague_clause(text))],
    )


def test_comments_of_a_module_are_read_as_a_whole() -> None:
    source = "// One. What\n// follows.\nconst a = 1;\n  /**\n   * Two.\n   * Who asks. */\n"
    assert list(comments(source)) == ["One. What follows.", "Two. Who asks."]
    assert [vague_clause(text) for text in comments(source)] == [". What follows.", ". Who asks."]


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("const it = 1, row = 2;", {"it"}),
        ("function told() {}", {"told"}),
        ("async function* repeated() {}", {"repeated"}),
        ("rows.map((x) => x)", {"x"}),
        ("rows.map(el => el.name)", {"el"}),
        ("rows.map((one) => one.name)", {"one"}),
        ("let running = null;", {"running"}),
        ("const [kept, row] = rows;", {"kept"}),
        ("({ name, fields: found }) => 1", {"found"}),
        ("for (const [e, value] of rows) {}", {"e"}),
        ("catch (e) {}", {"e"}),
        ('// const it\nconst row = "let it be"; /* (x) => */', set()),
        ("rows.found(), row.told = 1", set()),
    ],
)
def test_vague_names_of_a_module_are_found(source: str, names: set[str]) -> None:
    assert vague_names(source) == names
