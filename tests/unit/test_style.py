"""The rules of names and sentences that a machine can check, over every module of the package."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.style import foreign_wordings, hold, style_document, word_list
from tests.support.syntax import (
    DEFINITIONS,
    comments,
    docstrings,
    nodes_of,
    package_files,
    place,
    script_files,
    text_of,
    tree_of,
)

# Classes whose fields are part of JSON, of settings or of a message.
PUBLISHED_BASES = ("Value", "BaseModel", "Struct", "TypedDict", "OwnedCall")
# A name that reads as a question: `is_ready`, `has_plan`, `waits_for_request`, `keeps_alive`.
PREDICATE = re.compile(r"_*(?:is|are|was|has|have|had|can|may|must|[a-z]+s|include)(?:_|$)")
FUNCTION_NAME = re.compile(r"^ *(?:async )?def (\w+)", re.MULTILINE)
MAX_LINES = 60
MAX_WORDS = 20
MANY_PARAMETERS = 8
MAX_WIDE_FUNCTIONS = 8

# A clause that names nothing: "what it needs", "who asks". An infinitive is none ("what to do").
VAGUE_CLAUSE = re.compile(r"\b(?:[Ww]hat|[Ww]ho)\b(?! to \w).{0,60}")
VAGUE_SUBJECT = re.compile(r"(?:^|[.!?:] )((?:Who|What)(?:ever)?\b.{0,60})")
QUOTATION = re.compile(r"`[^`]*`|\"[^\"]*\"")
# A call in a row of a module docstring: `read_plan(text)`, `clock.step_s(...)`. No page of a manual
# (`sd_notify(3)`) and no code in backticks.
CALL = re.compile(r"(\w+\.)?\b([A-Za-z_]\w*)\((?!\d\))")
CODE = re.compile(r"`[^`]*`")
# A class is named by its purpose, not by its users, and a sentence begins with a capital letter,
# except for the name of a program.
PURPOSE = re.compile(r"(?!(?:Shared|Used) by\b)(?:[A-Z0-9]|vLLM\b|uv\b)")
# A docstring below an attribute that only continues the attribute's name.
NO_SUBJECT = re.compile(r"(?:Of|For|By|In|On|As|At|From|To|With|Without)\b")
# A fragment as a docstring of a function or class: "The same without x", "Of one run".
FRAGMENT = re.compile(
    r"(?:Of|For|By|In|On|As|At|From|To|With|Without|That|Which|Where|Also|The same)\b"
    r"(?! machine (?:as|of))"
)
# Likewise of the description of a field, which is a noun phrase or says "whether", "how", "why".
FIELD_FRAGMENT = re.compile(
    r"(?:of|for|by|in|on|as|at|from|to|with|without|that|those|what|who|whose|also|the same"
    r"|its?|they)\b(?! (?:least|most) \d)"
)
# Prepositions that begin no explanation of a name ("size: of the body") and no comment.
COMMENT_FRAGMENT = re.compile(
    r"(?:^|[.:] )(?:Of|Else|Also)\b|^(?:By|In|At|As|With|Without|Behind|Beside|So many)\b"
)
EXPLANATION_FRAGMENT = re.compile(
    r"[a-z_]\w*(?:, [a-z_]\w*)*: "
    r"(?:of|by|at|in|for|from|as|to|with|without|on|since|before|after|if|when|where|which|between"
    r"|among|below|behind|beside|besides|only|also)\b(?!:)"
)
PRONOUN_QUESTION = re.compile(r"(?:^|[.!?:] )(Whether (?:it|they)\b.{0,60})")
# A line of a docstring that explains a name: "size: bytes of the body".
EXPLANATION = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): \S")
# These words follow a plural noun: "Ends of numbers", "Answers within the limit".
NOUN_PHRASE = re.compile(
    r"(?:as|at|behind|by|for|from|in|of|on|over|per|that|to|with|within|without|a|are|`\w+`)\b"
)
# The meaning of a parameter comes before that of its missing value.
MISSING_MEANING = re.compile(r"\b\w+`?: None: ")
# The names that a docstring explains: `a: ...`, `a, b: ...`.
PARAMETERS = re.compile(
    r"(?:^|(?<=[.;!?)\"`] ))(`?\w+`?(?:(?:, | and )`?\w+`?)*)(?: None| False| True)?: "
)
PARAMETER = re.compile(r"\w+")
# A comment behind the bracket that closes a statement, where a formatter had to break its line.
STRANDED_COMMENT = re.compile(r"^[ \t]*[)\]}](?:.*\S)?  # (?!fmt: |type: |noqa)", re.MULTILINE)
OPERATOR = re.compile(r"__\w+__")


FILES = package_files()
# The files whose names are held to the words of style.toml.
NAMED_FILES = (*FILES, *script_files())


def definitions(
    files: Iterable[Path] = FILES,
) -> Iterator[tuple[Path, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    return (
        (path, node) for path in files for node in nodes_of(path) if isinstance(node, DEFINITIONS)
    )


def functions(
    files: Iterable[Path] = FILES,
) -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    return ((path, node) for path, node in definitions(files) if not isinstance(node, ast.ClassDef))


def vague_clause(text: str) -> str | None:
    """The first clause of a text, outside of code and quotations, that begins with "who" or
    "what"."""
    plain_text = QUOTATION.sub("", " ".join(text.split()))
    match = VAGUE_SUBJECT.search(plain_text) or VAGUE_CLAUSE.search(plain_text)
    return match[0].strip() if match else None


def sentence_files() -> list[Path]:
    """The modules whose docstrings and comments are checked."""
    return sorted([*FILES, *script_files(), *(ROOT / "tests").rglob("*.py")])


def places_of_vague_clauses(path: Path) -> Iterator[str]:
    for line, text in (*docstrings(nodes_of(path)), *comments(text_of(path))):
        if clause := vague_clause(text):
            yield f"{place(path, line)}: {clause}"


def test_no_class_name_stands_twice() -> None:
    files: dict[str, list[str]] = {}
    for path, node in definitions():
        if isinstance(node, ast.ClassDef):
            files.setdefault(node.name, []).append(place(path, node.lineno))
    hold("class_name", {name: rows for name, rows in files.items() if len(rows) > 1}.items())


def test_the_name_of_a_function_or_class_can_be_searched_for() -> None:
    hold(
        "function_name",
        [
            f"{place(path, node.lineno)}: {node.name}"
            for path, node in definitions(NAMED_FILES)
            if not OPERATOR.fullmatch(node.name)
            and node.name.strip("_").lower() in word_list("vague")
        ],
    )


def is_open_name(name: str) -> bool:
    """Whether the name of a function tells neither its act nor its result."""
    plain_name = name.strip("_")
    first, *_ = plain_name.lower().split("_")
    return plain_name in word_list("open_functions") or (
        first in word_list("prepositions") and plain_name not in word_list("right_prepositions")
    )


def test_a_function_is_named_by_its_act_or_its_result() -> None:
    hold(
        "function_act",
        [
            f"{place(path, node.lineno)}: {node.name}"
            for path, node in functions(NAMED_FILES)
            if is_open_name(node.name)
        ],
    )


@pytest.mark.parametrize(
    ("name", "is_open"),
    [
        ("with_tag", True),
        ("_from_mirror", True),
        ("words", True),
        ("in_flight", False),
        ("add_tag", False),
        ("offer_words", False),
    ],
)
def test_an_open_name_is_found(name: str, *, is_open: bool) -> None:
    assert is_open_name(name) is is_open


def is_participle(word: str) -> bool:
    return (
        len(word) > 3 and word.endswith("ed") and word not in word_list("no_participles")
    ) or word in word_list("irregular_participles")


def ends_in_participle(name: str) -> bool:
    """Whether a function's name is a participle, or ends in one that says nothing of a subject."""
    first, *_ = words = name.strip("_").lower().split("_")
    return (
        is_participle(words[-1])
        and first not in word_list("predicates")
        and not set(words[1:-1]) & word_list("clauses")
        and name.strip("_") not in word_list("right_participles")
    )


