"""A models file: YAML with the options of `fitserve add` by model name.

    models:
      qwen:
        source: Qwen/Qwen3-8B
        context: 32768

A file with a mistake changes nothing. Keys that begin with `x-` are for anchors. Relative folders
begin in the folder of the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from gateway.domain import Wish
from gateway.domain.value import equal_field, value_problem
from gateway.domain.wish import NAME_PATTERN, ChatTemplate, Policy
from gateway.errors import BadRequest, near_name
from gateway.file_reading import read_file
from gateway.wishes.model_request import ModelRequest
from gateway.wishes.references import References, UnresolvedReferenceError, texts
from gateway.wishes.yaml_document import Document, Keys, Mistake, read

_EXTENSION_PREFIX = "x-"
_MAX_PROBLEMS = 20
# A models file has at most this many characters. Reading YAML takes a second for some 200,000.
_MAX_CHARACTERS = 4 * 1024 * 1024
# Fields that hold other fields.
_NESTED_FIELDS: dict[str, set[str]] = {
    "policy": set(Policy.model_fields),
    "chat_template": set(ChatTemplate.model_fields),
}
_FIELDS = set(ModelRequest.model_fields) - {"name"}
_FOLDERS = ("source", "drafter")


class ModelsFile(NamedTuple):
    """The content of a models file.

    wishes: the wish of each model, by name.
    references: values that must not be shown.
    """

    path: Path
    wishes: dict[str, Wish]
    references: References


def load(path: Path) -> ModelsFile:
    """The wishes of a models file. Raises BadRequest with all mistakes: file, line, column."""
    try:
        text = read_file(path, 4 * _MAX_CHARACTERS + 1).decode("utf-8-sig")
        reason = (
            f"it is longer than {_MAX_CHARACTERS} characters" if len(text) > _MAX_CHARACTERS else ""
        )
    except (OSError, UnicodeDecodeError) as error:
        text = ""
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
    if reason:
        raise BadRequest(
            f"The file of models {path} cannot be read: {reason}.",
            hint="Correct the path, or make the file.",
        )
    document = read(text)
    references = References(path.absolute().parent)
    wishes: dict[str, Wish] = {}
    mistakes = [*document.mistakes, *_top_mistakes(document)]
    if not document.mistakes:
        for name, fields in _models(document):
            outcome = _read_wish(document, str(name), fields or {}, references)
            if isinstance(outcome, Wish):
                wishes[str(name)] = outcome
            else:
                mistakes += outcome
        mistakes += _name_mistakes(document, wishes)
    if mistakes:
        lines = [mistake.describe_in(path) for mistake in sorted(mistakes)[:_MAX_PROBLEMS]]
        rest_line = (
            [f"... and {len(mistakes) - _MAX_PROBLEMS} more"]
            if len(mistakes) > _MAX_PROBLEMS
            else []
        )
        raise BadRequest(
            "\n".join(
                [
                    f"{path.name} has mistakes, so nothing is changed:",
                    *lines,
                    *rest_line,
                    "`fitserve config schema` describes the file.",
                ]
            )
        )
    return ModelsFile(path, wishes, references)


def schema() -> dict[str, Any]:
    """The file as a JSON schema, for editors."""
    model_schema = TypeAdapter(ModelRequest).json_schema(ref_template="#/$defs/{model}")
    shared_definitions = model_schema.pop("$defs", {})
    del model_schema["properties"]["name"]
    model_schema["required"] = []
    model_schema["title"] = "Model"
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Models of fitserve",
        "type": "object",
        "properties": {
            "models": {
                "type": "object",
                "propertyNames": {"pattern": NAME_PATTERN},
                "additionalProperties": {"$ref": "#/$defs/Model"},
            }
        },
        "patternProperties": {f"^{_EXTENSION_PREFIX}": {}},
        "additionalProperties": False,
        "$defs": {**shared_definitions, "Model": model_schema},
    }


def _models(document: Document) -> list[tuple[str, dict[str, Any] | None]]:
    """The models with readable fields."""
    models = document.data.get("models") if isinstance(document.data, dict) else None
    if not isinstance(models, dict):
        return []
    return [
        (name, fields)
        for name, fields in models.items()
        if isinstance(fields, dict | None) and _is_name(name)
    ]


def _is_name(name: object) -> bool:
    return re.fullmatch(NAME_PATTERN, str(name)) is not None


def _top_mistakes(document: Document) -> list[Mistake]:
    """Mistakes of the outer mapping and of the forms of its models."""
    data = document.data
    if document.mistakes:
        return []
    if data is not None and not isinstance(data, dict):
        return [
            Mistake(document.position_of(()), "the file has to be a mapping with the key `models`")
        ]
    wrong_keys = [
        Mistake(document.position_of((str(key),)), _unknown_key(str(key), {"models"}))
        for key in data or {}
        if str(key) != "models" and not str(key).startswith(_EXTENSION_PREFIX)
    ]
    models = (data or {}).get("models")
    if models is None:
        # An unfinished or cut-off file looks like this: no model may be removed for it.
        no_models = Mistake(
            document.position_of(("models",)),
            "there are no models; a file without any says `models: {}`",
        )
        return wrong_keys or [no_models]
    if not isinstance(models, dict):
        return [
            *wrong_keys,
            Mistake(
                document.position_of(("models",)),
                "`models` has to be a mapping: a name, and below it what the model is",
            ),
        ]
    unquoted_keys = [
        Mistake(
            document.position_of(("models", str(name))),
            f"{name} has to be a mapping, as `source: org/name`",
        )
        for name, fields in models.items()
        if not isinstance(fields, dict | None)
    ]
    names = [
        Mistake(
            document.position_of(("models", str(name))),
            f"{str(name)!r} cannot be a model's name: {_NAME}",
        )
        for name in models
        if not _is_name(name)
    ]
    return wrong_keys + unquoted_keys + names


_NAME = "a name has letters, digits, `.`, `_` and `-`, one `/` at most, and perhaps a tag after `:`"


def _read_wish(
    document: Document, name: str, fields: dict[str, Any], references: References
) -> Wish | list[Mistake]:
    """The wish of one model, or its mistakes."""
    top: Keys = ("models", name)
    mistakes = []
    for keys, text in texts(fields, top):
        try:
            references.resolve(text)
        except UnresolvedReferenceError as problem:
            mistakes.append(Mistake(document.position_of(keys), f"{problem}"))
    if mistakes:
        return mistakes
    resolved_fields = references.resolve({str(key): value for key, value in fields.items()})
    folders = [(resolved_fields, key, (*top, key)) for key in _FOLDERS if key in resolved_fields]
    if isinstance(adapters := resolved_fields.get("loras"), dict):
        folders += [(adapters, key, (*top, "loras", str(key))) for key in adapters]
    for folder, key, at in folders:
        try:
            folder[key] = _absolute_source(references.folder, folder[key])
        except (ValueError, RuntimeError) as error:
            # No path has such a character, or the home is unknown.
            mistakes.append(
                Mistake(
                    document.position_of(at),
                    f"this cannot be a folder: {references.hide_values(str(error))}",
                )
            )
    if mistakes:
        return mistakes
    try:
        wish = ModelRequest.model_validate({"name": name, **resolved_fields}).wish()
    except ValidationError as error:
        return _field_mistakes(document, top, error, references)
    except BadRequest as error:
        return [
            Mistake(
                document.position_of((*top, error.param or "")), references.hide_values(str(error))
            )
        ]
    return wish


def _absolute_source(folder: Path, source: Any) -> Any:
    """A folder, relative to the folder of the file."""
    is_relative = isinstance(source, str) and source.startswith((".", "~"))
    return str((folder / Path(source).expanduser()).resolve()) if is_relative else source


def _field_mistakes(
    document: Document, top: Keys, error: ValidationError, references: References
) -> list[Mistake]:
    """The mistakes, one for each value: a value of several types fails as each of them."""
    unknown_keys: dict[Keys, str] = {}
    problems: dict[Keys, list[Mapping[str, Any]]] = {}
    for problem in error.errors(include_url=False):
        keys = (*top, *problem["loc"])
        field = problem["loc"][-1] if problem["loc"] else ""
        value_keys = next(
            keys[:end]
            for end in range(len(keys), 0, -1)
            if keys[:end] in document.positions or end == 1
        )
        if problem["type"] == "extra_forbidden":
            field_names = (
                _NESTED_FIELDS.get(str(problem["loc"][0]), set())
                if len(problem["loc"]) > 1
                else _FIELDS
            )
            unknown_keys[value_keys] = _unknown_key(str(field), field_names)
        else:
            problems.setdefault(value_keys, []).append(problem)
    wrong_values = {
        keys: f"{'.'.join(map(str, keys[1:]))}: {value_problem(value_problems)}"
        for keys, value_problems in problems.items()
    }
    return [
        Mistake(document.position_of(keys), references.hide_values(text))
        for keys, text in (wrong_values | unknown_keys).items()
    ]


def _name_mistakes(document: Document, wishes: dict[str, Wish]) -> list[Mistake]:
    """No two models have a name in common."""
    owners: dict[str, str] = {}
    names = [
        (name, name_of_model, owner)
        for name, wish in wishes.items()
        for name_of_model in (name, *wish.aliases)
        if (owner := owners.setdefault(name_of_model, name)) != name
    ]
    return [
        Mistake(
            document.position_of(("models", name)),
            f"{name} and {owner} are both called {name_of_model}",
        )
        for name, name_of_model, owner in names
    ]


# Keys of other programs' files, and their equals here.
_FOREIGN_KEYS = {
    "ttl": "write `policy: {keep_alive: 300s}`; llama-swap's 0 is -1",
    "cmd": "the plan makes the command; write `source` and perhaps `args`, or let `fitserve import`"
    " translate the file",
    "command": "the plan makes the command; write `source` and perhaps `args`",
    "proxy": "the gateway chooses the ports of engines; for an engine that runs elsewhere write"
    " `endpoints`",
    "groups": "models share the GPUs as they fit; write `policy: {pinned: true}` or `policy:"
    " {priority: 10}` for a model",
    "macros": "write anchors under a key that begins with x-",
    "healthCheckTimeout": "each start has as much time as its phases take; leave it out",
    "checkEndpoint": "the gateway checks that an engine answers; leave it out",
    "gpu_memory_utilization": "the plan sizes the memory; leave it out, or write it under `args`",
    "served_model_name": "the key of the model is its name; more names are `aliases`",
    "parameters": "clients send them with each request; leave it out",
}


def _unknown_key(key: str, keys: set[str]) -> str:
    plain_key = key.replace("-", "_")
    suggestion = near_name(plain_key, sorted(keys))
    equal_key = equal_field(key, keys)
    foreign_hint = _FOREIGN_KEYS.get(key) or _FOREIGN_KEYS.get(plain_key)
    foreign_hint = f"write `{equal_key}`" if equal_key else foreign_hint
    # A near key of a model may mean something else; of the whole file, there is one key.
    if foreign_hint and ("source" in keys or not suggestion):
        return f"there is no key `{key}`: {foreign_hint}"
    for parent, nested in _NESTED_FIELDS.items():
        if plain_key in nested and parent in keys:
            return f"`{plain_key}` stands below `{parent}`: write `{parent}: {{{plain_key}: ...}}`"
    if suggestion:
        return f"there is no key `{key}`; `{suggestion}` may be meant"
    flag_words = "; flags of engines stand below `args`" if "args" in keys else ""
    return f"there is no key `{key}`; known are {', '.join(sorted(keys))}{flag_words}"
