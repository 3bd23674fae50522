"""A command line that starts vLLM or SGLang, as fields of a wish. Pure."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gateway.domain import Engine
from gateway.errors import BadFlag
from gateway.variables import engine_env

ClosingReason = Callable[[str], tuple[str, str]]
"""A flag -> why users may not give it, and what to do."""

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
    "-q": "quantization",
} | {"-dp": "data-parallel-size"}
_LISTS = ("served-model-name", "lora-modules", "lora-paths")
# Letters of vLLM's human_readable_int (vllm/engine/arg_utils.py of 0.33.0).
_LETTERS = {"": 1, "k": 1000, "m": 10**6, "K": 1024, "M": 1024**2}
_DTYPES = {"half": "float16", "float": "float32"}
_TEMPLATE_FILE = "${{file:{}}}"
_MEMORY = ("gpu-memory-utilization", "mem-fraction-static")


class EngineCommand(NamedTuple):
    """kind: of the engine. image: of its container; "": none. words: before the engine's flags.
    flags: words of its flags."""

    kind: str
    image: str
    words: tuple[str, ...]
    flags: tuple[str, ...]


class ImportedFields(NamedTuple):
    """fields: of a wish. notices: what has no equal, and what to do."""

    fields: dict[str, Any]
    notices: list[str]


def split_words(command: object) -> list[str]:
    """The words of a command: of a shell line with continued lines, or of a list."""
    if isinstance(command, list | tuple):
        return [str(word) for word in command]
    try:
        return shlex.split(str(command or "").replace("\\\n", " "))
    except ValueError:
        return str(command).split()


def engine_command(words: Sequence[str]) -> EngineCommand | None:
    """The start of an engine in a command line; None: the command starts no engine of ours."""
    for kind, start in _STARTS:
        for index in range(len(words) - len(start) + 1):
            part = tuple(word.rpartition("/")[2] for word in words[index : index + len(start)])
            if part == start:
                return EngineCommand(
                    kind, "", tuple(words[:index]), tuple(words[index + len(start) :])
                )
    if "run" in words[:3]:
        for index, word in enumerate(words):
            if (match := _IMAGE.fullmatch(word)) and index > 1 and "=" not in word:
                return EngineCommand(
                    match[1].lower(), word, tuple(words[:index]), tuple(words[index + 1 :])
                )
    return None


def image_kind(image: str) -> str:
    """The engine in an image, by its name; "": no engine of ours."""
    match = _IMAGE.fullmatch(image)
    return match[1].lower() if match else ""


class FlagReader:
    """Reads flags of one engine version."""

    def __init__(self, engine: Engine, closing_reason: ClosingReason) -> None:
        self._engine, self._closing_reason = engine, closing_reason
        self._planned = {name: planned for planned, name in engine.spelling.items()}
        self._fields: dict[str, Any] = {}
        self._notices: list[str] = []

    def read(self, words: Sequence[str]) -> ImportedFields:
        """The fields of a wish for these words behind the start of the engine."""
        self._fields, self._notices = {"engines": [self._engine.kind]}, []
        positional, flags = self._split(words)
        if positional:
            self._fields["source"] = positional[0]
        for name, values in flags:
            self._add(name, values)
        return ImportedFields(self._fields, self._notices)

    def _split(self, words: Sequence[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
        """Words without a flag, and the flags with their values."""
        positional: list[str] = []
        flags: list[tuple[str, list[str]]] = []
        rest = list(words)
        while rest:
            word = rest.pop(0)
            if word in _SHORT_FORMS:
                flags.append((_SHORT_FORMS[word], [rest.pop(0)] if rest else []))
                continue
            if not word.startswith("--"):
                positional.append(word)
                continue
            name, equals, value = word[2:].partition("=")
            name = name.replace("_", "-")
            values = [value] if equals else []
            while rest and not rest[0].startswith("-") and self._takes(name, values):
                values.append(rest.pop(0))
            # A negative number is a value too.
            if rest and not values and re.fullmatch(r"-\d+", rest[0]):
                values.append(rest.pop(0))
            flags.append((name, values))
        return positional, flags

    def _takes(self, name: str, values: Sequence[str]) -> bool:
        flag = self._engine.flags.get(name)
        is_switch = flag is not None and flag.type == "bool"
        return not is_switch and (not values or name in _LISTS)

    def _add(self, name: str, values: list[str]) -> None:
        value = values[0] if values else ""
        planned = self._planned.get(name, name)
        match planned:
            case "model" | "model-path":
                self._fields["source"] = value
            case "served-model-name":
                self._fields["names"] = values
            case "tensor-parallel-size" | "tp" | "tp-size":
                self._number("tensor_parallel", value)
            case "data-parallel-size" | "dp" | "dp-size" if value != "1":
                key = "data_parallel" if "data-parallel-size" in self._engine.flags else "replicas"
                self._number(key, value)
            case "max-model-len" | "context-length":
                self._context(value)
            case "dtype" if value != "auto":
                self._fields["dtype"] = _DTYPES.get(value, value)
            case "revision":
                self._fields["revision"] = value
            case "chat-template":
                self._fields["chat_template"] = {"text": _TEMPLATE_FILE.format(value)}
            case "lora-modules" | "lora-paths":
                self._loras(values)
            case "enable-lora":
                pass
            case "speculative-config":
                self._speculation(value)
            case "trust-remote-code":
                self._fields.setdefault("policy", {})["allow_remote_code"] = True
                self._notices.append(
                    "--trust-remote-code: read the code, then set `revision` to its commit."
                )
            case planned if planned in _MEMORY or name in _MEMORY:
                self._notices.append(
                    f"--{name}={value}: the plan sizes the memory. `args: {{{name}: {value}}}`"
                    " keeps the number."
                )
            case _:
                self._add_flag(name, value)

    def _add_flag(self, name: str, value: str) -> None:
        """A flag that no field of a wish has: kept as it is, or told with the reason."""
        positive = name.removeprefix("no-")
        flag_name = name if name in self._engine.flags else positive
        flag = self._engine.flags.get(flag_name)
        if flag is None:
            self._notices.append(
                f"--{name}: {self._engine.ref} has no such flag. Leave it out, or name a version"
                " that has it in `engines`."
            )
        elif flag.ours:
            why, cure = self._closing_reason(flag_name)
            self._notices.append(f"--{name}: {why}. {cure}")
        else:
            is_switch = flag.type == "bool" and not value
            number = int(value) if value.isdecimal() else value
            self._fields.setdefault("args", {})[flag_name] = (
                flag_name == name if is_switch else number
            )

    def _number(self, field: str, value: str) -> None:
        if value.isdecimal():
            self._fields[field] = int(value)
        else:
            self._notices.append(f"{field}: {value!r} is no number. Write the number.")

    def _context(self, value: str) -> None:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmKM]?)", value)
        if match:
            self._fields["context"] = int(float(match[1]) * _LETTERS[match[2]])
        elif value not in ("auto", "-1"):
            self._notices.append(f"context: {value!r} is no number of tokens. Write the number.")

    def _loras(self, values: Sequence[str]) -> None:
        adapters = dict(value.split("=", 1) for value in values if "=" in value and value[0] != "{")
        if adapters:
            self._fields["loras"] = adapters
        for value in values:
            if "=" not in value or value[0] == "{":
                self._notices.append(f"LoRA {value!r}: write it as `loras: {{NAME: SOURCE}}`.")

    def _speculation(self, value: str) -> None:
        """The drafter or method of vLLM's --speculative-config."""
        try:
            config = json.loads(value)
        except ValueError:
            config = None
        if not isinstance(config, dict):
            self._notices.append("--speculative-config is no JSON object. Write `drafter: MODEL`.")
            return
        method, drafter = str(config.pop("method", "")), config.pop("model", None)
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
