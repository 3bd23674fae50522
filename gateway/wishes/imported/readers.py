"""Readers of llama-swap's file, Ollama's Modelfile and compose files. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gateway.domain import Engine
from gateway.domain.base import ValidationError
from gateway.domain.endpoint_url import endpoint_url
from gateway.domain.value import first_problem
from gateway.domain.wish import NAME_PATTERN
from gateway.errors import BadRequest, NotFound
from gateway.wishes.imported.container import HostPaths, image_version, volume_mounts
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
from gateway.wishes.yaml_document import Document, read

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
_OWN_STARTS = "the gateway starts its engines by itself"
# Fields that no plan of a machine without GPUs can follow: the engines of these files run on GPUs.
_FIELDS_OF_GPUS = ("engines", "gpus", "tensor_parallel")
_NO_GPU = (
    "this machine has no GPU that engines can use, so the plan chooses. Repeat the import on the"
    " machine that serves the model"
)
_PORT_OPTIONS = ("-p", "--publish")
_PORTS = "clients reach all models at the gateway's port"
_VOLUME_OPTIONS = ("-v", "--volume", "--mount")
_VOLUMES = (
    "the weights are in the gateway's cache (FITSERVE_MODELS_DIR), or in the folder that `source`"
    " names"
)
# Keys of llama-swap for work that the gateway does itself.
_SWAP_KEYS_OF_GATEWAY = {
    "proxy": "the gateway chooses the port of an engine; `endpoints` names one that runs elsewhere",
    "checkEndpoint": "the gateway checks that an engine answers",
    "useModelName": "clients may use `aliases`",
    "unlisted": "each model is listed",
    "filters": "clients send their own parameters",
    "concurrencyLimit": "`concurrency` is what a plan is made for",
    "cmdStop": "the gateway stops its engines",
    "healthCheckTimeout": "each start has as much time as its phases take",
    "logLevel": "FITSERVE_LOG_LEVEL is a setting of the gateway",
    "startPort": "the gateway chooses the ports of engines",
    "peers": "write a model with `endpoints` for each model of a peer",
    "hooks": "`policy: {pinned: true}` keeps a model loaded",
    "matrix": "no sets are needed: models share the GPUs as they fit. In the place of evict_costs,"
    " `policy: {priority: N}` keeps a model longer",
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
    """The models of another program's file.

    models: fields of a models file by name.
    """

    models: dict[str, dict[str, Any]]
    notices: list[Notice]


class _Problem(NamedTuple):
    """A part of one model, or of the file (model ""), without an equal. text: `PART: REASON`."""

    line: int
    model: str
    text: str


class _ReadModels(NamedTuple):
    """Models and problems before problems with one reason become one notice."""

    models: dict[str, dict[str, Any]]
    problems: list[_Problem]


class EngineKnowledge(NamedTuple):
    """The facts about engines that the readers need.

    engines: the newest version by kind.
    closing_reason: a function that says why users may not give a flag.
    engine_of: the engine `kind==version`; raises NotFound.
    has_gpu: whether the machine for which the file is read has a GPU.
    """

    engines: Mapping[str, Engine]
    closing_reason: ClosingReason
    engine_of: Callable[[str], Engine]
    has_gpu: bool = True


def read_file(text: str, name: str, knowledge: EngineKnowledge) -> ImportedModels | None:
    """The models of a file, by its content; None: the file has another kind.

    name: the name of the file, from which the model of a Modelfile is named. Raises BadRequest for
    a file of models or services that is not YAML.
    """
    document = read(text)
    data = document.data if isinstance(document.data, dict) else {}
    if isinstance(data.get("models"), dict):
        return _accepted_models(_read_llama_swap(document, knowledge), knowledge)
    if isinstance(data.get("services"), dict):
        return _accepted_models(_read_compose(document, knowledge), knowledge)
    if any(instruction == "from" and value for _, instruction, value in _instructions(text)):
        return _accepted_models(_read_modelfile(text, name), knowledge)
    if document.mistakes and re.search(r"^(models|services):", text, re.MULTILINE):
        position, reason = document.mistakes[0]
        raise BadRequest(
            f"Line {position.line}, column {position.column}: {reason}.",
            hint="Correct the YAML of this line, then import the file again.",
        )
    return None


def _read_llama_swap(document: Document, knowledge: EngineKnowledge) -> _ReadModels:
    """The models of llama-swap's configuration, and the keys without an equal."""
    models: dict[str, dict[str, Any]] = {}
    problems: list[_Problem] = []
    data = document.data
    pinned_names, is_group_lost = _persistent_members(data.get("groups"))
    for key in data:
        if key == "groups" and is_group_lost:
            problems.append(_Problem(document.position_of((key,)).line, "", f"groups: {_GROUPS}."))
        elif key not in ("models", "macros", "globalTTL", "groups"):
            reason = _SWAP_KEYS_OF_GATEWAY.get(str(key), "it has no equal here; leave it out")
            problems.append(
                _Problem(document.position_of((str(key),)).line, "", f"{key}: {reason}.")
            )
    macros = _macro_texts(data.get("macros"))
    for name, entry in data["models"].items():
        line = document.position_of(("models", str(name))).line
        entry_fields = entry if isinstance(entry, dict) else {}
        texts = macros | _macro_texts(entry_fields.get("macros")) | {"MODEL_ID": str(name)}
        fields, texts_of_problems = _swap_model(entry_fields, texts, knowledge)
        # -1 is the value of the whole file.
        ttl = entry_fields.get("ttl", -1)
        ttl = data.get("globalTTL") if ttl == -1 else ttl
        texts_of_problems += _set_stay(fields, ttl, is_pinned=str(name) in pinned_names)
        problems += [_Problem(line, str(name), text) for text in texts_of_problems]
        _add_model(models, str(name), fields, problems, line)
    return _ReadModels(models, problems)


