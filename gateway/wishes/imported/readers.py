"""Readers of llama-swap's file, Ollama's Modelfile and compose files. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gateway.domain import Engine
from gateway.domain.base import ValidationError
from gateway.domain.value import first_problem
from gateway.domain.wish import NAME_PATTERN
from gateway.errors import BadRequest
from gateway.wishes.document import Document, read
from gateway.wishes.imported.engine_command import (
    ClosingReason,
    EngineCommand,
    FlagReader,
    container_options,
    engine_command,
    environment,
    image_kind,
    split_words,
    whole_number,
)
from gateway.wishes.model_request import ModelRequest

_GGUF = re.compile(r"[-_.](?:i?q\d\w*|f16|bf16|gguf)\b.*$", re.IGNORECASE)
# Names of macros: config.example.yaml of llama-swap.
_MACRO = re.compile(r"\$\{([\w-]+)\}")
# No command line is longer: macros in macros can exceed any memory.
_MAX_COMMAND_CHARACTERS = 128 * 1024
_COMPOSE_DEFAULT = re.compile(r"\$\{\w+:?-([^${}]*)\}")
_COMPOSE_VARIABLE = re.compile(r"\$\{(\w+)(?::?\?[^${}]*)?\}")
_SWAP_VARIABLE = re.compile(r"\$\{env\.(\w+)\}")
# A variable in a models file.
_REFERENCE = r"${env:\1}"
# Keys of Compose that are read, and those whose notice has words of its own.
_COMPOSE_KEYS = ("image", "entrypoint", "command", "environment", "deploy", "volumes", "ports")
# Options of `docker run` that are read, and those that have no effect on a service.
_READ_OPTIONS = ("-e", "--env", "--gpus", "--rm", "-i", "-t", "-d", "--init", "--name")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_ENV_OPTIONS = ("-e", "--env")
# Keys of llama-swap for work that the gateway does itself.
_SWAP_KEYS_OF_GATEWAY = {
    "proxy": "the gateway chooses the port of an engine",
    "checkEndpoint": "the gateway checks that an engine answers",
    "useModelName": "clients may use `aliases`",
    "unlisted": "each model is listed",
    "filters": "clients send their own parameters",
    "concurrencyLimit": "`concurrency` is what a plan is made for",
    "cmdStop": "the gateway stops its engines",
    "healthCheckTimeout": "each start has as much time as its phases take",
    "logLevel": "FITSERVE_LOG_LEVEL is a setting of the gateway",
    "startPort": "the gateway chooses the ports of engines",
    "hooks": "`policy: {pinned: true}` keeps a model loaded",
}
_GROUPS = (
    "groups are not needed: models share the GPUs as they fit. `policy: {pinned: true}` keeps one,"
    " `policy: {priority: N}` says which leaves first"
)
# Parameters of Ollama that clients send with each request here.
_OWN_INSTRUCTIONS = {
    "system": "clients send a system message, or `fitserve run --system`",
    "template": "Go templates are not read: the model's own template is used, or `chat_template`"
    " with Jinja text",
    "message": "clients send earlier messages",
    "license": "the licence stays with the model",
    "requires": "no version of Ollama is needed",
}


class Notice(NamedTuple):
    """A part of a file that has no equal here, with what to do. line: from 1 on."""

    line: int
    text: str


class ImportedModels(NamedTuple):
    """models: fields of a models file by name."""

    models: dict[str, dict[str, Any]]
    notices: list[Notice]


class EngineKnowledge(NamedTuple):
    """engines: a version by kind. closing_reason: of flags that users may not give."""

    engines: Mapping[str, Engine]
    closing_reason: ClosingReason


def read_file(text: str, name: str, knowledge: EngineKnowledge) -> ImportedModels | None:
    """The models of a file, by its content; None: it is none of the three kinds.

    name: of the file, which names the model of a Modelfile. Raises BadRequest for a file of models
    or services that is no YAML.
    """
    document = read(text)
    data = document.data if isinstance(document.data, dict) else {}
    if isinstance(data.get("models"), dict):
        return _drop_refused_fields(_read_llama_swap(document, knowledge))
    if isinstance(data.get("services"), dict):
        return _drop_refused_fields(_read_compose(document, knowledge))
    if any(instruction == "from" and value for _, instruction, value in _instructions(text)):
        return _drop_refused_fields(_read_modelfile(text, name))
    if document.mistakes and re.search(r"^(models|services):", text, re.MULTILINE):
        place, why = document.mistakes[0]
        raise BadRequest(
            f"Line {place.line}, column {place.column}: {why}.", hint="Correct the file."
        )
    return None


def _read_llama_swap(document: Document, knowledge: EngineKnowledge) -> ImportedModels:
    models: dict[str, dict[str, Any]] = {}
    notices: list[Notice] = []
    data = document.data
    for key in data:
        if key == "groups":
            notices.append(Notice(document.place((key,)).line, f"groups: {_GROUPS}."))
        elif key not in ("models", "macros", "globalTTL"):
            why = _SWAP_KEYS_OF_GATEWAY.get(str(key), "it has no equal here; leave it out")
            notices.append(Notice(document.place((str(key),)).line, f"{key}: {why}."))
    macros = _texts(data.get("macros"))
    for name, entry in data["models"].items():
        line = document.place(("models", str(name))).line
        entry_fields = entry if isinstance(entry, dict) else {}
        texts = macros | _texts(entry_fields.get("macros")) | {"MODEL_ID": str(name)}
        words = split_words(_expand_macros(str(entry_fields.get("cmd") or ""), texts))
        fields, problems = _start(words, _pairs(entry_fields.get("env")), knowledge)
        ttl = entry_fields.get("ttl", -1)
        # -1 is the value of the whole file.
        ttl = data.get("globalTTL") if ttl == -1 else ttl
        if type(ttl) in (int, float) and ttl >= 0:
            fields.setdefault("policy", {})["keep_alive"] = f"{ttl}s" if ttl else "-1"
        elif ttl is not None:
            problems.append("ttl: it is no number of seconds. Write `policy: {keep_alive: 300s}`.")
        for key, value in entry_fields.items():
            if key == "aliases" and isinstance(value, list):
                ids = [alias.get("id") if isinstance(alias, dict) else alias for alias in value]
                fields["aliases"] = [*fields.get("aliases", ()), *map(str, ids)]
            elif key not in ("cmd", "env", "macros", "name", "description", "ttl"):
                why = _SWAP_KEYS_OF_GATEWAY.get(str(key), "it has no equal here; leave it out")
                problems.append(f"{key}: {why}.")
        notices += [Notice(line, f"{name}: {problem}") for problem in problems]
        _keep(models, str(name), fields, notices, line)
    return ImportedModels(models, notices)


def _read_compose(document: Document, knowledge: EngineKnowledge) -> ImportedModels:
    models: dict[str, dict[str, Any]] = {}
    notices: list[Notice] = []
    for service, entry in document.data["services"].items():
        line = document.place(("services", str(service))).line
        entry_fields = entry if isinstance(entry, dict) else {}
        words = [
            _interpolate(word)
            for key in ("entrypoint", "command")
            for word in split_words(entry_fields.get(key))
        ]
        image = str(entry_fields.get("image") or "")
        kind = image_kind(image)
        if engine_command(words) is None and kind:
            words = ["docker", "run", image, *words]
        if engine_command(words) is None:
            notices.append(Notice(line, f"{service}: it starts no vLLM or SGLang. Keep it there."))
            continue
        fields, problems = _start(words, _pairs(entry_fields.get("environment")), knowledge)
        if devices := _devices(entry_fields):
            fields["gpus"] = devices
        if entry_fields.get("volumes"):
            problems.append(
                "volumes: the weights are in the gateway's cache (FITSERVE_MODELS_DIR), or in the"
                " folder that `source` names."
            )
        if entry_fields.get("ports"):
            problems.append("ports: clients reach all models at the gateway's port.")
        if entry_fields.get("env_file"):
            problems.append("env_file: write the engine's variables under `env`.")
        if keys := sorted({*map(str, entry_fields)} - {*_COMPOSE_KEYS, "env_file"}):
            problems.append(f"{', '.join(keys)}: the gateway starts its engines by itself.")
        notices += [Notice(line, f"{service}: {problem}") for problem in problems]
        _keep(models, str(service), fields, notices, line)
    return ImportedModels(models, notices)


def _read_modelfile(text: str, name: str) -> ImportedModels:
    fields: dict[str, Any] = {}
    notices: list[Notice] = []
    first_line = 1
    for line, instruction, value in _instructions(text):
        if instruction == "from":
            source = re.sub(r"^(https?://)?(hf\.co|huggingface\.co)/", "", value)
            fields["source"], first_line = source, line
        elif instruction == "adapter":
            fields["loras"] = {"adapter": value}
        elif instruction == "parameter":
            key, *numbers = value.split() or [""]
            number = whole_number(numbers[0]) if numbers else None
            if key == "num_ctx" and number is not None:
                fields["context"] = number
            elif key == "num_ctx":
                notices.append(Notice(line, "PARAMETER num_ctx: it is no number of tokens."))
            else:
                notices.append(Notice(line, f"PARAMETER {key}: clients send it with each request."))
        else:
            why = _OWN_INSTRUCTIONS.get(instruction, "it has no equal here; leave it out")
            notices.append(Notice(line, f"{instruction.upper()}: {why}."))
    models: dict[str, dict[str, Any]] = {}
    _keep(models, name, fields, notices, first_line)
    return ImportedModels(models, notices)


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """The line, the name in lower case and the value of each instruction of a Modelfile."""
    lines = enumerate(text.splitlines(), start=1)
    for number, line in lines:
        name, *rest = line.split(maxsplit=1) or ["#"]
        if name.startswith("#"):
            continue
        value = rest[0].strip() if rest else ""
        # A role stands before the text of a message.
        quoted = value.split(maxsplit=1)[-1] if name.lower() == "message" and value else value
        quote = next((sign for sign in ('"""', '"') if quoted.startswith(sign)), "")
        if quote and (len(quoted) < 2 * len(quote) or not quoted.endswith(quote)):
            further = [value]
            for _, line_inside in lines:
                further.append(line_inside)
                if line_inside.rstrip().endswith(quote):
                    break
            value = "\n".join(further)
        yield number, name.lower(), value.strip('"')


