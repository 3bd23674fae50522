"""Names that lead to their thing: tests have the names of their modules and say a behaviour of a
noun, and constants and private functions are nouns or verbs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.syntax import nodes_of, package_files, tree_of

# Tests of several modules together, by the folder of the lowest of them.
TOGETHER = """
local/controller/test_faults.py
local/controller/test_gpu_loss.py
local/controller/test_images.py
local/controller/test_proof.py
local/controller/test_start_phases.py
local/controller/test_unexpected_errors.py
local/proxy/test_app_requests.py
local/proxy/test_compiled_wheel.py
local/proxy/test_endpoint_sdks.py
local/proxy/test_hostile_bytes.py
local/proxy/test_hostile_engine.py
local/proxy/test_openai.py
local/proxy/test_openai_clients.py
local/proxy/test_sdks.py
local/test_boot_storm.py
local/test_storm.py
local/test_documented_answers.py
local/test_documented_commands.py
local/test_examples.py
local/test_proxy_benchmark.py
local/test_security.py
local/test_seed_scenarios.py
local/test_sharing.py
unit/engines/common/kernels/test_sglang_kernels.py
unit/planner/test_launch.py
unit/planner/test_plan_json.py
unit/planner/test_properties.py
unit/planner/test_public_logs.py
unit/planner/test_foreseen_failures.py
unit/planner/test_sources.py
unit/test_architecture.py
unit/test_readme_comparison.py
unit/test_contributing.py
unit/test_docs_style.py
unit/test_docstring_names.py
unit/test_docstring_style.py
unit/test_explanation_style.py
unit/test_form_style.py
unit/test_function_style.py
unit/test_sentence_style.py
unit/test_tests_style.py
unit/test_value_style.py
unit/test_verb_style.py
unit/test_yaml_style.py
unit/test_documented_commands.py
unit/test_documented_routes.py
unit/test_forge.py
unit/test_imports.py
unit/test_storm_ledger.py
unit/test_locks.py
unit/test_measured_grid.py
unit/test_mentioned_files.py
unit/test_names.py
unit/test_published_measurements.py
unit/test_page_style.py
unit/test_pure_rooms.py
unit/test_scripts.py
unit/test_security.py
unit/test_style.py
"""
TESTS = sorted(
    path for tier in ("unit", "local") for path in (ROOT / "tests" / tier).glob("**/test_*.py")
)


def modules(test: Path) -> set[str]:
    """The files and folders of the package, of tests/support or of profiles, where the test
    stands."""
    inside = Path(*test.relative_to(ROOT / "tests").parts[1:-1])
    roots = {"support": ("tests",), "profiles": ("", "gateway")}.get(inside.name, ("gateway",))
    files = (path for root in roots for path in (ROOT / root / inside).glob("*"))
    return {path.stem for path in files if path.suffix in (".py", ".yaml") or path.is_dir()} | {
        inside.name
    }


def nameless() -> set[str]:
    """Tests whose name begins with the name of no module there."""
    return {
        str(test.relative_to(ROOT / "tests"))
        for test in TESTS
        if not any(f"{test.stem}_".startswith(f"test_{module}_") for module in modules(test))
    }


def test_a_test_has_the_name_of_its_module() -> None:
    names = nameless() - set(TOGETHER.split())
    assert not names, (
        f"{', '.join(sorted(names))}: name the file after a module in the same place, as"
        " tests/unit/planner/test_decide.py after gateway/planner/decide.py, or after a module and"
        " an aspect (test_decide_order.py)."
    )


# Beginnings of names of tests that have no noun as their subject: clauses, prepositions,
# conjunctions and pronouns. "another" and the like may stand before a noun.
SUBJECTLESS_BEGINNINGS = """
what who whom whose which whatever whoever whichever when whenever where wherever why how that
if unless until while since because though although as so than and but nor or never
of to with without within by for from in into at on onto upon before after behind beside between
beyond above below over under up about against along among around across beneath during inside
near off out outside through toward via
it its they them this these those there such others
"""
# Clauses without a noun within a name: "what it needs", "who asks". An infinitive has a
# noun (`what_to_do`). Each other word refers to a sentence before the name.
INNER_CLAUSE = re.compile(
    r"_(?:what(?!_to_)|who|whom|whatever|whoever|whichever|that_it|otherwise|such|himself)(?=_|$)"
)
TEST_NAME = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)
MAX_TEST_NAME = 95
# A shorter name is a topic instead of a claim: `test_gptq`, `test_no_network`.
MIN_TEST_WORDS = 3


def names_of_tests() -> Iterator[tuple[str, str]]:
    """File and name of every test of every tier."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in TEST_NAME.findall(path.read_text()):
            yield str(path.relative_to(ROOT)), name