def _persistent_members(groups: object) -> tuple[set[str], bool]:
    """The members of llama-swap's persistent groups, and whether groups say more than that."""
    pinned_names: set[str] = set()
    is_more = not isinstance(groups, dict)
    for group in groups.values() if isinstance(groups, dict) else ():
        group_fields = group if isinstance(group, dict) else {}
        members = group_fields.get("members")
        names = [str(name) for name in members] if isinstance(members, list) else []
        is_persistent = group_fields.get("persistent") is True
        swaps = group_fields.get("swap") is not False and len(names) > 1
        excludes = group_fields.get("exclusive") is not False and not is_persistent
        pinned_names |= {*names} if is_persistent else set()
        is_more = is_more or swaps or excludes
    return pinned_names, is_more


def _swap_model(
    entry: Mapping[str, Any], macros: Mapping[str, str], knowledge: EngineKnowledge
) -> tuple[dict[str, Any], list[str]]:
    """The fields and problems of a model of llama-swap, without the time that it stays."""
    words = split_words(_expand_macros(str(entry.get("cmd") or ""), macros))
    proxy = _expand_macros(str(entry.get("proxy") or ""), macros)
    if endpoint := _remote_endpoint(proxy, words):
        fields: dict[str, Any] = {"endpoints": [endpoint]}
        problems = ["cmd: the engine of an endpoint is started where it runs."] if words else []
    else:
        fields, problems = _read_engine_start(
            words, _variables_by_name(entry.get("env")), knowledge
        )
    read_keys = {"cmd", "env", "macros", "name", "description", "ttl"}
    for key, value in entry.items():
        if key == "aliases" and isinstance(value, list):
            ids = [alias.get("id") if isinstance(alias, dict) else alias for alias in value]
            fields["aliases"] = [*fields.get("aliases", ()), *map(str, ids)]
        elif key not in read_keys and not (key == "proxy" and endpoint):
            reason = _SWAP_KEYS_OF_GATEWAY.get(str(key), "it has no equal here; leave it out")
            problems.append(f"{key}: {reason}.")
    return fields, problems


