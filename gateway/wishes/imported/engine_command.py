"""A command line that starts vLLM or SGLang, as fields of a wish. Pure."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gateway.domain import Engine
from gateway.domain.units import plural
from gateway.errors import BadFlag
from gateway.variables import engine_env

ClosingReason = Callable[[str], tuple[str, str]]
"""A flag -> the reason why users may not give it, and its equal here ("": none)."""

_IMAGE = re.compile(r"(?:[\w.:-]+/)*(vllm|sglang)[\w.-]*(?:[:@].*)?", re.IGNORECASE)
_STARTS = (
    ("vllm", ("vllm", "serve")),
    ("vllm", ("-m", "vllm.entrypoints.openai.api_server")),
    ("vllm", ("-m", "vllm.entrypoints.cli.main", "serve")),
    ("sglang", ("-m", "sglang.launch_server")),
    ("sglang", ("sglang", "serve")),
)
# Short forms of vLLM's parser (vllm/engine/arg_utils.py of 0.33.0).
_SHORT_FORMS = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-q": "quantization",
}
_LISTS = ("served-model-name", "lora-modules", "lora-paths")
# Options of `docker run` and `podman run` without a value.
_CONTAINER_SWITCHES = (
    "detach disable-content-trust env-host help init interactive no-healthcheck no-hosts"
    " oom-kill-disable privileged publish-all quiet read-only replace rm rmi sig-proxy tty"
    " use-api-socket"
)
_CONTAINER_SWITCH_LETTERS = "diqtP"
_SHELLS = ("sh", "bash", "dash", "zsh")
_SHELL_SIGNS = "();<>|&"
# A longer text is not a number of a flag; also the bound of `int`.
_NUMBER = re.compile(r"[0-9]{1,18}")
# Flags of SGLang's drafting, and its algorithms for layers of the checkpoint and for n-grams.
_DRAFT_FLAGS = frozenset(
    {
        "speculative-algorithm",
        "speculative-num-steps",
        "speculative-eagle-topk",
        "speculative-num-draft-tokens",
    }
)
_DRAFT_METHODS = {"NEXTN": "mtp", "EAGLE": "mtp", "NGRAM": "ngram"}
# Letters of vLLM's human_readable_int (vllm/engine/arg_utils.py of 0.33.0).
_LETTERS = {"": 1, "k": 1000, "m": 10**6, "K": 1024, "M": 1024**2}
_DTYPES = {"half": "float16", "float": "float32"}
_TEMPLATE_FILE = "${{file:{}}}"
_MEMORY = ("gpu-memory-utilization", "mem-fraction-static")
_TEXT_FIELDS = {"model": "source", "model-path": "source", "revision": "revision"}


class EngineCommand(NamedTuple):
    """A command line that starts an engine.

    kind: the kind of the engine.
    image: the image of its container; "": none.
    words: the words before the engine's flags.
    flags: words of its flags.
    """

    kind: str
    image: str
    words: tuple[str, ...]
    flags: tuple[str, ...]


class ImportedFields(NamedTuple):
    """The options of a command line as fields of a wish.

    fields: the fields of a wish.
    notices: settings without an equal, and the remedies.
    """

    fields: dict[str, Any]
    notices: list[str]


def split_words(command: object) -> list[str]:
    """The words of a command: of a shell line with continued lines, or of a list. Lines of comments
    have none."""
    if isinstance(command, list | tuple):
        return [str(word) for word in command]
    lines = str(command or "").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    text = text.replace("\\\n", " ")
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def whole_number(text: str) -> int | None:
    """The number that a text of at most 18 digits writes; None: another text."""
    return int(text) if _NUMBER.fullmatch(text) else None


def _script_words(words: Sequence[str]) -> list[str]:
    """The words of the script after `sh -c`, with the signs of the shell as words; else the same
    words."""
    for at, word in enumerate(words[:-2]):
        is_shell = word.rpartition("/")[2] in _SHELLS
        if is_shell and re.fullmatch(r"-[a-z]*c", words[at + 1]):
            lexer = shlex.shlex(
                words[at + 2].replace("\\\n", " "), posix=True, punctuation_chars=True
            )
            lexer.whitespace_split = True
            try:
                return list(lexer)
            except ValueError:
                return words[at + 2].split()
    return list(words)


def _first_command_words(words: Sequence[str]) -> tuple[str, ...]:
    """The words before the first sign of the shell."""
    signs = (at for at, word in enumerate(words) if word and not word.strip(_SHELL_SIGNS))
    return tuple(words[: next(signs, len(words))])


def container_options(words: Sequence[str]) -> list[str]:
    """The options of `docker run` before the image, without their values."""
    options, _ = _parse_container(words) if "run" in words[:4] else ([], None)
    return options


def _parse_container(words: Sequence[str]) -> tuple[list[str], int | None]:
    """The options of `docker run`, and the index of the image; None: there is none."""
    options: list[str] = []
    index = words.index("run") + 1
    while index < len(words) and words[index].startswith("-"):
        option = words[index]
        options.append(option.partition("=")[0] if option.startswith("--") else option[:2])
        if option.startswith("--"):
            takes_next = "=" not in option and option[2:] not in _CONTAINER_SWITCHES.split()
        else:
            takes_next = len(option[1:].lstrip(_CONTAINER_SWITCH_LETTERS)) == 1
        index += 2 if takes_next else 1
    return options, index if index < len(words) else None


def engine_command(command: Sequence[str]) -> EngineCommand | None:
    """The start of an engine in a command line; None: the command starts no engine of ours."""
    words = _script_words(command)
    _, image_index = _parse_container(words) if "run" in words[:4] else ([], None)
    image = "" if image_index is None else words[image_index]
    for kind, start in _STARTS:
        for index in range(len(words) - len(start) + 1):
            part = tuple(word.rpartition("/")[2] for word in words[index : index + len(start)])
            if part == start:
                flags = _first_command_words(words[index + len(start) :])
                return EngineCommand(kind, image, tuple(words[:index]), flags)
    if image_index is None or not (kind := image_kind(image)):
        return None
    flags = _first_command_words(words[image_index + 1 :])
    return EngineCommand(kind, image, tuple(words[:image_index]), flags)


def image_kind(image: str) -> str:
    """The engine in an image, by its name; "": no engine of ours."""
    match = _IMAGE.fullmatch(image)
    return match[1].lower() if match else ""


class FlagReader:
    """Reads flags of one engine version."""

    def __init__(self, engine: Engine, closing_reason: ClosingReason) -> None:
        self._engine = engine
        self._closing_reason = closing_reason
        self._planned_names = {name: planned_name for planned_name, name in engine.spelling.items()}
        self._fields: dict[str, Any] = {}
        self._notices: list[str] = []

    def read(self, words: Sequence[str]) -> ImportedFields:
        """The fields of a wish for these words after the start of the engine."""
        self._fields = {"engines": [self._engine.kind]}
        self._notices = []
        positional, flags = self._split_words(words)
        if positional:
            self._fields["source"] = positional[0]
        if len(positional) > 1:
            # The words themselves may be secrets of a short form.
            count = plural(len(positional) - 1, "further word")
            self._notices.append(f"{count} without a flag: the engine takes one model.")
        for name, values in flags:
            self._add_field(name, values)
        return ImportedFields(self._fields, self._notices)

    def _split_words(self, words: Sequence[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
        """Words without a flag, and the flags with their values."""
        positional: list[str] = []
        flags: list[tuple[str, list[str]]] = []
        at = 0
        while at < len(words):
            word, separator, value = words[at].partition("=")
            at += 1
            if word in _SHORT_FORMS:
                name = _SHORT_FORMS[word]
            elif word.startswith("--"):
                name = word[2:].replace("_", "-")
            elif word.startswith("-"):
                self._notices.append(f"{word}: this short form is not known. Write the long one.")
                continue
            else:
                positional.append(words[at - 1])
                continue
            values = [value] if separator else []
            while (
                at < len(words)
                and not words[at].startswith("-")
                and self._takes_values(name, values)
            ):
                values.append(words[at])
                at += 1
            # A negative number is a value too.
            if at < len(words) and not values and re.fullmatch(r"-\d+", words[at]):
                values.append(words[at])
                at += 1
            flags.append((name, values))
        return positional, flags

    def _takes_values(self, name: str, values: Sequence[str]) -> bool:
        flags = self._engine.flags
        flag = flags.get(name) or flags.get(name.removeprefix("no-"))
        is_switch = flag is not None and flag.type == "bool"
        return not is_switch and (not values or name in _LISTS)

    def _add_field(self, name: str, values: list[str]) -> None:
        value = values[0] if values else ""
        planned_name = self._planned_names.get(name, name)
        if planned_name in _TEXT_FIELDS:
            self._fields[_TEXT_FIELDS[planned_name]] = value
        elif planned_name in _MEMORY or name in _MEMORY:
            self._notices.append(
                f"--{name}={value}: the plan sizes the memory. `args: {{{name}: {value}}}`"
                " keeps the number."
            )
        elif name in _DRAFT_FLAGS:
            self._add_draft_flag(name, value)
        elif not self._add_special(planned_name, value, values):
            self._add_flag(name, value)

    def _add_special(self, planned_name: str, value: str, values: list[str]) -> bool:
        """Add a flag whose field has another form. Returns whether there is such a field."""
        match planned_name:
            case "served-model-name":
                self._fields["names"] = values
            case "tensor-parallel-size" | "tp" | "tp-size":
                self._add_number("tensor_parallel", value)
            case "data-parallel-size" | "dp" | "dp-size":
                key = "data_parallel" if "data-parallel-size" in self._engine.flags else "replicas"
                if value != "1":
                    self._add_number(key, value)
            case "max-model-len" | "context-length":
                self._add_context(value)
            case "dtype":
                if value != "auto":
                    self._fields["dtype"] = _DTYPES.get(value, value)
            case "chat-template":
                self._fields["chat_template"] = {"text": _TEMPLATE_FILE.format(value)}
            case "lora-modules" | "lora-paths":
                self._add_adapters(values)
            case "speculative-config":
                self._add_speculation(value)
            case "trust-remote-code":
                self._fields.setdefault("policy", {})["allow_remote_code"] = True
                self._notices.append(
                    "--trust-remote-code: read the code, then set `revision` to its commit."
                )
            case _:
                return planned_name == "enable-lora"  # `loras` say it
        return True

    def _add_flag(self, name: str, value: str) -> None:
        """A flag that no field of a wish has: kept as it is, or reported with the reason."""
        positive = name.removeprefix("no-")
        flag_name = name if name in self._engine.flags else positive
        flag = self._engine.flags.get(flag_name)
        if flag is None:
            self._notices.append(
                f"--{name}: {self._engine.ref} has no such flag. `engines` may name a version that"
                " has it."
            )
        elif flag.is_reserved:
            reason, cure = self._closing_reason(flag_name)
            self._notices.append(f"--{name}: {reason}. {cure}".rstrip())
        else:
            is_switch = flag.type == "bool" and not value
            number = whole_number(value)
            setting = value if number is None else number
            self._fields.setdefault("args", {})[flag_name] = (
                flag_name == name if is_switch else setting
            )

    def _add_number(self, field: str, value: str) -> None:
        if (number := whole_number(value)) is not None:
            self._fields[field] = number
        else:
            self._notices.append(f"{field}: {value[:80]!r} is not a number. Write the number.")

    def _add_context(self, value: str) -> None:
        match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([kmKM]?)", value)
        if match:
            self._fields["context"] = int(float(match[1]) * _LETTERS[match[2]])
        elif value not in ("auto", "-1"):
            self._notices.append(
                f"context: {value[:80]!r} is not a number of tokens. Write the number."
            )

    def _add_adapters(self, values: Sequence[str]) -> None:
        adapters = dict(value.split("=", 1) for value in values if "=" in value and value[0] != "{")
        if adapters:
            self._fields["loras"] = adapters
        for value in values:
            if "=" not in value or value[0] == "{":
                self._notices.append(f"LoRA {value!r}: write it as `loras: {{NAME: SOURCE}}`.")

    def _add_draft_flag(self, name: str, value: str) -> None:
        """A flag of SGLang's drafting. A chain of drafts has one token more to verify than steps,
        and one branch."""
        method = _DRAFT_METHODS.get(value.upper())
        if name == "speculative-num-steps":
            self._add_number("num_speculative_tokens", value)
        elif name == "speculative-algorithm" and method is not None:
            self._fields["speculative"] = method
        elif name == "speculative-algorithm" or (name == "speculative-eagle-topk" and value != "1"):
            self._notices.append(f"--{name}={value[:80]} has no equal here. The engine chooses.")

    def _add_speculation(self, value: str) -> None:
        """The drafter or method of vLLM's --speculative-config."""
        try:
            config = json.loads(value)
        except (ValueError, RecursionError):
            config = None
        if not isinstance(config, dict):
            self._notices.append(
                "--speculative-config is not a JSON object. Write `drafter: MODEL`."
            )
            return
        method = str(config.pop("method", ""))
        drafter = config.pop("model", None)
        tokens = config.pop("num_speculative_tokens", None)
        if drafter:
            self._fields["drafter"] = str(drafter)
        elif method in ("ngram", "mtp") or method.endswith("_mtp"):
            self._fields["speculative"] = "ngram" if method == "ngram" else "mtp"
        else:
            self._notices.append(f"--speculative-config: the method {method!r} has no equal here.")
            return
        if type(tokens) is int:
            self._fields["num_speculative_tokens"] = tokens
        for name in config:
            self._notices.append(f"--speculative-config: {name} has no equal. The engine chooses.")


def environment(variables: Mapping[str, str], engine: Engine) -> tuple[dict[str, Any], list[str]]:
    """Fields for the variables of an engine's process, and notices for the others."""
    fields: dict[str, Any] = {}
    notices: list[str] = []
    for name, value in variables.items():
        if name == "CUDA_VISIBLE_DEVICES" and value and value != "all":
            fields["gpus"] = [part.strip() for part in value.split(",")]
        elif name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            notices.append(f"{name}: set FITSERVE_HF_TOKEN in the environment of the gateway.")
        else:
            try:
                engine_env(engine, {name: value}, {})
            except BadFlag as error:
                notices.append(f"{name}: {error}")
            else:
                fields.setdefault("env", {})[name] = value
    return fields, notices
