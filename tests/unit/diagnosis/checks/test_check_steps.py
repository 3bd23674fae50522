"""The changes that let a check of an engine's source pass."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.diagnosis.checks.check_index import CheckMatch
from gateway.diagnosis.checks.check_site import CheckSite, parse_condition
from gateway.diagnosis.checks.check_steps import check_steps, source_steps
from gateway.diagnosis.clues.features import VersionSettings
from gateway.diagnosis.options import StartOptions
from gateway.diagnosis.structure import ExceptionShape

FLAGS: dict[str, dict[str, Any]] = {
    "frob-size": {"type": "int"},
    "row-size": {"type": "int"},
    "enable-frob": {"type": "bool", "default": False},
    "frob-cache": {"type": "bool", "default": True},
    "frob-config": {"type": "json"},
    "tp-size": {"type": "int"},
    "closed-size": {"type": "int", "ours": True},
}
SETTINGS = VersionSettings("0.33.0", FLAGS, frozenset({"VLLM_FROB"}))
REASON = ": the engine's check in vllm/frob.py:run reads it."


def options(**values: Any) -> StartOptions:
    read = StartOptions()
    read.read(f"(APIServer pid=1) INFO 08-12 [utils.py:1] non-default args: {values!r}")
    return read


def steps(*conditions: str, start: StartOptions | None = None) -> list[str]:
    text = "frob_cache and VLLM_FROB decide"
    place = CheckSite("vllm/frob.py", "run", "", text, tuple(map(parse_condition, conditions)))
    start_options = start or options(model="/m/frob", enable_frob=True, frob_config={"a": "b"})
    step_texts = check_steps(CheckMatch(place, is_sure=True), SETTINGS, start_options)
    assert all(step.endswith(REASON) for step in step_texts)
    return [step.removesuffix(REASON) for step in step_texts]


@pytest.mark.parametrize(
    ("condition", "step"),
    [
        ("frob-size>8", "Lower --frob-size to at most 8"),
        ("frob-size>=8", "Lower --frob-size to less than 8"),
        ("frob-size<8", "Raise --frob-size to at least 8"),
        ("frob-size%16", "Set --frob-size to a multiple of 16"),
        ("frob-size%row-size", "Set --frob-size to a multiple of --row-size"),
        ("frob-size==3", "Give --frob-size another value than 3"),
        ("frob-size!=3", "Set --frob-size to 3"),
        ("frob-size!~1,2", "Set --frob-size to one of 1, 2"),
        ("enable-frob=", "Omit --enable-frob"),
        ("frob-cache!", "Set --frob-cache"),
        ("frob-cache=", "Add --no-frob-cache"),
        ("frob-config.method!=mtp", "Set method of --frob-config to mtp"),
        ("VLLM_FROB=", "Unset VLLM_FROB, or set it to 0"),
        ("VLLM_FROB!", "Set VLLM_FROB=1"),
        ("model.num_heads>3", "Check num_heads in the model's config.json"),
        ("gpu.capability<90", "Use a GPU of compute capability 9.0 or newer"),
    ],
)
def test_a_step_undoes_a_condition(condition: str, step: str) -> None:
    assert steps(condition) == [step]


@pytest.mark.parametrize(
    "condition", ["gpu.cuda!", "model.architectures!", "unknown-flag>3", "model==3", "enable-frob!"]
)
def test_a_condition_that_no_setting_undoes_has_no_step(condition: str) -> None:
    assert steps(condition) == []


def test_a_setting_is_turned_on_only_where_the_message_names_it() -> None:
    assert steps("frob-cache!") == ["Set --frob-cache"]
    assert steps("frob-config!") == []


def test_a_setting_that_is_compared_with_itself_is_not_changed() -> None:
    assert steps("frob-size%frob-size") == []


def test_a_default_that_was_not_given_and_is_off_is_not_omitted() -> None:
    assert steps("enable-frob=", start=options(model="/m/frob")) == []


def test_a_setting_of_the_start_comes_first_then_the_innermost_condition() -> None:
    assert steps("enable-frob=", "row-size>3", "frob-size>8") == [
        "Omit --enable-frob",
        "Lower --frob-size to at most 8",
    ]


@pytest.mark.parametrize("condition", ["closed-size>3", "tp-size>1"])
def test_a_setting_of_the_planner_and_the_layout_come_last(condition: str) -> None:
    assert steps("frob-size>8", condition)[0] == "Lower --frob-size to at most 8"


def test_a_setting_without_a_value_is_set() -> None:
    line = "if self.frob_size > 1 and self.table.row_count > 2:"
    failing = ExceptionShape(
        "TypeError", "'>' not supported between instances of 'NoneType' and 'int'", (), "", line
    )
    assert source_steps(failing, SETTINGS, options(model="/m/frob")) == (
        "Set --frob-size: the failing line needs its value.",
    )
    assert source_steps(failing, SETTINGS, options(frob_size=3)) == ()
    assert source_steps(failing._replace(exception="ValueError"), SETTINGS, options()) == ()