def _remote_endpoint(proxy: str, words: Sequence[str]) -> str:
    """The base URL of an engine that runs on another machine; "": the command starts one here.

    A container of this machine may have a name of its own in the URL.
    """
    is_here = "run" in words[:4] or (engine_command(words) is not None and words[0] != "ssh")
    is_local = re.match(r"https?://(localhost|127\.|\[::1\]|0\.0\.0\.0)", proxy)
    if is_here or is_local or not proxy:
        return ""
    try:
        return endpoint_url(proxy)
    except ValueError:
        return ""


def _set_stay(fields: dict[str, Any], ttl: object, *, is_pinned: bool) -> list[str]:
    """Set how long a model stays loaded; problems. ttl: seconds; 0: for ever."""
    if not fields or "endpoints" in fields:
        return []
    policy = fields.setdefault("policy", {})
    if is_pinned:
        policy["pinned"] = True
    if type(ttl) in (int, float) and ttl >= 0:  # type: ignore[operator]
        if is_pinned and ttl:
            return ["ttl: a model of a persistent group is pinned, so it stays loaded."]
        policy["keep_alive"] = f"{ttl}s" if ttl else "-1"
    elif ttl is not None:
        return ["ttl: it is not a number of seconds. Write `policy: {keep_alive: 300s}`."]
    return []


def _read_compose(document: Document, knowledge: EngineKnowledge) -> _ReadModels:
    """The models of a compose file, and the services that start no engine."""
    models: dict[str, dict[str, Any]] = {}
    problems: list[_Problem] = []
    for service, entry in document.data["services"].items():
        line = document.position_of(("services", str(service))).line
        entry_fields = entry if isinstance(entry, dict) else {}
        words = [
            _interpolate_word(word)
            for key in ("entrypoint", "command")
            for word in split_words(entry_fields.get(key))
        ]
        image = _interpolate_word(str(entry_fields.get("image") or ""))
        if engine_command(words) is not None or image_kind(image):
            # `docker run` has the same parts.
            words = ["docker", "run", image, *words]
        if engine_command(words) is None:
            text = "it starts no vLLM or SGLang. Keep it there."
            problems.append(_Problem(line, str(service), text))
            continue
        variables = _variables_by_name(entry_fields.get("environment"))
        volumes = entry_fields.get("volumes")
        mounts = [
            {key: _interpolate_word(str(value)) for key, value in volume.items()}
            if isinstance(volume, dict)
            else _interpolate_word(str(volume))
            for volume in (volumes if isinstance(volumes, list) else ())
        ]
        fields, texts = _read_engine_start(words, variables, knowledge, mounts)
        if devices := _devices(entry_fields):
            fields["gpus"] = devices
        texts += _compose_problems(entry_fields)
        problems += [_Problem(line, str(service), text) for text in texts]
        _add_model(models, str(service), fields, problems, line)
    return _ReadModels(models, problems)


def _compose_problems(entry: Mapping[Any, Any]) -> list[str]:
    """The keys of a service that have no equal here."""
    problems: list[str] = []
    if entry.get("ports"):
        problems.append(f"ports: {_PORTS}.")
    if entry.get("env_file"):
        problems.append("env_file: write the engine's variables under `env`.")
    if keys := sorted({*map(str, entry)} - {*_COMPOSE_KEYS, "env_file"}):
        problems.append(f"{', '.join(keys)}: {_OWN_STARTS}.")
    return problems