def is_subjectless(name: str) -> bool:
    """Whether the name of a test begins without the noun whose behaviour it states."""
    return name.split("_")[1] in SUBJECTLESS_BEGINNINGS.split()


def test_the_name_of_a_test_states_the_behaviour_of_a_noun() -> None:
    assert not [f"{path}: {name}" for path, name in names_of_tests() if is_subjectless(name)]


def test_names_of_tests_are_short() -> None:
    assert not [f"{path}: {name}" for path, name in names_of_tests() if len(name) > MAX_TEST_NAME]


def is_claim(name: str) -> bool:
    """Whether the name of a test states its claim by nouns."""
    return not INNER_CLAUSE.search(name) and len(name.split("_")) > MIN_TEST_WORDS


def test_the_name_of_a_test_is_a_claim_by_nouns() -> None:
    assert not [f"{path}: {name}" for path, name in names_of_tests() if not is_claim(name)]


@pytest.mark.parametrize(
    ("name", "is_right"),
    [
        ("test_a_model_says_what_it_needs", False),
        ("test_a_gateway_tells_those_who_wait", False),
        ("test_a_page_hears_that_it_ends", False),
        ("test_no_network", False),
        ("test_each_kind_names_what_to_do", True),
        ("test_a_model_names_its_needs", True),
        ("test_a_whole_page_loads", True),
    ],
)
def test_a_topic_or_an_inner_clause_is_found(name: str, *, is_right: bool) -> None:
    assert is_claim(name) is is_right


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("test_what_fits_takes_nothing", True),
        ("test_without_a_queue_nobody_waits", True),
        ("test_it_is_bounded", True),
        ("test_a_plan_that_fits_takes_nothing", False),
        ("test_nobody_waits_without_a_queue", False),
        ("test_another_backend_is_forced", False),
    ],
)
def test_a_test_without_a_subject_is_found(name: str, *, wrong: bool) -> None:
    assert is_subjectless(name) is wrong


# Words that hold no noun: pronouns, adverbs, adjectives, participles and forms of verbs. A name
# whose last word is one of them leaves its subject open.
OPEN_WORDS = """
one ones both each every all any some none never always nobody anyone nothing everything ours other
others same most least many few more less last first next own different again there here now then
long longest longer short shortest shorter large larger largest small smaller smallest big near
nearest far deep deepest innermost outermost outer inner wide narrow high low
quiet silent steady slow fast young old soon alive asleep live cold warm hot cool restless light
odd bare plain loud hopeless hopeful harmless loadable vague vain sure unsure common recent often
once early late usual square sparse equal unequal numeric foreign benign possible impossible public
informational bodiless absent immutable incomplete conservative exact endless cureless diagnostic
coarse compact special sound whole hidden open closed
behind before after between beside elsewhere away out off on in at already around alone together
is does would tells comes stays begins closes decides advises serves keeps
told said kept held found seen given gone done made taken known meant shown written got left lost
built brought struck sent hung unset cut
"""
# Beginnings that make a name a place or a relation, and superlatives of bounds, which are named
# by MAX and MIN.
OPEN_BEGINNINGS = "of to with without within by for from in into at on before after behind between"
BOUNDS = "most least longest largest"
# Words that end like participles and are nouns or infinitives, and units behind a noun.
NOUNS = """
need seed feed speed embed exceed shed setting sampling sharing string routing warning mapping
"""
UNITS = "s ms"
# A function may be named by a relation to its argument (`_replace_config`).
RELATIONS = "with without from on"
# Terms of TCP, Python and the code's own subject, whose last word stands for a noun.
TERMS = "_RESERVE_PARTS_ELSEWHERE _MAX_PENDING"


