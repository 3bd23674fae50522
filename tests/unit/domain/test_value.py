"""gateway.domain.value: forms of texts."""

from __future__ import annotations

import ast
import pickle
import re
from collections.abc import Iterator

import pytest
from pydantic import ValidationError

from gateway.domain import ChatTemplate, Wish
from gateway.domain.value import FIELD_BY_FOREIGN_NAME, equal_field
from tests.support.paths import ROOT

# All letters of Unicode, as often as the count says: a `Form` holds them once.
WIDE = re.compile(r"\\[wWdDsS][^{]*\{")


def patterns(code: str) -> Iterator[str]:
    """Patterns for `Field(pattern=...)`."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Field":
            yield from (
                ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "pattern"
            )


def test_no_field_has_a_pattern_that_takes_megabytes() -> None:
    patterns_by_file = {
        path: list(patterns(path.read_text())) for path in (ROOT / "gateway").rglob("*.py")
    }
    assert sum(map(len, patterns_by_file.values())) > 3
    literal = re.compile(r"r?['\"]")
    wrong = {
        path: pattern
        for path, file_patterns in patterns_by_file.items()
        for pattern in file_patterns
        if WIDE.search(pattern) or not literal.match(pattern)
    }
    assert not wrong, "take a `Form` of gateway.domain.value"


def test_a_wide_pattern_is_noticed() -> None:
    assert [
        bool(WIDE.search(pattern))
        for pattern in patterns(
            r'x = Field("", pattern=r"^[\w. -]{0,100}$"), Field(pattern=r"^\w+$")'
        )
    ] == [True, False]


@pytest.mark.parametrize("name", ["my chat.jinja", "", "Ä" * 100])
def test_a_template_has_a_name_for_people(name: str) -> None:
    assert ChatTemplate(text="x", name=name).name == name


@pytest.mark.parametrize("name", ["a/b", "a" * 101, "a\n"])
def test_a_name_of_another_form_is_refused_with_allowed_forms(name: str) -> None:
    with pytest.raises(ValidationError, match="is not allowed here: a name has up to 100 letters"):
        ChatTemplate(text="x", name=name)


def test_an_evolved_value_equals_the_copy_of_pydantic() -> None:
    wish = Wish(name="m", source="s", gpus=2)
    evolved_wish = wish.evolve(gpus=4, context=8192)
    wish_copy = wish.model_copy(update={"gpus": 4, "context": 8192})
    assert evolved_wish == wish_copy
    assert evolved_wish.model_fields_set == wish_copy.model_fields_set
    assert evolved_wish.model_dump_json() == wish_copy.model_dump_json()
    assert (wish.gpus, wish.model_fields_set) == (2, {"name", "source", "gpus"})
    assert pickle.loads(pickle.dumps(evolved_wish)) == wish_copy


def test_an_evolved_value_has_no_unknown_fields() -> None:
    wish = Wish(name="m", source="s")
    with pytest.raises(TypeError, match=r"Wish has no fields \['gpu'\]"):
        wish.evolve(context=8192, gpu=4)


@pytest.mark.parametrize("name", ["", "a b", "a/b/c", "\u00e4"])
def test_an_adapter_has_a_name_as_models_have(name: str) -> None:
    with pytest.raises(ValidationError, match="is not allowed here: a name has up to 96 letters"):
        Wish(name="m", source="s", loras={name: "org/adapter"})


def test_each_foreign_name_leads_to_a_field_and_is_none() -> None:
    names = FIELD_BY_FOREIGN_NAME
    assert set(names.values()) <= set(Wish.model_fields)
    assert not set(names) & set(Wish.model_fields)


def test_a_name_with_dashes_is_found_among_the_given_fields_only() -> None:
    assert equal_field("max-model-len", Wish.model_fields) == "context"
    assert equal_field("model", Wish.model_fields) == "source"
    assert equal_field("model", {"models"}) == ""
    assert equal_field("contxt", Wish.model_fields) == ""