def _read_modelfile(text: str, name: str) -> _ReadModels:
    """The model of Ollama's Modelfile, and the instructions without an equal."""
    fields: dict[str, Any] = {}
    problems: list[_Problem] = []
    first_line = 1
    for line, instruction, value in _instructions(text):
        if instruction == "from":
            source = re.sub(r"^(https?://)?(hf\.co|huggingface\.co)/", "", value)
            fields["source"], first_line = source, line
        elif instruction == "adapter":
            adapters = fields.setdefault("loras", {})
            number = len(adapters) + 1
            adapters["adapter" if number == 1 else f"adapter-{number}"] = value
        elif instruction == "parameter":
            key, *numbers = value.split() or [""]
            number_of_tokens = whole_number(numbers[0]) if numbers else None
            if key == "num_ctx" and number_of_tokens is not None:
                fields["context"] = number_of_tokens
            elif key == "num_ctx":
                reason = "it is not a number of tokens"
                problems.append(_Problem(line, "", f"PARAMETER num_ctx: {reason}."))
            else:
                reason = "clients send it with each request"
                problems.append(_Problem(line, "", f"PARAMETER {key}: {reason}."))
        else:
            reason = _OWN_INSTRUCTIONS.get(instruction, "it has no equal here; leave it out")
            problems.append(_Problem(line, "", f"{instruction.upper()}: {reason}."))
    models: dict[str, dict[str, Any]] = {}
    _add_model(models, name, fields, problems, first_line)
    return _ReadModels(models, problems)


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """The line, the name in lower case and the value of each instruction of a Modelfile."""
    lines = enumerate(text.splitlines(), start=1)
    for number, line in lines:
        name, *arguments = line.split(maxsplit=1) or ["#"]
        if name.startswith("#"):
            continue
        value = arguments[0].strip() if arguments else ""
        # A role stands before the text of a message.
        quoted_text = value.split(maxsplit=1)[-1] if name.lower() == "message" and value else value
        quote = next((sign for sign in ('"""', '"') if quoted_text.startswith(sign)), "")
        if quote and (len(quoted_text) < 2 * len(quote) or not quoted_text.endswith(quote)):
            further = [value]
            for _, line_inside in lines:
                further.append(line_inside)
                if line_inside.rstrip().endswith(quote):
                    break
            value = "\n".join(further)
        yield number, name.lower(), value.strip('"')


def _read_engine_start(
    words: Sequence[str],
    variables: Mapping[str, str],
    knowledge: EngineKnowledge,
    volumes: Iterable[object] = (),
) -> tuple[dict[str, Any], list[str]]:
    """The fields and problems of a command that starts an engine. volumes: of a service."""
    command = engine_command(words)
    if command is None:
        source = _option_value(words, ("-hf", "-hfr", "--hf-repo", "-m", "--model"))
        program = words[0].rpartition("/")[2][:80] if words else "the command"
        # `python -m` names no model.
        is_model = "/" in source or "gguf" in source.lower()
        return {"source": source} if is_model else {}, [f"{program} starts no vLLM or SGLang."]
    engine, engine_name, problems = _named_engine(command, knowledge)
    result = FlagReader(engine, knowledge.closing_reason).read(command.flags)
    fields = result.fields | {"engines": [engine_name]}
    problems += result.notices
    names = fields.pop("names", [])
    if names:
        fields["aliases"] = names
    passed_variables = dict(variables) | _variables_by_name(_option_values(command, _ENV_OPTIONS))
    container_words = command.words
    if "run" in container_words[:4]:
        container_words = (
            container_words[container_words.index(command.image) + 1 :]
            if command.image in container_words
            else ()
        )
    passed_variables |= _variables_by_name(
        [word for word in container_words if _ASSIGNMENT.fullmatch(word)]
    )
    other_variables, notices = environment(passed_variables, engine)
    fields |= other_variables
    if gpus := _gpus_text(next(iter(_option_values(command, ("--gpus",))), "")):
        fields["gpus"] = gpus
    options = {*container_options(command.words)}
    if "run" in command.words[:4]:
        problems += _use_host_paths(fields, [*volumes, *_option_values(command, _VOLUME_OPTIONS)])
    if ports := sorted(options.intersection(_PORT_OPTIONS)):
        problems.append(f"{', '.join(ports)}: {_PORTS}.")
    if options := options - {*_READ_OPTIONS, *_VOLUME_OPTIONS, *_PORT_OPTIONS}:
        problems.append(f"{', '.join(sorted(options))}: {_OWN_STARTS}.")
    return fields, [*problems, *notices]