def holds_no_noun(name: str) -> bool:
    """Whether the last word of a name, before a relation and its unit, is none of a thing."""
    words = name.strip("_").lower().split("_")
    words = words[:-1] if words[-1] in UNITS.split() else words
    relations = [at for at, word in enumerate(words) if at and word in OPEN_BEGINNINGS.split()]
    head = words[relations[0] - 1 if relations else -1] if words else "s"
    is_participle = len(head) > 3 and head.endswith(("ed", "ing")) and head not in NOUNS.split()
    return not words or is_participle or head in OPEN_WORDS.split()


def is_open_constant(name: str) -> bool:
    """Whether the name of a constant leaves its content open."""
    first = name.strip("_").lower().split("_")[0]
    return first in (*OPEN_BEGINNINGS.split(), *BOUNDS.split()) or holds_no_noun(name)


def is_open_function(name: str) -> bool:
    """Whether the name of a function leaves its act or result open.

    A verb may have an adverb behind it (`_run_all`), so only names without any other word count.
    """
    first, *rest = name.strip("_").split("_")
    if first == "is" and rest:
        return False
    if first in (*OPEN_BEGINNINGS.split(), *BOUNDS.split()):
        return not (rest and first in RELATIONS.split())
    return all(map(holds_no_noun, (first, *rest)))


