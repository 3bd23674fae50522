"""The kinds of engines: which rules a version of each kind has. A new kind is one class and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

from gateway.core.engines.candidate import EngineRules
from gateway.core.engines.sglang_engine import SglangRules
from gateway.core.engines.vllm_engine import VllmRules
from gateway.domain import Value


class RulesOfFiles(EngineRules, Protocol):
    """Rules that are made of files: FILES are the names of a version's YAML files, by which `__init__` takes what they hold."""

    FILES: ClassVar[Mapping[str, type[Value]]]


KINDS: dict[str, type[RulesOfFiles]] = {"vllm": VllmRules, "sglang": SglangRules}