def _named_engine(
    command: EngineCommand, knowledge: EngineKnowledge
) -> tuple[Engine, str, list[str]]:
    """The engine of a command, its name in `engines`, and problems with the tag of its image."""
    newest_engine = knowledge.engines[command.kind]
    if not command.image:
        return newest_engine, command.kind, []
    version, problem = image_version(command.image, newest_engine.image)
    if not version:
        return newest_engine, command.kind, [problem] if problem else []
    try:
        engine = knowledge.engine_of(f"{command.kind}=={version}")
    except NotFound as error:
        return newest_engine, command.kind, [f"image {command.image[:200]}: {error}"]
    return engine, engine.ref, []


def _use_host_paths(fields: dict[str, Any], volumes: Iterable[object]) -> list[str]:
    """Replace paths of the container by those of the host; problems."""
    mounts = volume_mounts(volumes)
    paths = HostPaths(mounts)
    paths.translate(fields)
    unused_targets = [mount.target[:100] for mount in mounts if mount not in paths.used_mounts]
    return [
        *paths.notices,
        *([f"volume {', '.join(unused_targets)}: {_VOLUMES}."] if unused_targets else []),
    ]


def _interpolate_word(word: str) -> str:
    """A word of a compose file: with defaults in the place of variables, and others by the name of
    the variable as a models file has it."""
    return "$".join(
        _COMPOSE_VARIABLE.sub(_REFERENCE, _COMPOSE_DEFAULT.sub(r"\1", part))
        for part in word.split("$$")
    )


def _option_values(command: EngineCommand, names: Sequence[str]) -> list[str]:
    """The values of an option before the engine's own flags."""
    words = command.words
    values = [words[at + 1] for at, word in enumerate(words[:-1]) if word in names]
    prefixes = tuple(f"{name}=" for name in names if name.startswith("--"))
    return values + [word.partition("=")[2] for word in words if word.startswith(prefixes)]


def _option_value(words: Sequence[str], names: Sequence[str]) -> str:
    return next((words[at + 1] for at, word in enumerate(words[:-1]) if word in names), "")


def _gpus_text(text: str) -> list[str] | int | None:
    """The GPUs of `docker run --gpus`: all (None), a number, or `device=0,1`."""
    plain_text = text.strip("\"'")
    if (number := whole_number(plain_text)) is not None:
        return number
    return (
        plain_text.removeprefix("device=").split(",") if plain_text.startswith("device=") else None
    )


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


def _variables_by_name(variables: object) -> dict[str, str]:
    """Variables by name, from a mapping or from `NAME=VALUE` items."""
    if isinstance(variables, dict):
        return {str(name): str(value) for name, value in variables.items() if value is not None}
    items = variables if isinstance(variables, list) else ()
    return dict(str(item).split("=", 1) for item in items if "=" in str(item))


def _macro_texts(macros: object) -> dict[str, str]:
    entry_fields = macros if isinstance(macros, dict) else {}
    return {str(name): str(value) for name, value in entry_fields.items()}


def _expand_macros(text: str, macros: Mapping[str, str]) -> str:
    """The text with its macros, which may hold others; unknown ones stay, and all where the text
    would be too long."""
    for _ in range(4):
        used_macros = [macros[name] for name in _MACRO.findall(text) if name in macros]
        if len(text) + sum(map(len, used_macros)) > _MAX_COMMAND_CHARACTERS:
            break
        text = _MACRO.sub(lambda match: macros.get(match[1], match[0]), text)
    return _SWAP_VARIABLE.sub(_REFERENCE, text)


