"""Shared parts of the tests of rules: the rule files of vLLM's versions, and the schemes of their
questions."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from hypothesis import strategies as st

from gateway.domain import Value
from gateway.models.scheme import Scheme
from gateway.profiles.profile_tables import shipped_profiles
from gateway.profiles.profiles import Profiles
from gateway.profiles.rule_sets import RuleSets
from gateway.profiles.yaml_cache import Documents

V = TypeVar("V", bound=Value)

# Any scheme, also those that no checkpoint has.
SCHEMES = st.builds(
    Scheme,
    bits=st.integers(-8, 64),
    group=st.integers(-2, 512),
    symmetric=st.booleans(),
    act_order=st.booleans(),
    static_activation=st.booleans(),
    weight_only=st.booleans(),
)


def read_rules(kind: type[V], name: str, version: str) -> V:
    """The content of profiles/engines/vllm/VERSION/NAME.yaml."""
    profiles = Profiles()
    engine = profiles.engine(f"vllm=={version}")
    rules = getattr(profiles.rules([engine])[engine.ref], name)
    assert isinstance(rules, kind)
    return rules


def rule_document(kind: str, version: str, name: str) -> Any:
    """The rules of one file as YAML data, with the inherited rows."""

    def folder_of(ref: str) -> Path:
        kind, _, version = ref.partition("==")
        return shipped_profiles() / "engines" / kind / version

    return RuleSets(Documents(), folder_of).read(folder_of(f"{kind}=={version}"), name)


def scheme_of(question: Any) -> Scheme:
    """How the layer is quantized that the engine was asked about."""
    return Scheme(
        kind=question.kind,
        bits=question.bits,
        group=question.group,
        symmetric=question.symmetric,
        act_order=question.act_order,
        static_activation=question.static,
        weight_only=question.weight_only,
    )


def tells_the_line(source: str) -> bool:
    """Whether a source has the form `file.py:12`."""
    name, _, line = source.rpartition(":")
    return name.endswith(".py") and line.isdigit()
