"""Form of every Markdown page: line length, paragraphs, tables, sentences and links."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.style import foreign_wordings, hold

COLUMNS = 100
PARAGRAPH_LINES = 6
CELL_CHARACTERS = 200
SENTENCE_WORDS = 25
# The pages of the architecture beside its overview.
PARTS = ("planner.md", "data-plane.md", "state.md")
PART_WORDS = 1_300
# Their pages are held to the form alone.
FOLDERS = (".github", "benchmarks", "examples", "tests")

# Pages for readers. Notebooks of measurements are held to the form alone.
READERS = (
    *(
        path
        for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
        if (path := ROOT / name).exists()
    ),
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "findings" / "README.md",
)
PAGES = (
    *READERS,
    *sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")),
)
LIST_ITEM = re.compile(r"^\s*(?:[*-]|\d+\.) ")
PRONOUN_SUBJECT = re.compile(
    r"(?:Who|What|It|Whoever|Whatever)\b|That (?:is|was|has|had|does|means|says|would)\b"
)
BOX = re.compile("[\u2500-\u257f]")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Number and text of each line outside blocks of code; a line of code is empty."""
    is_fenced = block = in_list = False
    previous = ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith(" "):
            in_list = LIST_ITEM.match(line) is not None
        fence = line.lstrip().startswith("```")
        block = line.startswith("    ") and not in_list and (block or not previous.strip())
        yield number, "" if fence or is_fenced or block else line
        is_fenced ^= fence
        previous = line


def paragraphs(text: str) -> Iterator[tuple[int, list[str]]]:
    """First line number and lines of each paragraph and list item."""
    lines: list[str] = []
    began = 0
    for number, line in [*prose(text), (0, "")]:
        ends = not line.strip() or line.startswith(("|", "#")) or LIST_ITEM.match(line)
        if ends and lines:
            yield began, lines
            lines = []
        if line.strip() and not line.startswith(("|", "#")):
            began = began if lines else number
            lines.append(line)


