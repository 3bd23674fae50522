"""Rule files of engine versions: inherited rules, changes, and sources.

    extends: KIND==VERSION     the rest changes the file of the same name of that version
    NAME: {KEY: VALUE}         a key replaces one value, or adds it, down to the fields of an entry
    without: [KEY, ...]        keys that the mapping no longer has; "*": all
    - same: 3-7                items 3 to 7 of the inherited list
    - like: 3                  item 3 with the other fields replaced; `without` removes fields

A list without `same` and `like` replaces the inherited one. `sources.yaml` next to the rules says
where each was read: by file, keys, and numbers of list items.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gateway.errors import SettingsError
from gateway.profiles.yaml_cache import Documents

SOURCES = "sources"
# Levels of a file whose mappings are merged: the file, a section, an entry.
_MERGED_LEVELS = 3


class RuleSets:
    """Reads rule files. folder_of: where a version's rules are, by `kind==version`."""

    def __init__(self, documents: Documents, folder_of: Callable[[str], Path | None]) -> None:
        self._documents = documents
        self._folder_of = folder_of
        # Rules are cached because versions extend each other and share files.
        self._rules: dict[Path, Mapping[str, Any]] = {}
        self._sources: dict[Path, Any] = {}

    def read(self, folder: Path, name: str) -> Mapping[str, Any] | None:
        """The rules of one file with their sources; None: there is no such file.

        Raises SettingsError.
        """
        if not (folder / f"{name}.yaml").is_file():
            return None
        rules = self._inherit(folder, name, ())
        sources = folder / f"{SOURCES}.yaml"
        if sources not in self._sources:
            self._sources[sources] = self._documents.first(sources) if sources.is_file() else None
        source_names = self._sources[sources]
        if not source_names or name not in source_names:
            return rules
        try:
            rule_set: Mapping[str, Any] = _add_sources(rules, source_names[name])
        except (KeyError, TypeError, AttributeError) as error:
            raise SettingsError(
                f"{sources} has a source of {name} for a rule that does not exist ({error}).",
                hint="Change the key to a rule of the file, or remove the source.",
            ) from None
        return rule_set

    def _inherit(self, folder: Path, name: str, heirs: tuple[Path, ...]) -> Mapping[str, Any]:
        """The rules of the file, merged into those that it extends."""
        path = folder / f"{name}.yaml"
        if path not in self._rules:
            self._rules[path] = self._extend(path, heirs)
        return self._rules[path]

    def _extend(self, path: Path, heirs: tuple[Path, ...]) -> Mapping[str, Any]:
        """The rules of a file with those that the file extends. Raises SettingsError."""
        name = path.stem
        rules = self._documents.first(path)
        if not isinstance(rules, dict):
            raise SettingsError(
                f"The rules {path} are not a mapping.",
                hint="Write lines `RULE: VALUE`, as the files in profiles/engines have.",
            )
        if "extends" not in rules:
            return rules
        changes = dict(rules)
        ref = str(changes.pop("extends"))
        base = self._folder_of(ref)
        if base is None or path in heirs or not (base / f"{name}.yaml").is_file():
            raise SettingsError(
                f"The rules {path} extend {ref}, which has no such rules.",
                hint="Set `extends` to KIND==VERSION of a version that has this file.",
            )
        try:
            rule_set: Mapping[str, Any] = merge(self._inherit(base, name, (*heirs, path)), changes)
        except (IndexError, ValueError, TypeError):
            raise SettingsError(
                f"The rules {path} change items that {ref} does not have.",
                hint="Set `same` and `like` to numbers of items in the inherited list.",
            ) from None
        return rule_set


def merge(base: Any, change: Any, level: int = 0) -> Any:
    """The inherited value with a change applied."""
    if isinstance(base, list) and isinstance(change, list):
        return _merged_list(base, change)
    if isinstance(base, dict) and isinstance(change, dict) and level < _MERGED_LEVELS:
        base_fields = _remove_fields(base, change)
        return base_fields | {
            key: merge(base_fields[key], value, level + 1) if key in base_fields else value
            for key, value in change.items()
            if key != "without"
        }
    return change


def _merged_list(base: list[Any], change: list[Any]) -> list[Any]:
    result: list[Any] = []
    for item in change:
        if isinstance(item, dict) and [*item] == ["same"]:
            first, _, last = str(item["same"]).partition("-")
            end = int(last or first)
            if not 1 <= int(first) <= end <= len(base):
                raise IndexError(item)
            result += base[int(first) - 1 : end]
        elif isinstance(item, dict) and "like" in item:
            fields = {key: value for key, value in item.items() if key not in ("like", "without")}
            result.append(_remove_fields(base[item["like"] - 1], item) | fields)
        else:
            result.append(item)
    return result


def _remove_fields(base: dict[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    removed_names = change.get("without", ())
    if removed_names == "*":
        return {}
    return {key: value for key, value in base.items() if key not in removed_names}


def _add_sources(rules: Any, sources: Any) -> Any:
    """The rules with their sources: a text is the field `source` of a rule."""
    if isinstance(sources, str):
        return {**rules, "source": sources}
    if isinstance(rules, list):
        numbered = {**dict(enumerate(rules, 1))}
        for number, source in sources.items():
            numbered[number] = _add_sources(numbered[number], source)
        return [*numbered.values()]
    result = dict(rules)
    for key, source in sources.items():
        if key == "source" or key.endswith("_source"):
            result[key] = source
        else:
            result[key] = _add_sources(result[key], source)
    return result