def names_of(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Line, name and whether it is a function, of the constants and private functions."""
    for statement in tree_of(path).body:
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        else:
            continue
        for node in (node for target in targets for node in ast.walk(target)):
            if isinstance(node, ast.Name) and node.id.isupper():
                yield statement.lineno, node.id, False
    for node in nodes_of(path):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name.startswith("_") and not node.name.startswith("__"):
            yield node.lineno, node.name, True


def test_constants_and_private_functions_are_named_by_nouns_and_verbs() -> None:
    assert not [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in package_files()
        for line, name, is_function in names_of(path)
        if name not in TERMS.split()
        if (is_open_function if is_function else is_open_constant)(name)
    ]


def test_each_term_exists() -> None:
    names = {name for path in package_files() for _, name, _ in names_of(path)}
    assert not set(TERMS.split()) - names


@pytest.mark.parametrize(
    ("name", "is_open"),
    [
        ("_MOST", True),
        ("_MOST_BYTES", True),
        ("_OF_GPU", True),
        ("_QUIET_S", True),
        ("_SETTINGS_MEANT", True),
        ("_TELLING", True),
        ("_S", True),
        ("_MAX_BYTES", False),
        ("_SETTLED_SHARE", False),
        ("_GRAPH_BYTES_OF_LAYER", False),
        ("_POLL_S", False),
        ("_SAMPLING", False),
    ],
)
def test_an_open_name_of_a_constant_is_found(name: str, *, is_open: bool) -> None:
    assert is_open_constant(name) is is_open


@pytest.mark.parametrize(
    ("name", "is_open"),
    [
        ("_lacking", True),
        ("_cut_off", True),
        ("_of_runner", True),
        ("_plain", True),
        ("_with", True),
        ("_without_config", False),
        ("_is_open", False),
        ("_raise_if_lost", False),
        ("_fetch_files", False),
    ],
)
def test_an_open_name_of_a_function_is_found(name: str, *, is_open: bool) -> None:
    assert is_open_function(name) is is_open


# Things of the domain. A loop over some of them names one of them, not another thing.
DOMAIN_NOUNS = """
adapter answer attempt backend candidate change copy device engine event fact failure file flag gpu
instance kernel layer limit link machine model node offer owner page plan process question rank
record rejection replica request route rule slot stage start step task token variant version wish
worker
"""
# Variables that say nothing of their thing.
EMPTY_NOUNS = "item row"
# The models of a table of routes are routes, answers are kept by their questions, and a replica is
# a copy.
LOOP_VARIABLES = "models:route answers:question replicas:copy"
# The words after these in a name are a property of its things: `best_by_engine`.
PROPERTY = re.compile(r"_(?:by|of)_.*")
# Calls whose elements are those of their first argument.
ORDERINGS = ("sorted", "reversed", "list", "tuple", "set", "filter", "min", "max")


def singular(word: str) -> str:
    if word.endswith("ies"):
        return f"{word[:-3]}y"
    return word[:-2] if word.endswith(("ches", "shes", "sses", "xes")) else word.removesuffix("s")


def last_noun(name: str) -> str:
    return PROPERTY.sub("", name.strip("_").lower()).rpartition("_")[2]


def elements_name(iterable: ast.expr) -> str:
    """The name of the things that an expression lists; "" for an expression without a name."""
    match iterable:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=ast.Name(id=name), args=[*_, first]) if name == "filter":
            return elements_name(first)
        case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name in ORDERINGS:
            return elements_name(first)
        case ast.Call(func=ast.Attribute(value=mapping, attr="values")):
            return elements_name(mapping)
        case ast.Call(func=function):
            return elements_name(function)
        case ast.Subscript(value=sequence, slice=ast.Slice()):
            return elements_name(sequence)
    return ""


def loops(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str, ast.expr]]:
    """Line, variable and iterable of each loop, comprehension and key of an order."""
    for node in nodes:
        match node:
            case (
                ast.For(target=ast.Name(id=name, lineno=line), iter=iterable)
                | ast.AsyncFor(target=ast.Name(id=name, lineno=line), iter=iterable)
                | ast.comprehension(target=ast.Name(id=name, lineno=line), iter=iterable)
            ):
                yield line, name, iterable
            case ast.Call(func=ast.Name(id=function), args=[iterable], keywords=keywords) if (
                function in ORDERINGS
            ):
                for keyword in keywords:
                    match keyword:
                        case ast.keyword(arg="key", value=ast.Lambda(args=arguments)):
                            yield node.lineno, arguments.args[0].arg, iterable


def untrue_loops(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and text of the loops whose variable names another thing than their elements are."""
    nouns, empty_nouns = DOMAIN_NOUNS.split(), EMPTY_NOUNS.split()
    for line, variable, iterable in loops(nodes):
        elements = last_noun(elements_name(iterable))
        element, noun = singular(elements), last_noun(variable)
        is_plural = elements != element and element in nouns
        is_other_noun = noun != element and noun in (*nouns, *empty_nouns)
        if is_plural and is_other_noun and f"{elements}:{noun}" not in LOOP_VARIABLES.split():
            yield line, f"for {variable} in {ast.unparse(iterable)}"


def test_a_loop_names_the_thing_that_its_elements_are() -> None:
    assert not [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in package_files()
        for line, text in untrue_loops(nodes_of(path))
    ]


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("[replica.id for replica in live_attempts]", 1),
        ("for model in machine.gpus: pass", 1),
        ("for row in plan.nodes[:2]: pass", 1),
        ("sorted(candidates, key=lambda process: process.number)", 1),
        ("max(plans.values(), key=lambda copy: copy.size)", 1),
        ("for version in sorted(_kernels()): pass", 1),
        ("for plan in best_plans_by_engine.values(): pass", 0),
        ("for live_attempt in attempts: pass", 0),
        ("for name in models: pass", 0),
        ("for row in rows: pass", 0),
        ("for gpu, link in links: pass", 0),
        ("for copy in sorted(copies, key=lambda copy: copy.index): pass", 0),
    ],
)
def test_an_untrue_loop_is_found(source: str, count: int) -> None:
    assert len([*untrue_loops([*ast.walk(ast.parse(source))])]) == count
