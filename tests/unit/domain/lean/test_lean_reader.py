"""gateway.domain.lean.lean_reader: data are read as pydantic reads them, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal  # noqa: F401

import pydantic
import pytest

from gateway.domain.base import NeedsPydantic
from gateway.domain.lean import lean_value
from gateway.domain.lean.lean_class import Field, ValueType, field_validator
from gateway.domain.value import Scalar  # noqa: F401

TYPES = (
    "str",
    "int",
    "float",
    "bool",
    "Any",
    "Path",
    "str | None",
    "int | None",
    "float | None",
    "int | float",
    "Scalar",
    "Scalar | None",
    "Literal['a', 'b']",
    "Literal['a', 1, True]",
    "Literal['all', 'few'] | int | tuple[str, ...] | None",
    "tuple[str, ...]",
    "tuple[int, ...]",
    "tuple[float, ...]",
    "tuple[tuple[int, int], ...]",
    "tuple[Scalar | None, ...]",
    "list[str]",
    "dict[str, str]",
    "dict[str, float]",
    "dict[int, str]",
    "dict[str, tuple[str, ...]]",
    "dict[Literal['a'], int]",
    "dict[str, Any]",
    "set[str]",
)
DATA: tuple[Any, ...] = (
    None,
    "",
    "a",
    "1",
    "true",
    0,
    1,
    -3,
    2**70,
    1.0,
    1.5,
    1e-5,
    1.25e-7,
    123456789012345.6,
    1e15,
    1e17,
    float("inf"),
    True,
    b"a",
    [],
    ["a"],
    [1],
    [1.5, 2],
    [[1, 2]],
    [[1, 2, 3]],
    ["a", None],
    (),
    ("a",),
    (1, 2),
    {},
    {"a": 1},
    {"a": "b"},
    {1: "b"},
    {"a": ["b"]},
    {"a": 1.5},
    {"a", "b"},
    Path("/x"),
)
LIMITS: tuple[dict[str, Any], ...] = (
    {"ge": 1},
    {"gt": 0, "lt": 5},
    {"le": 2},
    {"min_length": 1},
    {"max_length": 1},
    {"pattern": r"^[a-z]$"},
    {"allow_inf_nan": False},
    {"multiple_of": 2},
)


def lean_class(annotation: str, field: Any = ..., **config: Any) -> Any:
    namespace = {
        "__module__": __name__,
        "__annotations__": {"x": annotation},
        "model_config": config,
    } | ({} if field is ... else {"x": field})
    return ValueType("Lean", (lean_value.BaseModel,), namespace)


def agree(lean: Any, model: Any, data: dict[str, Any]) -> bool:
    """Whether the lean class reads the data; asserts that it reads them as the model does."""
    try:
        read = lean.model_validate(data)
    except NeedsPydantic:
        return False
    model_value = model.model_validate(data)
    for name, value in model_value:
        assert repr(getattr(read, name)) == repr(value), data
    try:
        assert repr(read.model_dump()) == repr(model_value.model_dump())
        assert read.model_dump_json() == model_value.model_dump_json()
    except NeedsPydantic:
        assert type(data["x"]) in (bytes, set) or 1e16 <= data["x"] < float("inf")
    return True


@pytest.mark.parametrize("annotation", TYPES)
def test_data_are_read_as_by_pydantic(annotation: str) -> None:
    model = pydantic.create_model("Model", x=(eval(annotation), ...))
    lean = lean_class(annotation)
    read = [datum for datum in DATA if agree(lean, model, {"x": datum})]
    assert read or annotation == "set[str]"
    assert not agree(lean, model, {})
    assert not agree(lean, model, {"x": read[:1], "y": 1})


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_limits_are_those_of_pydantic(limits: dict[str, Any]) -> None:
    kind = "str" if limits.keys() & {"min_length", "max_length", "pattern"} else "float"
    model = pydantic.create_model(
        "Model",
        x=(eval(f"{kind} | None"), pydantic.Field(None, **limits)),
    )
    lean = lean_class(f"{kind} | None", Field(None, **limits))
    texts = ("", "a", "b\n", "ab", "\u00e4", None)
    numbers = (-1, 0, 0.5, 1, 2, 5.0, float("inf"), None)
    read = [
        value for value in (texts if kind == "str" else numbers) if agree(lean, model, {"x": value})
    ]
    assert read or "multiple_of" in limits


def test_a_mapping_is_the_value_of_a_class() -> None:
    inner = lean_class("int")
    globals()["Inner"] = inner
    outer = lean_class("tuple[Inner, ...] | None", None)
    assert outer.model_validate({"x": [{"x": 1}]}).x == (inner(x=1),)
    assert outer.model_validate({}).x is None
    with pytest.raises(NeedsPydantic):
        outer.model_validate({"x": [{"x": "1"}]})


def test_trusted_data_are_converted_and_not_checked() -> None:
    lean = lean_class("dict[str, tuple[float, ...]]", Field(max_length=0))
    assert repr(lean.trust_data({"x": {"a": [1]}}).x) == "{'a': (1.0,)}"
    with pytest.raises(NeedsPydantic):
        lean.model_validate({"x": {"a": [1]}})


def test_a_validator_that_refuses_asks_for_pydantic() -> None:
    def validate_even(cls: Any, value: int) -> int:
        if value % 2:
            raise ValueError(value)
        return value

    mark = field_validator("x")(classmethod(validate_even))
    lean = ValueType(
        "Lean",
        (lean_value.BaseModel,),
        {"__module__": __name__, "__annotations__": {"x": "int"}, "even": mark},
    )
    assert lean(x=2).x == 2
    with pytest.raises(NeedsPydantic):
        lean(x=1)
    assert lean.trust_data({"x": 1}).x == 1


def test_a_value_is_frozen_and_equal_by_content() -> None:
    lean = lean_class("int")
    value = lean(x=1)
    assert value == lean(x=1) != lean(x=2)
    assert len({value, lean(x=1), value.evolve(x=2)}) == 2
    assert repr(value) == "Lean(x=1)"
    assert dict(value) == {"x": 1}
    with pytest.raises(NeedsPydantic):
        value.x = 2
    with pytest.raises(NeedsPydantic):
        value.model_copy()
