"""Rule files that inherit from another version, and their sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.domain.value import TRUSTED_KEY
from gateway.engines.kind_rules import rules_class
from gateway.errors import SettingsError
from gateway.profiles.profile_tables import shipped_profiles
from gateway.profiles.profiles import Profiles
from gateway.profiles.rule_sets import RuleSets, merge
from gateway.profiles.yaml_cache import Documents
from tests.support.yaml_file import read_yaml

RULES = shipped_profiles() / "engines"
FILES = sorted(
    f"{path.parent.parent.name}=={path.parent.name}/{path.stem}"
    for path in RULES.glob("*/*/*.yaml")
    if path.stem != "sources"
)


def folder_of(ref: str) -> Path:
    kind, _, version = ref.partition("==")
    return RULES / kind / version


@pytest.mark.parametrize("name", FILES)
def test_shipped_rules_are_valid_and_equal_without_the_check(name: str) -> None:
    ref, _, stem = name.partition("/")
    rules = RuleSets(Documents(), folder_of).read(folder_of(ref), stem)
    model = rules_class(ref.partition("==")[0]).FILES[stem]
    document = model.model_validate(rules).model_dump()
    assert repr(model.model_validate(rules, context={TRUSTED_KEY: True}).model_dump()) == repr(
        document
    )


@pytest.mark.parametrize("name", FILES)
def test_rules_get_their_sources_from_the_file_next_to_them(name: str) -> None:
    ref, _, stem = name.partition("/")

    def keys(value: Any) -> set[str]:
        if isinstance(value, dict):
            return {str(key) for key in value}.union(*map(keys, value.values()))
        return set().union(*map(keys, value)) if isinstance(value, list) else set()

    yaml = read_yaml(folder_of(ref) / f"{stem}.yaml")
    assert not {key for key in keys(yaml) if key == "source" or key.endswith("_source")}


@pytest.mark.parametrize(
    ("change", "result"),
    [
        ({}, {"a": [1, 2, 3], "b": {"x": {"m": 1, "n": 2}}}),
        ({"a": [{"same": "2-3"}, 4]}, {"a": [2, 3, 4], "b": {"x": {"m": 1, "n": 2}}}),
        ({"a": [9]}, {"a": [9], "b": {"x": {"m": 1, "n": 2}}}),
        ({"b": {"x": {"n": 3}}}, {"a": [1, 2, 3], "b": {"x": {"m": 1, "n": 3}}}),
        ({"b": {"y": {}, "without": ["x"]}}, {"a": [1, 2, 3], "b": {"y": {}}}),
        ({"without": "*", "c": 1}, {"c": 1}),
    ],
)
def test_a_change_is_merged(change: dict[str, Any], result: dict[str, Any]) -> None:
    assert merge({"a": [1, 2, 3], "b": {"x": {"m": 1, "n": 2}}}, change) == result


def test_conditions_are_replaced_as_a_whole_for_they_have_an_order() -> None:
    base = {"kernels": {"k": {"requires": {"p": 1, "q": 2}}}}
    change = {"kernels": {"k": {"requires": {"q": 3}}}}
    assert merge(base, change) == change


def test_an_item_extends_another_item() -> None:
    base = [{"name": "a", "x": 1, "y": 2}]
    change = [{"like": 1, "x": 3, "without": ["y"]}]
    assert merge(base, change) == [{"name": "a", "x": 3}]


def sets(folder: Path, files: dict[str, str]) -> RuleSets:
    for name, text in files.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return RuleSets(Documents(), lambda ref: folder / ref.partition("==")[2])


def test_sources_name_rules_by_keys_and_numbers(tmp_path: Path) -> None:
    files = {
        "1.0/linear": "kernels: {a: {bits: 4}}\npaths: [{kernels: [a]}, {kernels: []}]\n",
        "1.0/sources": "linear: {order_source: x.py:1, kernels: {a: y.py:2}, paths: {2: z.py:3}}\n",
    }
    assert sets(tmp_path, files).read(tmp_path / "1.0", "linear") == {
        "order_source": "x.py:1",
        "kernels": {"a": {"bits": 4, "source": "y.py:2"}},
        "paths": [{"kernels": ["a"]}, {"kernels": [], "source": "z.py:3"}],
    }


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"1.0/linear": "extends: toy==0.9\n"}, "extend toy==0.9, which has no such rules"),
        ({"1.0/linear": "extends: toy==1.0\n"}, "extend toy==1.0, which has no such rules"),
        (
            {"0.9/linear": "a: [1]\n", "1.0/linear": "extends: toy==0.9\na: [{same: 1-2}]\n"},
            "change items that toy==0.9 does not have",
        ),
        ({"1.0/linear": "[]\n"}, "are not a mapping"),
        ({"1.0/linear": "a: 1\n", "1.0/sources": "linear: {b: {c: x}}\n"}, "does not exist"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, files: dict[str, str], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        sets(tmp_path, files).read(tmp_path / "1.0", "linear")


def test_a_user_can_extend_shipped_rules(tmp_path: Path) -> None:
    newest = next(iter(Profiles().engine_files))
    kind, _, version = newest.partition("==")
    text = (RULES / kind / f"{version}.yaml").read_text().replace(version, "99.0.0", 1)
    folder = tmp_path / "engines" / kind
    (folder / "99.0.0").mkdir(parents=True)
    (folder / "99.0.0.yaml").write_text(text)
    (folder / "99.0.0/linear.yaml").write_text(f"extends: {newest}\npackages: []\n")
    profiles = Profiles(tmp_path)
    rules = profiles.rules([profiles.engine(f"{kind}==99.0.0")])[f"{kind}==99.0.0"]
    assert rules.linear is not None
    assert not rules.linear.packages
