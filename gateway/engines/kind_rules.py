"""Rules of the engine kinds, loaded by the names that the registry has for them."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import ImportString, TypeAdapter

from gateway.engines.common.candidate import EngineRules, RulesOfFiles
from gateway.engines.registry import entry

_BY_NAME: TypeAdapter[Any] = TypeAdapter(ImportString[Any])


def rules_class(kind: str) -> type[RulesOfFiles]:
    """Class of the kind's rules."""
    found: type[RulesOfFiles] = _BY_NAME.validate_python(entry(kind).rules)
    return found


@cache
def rules_without_files(kind: str) -> EngineRules:
    """Rules of a version that has no rule files."""
    return rules_class(kind)()