def names_ending_in_participles(path: Path) -> Iterator[str]:
    """The functions of a module, which is parsed where its text has such a name."""
    source = path.read_text()
    names = {
        name
        for name in FUNCTION_NAME.findall(source)
        if ends_in_participle(name) and not name.startswith("test_")
    }
    if names:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, DEFINITIONS) and node.name in names:
                yield f"{place(path, node.lineno)}: {node.name}"


def test_functions_are_named_by_verbs_and_nouns() -> None:
    hold(
        "function_participle",
        [
            row
            for path in (
                *script_files(),
                *(
                    path
                    for folder in ("gateway", "tests", "benchmarks")
                    for path in sorted((ROOT / folder).rglob("*.py"))
                ),
            )
            for row in names_ending_in_participles(path)
        ],
    )


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("muttered", True),
        ("_gave", True),
        ("keep_measured", True),
        ("list_prepared", True),
        ("is_expired", False),
        ("wait_until_drained", False),
        ("_set_stopped", False),
        ("seed", False),
        ("read", False),
        ("requests_ended", False),
        ("prepared_views", False),
    ],
)
def test_a_participle_is_recognised_in_a_name(name: str, *, wrong: bool) -> None:
    assert ends_in_participle(name) is wrong


def value_names(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and name of every local, parameter, attribute, field and constant that is set.

    A field's name stands behind that of its class.
    """
    fields = {
        row.target: f"{node.name}.{row.target.id}"
        for node in nodes
        if isinstance(node, ast.ClassDef)
        for row in node.body
        if isinstance(row, ast.AnnAssign) and isinstance(row.target, ast.Name)
    }
    operators = {
        parameter
        for node in nodes
        if isinstance(node, ast.FunctionDef) and OPERATOR.fullmatch(node.name)
        for parameter in node.args.args
        if node.name != "__init__"
    }
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Store(), lineno=line):
                yield line, fields.get(node, name)
            case ast.Attribute(attr=name, ctx=ast.Store(), lineno=line):
                yield line, name
            case ast.arg(arg=name, lineno=line) if node not in operators:
                yield line, name
            case ast.MatchAs(name=str(name), lineno=line):
                yield line, name
            case ast.ExceptHandler(name=str(name), lineno=line):
                yield line, name


def is_vague(name: str) -> bool:
    """Whether the name of a value is nothing but one of the words."""
    word = name.rpartition(".")[2]
    return not OPERATOR.fullmatch(word) and word.strip("_").lower() in word_list("vague_values")


def test_the_names_of_values_can_be_searched_for() -> None:
    hold(
        "value_name",
        [
            f"{place(path, line)}: {name}"
            for path in NAMED_FILES
            for line, name in value_names(nodes_of(path))
            if is_vague(name) and name not in word_list("published_fields")
        ],
    )


def is_open(name: str) -> bool:
    """Whether the name of a local, parameter or attribute has no noun; fields are published."""
    return "." not in name and name.strip("_") in word_list("open_values")


def test_the_names_of_locals_and_parameters_have_a_noun() -> None:
    hold(
        "value_noun",
        [
            f"{place(path, line)}: {name}"
            for path in NAMED_FILES
            for line, name in value_names(nodes_of(path))
            if is_open(name)
        ],
    )


@pytest.mark.parametrize(
    ("source", "names"),
    [
        (
            "def f(former, *, former_plan):\n    missing = 1\n    missing_files = 2",
            {"former", "missing"},
        ),
        ("self._waiting = self._waiting_count = 1", {"_waiting"}),
        ("class A:\n    missing: int", set()),
        ("with x as best, y as best_plan: pass", {"best"}),
    ],
)
def test_names_of_values_without_a_noun(source: str, names: set[str]) -> None:
    names_by_line = value_names([*ast.walk(ast.parse(source))])
    assert {name for _, name in names_by_line if is_open(name)} == names


def test_each_published_field_exists() -> None:
    names = {name for path in FILES for _, name in value_names(nodes_of(path))}
    assert not word_list("published_fields") - names


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def f(told, *, sorted_rows):\n    held = 1\n    cached_rows = 2", {"told", "held"}),
        ("class A:\n    told: int\n    def __eq__(self, other): ...", {"A.told"}),
        ("match x:\n    case [found]: pass", {"found"}),
        ("self._seen = KEPT = 1", {"_seen", "KEPT"}),
        ("for others in [*(given for given in x)]: pass", {"others", "given"}),
    ],
)
def test_vague_names_of_values_are_found(source: str, names: set[str]) -> None:
    names_by_line = value_names([*ast.walk(ast.parse(source))])
    assert {name for _, name in names_by_line if is_vague(name)} == names


def is_boolean(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation) in ("bool", "bool | None")


def booleans_of(node: ast.ClassDef) -> Iterator[tuple[int, str]]:
    """Line and name of every field, property and attribute of a class that holds a boolean."""
    for row in node.body:
        match row:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, lineno=line):
                if is_boolean(annotation):
                    yield line, name
            case ast.FunctionDef(name=name, returns=returns, lineno=line):
                decorators = {ast.unparse(decorator) for decorator in row.decorator_list}
                if is_boolean(returns) and decorators & {"property", "cached_property"}:
                    yield line, name
    for inner in ast.walk(node):
        match inner:
            case (
                ast.Assign(targets=targets, value=ast.Constant(value=bool()), lineno=line)
                | ast.Assign(
                    targets=targets, value=ast.UnaryOp(op=ast.Not()) | ast.Compare(), lineno=line
                )
            ):
                for target in targets:
                    if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                        yield line, target.attr


def is_published(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).rpartition(".")[2] in PUBLISHED_BASES for base in node.bases)


def unclear_booleans(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and name of the booleans inside the program that read as nouns or participles."""
    for node in nodes:
        if isinstance(node, ast.ClassDef) and not is_published(node):
            for line, name in booleans_of(node):
                full_name = f"{node.name}.{name}"
                if not PREDICATE.match(name) and full_name not in word_list("boolean_terms"):
                    yield line, full_name


def test_booleans_are_named_by_predicates() -> None:
    hold(
        "boolean",
        [
            f"{place(path, line)}: {name}"
            for path in FILES
            for line, name in unclear_booleans(nodes_of(path))
        ],
    )


def unclear_parameters(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and name of the boolean parameters that read as nouns or participles."""
    for node in nodes:
        match node:
            case ast.arg(arg=name, annotation=annotation, lineno=line) if is_boolean(annotation):
                if not PREDICATE.match(name) and name not in word_list("boolean_parameters"):
                    yield line, name


def test_boolean_parameters_are_named_by_predicates() -> None:
    hold(
        "boolean",
        [
            f"{place(path, line)}: {name}"
            for path in FILES
            for line, name in unclear_parameters(nodes_of(path))
        ],
    )


def test_an_unclear_parameter() -> None:
    source = (
        "def f(tied: bool, *, is_tied: bool, keep_alive: bool, name: str, raw: bool | None): ..."
    )
    assert {name for _, name in unclear_parameters(ast.walk(ast.parse(source)))} == {"tied", "raw"}


def test_each_term_of_a_boolean_exists() -> None:
    names = {
        f"{node.name}.{name}"
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
        for _, name in booleans_of(node)
    }
    assert sorted(word_list("boolean_terms") - names) == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("class A:\n    busy: bool = False\n    is_ready: bool | None = None", {"A.busy"}),
        ("class A(Value):\n    busy: bool = False", set()),
        ("class A:\n    @property\n    def asleep(self) -> bool: ...", {"A.asleep"}),
        ("class A:\n    def f(self):\n        self._ended = self.waits = True", {"A._ended"}),
        ("class A:\n    def close(self) -> bool: ...", set()),
    ],
)
def test_an_unclear_boolean_is_found(source: str, names: set[str]) -> None:
    assert {name for _, name in unclear_booleans(ast.walk(ast.parse(source)))} == names


@pytest.mark.parametrize(
    ("text", "vague"),
    [
        ("Who asks is answered.", True),
        ("The answer.  What follows\nis ignored.", True),
        ("The answer: whatever it is. Whatever follows.", True),
        ("A wish, and what follows\nfrom it.", True),
        ("All who ask share it.", True),
        ("The error says what to do.", False),
        ('A field `what`, and "what it was".', False),
        ("The answer, whatever the model.", False),
        ("Whole plans. Whose?", False),
    ],
)
def test_a_vague_clause_is_found(text: str, *, vague: bool) -> None:
    assert (vague_clause(text) is not None) is vague


def test_clauses_have_nouns_as_subjects() -> None:
    files = sentence_files()
    assert {"gateway", "scripts", "tests"} == {path.relative_to(ROOT).parts[0] for path in files}
    hold("clause_subject", [clause for path in files for clause in places_of_vague_clauses(path)])


def stranded_comments(source: str) -> Iterator[int]:
    """The lines of comments that a formatter left behind a closing bracket."""
    return (source.count("\n", 0, row.start()) + 1 for row in STRANDED_COMMENT.finditer(source))


def test_no_comment_stands_behind_a_closing_bracket() -> None:
    files = [
        *(path for path in (ROOT / "scripts").iterdir() if path.is_file()),
        *(
            path
            for folder in ("gateway", "tests", "benchmarks")
            for path in (ROOT / folder).rglob("*.py")
        ),
    ]
    hold(
        "comment_place",
        [
            place(path, line)
            for path in sorted(files)
            for line in stranded_comments(path.read_text())
        ],
    )


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("a = (\n    b\n)  # why", [3]),
        ("    d: tuple[\n        str, ...\n    ] = ()  # a list", [3]),
        ("    if (\n        a\n    ):  # why", [3]),
        ("a = (\n    b\n)  # fmt: skip", []),
        ("a = (b)  # why", []),
        ("# why\na = (\n    b,  # a part\n)", []),
    ],
)
def test_a_stranded_comment_is_found(source: str, lines: list[int]) -> None:
    assert list(stranded_comments(source)) == lines


def test_every_module_has_a_short_description() -> None:
    first = {
        place(path, 1): (ast.get_docstring(tree_of(path)) or "").partition("\n\n")[0]
        for path in FILES
    }
    hold(
        "module_docstring",
        [name for name, text in first.items() if not 0 < len(text.split()) <= MAX_WORDS],
    )


def names_of(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The functions and classes of a module, and the names that it imports."""
    for node in nodes:
        if isinstance(node, DEFINITIONS):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)


def calls(docstring: str) -> Iterator[tuple[str, str]]:
    """The owner, if any, and the name of each call that a module docstring lists."""
    return ((row[1] or "", row[2]) for row in CALL.finditer(CODE.sub("", docstring)))


def test_each_call_in_a_module_docstring_exists() -> None:
    """A name behind an owner may be of another module."""
    names = {name for path in FILES for name in names_of(nodes_of(path))}
    hold(
        "docstring_call",
        [
            f"{place(path, 1)}: {name}"
            for path in FILES
            for owner, name in calls(ast.get_docstring(tree_of(path)) or "")
            if name not in (names if owner else names_of(nodes_of(path)))
        ],
    )


@pytest.mark.parametrize(
    ("docstring", "expected_calls"),
    [
        ("Rows.\n\n    read(path) -> str\n", [("", "read")]),
        ("clock = Clock(work)\nclock.step_s(...)", [("", "Clock"), ("clock.", "step_s")]),
        ("Source: sd_notify(3), `ServerArgs(...)`, 2x(8xh100), a list (of three).", []),
    ],
)
def test_the_calls_of_a_docstring_are_found(
    docstring: str, expected_calls: list[tuple[str, str]]
) -> None:
    assert list(calls(docstring)) == expected_calls


def test_no_class_docstring_ends_in_a_fragment() -> None:
    """A sentence needs a verb: "One object per gateway." has none."""
    hold(
        "class_verb",
        [
            f"{place(path, node.lineno)}: {text}"
            for path, node in definitions()
            if isinstance(node, ast.ClassDef)
            and (text := ast.get_docstring(node))
            and re.search(r"\bOne (?:object|instance) per\b", text)
        ],
    )


def test_each_class_docstring_begins_with_its_purpose() -> None:
    hold(
        "class_purpose",
        [
            f"{place(path, node.lineno)}: {text}"
            for path, node in definitions()
            if isinstance(node, ast.ClassDef)
            and (text := ast.get_docstring(node))
            and not PURPOSE.match(text)
        ],
    )


def attribute_docstrings(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring below an attribute, a field or a constant."""
    for node in nodes:
        if isinstance(node, (ast.Module, *DEFINITIONS)):
            for above, row in itertools.pairwise(node.body):
                if isinstance(above, ast.Assign | ast.AnnAssign):
                    yield from docstrings([row])


def test_each_attribute_docstring_has_a_subject() -> None:
    hold(
        "docstring_subject",
        [
            f"{place(path, line)}: {text}"
            for path in FILES
            for line, text in attribute_docstrings(nodes_of(path))
            if NO_SUBJECT.match(text)
        ],
    )


def test_each_docstring_has_a_subject() -> None:
    hold(
        "docstring_subject",
        [
            f"{place(path, node.lineno)}: {text[:50]}; begin with a noun or a verb"
            for path, node in definitions()
            if FRAGMENT.match(text := ast.get_docstring(node) or "")
        ],
    )


def descriptions(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and text of each description of a field."""
    for node in nodes:
        match node:
            case ast.keyword(arg="description", value=ast.Constant(value=str(text)), lineno=line):
                yield line, text


def test_each_description_has_a_subject() -> None:
    hold(
        "field_description",
        [
            f"{place(path, line)}: {text[:50]}; begin with a noun"
            for path in FILES
            for line, text in descriptions(nodes_of(path))
            if FIELD_FRAGMENT.match(text)
        ],
    )


@pytest.mark.parametrize(
    ("docstring", "field", "wrong"),
    [
        ("The same without sizes.", "the same, of tokenizers", True),
        ("Of one run.", "of its plan", True),
        ("For a shell.", "its memory", True),
        ("A line for a shell.", "bytes of memory", False),
        ("The plans of a run.", "whether the node is there", False),
    ],
)
def test_a_fragment_of_a_sentence_is_found(docstring: str, field: str, *, wrong: bool) -> None:
    assert (FRAGMENT.match(docstring) is not None) is wrong
    nodes = ast.walk(ast.parse(f"x: int = Field(description={field!r})"))
    assert [FIELD_FRAGMENT.match(text) is not None for _, text in descriptions(nodes)] == [wrong]


def fragments_of_explanations(docstring: str) -> Iterator[str]:
    """The lines of a docstring that explain a name by a phrase without a noun."""
    previous = ""
    for line in docstring.splitlines():
        begins = not previous or previous.endswith((".", ":"))
        if begins and EXPLANATION_FRAGMENT.match(line.strip()):
            yield line.strip()
        previous = line.strip()


def test_each_explanation_of_a_name_begins_with_a_noun() -> None:
    hold(
        "explanation_noun",
        [
            f"{place(path, line)}: {row}"
            for path in sentence_files()
            for line, text in docstrings(nodes_of(path))
            for row in fragments_of_explanations(text)
        ],
    )


def test_each_comment_begins_with_a_subject() -> None:
    hold(
        "comment_subject",
        [
            f"{place(path, line)}: {text[:60]}"
            for path in sentence_files()
            for line, text in comments(text_of(path))
            if COMMENT_FRAGMENT.search(text)
        ],
    )


@pytest.mark.parametrize(
    ("docstring", "rows"),
    [
        ("size: of the body.", ["size: of the body."]),
        ("A body.\n\n    size: bytes of it.\n    hub: at a commit.", ["hub: at a commit."]),
        ("a, b: only here.", ["a, b: only here."]),
        ("A body with a\n    size: of no use.", []),
        ("size: bytes.\n    on: for each.", ["on: for each."]),
        ("on: the time. before: a time.", []),
    ],
)
def test_an_explanation_without_a_noun_is_found(docstring: str, rows: list[str]) -> None:
    assert list(fragments_of_explanations(docstring)) == rows


@pytest.mark.parametrize(
    ("comment", "wrong"),
    [
        ("Of the size of a cache.", True),
        ("Without NVML the module asks torch.", True),
        ("The first counts. Of plans the longest.", True),
        ("The first of equal scopes counts.", False),
        ("Ask the engine: as a user would.", False),
    ],
)
def test_a_comment_without_a_subject_is_found(comment: str, *, wrong: bool) -> None:
    assert (COMMENT_FRAGMENT.search(comment) is not None) is wrong


def shown_texts(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and text of each string with a space: docstrings, messages, reasons and help."""
    for node in nodes:
        match node:
            case ast.Constant(value=str(text), lineno=line) if " " in text:
                yield line, text


def test_sentences_have_plain_words() -> None:
    hold(
        "wording",
        [
            f"{place(path, line)}: {row}"
            for path in FILES
            for line, text in (*shown_texts(nodes_of(path)), *comments(text_of(path)))
            for row in foreign_wordings(text)
        ],
    )


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("A file beside the\ndatabase, and no `offer.beside`.", 1),
        ("Requests at once are planned anew.", 2),
        ("It is no tensor.", 1),
        ("There is no tensor. It is no longer there.", 0),
        ("A file next to the database.", 0),
    ],
)
def test_a_foreign_wording_is_found(text: str, count: int) -> None:
    assert len([*foreign_wordings(text)]) == count


# A hint that only asks the user to find the step: "Correct it.", "See its log."
EMPTY_HINT = re.compile(
    r"(?:Correct|Fix|See|Check|Stop|Change) (?:it|(?:its|the|this) [\w.']+(?: log)?)"
    r"(?: first| again)?\.?"
)


def hints(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and text of each hint of an error that is a constant."""
    for node in nodes:
        match node:
            case ast.keyword(arg="hint", value=ast.Constant(value=str(text)), lineno=line):
                yield line, text


def test_hints_say_the_step() -> None:
    hold(
        "hint",
        [
            f"{place(path, line)}: {text}"
            for path in FILES
            for line, text in hints(nodes_of(path))
            if EMPTY_HINT.fullmatch(text)
        ],
    )


@pytest.mark.parametrize(
    ("hint", "empty"),
    [
        ("Correct it.", True),
        ("See the engine's log.", True),
        ("Stop it first.", True),
        ("Check the driver with `nvidia-smi`.", False),
        ("Set it to a number such as 4.", False),
    ],
)
def test_an_empty_hint_is_found(hint: str, *, empty: bool) -> None:
    (text,) = (text for _, text in hints(ast.walk(ast.parse(f"error(hint={hint!r})"))))
    assert (EMPTY_HINT.fullmatch(text) is not None) is empty


RULE = re.compile(r"\bhold\(\s*\"(\w+)\"")


def test_each_rule_is_held_by_a_test_and_says_a_better_form() -> None:
    texts = [path.read_text() for path in (ROOT / "tests" / "unit").glob("test_*.py")]
    rules = style_document()["rules"]
    assert {rule for text in texts for rule in RULE.findall(text)} == set(rules)
    assert [rule for rule, entry in rules.items() if set(entry) != {"rule", "better"}] == []


def test_a_failure_prints_its_rule_and_a_better_form() -> None:
    with pytest.raises(pytest.fail.Exception) as failure:
        hold("hint", ["gateway/errors.py:1: Correct it."])
    lines = str(failure.value).splitlines()
    assert lines[0] == style_document()["rules"]["hint"]["rule"]
    assert lines[1].startswith("Better: ")
    assert lines[2] == "gateway/errors.py:1: Correct it."
    hold("hint", [])


def test_no_question_has_a_pronoun_as_subject() -> None:
    files = (path for folder in ("gateway", "tests") for path in (ROOT / folder).rglob("*.py"))
    hold(
        "whether_subject",
        [
            f"{place(path, line)}: {match[1]}"
            for path in sorted(files)
            if "Whether " in path.read_text()
            for line, text in docstrings(ast.walk(ast.parse(path.read_text())))
            if (match := PRONOUN_QUESTION.search(" ".join(text.split())))
        ],
    )


def explained_names(docstring: str) -> Iterator[tuple[list[str], bool]]:
    """The names of each explanation, and whether a blank line parts it from the one before."""
    is_behind_explanation = is_parted = False
    previous = ""
    for line in docstring.splitlines():
        match = EXPLANATION.match(line)
        if match and (not previous or previous.endswith((".", ":"))):
            yield match[1].split(", "), is_behind_explanation and is_parted
            is_behind_explanation, is_parted = True, False
        elif not line:
            is_parted = True
        elif is_parted:
            is_behind_explanation = is_parted = False
        previous = line


# The key of a value, and answers to a question, which stand where a name does.
ANSWERS = frozenset({"empty", "none", "zeros"})
# Choices of a field and keys of a mapping that a docstring explains.
EXPLAINED_TERMS = frozenset(
    {"code_change", "code_gone", "no_other_code", "others", "plan_verified"}
    | {"sleep", "stop", "surplus"}
)
INLINE_EXPLANATION = re.compile(r"(?:^|[.;:] )([a-z]\w*(?:, [a-z]\w*)*): (?=\S)")


def known_names(node: ast.AST) -> set[str]:
    """Parameters, public attributes and methods, and terms."""
    methods = {row.name for row in ast.walk(node) if isinstance(row, DEFINITIONS)}
    packed = {
        row.arg
        for function in ast.walk(node)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for row in (function.args.vararg, function.args.kwarg)
        if row is not None
    }
    return {*parameters_of(node), *methods, *packed, *ANSWERS, *EXPLAINED_TERMS}


def wrong_explanations(path: Path) -> Iterator[str]:
    for node in nodes_of(path):
        if isinstance(node, DEFINITIONS):
            names, docstring = known_names(node), ast.get_docstring(node) or ""
            inline_names = INLINE_EXPLANATION.findall(" ".join(docstring.split()))
            for name in {name for row in inline_names for name in row.split(", ")} - names:
                yield f"{place(path, node.lineno)}: {name} names no parameter or field"
            for row, is_parted in explained_names(docstring):
                if is_parted:
                    yield f"{place(path, node.lineno)}: a blank line before {row[0]}"
                for name in set(row) - names:
                    yield f"{place(path, node.lineno)}: {name} names no parameter or field"


def test_docstrings_explain_names_that_exist() -> None:
    hold("explained_name", [row for path in FILES for row in wrong_explanations(path)])


@pytest.mark.parametrize(
    ("docstring", "names"),
    [
        ("All.\n\na: one.\nb, c: two.", [(["a"], False), (["b", "c"], False)]),
        ("All.\n\na: one.\n\nb: two.", [(["a"], False), (["b"], True)]),
        ("All.\n\na: one.\n\nMore.\n\nb: two.", [(["a"], False), (["b"], False)]),
        ("All of one\nkind: two.", []),
    ],
)
def test_the_explained_names(docstring: str, names: list[tuple[list[str], bool]]) -> None:
    assert list(explained_names(docstring)) == names


def test_the_attribute_docstrings_of_a_module_are_found() -> None:
    source = 'A = 1\n"""Of a."""\nclass B:\n    """Of b."""\n    c: int\n    """Of c."""\n'
    assert list(attribute_docstrings([*ast.walk(ast.parse(source))])) == [
        (2, "Of a."),
        (6, "Of c."),
    ]


def third_person(verb: str) -> str:
    if verb in ("do", "have"):
        return {"do": "does", "have": "has"}[verb]
    if verb.endswith("y"):
        return f"{verb[:-1]}ies"
    return f"{verb}es" if verb.endswith(("s", "sh", "ch")) else f"{verb}s"


DOCSTRING_VERBS = word_list("acts") | style_document()["retired_verbs"].keys()
THIRD_PERSONS = {third_person(verb).capitalize() for verb in DOCSTRING_VERBS} | {"Has"}


def is_third_person(docstring: str) -> bool:
    """Whether the docstring of a function begins with another form than the imperative."""
    first, _, rest = docstring.partition(" ")
    return first in THIRD_PERSONS and not NOUN_PHRASE.match(rest.lstrip())


def test_docstrings_say_the_act_or_the_result_before_the_errors() -> None:
    hold(
        "raises_last",
        [
            place(path, node.lineno)
            for path, node in functions()
            if (ast.get_docstring(node) or "").startswith("Raises")
        ],
    )


def test_docstrings_of_functions_that_act_are_imperatives() -> None:
    hold(
        "imperative",
        [
            f"{place(path, node.lineno)}: {text[:50]}; begin with the imperative"
            for path, node in functions()
            if is_third_person(text := ast.get_docstring(node) or "")
        ],
    )


@pytest.mark.parametrize(
    ("docstring", "wrong"),
    [
        ("Ends the request.", True),
        ("Has the workers end.", True),
        ("Retries once.", True),
        ("Passes the answer on.", True),
        ("End the request.", False),
        ("Ends of whole numbers.", False),
        ("Bytes of a token.", False),
    ],
)
def test_a_docstring_in_the_third_person(docstring: str, *, wrong: bool) -> None:
    assert is_third_person(docstring) is wrong


def test_each_parameter_has_a_meaning_before_none() -> None:
    hold(
        "meaning_of_none",
        [
            f"{place(path, line)}: {row[0]}"
            for path in FILES
            for line, text in docstrings(nodes_of(path))
            if (row := MISSING_MEANING.search(text))
        ],
    )


def parameters_of(node: ast.AST) -> Iterator[str]:
    """The names that a docstring may explain: parameters, fields and attributes."""
    for inner in ast.walk(node) if isinstance(node, ast.ClassDef) else [node]:
        match inner:
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                yield name
            case ast.FunctionDef(args=args) | ast.AsyncFunctionDef(args=args):
                for parameter in (*args.posonlyargs, *args.args, *args.kwonlyargs):
                    yield parameter.arg


def packed_lines(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """The lines of a docstring in which an explained parameter stands behind another."""
    names = set(parameters_of(node))
    is_behind_another = False
    for line in (ast.get_docstring(node) or "").splitlines():
        for row in PARAMETERS.finditer(line):
            if set(PARAMETER.findall(row[1])) & names:
                if is_behind_another and row.start():
                    yield line
                is_behind_another = True


def test_each_explained_parameter_begins_a_line() -> None:
    hold(
        "parameter_line",
        [
            f"{place(path, node.lineno)}: {line}"
            for path, node in definitions()
            for line in packed_lines(node)
        ],
    )


@pytest.mark.parametrize(
    ("docstring", "lines"),
    [
        ("All. a: one. b: two.", ["All. a: one. b: two."]),
        ("All.\n\n    a: one\n    of many. `b`: two.\n", ["of many. `b`: two."]),
        ("All.\n\n    a: one; b, c: two.\n", ["a: one; b, c: two."]),
        ("All. a: one.\n\n    b, c: two; none: three.\n", []),
    ],
)
def test_packed_parameters_are_found(docstring: str, lines: list[str]) -> None:
    function = ast.parse(f'def f(a, *, b, c):\n    """{docstring}"""').body[0]
    assert isinstance(function, ast.FunctionDef)
    assert list(packed_lines(function)) == lines


# Tests whose modules are not all described yet.
OLD_TESTS = ("tests/e2e", "tests/local/server/page")


def test_every_module_of_tests_says_its_subject() -> None:
    files = (
        path
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path.name != "__init__.py"
        if not str(path.relative_to(ROOT)).startswith(OLD_TESTS)
    )
    hold(
        "test_subject", [place(path, 1) for path in files if not path.read_text().startswith('"""')]
    )


def vague_test_values(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and name of the vague locals, parameters, fields and attributes of a module of tests;
    constants are none."""
    words = word_list("vague_locals") | word_list("vague_values")
    for line, name in value_names(nodes):
        word = name.rpartition(".")[2].strip("_")
        if (
            word in words
            and not OPERATOR.fullmatch(name)
            and name not in word_list("fixed_test_names")
        ):
            yield line, name


def vague_helpers(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and name of the functions and classes of a module of tests that name no thing."""
    words = (word_list("vague") | word_list("vague_locals")) - word_list("test_helpers")
    for node in nodes:
        if isinstance(node, DEFINITIONS) and node.name.strip("_").lower() in words:
            yield node.lineno, node.name


def test_values_of_tests_are_named_by_nouns() -> None:
    hold(
        "test_value",
        [
            f"{place(path, line)}: {name}"
            for path in sorted((ROOT / "tests").rglob("*.py"))
            for line, name in vague_test_values([*ast.walk(ast.parse(path.read_text()))])
        ],
    )


def test_helpers_of_tests_are_named_by_verbs_and_nouns() -> None:
    hold(
        "test_helper",
        [
            f"{place(path, line)}: {name}"
            for path in sorted((ROOT / "tests").rglob("*.py"))
            for line, name in vague_helpers(ast.walk(ast.parse(path.read_text())))
        ],
    )


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("one, neighbour = 1, 2", {"one"}),
        ("rows = [told for told in x]", {"told"}),
        ("class A:\n    said: str", {"A.said"}),
        ("class Choice:\n    ours: str", set()),
        ("def f(given, *, wanted_rows): pass", {"given"}),
        ("self._held = 1", {"_held"}),
        ("for name, kept in x: pass", {"kept"}),
        ("with x as (made, name): pass", {"made"}),
        ("KEPT = kept_rows = kept", set()),
    ],
)
def test_a_vague_value_of_a_test_is_found(source: str, names: set[str]) -> None:
    assert {name for _, name in vague_test_values([*ast.walk(ast.parse(source))])} == names


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def alone(): pass", {"alone"}),
        ("class Told: pass", {"Told"}),
        ("async def until(): pass", set()),
        ("def is_alone(): pass", set()),
    ],
)
def test_a_vague_helper_of_a_test_is_found(source: str, names: set[str]) -> None:
    assert {name for _, name in vague_helpers(ast.walk(ast.parse(source)))} == names


# Modules that still import from another module of tests; the others share through tests/support.
MAX_IMPORTS_OF_TESTS = 21


def test_few_modules_of_tests_import_from_another_one() -> None:
    import_line = re.compile(r"^from tests\.[\w.]*\btest_\w+ import", re.MULTILINE)
    files = [
        place(path, 1)
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if import_line.search(path.read_text())
    ]
    assert len(files) <= MAX_IMPORTS_OF_TESTS, "\n".join(files)


def test_models_of_tests_are_read_with_named_fields() -> None:
    """`read_model` has eight parameters; tests/support/published.py gives them defaults."""
    files = (ROOT / "tests").rglob("*.py")
    call = re.compile(r"\bread_model[(]")
    callers = {path.name for path in files if call.search(path.read_text())}
    assert callers == {"published.py"}


def test_every_function_fits_on_a_screen() -> None:
    sizes = {
        f"{place(path, node.lineno)}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path, node in functions()
    }
    hold(
        "function_length", {name: size for name, size in sizes.items() if size > MAX_LINES}.items()
    )


def test_every_function_of_tests_fits_on_a_screen_or_is_a_table() -> None:
    large_names = {
        node.name
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (node.end_lineno or 0) - node.lineno + 1 > MAX_LINES
    }
    assert large_names == word_list("large_test_functions")


def test_few_functions_have_many_parameters() -> None:
    wide = []
    for path, node in functions():
        names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
        names = names[names[:1] in (["self"], ["cls"]) :] + [
            arg.arg for arg in node.args.kwonlyargs
        ]
        if len(names) >= MANY_PARAMETERS:
            wide.append(f"{place(path, node.lineno)}: {node.name} has {len(names)}")
    assert len(wide) <= MAX_WIDE_FUNCTIONS, "\n".join(wide)


def folded_tuples(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and text of each statement that assigns several values over several lines, and of each
    row that is unpacked where its elements could stand."""
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Tuple()], value=ast.Tuple()):
                if node.end_lineno != node.lineno:
                    yield node.lineno, ast.unparse(node.targets[0])
            case ast.Starred(value=ast.Tuple(elts=[_, *_]) | ast.List(elts=[_, *_])):
                yield node.lineno, ast.unparse(node)


def test_a_statement_assigns_one_value_and_rows_are_flat() -> None:
    files = [*FILES, *sorted((ROOT / "tests").rglob("*.py"))]
    hold(
        "one_assignment",
        [
            f"{place(path, line)}: {text}"
            for path in files
            for line, text in folded_tuples(nodes_of(path))
        ],
    )


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("a, b = (\n    1,\n    2,\n)", 1),
        ("a = (*('b', 'c'), *('d',))", 2),
        ("a, b = 1, 2", 0),
        ("a, b = pair(\n    1,\n)", 0),
        ("a = (*b, 'c')", 0),
    ],
)
def test_a_folded_tuple_is_found(source: str, count: int) -> None:
    assert len([*folded_tuples(ast.walk(ast.parse(source)))]) == count


def exception_names() -> set[str]:
    """The classes of the package that are errors, by their bases."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for _, node in definitions()
        if isinstance(node, ast.ClassDef)
    }
    names = {"Exception", "OSError", "RuntimeError", "ValueError"}
    while more := {name for name, of in bases.items() if of & names} - names:
        names |= more
    return names


def returned_names(annotation: ast.expr | None) -> set[str]:
    """The types of a returned value, without None."""
    return set() if annotation is None else {*ast.unparse(annotation).split(" | ")} - {"None"}


def test_a_function_that_makes_an_error_says_so() -> None:
    errors = exception_names()
    makers = [
        (path, node)
        for path, node in functions()
        if (types := returned_names(node.returns)) and types <= errors
    ]
    assert len(makers) > 50
    hold(
        "error_maker",
        [
            f"{place(path, node.lineno)}: {node.name}"
            for path, node in makers
            # A refusal makes copies of itself.
            if not node.name.endswith("_error") and returned_names(node.returns) != {"RefusalError"}
        ],
    )


def is_statement_of_bool(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether the docstring of a function says "Whether ..."; an act says "Returns whether"."""
    return (ast.get_docstring(node) or "").startswith("Whether")


def test_a_function_that_tells_whether_is_a_predicate() -> None:
    hold(
        "predicate",
        [
            f"{place(path, node.lineno)}: {node.name}"
            for path, node in functions()
            if node.returns is not None and ast.unparse(node.returns) == "bool"
            if is_statement_of_bool(node)
            if not PREDICATE.match(node.name) and not OPERATOR.fullmatch(node.name)
        ],
    )


# Calls with variadic parameters, and tables of layers and of drafters.
MAX_POSITIONAL_CALLS = 44


def test_few_calls_have_six_arguments_without_names() -> None:
    calls = [
        f"{place(path, node.lineno)}: {ast.unparse(node.func)}"
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and len(node.args) >= 6
    ]
    assert len(calls) <= MAX_POSITIONAL_CALLS, "\n".join(calls)
