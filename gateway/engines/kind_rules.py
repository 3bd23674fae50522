"""Rules of the engine kinds, loaded by the names that the registry has for them."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from gateway.engines.common.candidate import EngineRules, RulesOfFiles
from gateway.engines.registry import entry


def rules_class(kind: str) -> type[RulesOfFiles]:
    """Class of the kind's rules."""
    module, _, name = entry(kind).rules.partition(":")
    rules: type[RulesOfFiles] = getattr(import_module(module), name)
    return rules


@cache
def rules_without_files(kind: str) -> EngineRules:
    """Rules of a version that has no rule files."""
    return rules_class(kind)()