def _start(
    words: Sequence[str], variables: Mapping[str, str], knowledge: EngineKnowledge
) -> tuple[dict[str, Any], list[str]]:
    """The fields and notices of a command that starts an engine."""
    command = engine_command(words)
    if command is None:
        source = _option(words, ("-hf", "-hfr", "--hf-repo", "-m", "--model"))
        program = words[0].rpartition("/")[2][:80] if words else "the command"
        # `python -m` names no model.
        is_model = "/" in source or "gguf" in source.lower()
        return {"source": source} if is_model else {}, [f"{program} starts no vLLM or SGLang."]
    engine = knowledge.engines[command.kind]
    result = FlagReader(engine, knowledge.closing_reason).read(command.flags)
    fields, problems = result.fields, result.notices
    names = fields.pop("names", [])
    if names:
        fields["aliases"] = names
    passed = dict(variables) | _pairs(_options(command, _ENV_OPTIONS))
    if "run" not in command.words:
        passed |= _pairs([word for word in command.words if _ASSIGNMENT.fullmatch(word)])
    more, notices = environment(passed, engine)
    fields |= more
    if gpus := _gpus_text(next(iter(_options(command, ("--gpus",))), "")):
        fields["gpus"] = gpus
    if options := sorted({*container_options(command.words)} - {*_READ_OPTIONS}):
        problems.append(f"{', '.join(options)}: the gateway starts its engines by itself.")
    return fields, [*problems, *notices]


