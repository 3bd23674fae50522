"""Checks: combinations of a profile's conditions, and the errors of a profile with unknown ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.engines.common.rules.check import Check, UnknownSubject, first_refusal
from gateway.engines.common.rules.subject import AttentionQuery, Subject
from gateway.errors import SettingsError
from gateway.profiles.profile_tables import shipped_profiles
from gateway.profiles.profiles import Profiles
from tests.support.versions import NEWEST_VLLM, VLLM, VLLM_REF

AMPERE = Subject("8.6", attention=AttentionQuery(kind="mla", head_dim=576))


def refusal(**conditions: Any) -> str | None:
    return Check.model_validate(conditions).refusal(AMPERE)


def test_the_first_condition_that_does_not_hold_gives_the_reason() -> None:
    assert refusal() is None
    assert (
        refusal(layers=["mla"], max_head=256, min_capability="9.0") == "head size 576 is above 256"
    )
    assert (
        refusal(min_capability="9.0", max_head=256)
        == "needs compute capability 9.0 or higher, this GPU has 8.6"
    )


def test_the_condition_of_a_check_limits_the_rest() -> None:
    assert refusal(when={"capabilities": ["9.*"]}, max_head=256) is None
    assert refusal(when={"capabilities": ["8.*"]}, max_head=256) == "head size 576 is above 256"


def test_one_alternative_is_enough_and_every_reason_is_reported_once() -> None:
    assert refusal(any_of=[{"max_head": 256}, {"layers": ["mla"]}]) is None
    conditions = [
        {"max_head": 256},
        {"capabilities": ["9.*"]},
        {"max_head": 256, "layers": ["mla"]},
    ]
    assert (
        refusal(any_of=conditions)
        == "head size 576 is above 256 and runs on compute capability 9.*, this GPU has 8.6"
    )


def test_the_subjects_of_a_check_are_known_without_asking_it() -> None:
    parsed_check = Check.model_validate({"schemes": ["wna16"], "min_capability": "9.0"})
    assert [parsed_check.asks_for("schemes", kind) for kind in ("wna16", "nvfp4")] == [
        True,
        False,
    ]
    assert parsed_check.asks_for("bits", 4)
    # Outside of `when` it holds, whatever else it asks for.
    assert Check.model_validate({"when": {"min_capability": "9.0"}, "schemes": ["wna16"]}).asks_for(
        "schemes", "nvfp4"
    )


def test_an_unknown_value_is_no_refusal() -> None:
    for conditions in (
        {"nope_dims": [128]},
        {"when": {"nope_dims": [128]}, "max_head": 1},
        {"any_of": [{"nope_dims": [1]}]},
    ):
        reason = refusal(**conditions)
        assert isinstance(reason, UnknownSubject)
        assert reason == "qk_nope_head_dim is not known"
    assert (
        first_refusal([Check(), Check.model_validate({"max_head": 8})], AMPERE)
        == "head size 576 is above 8"
    )


@pytest.mark.parametrize(
    ("conditions", "problem"),
    [
        (
            {"min_capabilty": "9.0"},
            "there is no condition `min_capabilty`; the nearest is `min_capability`",
        ),
        (
            {"any_of": [{"head_dim": [64]}]},
            "`any_of`: there is no condition `head_dim`; the nearest is `head_dims`",
        ),
        ({"n_multiple": "many"}, "`n_multiple`: must be a whole number"),
        ({"schemes": ["int3"]}, "`schemes`: must be 'wna16'"),
        ({"any_of": {"sinks": True}}, "`any_of`: must be a list"),
    ],
)
def test_a_check_that_is_wrong_says_which_name(conditions: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        Check.model_validate(conditions)


def test_a_wrong_condition_of_a_user_is_refused_with_file_and_nearest_name(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "engines" / "vllm"
    (folder / NEWEST_VLLM).mkdir(parents=True)
    shipped_rules = shipped_profiles() / "engines/vllm"
    (folder / f"{NEWEST_VLLM}.yaml").write_text((shipped_rules / f"{NEWEST_VLLM}.yaml").read_text())
    (folder / NEWEST_VLLM / "linear.yaml").write_text(
        f"extends: vllm=={VLLM[-2]}\n"
        "kernels: {AutoAWQLinearMethod: {requires: [{bits: [4]}, {n_pack: true}]}}\n"
    )
    profiles = Profiles(tmp_path)
    with pytest.raises(SettingsError) as error:
        profiles.rules([profiles.engine(VLLM_REF)])
    assert (
        "linear.yaml is wrong at kernels.AutoAWQLinearMethod.requires.1: there is no condition"
        " `n_pack`" in str(error.value)
    )
    assert "the nearest is `n_packs`" in str(error.value)