def _add_model(
    models: dict[str, dict[str, Any]],
    name: str,
    fields: dict[str, Any],
    problems: list[_Problem],
    line: int,
) -> None:
    """Add a model, or say why its weights cannot be served."""
    source = str(fields.get("source") or "")
    if problem := "" if "endpoints" in fields else _source_problem(source, fields):
        problems.append(_Problem(line, name, problem))
    elif not re.fullmatch(NAME_PATTERN, name):
        text = f"{name!r} cannot be a model's name. Choose another one."
        problems.append(_Problem(line, "", text))
    else:
        fields["aliases"] = [alias for alias in fields.get("aliases", ()) if alias != name]
        models[name] = {
            key: value for key, value in fields.items() if value not in ([], {}, None, "")
        }


def _source_problem(source: str, fields: Mapping[str, Any]) -> str:
    """The reason why this source cannot be served; "": it can."""
    if "gguf" in source.lower():
        text = _GGUF.sub("", source.rstrip("/").rpartition("/")[2].partition(":")[0])
        return (
            f"{source} is GGUF, which is not planned here. `fitserve search {text}` finds the"
            " model in another form."
        )
    if "/" not in source:
        problem = "no model"
        words = "WORDS"
        if source and "engines" in fields:
            problem = f"{source!r} is neither a folder nor a repository as ORGANIZATION/NAME"
        elif source:
            problem = f"names of Ollama's library, as {source}, are not known"
            words = " ".join(re.findall(r"[\w.]+", source.removesuffix(":latest"))) or words
        return f"{problem}. `fitserve search {words}` finds the repository."
    if "$" in (unknown_reference := re.sub(r"\$\{env:\w+\}", "", source)):
        variable = unknown_reference[unknown_reference.index("$") :][:80]
        problem = f"the value of {variable} is not in the file"
        return f"{problem}. Write `source` yourself."
    return ""


def _accepted_models(models_read: _ReadModels, knowledge: EngineKnowledge) -> ImportedModels:
    """The models without fields that a wish does not take or this machine cannot have, and a notice
    for each reason."""
    problems = list(models_read.problems)
    models: dict[str, dict[str, Any]] = {}
    for name, fields in models_read.models.items():
        remaining = dict(fields)
        if not knowledge.has_gpu:
            lost_fields = [key for key in _FIELDS_OF_GPUS if remaining.pop(key, None) is not None]
            problems += [_Problem(1, name, f"{key}: {_NO_GPU}.") for key in lost_fields]
        for _ in range(len(fields)):
            try:
                ModelRequest.model_validate({"name": name, **remaining}).wish()
                break
            except ValidationError as error:
                field = str(error.errors()[0]["loc"][0]) if error.errors()[0]["loc"] else ""
                if remaining.pop(field, None) is None:
                    break
                text = f"{first_problem(error)}. It is left out."
                problems.append(_Problem(1, name, text))
        models[name] = remaining
    return ImportedModels(models, _fold(problems))


def _fold(problems: Iterable[_Problem]) -> list[Notice]:
    """One notice for each reason, with its parts and models, at the first line."""
    models_by_reason: dict[str, dict[str, list[_Problem]]] = {}
    for problem in sorted(problems):
        _, reason = _part_and_reason(problem.text)
        models_by_reason.setdefault(reason, {}).setdefault(problem.model, []).append(problem)
    notices: list[Notice] = []
    for reason, problems_by_model in models_by_reason.items():
        models_by_parts: dict[str, list[str]] = {}
        for model, model_problems in problems_by_model.items():
            parts = dict.fromkeys(_part_and_reason(problem.text)[0] for problem in model_problems)
            models_by_parts.setdefault(", ".join(parts), []).append(model)
        subjects = [
            ": ".join(filter(None, (", ".join(filter(None, models)), parts)))
            for parts, models in models_by_parts.items()
        ]
        line = min(
            problem.line
            for model_problems in problems_by_model.values()
            for problem in model_problems
        )
        notices.append(Notice(line, ": ".join(filter(None, ("; ".join(subjects), reason)))))
    return sorted(notices)


def _part_and_reason(text: str) -> tuple[str, str]:
    """The part of a problem's text before its reason; "": the text names no part."""
    part, colon, reason = text.partition(": ")
    return (part, reason) if colon and "`" not in part else ("", text)