def _interpolate(word: str) -> str:
    """A word of a compose file: with defaults in the place of variables, and others by the name of
    the variable as a models file has it."""
    return "$".join(
        _COMPOSE_VARIABLE.sub(_REFERENCE, _COMPOSE_DEFAULT.sub(r"\1", part))
        for part in word.split("$$")
    )


def _options(command: EngineCommand, names: Sequence[str]) -> list[str]:
    """The values of an option before the engine's own flags."""
    words = command.words
    values = [words[at + 1] for at, word in enumerate(words[:-1]) if word in names]
    prefixes = tuple(f"{name}=" for name in names if name.startswith("--"))
    return values + [word.partition("=")[2] for word in words if word.startswith(prefixes)]


def _option(words: Sequence[str], names: Sequence[str]) -> str:
    return next((words[at + 1] for at, word in enumerate(words[:-1]) if word in names), "")


def _gpus_text(text: str) -> list[str] | int | None:
    """The GPUs of `docker run --gpus`: all (None), a number, or `device=0,1`."""
    plain = text.strip("\"'")
    if (number := whole_number(plain)) is not None:
        return number
    return plain.removeprefix("device=").split(",") if plain.startswith("device=") else None


def _devices(service: Mapping[str, Any]) -> list[str] | int | None:
    """The GPUs of a compose service; None: all, or none are named."""
    node: Any = service
    for key in ("deploy", "resources", "reservations", "devices"):
        node = node.get(key) if isinstance(node, dict) else None
    for device in node if isinstance(node, list) else ():
        if isinstance(device, dict) and isinstance(device.get("device_ids"), list):
            return [str(identifier) for identifier in device["device_ids"]]
        if isinstance(device, dict) and type(device.get("count")) is int:
            return int(device["count"])
    return None


