"""The conditions of rules: every one is used by a rule that ships, and answers in words."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from pydantic import BaseModel

from gateway.engines.common.rules.check import Check
from gateway.engines.common.rules.conditions import CONDITIONS, UnknownSubject
from gateway.engines.common.rules.subject import AttentionQuery, Subject
from gateway.models.scheme import LinearShape, MoeShape, Scheme
from gateway.profiles.profiles import Profiles

SCHEME = Scheme(kind="wna16", bits=4, group=128)
LAYER = LinearShape(k=2048, n=32, scheme=SCHEME, dtype="bfloat16")
EXPERTS = MoeShape(
    hidden=2816,
    intermediate=352,
    experts=128,
    scheme=SCHEME,
    dtype="bfloat16",
    routing="renormalize",
)


def checks(value: Any) -> Iterator[Check]:
    """Every check in a rule file, those within others too."""
    if isinstance(value, Check):
        yield value
        yield from checks(list(value.root.values()))
    elif isinstance(value, BaseModel):
        yield from checks(list(dict(value).values()))
    elif isinstance(value, dict):
        yield from checks(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from checks(item)


@cache
def shipped_checks() -> list[Check]:
    profiles = Profiles()
    rules = profiles.rules([profiles.engine(ref) for ref in profiles.engine_files])
    return [
        check
        for version in rules.values()
        for file in vars(version).values()
        for check in checks(file)
    ]


def test_every_condition_is_asked_for_by_a_rule_that_ships() -> None:
    names = {name for check in shipped_checks() for name in check.root}
    assert names == {*CONDITIONS, "when", "any_of"}


@pytest.mark.parametrize("name", sorted(CONDITIONS))
def test_a_condition_never_fails_on_a_subject_without_its_field(name: str) -> None:
    """The condition is undecided, or about the GPU and installed packages."""
    condition = next(check.root[name] for check in shipped_checks() if name in check.root)
    reason = CONDITIONS[name].test(condition, Subject(""))
    about_the_machine = (
        "capabilities",
        "min_capability",
        "below_capability",
        "min_gib",
        "package",
        "variable",
        "enabled",
    )
    if name in (*about_the_machine, "activations", "block_multiple"):
        assert not isinstance(reason, UnknownSubject)
    else:
        assert isinstance(reason, UnknownSubject)
        assert reason.endswith("is not known")


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        ({"schemes": ["fp8_block", "int8"]}, "takes schemes fp8_block or int8, not wna16"),
        ({"n_multiple": 64}, "N=32 is not a multiple of 64 (32 over)"),
        ({"min_n": 64}, "N=32 is below 64"),
        ({"symmetric": False}, "is not for symmetric quantization"),
        ({"act_order": "yes"}, "is for layers with act-order"),
        ({"dtypes": ["float16"]}, "takes activations in float16, not bfloat16"),
        ({"intermediate_multiple": 128}, "intermediate size 352 is not a multiple of 128"),
        ({"max_experts": 64}, "takes at most 64 experts, not 128"),
        ({"halved_groups": 64}, "no half of the group size 128 down to 64 divides 2816 and 352"),
        (
            {"capabilities": ["9.0", "10.*"]},
            "runs on compute capability 9.0 or 10.*, this GPU has 8.6",
        ),
        ({"package": "humming"}, "the package humming is not installed"),
    ],
)
def test_a_refusal_has_the_numbers(check: dict[str, Any], reason: str) -> None:
    subject = Subject("8.6", layer=LAYER, experts=EXPERTS)
    assert Check.model_validate(check).refusal(subject) == reason


def test_the_data_type_of_a_model_has_one_name_for_layers_and_attention() -> None:
    attention = Subject("8.6", attention=AttentionQuery(kind="full", head_dim=128))
    assert (
        Check.model_validate({"dtypes": ["float16"]}).refusal(attention)
        == "takes dtype float16, not bfloat16"
    )
    assert Check.model_validate({"dtypes": ["bfloat16"]}).refusal(attention) is None
