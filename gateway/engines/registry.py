"""The kinds of engines: which rules a version of each kind has. A new kind is one class and one
line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

from gateway.domain import Value
from gateway.engines.common.candidate import EngineRules
from gateway.engines.sglang.engine import SglangRules
from gateway.engines.vllm.engine import VllmRules


class RulesOfFiles(EngineRules, Protocol):
    """Rules that are made of files: FILES are the names of a version's YAML files, by which
    `__init__` takes what they hold."""

    FILES: ClassVar[Mapping[str, type[Value]]]


KINDS: dict[str, type[RulesOfFiles]] = {"vllm": VllmRules, "sglang": SglangRules}