def _pairs(variables: object) -> dict[str, str]:
    """Variables by name, from a mapping or from `NAME=VALUE` items."""
    if isinstance(variables, dict):
        return {str(name): str(value) for name, value in variables.items() if value is not None}
    items = variables if isinstance(variables, list) else ()
    return dict(str(item).split("=", 1) for item in items if "=" in str(item))


def _texts(macros: object) -> dict[str, str]:
    entry_fields = macros if isinstance(macros, dict) else {}
    return {str(name): str(value) for name, value in entry_fields.items()}


def _expand_macros(text: str, macros: Mapping[str, str]) -> str:
    """The text with its macros, which may hold others; unknown ones stay, and all where the text
    would be too long."""
    for _ in range(4):
        used = [macros[name] for name in _MACRO.findall(text) if name in macros]
        if len(text) + sum(map(len, used)) > _MAX_COMMAND_CHARACTERS:
            break
        text = _MACRO.sub(lambda match: macros.get(match[1], match[0]), text)
    return _SWAP_VARIABLE.sub(_REFERENCE, text)


def _keep(
    models: dict[str, dict[str, Any]],
    name: str,
    fields: dict[str, Any],
    notices: list[Notice],
    line: int,
) -> None:
    """Add a model, or say why its weights cannot be served."""
    source = str(fields.get("source") or "")
    if "gguf" in source.lower():
        words = _GGUF.sub("", source.rstrip("/").rpartition("/")[2].partition(":")[0])
        notices.append(
            Notice(
                line,
                f"{name}: {source} is GGUF, which is not planned here. `fitserve"
                f" search {words}` finds the model in another form.",
            )
        )
    elif "/" not in source:
        problem = "no model"
        if source and "engines" in fields:
            problem = f"{source!r} is no folder and no repository as ORGANIZATION/NAME"
        elif source:
            problem = f"names of Ollama's library, as {source}, are not known"
        notices.append(
            Notice(line, f"{name}: {problem}. `fitserve search WORDS` finds the repository.")
        )
    elif "$" in (unknown := re.sub(r"\$\{env:\w+\}", "", source)):
        problem = f"the value of {unknown[unknown.index('$') :][:80]} is not in the file"
        notices.append(Notice(line, f"{name}: {problem}. Write `source` yourself."))
    elif not re.fullmatch(NAME_PATTERN, name):
        notices.append(Notice(line, f"{name!r} cannot be a model's name. Choose another one."))
    else:
        fields["aliases"] = [alias for alias in fields.get("aliases", ()) if alias != name]
        models[name] = {
            key: value for key, value in fields.items() if value not in ([], {}, None, "")
        }


def _drop_refused_fields(imported: ImportedModels) -> ImportedModels:
    """The models without fields that a wish does not take, each with a notice."""
    notices = list(imported.notices)
    models: dict[str, dict[str, Any]] = {}
    for name, fields in imported.models.items():
        remaining = dict(fields)
        for _ in range(len(fields)):
            try:
                ModelRequest.model_validate({"name": name, **remaining}).wish()
                break
            except ValidationError as error:
                field = str(error.errors()[0]["loc"][0]) if error.errors()[0]["loc"] else ""
                if remaining.pop(field, None) is None:
                    break
                notices.append(Notice(1, f"{name}: {first_problem(error)}. It is left out."))
        models[name] = remaining
    return ImportedModels(models, sorted(notices))