def sentences(lines: list[str]) -> list[str]:
    """Sentences of a paragraph. Code, links and figures in brackets count as one word."""
    text = LIST_ITEM.sub(
        "", " ".join(line.strip() for line in [" " + lines[0], *lines[1:]]), count=1
    )
    text = re.sub(r"`[^`]*`", "CODE", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return [part for part in re.split(r"(?<=[.:;?!])[\"')*]*\s+", text) if part.strip()]


def wide_lines(text: str, rows: bool = True) -> list[int]:
    """Lines over the limit, but for single words that cannot be broken. rows: also of tables."""
    return [
        number
        for number, line in prose(text)
        if len(line) > COLUMNS
        and (rows or not line.startswith("|"))
        and " " in LIST_ITEM.sub("", line, count=1).strip()
    ]


def wide_cells(text: str) -> list[int]:
    """Table rows with a cell over the limit."""
    return [
        number
        for number, line in prose(text)
        if line.startswith("|")
        and any(len(cell.strip()) > CELL_CHARACTERS for cell in re.split(r"(?<!\\)\|", line))
    ]


def anchors(text: str) -> set[str]:
    """Anchors of the headings of a page, as forges make them."""
    headings = [line.lstrip("#").strip() for _, line in prose(text) if re.match(r"#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Targets within the repository that do not exist."""
    links = []
    for target in LINK.findall(page.read_text()):
        path, _, anchor = target.partition("#")
        file = page if not path else (page.parent / path)
        if "://" in target or target.startswith("mailto:"):
            continue
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            links.append(target)
    return links


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_paragraphs_and_cells_are_short(page: Path) -> None:
    text = page.read_text()
    long = [began for began, lines in paragraphs(text) if len(lines) > PARAGRAPH_LINES]
    wide = wide_lines(text, rows=page in READERS)
    assert (wide, long, wide_cells(text)) == ([], [], [])


def words_of(text: str) -> Iterator[str]:
    """Words of a line; a span of code with spaces is one word."""
    word = ""
    for part in text.split(" "):
        word = f"{word} {part}" if word else part
        if word.count("`") % 2 == 0:
            yield word
            word = ""
    if word:
        yield word


def early_breaks(text: str) -> list[int]:
    """Numbers of the lines of paragraphs that end although the next word has room."""
    return [
        began + number
        for began, lines in paragraphs(text)
        for number, (line, next_line) in enumerate(itertools.pairwise(lines))
        if line.count("`") % 2 == 0
        and len(line.rstrip()) + 1 + len(next(words_of(next_line.strip()))) <= COLUMNS
    ]


@pytest.mark.parametrize("page", READERS, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_paragraphs_are_filled(page: Path) -> None:
    assert early_breaks(page.read_text()) == [], "join these lines with the next"


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("a short line\nand its rest", [1]),
        ("word " * 19 + "four\nmore", []),
        ("word " * 18 + "four\n`code with spaces`", []),
        ("a line\n\nanother one", []),
        ("* an item\n* another", []),
        ("```\na\nb\n```", []),
    ],
)
def test_an_early_break_is_found(text: str, numbers: list[int]) -> None:
    assert early_breaks(text) == numbers


def drawn_lines(text: str) -> list[int]:
    """Lines with box characters outside blocks of code, where no font lines them up."""
    return [number for number, line in prose(text) if BOX.search(line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_box_characters_stand_in_blocks_of_code(page: Path) -> None:
    assert drawn_lines(page.read_text()) == []


def test_a_drawing_outside_a_block_of_code_is_found() -> None:
    text = "```\n\u250c\u2500\u2510\n```\n\nA line: \u2502.\n\n    \u2514\u2500\u2518\n"
    assert drawn_lines(text) == [5]


@pytest.mark.parametrize("page", READERS, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short(page: Path) -> None:
    long = [
        f"{began}: {sentence}"
        for began, lines in paragraphs(page.read_text())
        for sentence in sentences(lines)
        if len(sentence.split()) > SENTENCE_WORDS
    ]
    assert long == []


@pytest.mark.parametrize("page", READERS, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_has_a_pronoun_as_subject(page: Path) -> None:
    wrong = [
        f"{began}: {sentence}"
        for began, lines in paragraphs(page.read_text())
        for sentence in sentences(lines)
        if PRONOUN_SUBJECT.match(sentence.lstrip("*_("))
    ]
    assert wrong == []


@pytest.mark.parametrize("page", READERS, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_of_pages_have_plain_words(page: Path) -> None:
    texts = (" ".join(line.strip() for line in lines) for _, lines in paragraphs(page.read_text()))
    hold("wording", [row for text in texts for row in foreign_wordings(text)])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_the_index_links_every_page() -> None:
    targets = {
        target.partition("#")[0] for target in LINK.findall((ROOT / "docs/index.md").read_text())
    }
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages - targets == set()


def test_the_architecture_is_a_page_for_each_part() -> None:
    targets = LINK.findall((ROOT / "docs/architecture.md").read_text())
    assert set(PARTS) <= set(targets)
    words = {
        name: len((ROOT / "docs" / name).read_text().split())
        for name in ("architecture.md", *PARTS)
    }
    assert {name: count for name, count in words.items() if count > PART_WORDS} == {}


def test_each_word_of_the_architecture_has_one_meaning() -> None:
    text = (ROOT / "docs/architecture.md").read_text().partition("## Words")[2]
    rows = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    assert len(rows) > 15
    assert [row for row in rows if re.search(r"; (?:of|elsewhere|also)\b", row)] == []


def test_no_command_installs_the_package_from_an_index_without_one() -> None:
    if "no package is published yet" in " ".join((ROOT / "README.md").read_text().split()):
        files = [
            path for top in ("gateway", "docs", "examples") for path in (ROOT / top).rglob("*")
        ]
        files += PAGES
        texts = {
            path: path.read_text() for path in files if path.suffix in (".py", ".md", ".service")
        }
        assert [path for path, text in texts.items() if re.search(r"fitserve\[\w", text)] == []


def test_the_words_of_the_architecture_are_in_order() -> None:
    text = (ROOT / "docs/architecture.md").read_text().partition("## Words")[2]
    words = re.findall(r"^\| ([^|]+) \|", text.partition("\n## ")[0], re.MULTILINE)[2:]
    assert words == sorted(set(words))


@pytest.mark.parametrize("page", READERS, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_begins_with_a_sentence(page: Path) -> None:
    title, _, first_line = page.read_text().splitlines()[:3]
    assert title.startswith("# ")
    assert re.match(r"[\w`\[]", first_line), first_line


def test_the_front_pages_are_short() -> None:
    limits = {"README.md": 120, "CONTRIBUTING.md": 150}
    lengths = {name: len((ROOT / name).read_text().splitlines()) for name in limits}
    assert {name: length for name, length in lengths.items() if length > limits[name]} == {}


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("word " * 30, ([1], [], [])),
        ("```\n" + "word " * 30 + "\n```", ([], [], [])),
        ("a\nb\nc\nd\ne\nf\ng", ([], [1], [])),
        ("| " + "x" * 201 + " |", ([1], [], [1])),
        ("* `" + "x" * 120 + "`", ([], [], [])),
    ],
)
def test_each_fault_is_found(text: str, faults: tuple[list[int], ...]) -> None:
    long = [began for began, lines in paragraphs(text) if len(lines) > PARAGRAPH_LINES]
    assert (wide_lines(text), long, wide_cells(text)) == faults


def test_a_link_without_a_target_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One\n[here](#one) [gone](#two) [file](gone.md) [web](https://example.org)\n")
    assert broken_links(page) == ["#two", "gone.md"]


def test_the_changelog_has_each_part_of_a_version_once() -> None:
    version, parts = "", []
    for _, line in prose((ROOT / "CHANGELOG.md").read_text()):
        if line.startswith("## "):
            version = line
        if line.startswith("### "):
            parts.append((version, line))
    assert parts
    assert len(parts) == len(set(parts)), parts
