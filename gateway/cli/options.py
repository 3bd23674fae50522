"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from copy import copy
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NoReturn, get_args, get_type_hints

import msgspec
import typer

from gateway.cli.terminal import print_message
from gateway.domain.record import FrozenRecord
from gateway.domain.release import engine_name
from gateway.domain.units import token_count
from gateway.errors import BadRequest, near_name_hint, plain_problem
from gateway.model_folder import model_folder

if TYPE_CHECKING:
    from gateway.domain import Wish

ModelName = Annotated[str, typer.Argument(help="Name of the model.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
AllRows = Annotated[
    bool,
    typer.Option("--all", help="Print defaults, each layer's kernel and all rejections too."),
]
Engines = Annotated[
    list[str] | None,
    typer.Option("--engine", help="Engine to allow, KIND or KIND==VERSION; repeatable."),
]
Image = Annotated[
    str | None,
    typer.Option(
        help=(
            "Container image of the engine, instead of the project's own. Without --engine, the"
            " image is asked for its engine."
        )
    ),
]
Tp = Annotated[int | None, typer.Option("--tp", min=1, help="Tensor parallel size.")]
Goal = Annotated[
    str | None,
    typer.Option(
        "--for",
        help="Goal of the plan: balanced (the default), latency, throughput, context or agents.",
    ),
]
Concurrency = Annotated[int | None, typer.Option(min=1, help="Expected concurrent requests.")]
Gpus = Annotated[
    str | None,
    typer.Option(help="GPUs that the model may use: all, few, a number, or comma-separated UUIDs."),
]
Gpu = Annotated[
    list[str] | None,
    typer.Option(
        "--gpu",
        help="GPU that the model may use: its number in nvidia-smi, or its UUID; repeatable.",
    ),
]
Aliases = Annotated[
    list[str] | None, typer.Option("--alias", help="Another name for clients; repeatable.")
]
Dtype = Annotated[
    str | None, typer.Option(help="Type of the weights: auto, bfloat16, float16 or float32.")
]
Template = Annotated[
    Path | None,
    typer.Option(
        "--chat-template",
        help="Jinja file that turns messages into a prompt, instead of the model's own template.",
    ),
]
EndpointKey = Annotated[
    str | None,
    typer.Option(
        help=(
            "Where the gateway finds the key of the endpoints: env:FITSERVE_ENDPOINT_KEY_NAME, or"
            " file:NAME in DATA_DIR/endpoint-keys."
        )
    ),
]
Endpoints = Annotated[
    list[str] | None,
    typer.Option("--endpoint", help="Base URL of an engine that runs elsewhere; repeatable."),
]
Loras = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        help=(
            "LoRA adapter, NAME=SOURCE, served under that name. SOURCE is a folder or a"
            " repository; repeatable."
        ),
    ),
]
Context = Annotated[
    str | None,
    typer.Option(help="Context that the model will have: 8192, 32k. Default: what fits."),
]
MinContext = Annotated[str | None, typer.Option(help="Refuse plans with a shorter context.")]
MaxContext = Annotated[str | None, typer.Option(help="Never plan a longer context.")]
Args = Annotated[
    list[str] | None,
    typer.Option("--arg", help="Engine flag that overrides the plan, FLAG=VALUE; repeatable."),
]
Env = Annotated[
    list[str] | None,
    typer.Option("--env", help="Environment variable of the engine, NAME=VALUE; repeatable."),
]
TextOnly = Annotated[
    bool | None,
    typer.Option(
        "--text-only/--no-text-only",
        help="Accept text-only plans, where the model also takes images, video or audio.",
    ),
]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a Hugging Face repository.")
]
KeepAlive = Annotated[
    str | None,
    typer.Option(
        help="How long an idle model stays loaded: 5m, 1h30m, 300 (seconds), 0, -1 (for ever)."
    ),
]
Priority = Annotated[
    int | None,
    typer.Option(
        min=-100,
        max=100,
        help="When a model needs memory, models with the lowest priority are unloaded first.",
    ),
]
Drafter = Annotated[
    str | None,
    typer.Option(help="Draft model for speculative decoding: folder or repository."),
]
Speculative = Annotated[
    str | None,
    typer.Option(help="Speculative decoding without a draft model: auto, mtp, ngram or off."),
]
DraftTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens in each draft, with --speculative or --drafter."),
]
Hardwares = Annotated[
    str | None,
    typer.Option(
        "--hardware", help="Snapshots (2x3090, a file), comma-separated; default: this machine."
    ),
]


class WishOptions(FrozenRecord, frozen=True):
    """The options that describe a wish, for commands decorated with `expand_options`."""

    help_title: ClassVar[str] = "Options of the plan"

    context: Context = None
    goal: Goal = None
    gpus: Gpus = None
    gpu: Gpu = None
    concurrency: Concurrency = None
    engine: Engines = None
    image: Image = None
    alias: Aliases = None
    dtype: Dtype = None
    tp: Tp = None
    min_context: MinContext = None
    max_context: MaxContext = None
    arg: Args = None
    env: Env = None
    text_only: TextOnly = None
    chat_template: Template = None
    lora: Loras = None
    drafter: Drafter = None
    speculative: Speculative = None
    draft_tokens: DraftTokens = None
    revision: Revision = None

    def fields(self) -> dict[str, Any]:
        """The fields of a Wish, without those that were not given."""
        template = self.chat_template
        return drop_none(
            {
                "engines": [engine_name(text) for text in self.engine or ()] or None,
                "args": flag_values(self.arg) or None,
                "env": environment_variables(self.env) or None,
                "image": self.image,
                "goal": _goal_option(self.goal),
                "concurrency": self.concurrency,
                "gpus": _gpu_option(self.gpus, self.gpu),
                "aliases": self.alias or None,
                "dtype": self.dtype,
                "context": read_tokens("--context", self.context),
                "tensor_parallel": self.tp,
                "min_context": read_tokens("--min-context", self.min_context),
                "max_context": read_tokens("--max-context", self.max_context),
                "text_only": self.text_only,
                "loras": _adapter_option(self.lora) or None,
                "chat_template": _template(template) if template is not None else None,
                "drafter": absolute_source(self.drafter),
                "speculative": self.speculative,
                "num_speculative_tokens": self.draft_tokens,
                "revision": self.revision,
            }
        )


Copies = Annotated[
    str | None,
    typer.Option(metavar="LEAST-MOST", help="Least and most copies, which follow the load: 1-4."),
]


class EndpointOptions(FrozenRecord, frozen=True):
    """Engines that run elsewhere, and the reference to their key."""

    help_title: ClassVar[str] = "Engines elsewhere"

    endpoint: Endpoints = None
    endpoint_key: EndpointKey = None


def drop_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def serving_fields(
    *, replicas: int | None, copies: str | None, check: bool | None, **policy: Any
) -> dict[str, Any]:
    """The fields of a request that say how a model is served, without those that are None.

    policy: the fields of `gateway.domain.wish.Policy`.
    """
    return drop_none(
        {
            "replicas": replicas,
            "copies": copies,
            "check": check,
            "policy": drop_none(policy) or None,
        }
    )


def _goal_option(text: str | None) -> str | None:
    """The goal in small letters; one agent is a form of agents."""
    return {"agent": "agents"}.get(text.lower(), text.lower()) if text is not None else None


_GPUS_FORMS = "--gpus takes all, few, a number of at least 1, or comma-separated UUIDs"
# NVML's UUIDs of a GPU, and of a part of one.
_UUIDS = ("GPU-", "MIG-")


def _gpu_option(text: str | None, identifiers: list[str] | None) -> str | int | list[str] | None:
    if identifiers:
        if text is not None:
            usage_error("Give --gpus (how many) or --gpu (which), not both.")
        return [part for identifier in identifiers for part in identifier.split(",")]
    if text is None or text in ("all", "few"):
        return text
    if not text.isdecimal():
        identifiers = [part.strip() for part in text.split(",")]
        if not all(part.isdecimal() or part.upper().startswith(_UUIDS) for part in identifiers):
            usage_error(f"{_GPUS_FORMS}, not {text[:80]!r}{near_name_hint(text, ('all', 'few'))}.")
        return identifiers
    if int(text) < 1:
        usage_error(f"{_GPUS_FORMS}.")
    return int(text)


def _template(file: Path) -> dict[str, str]:
    """The content of the file, because the gateway may run elsewhere."""
    try:
        text = file.read_bytes().decode()
    except OSError as error:
        usage_error(f"{file} cannot be read: {error.strerror}.")
    except ValueError:
        usage_error(f"{file} is not text in UTF-8.")
    return {"text": text, "name": re.sub(r"[^\w. -]", "_", file.name)[:100]}


def _adapter_option(items: list[str] | None) -> dict[str, str | None]:
    adapters: dict[str, str | None] = {}
    for option_text in items or ():
        name, separator, source = option_text.partition("=")
        if not name or not separator or not source:
            usage_error(f"--lora takes NAME=SOURCE, not {option_text!r}.")
        adapters[name] = absolute_source(source)
    return adapters


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with one option for each field of its parameters that are records."""
    command_signature = signature(command, eval_str=True)
    groups = {
        name: _field_options(parameter.annotation)
        for name, parameter in command_signature.parameters.items()
        if isinstance(parameter.annotation, type) and issubclass(parameter.annotation, FrozenRecord)
    }

    @wraps(command)
    def run(**values: Any) -> None:
        for name, options in groups.items():
            group = command_signature.parameters[name].annotation
            values[name] = group(**{option.name: values.pop(option.name) for option in options})
        command(**values)

    options = [
        option.replace(kind=Parameter.KEYWORD_ONLY)
        for name, parameter in command_signature.parameters.items()
        for option in groups.get(name, [parameter])
    ]
    run.__signature__ = command_signature.replace(parameters=options)  # type: ignore[attr-defined]
    return run


def _field_options(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    title = getattr(group, "help_title", None)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=_title_option(hints[field.name], title),
        )
        for field in msgspec.structs.fields(group)
    ]


def _title_option(annotation: Any, title: str | None) -> Any:
    """The annotation of an option that stands under this title in `--help`."""
    kind, *information = get_args(annotation)
    option = copy(information[0])
    option.rich_help_panel = title
    return Annotated[kind, option]


def flag_values(items: list[str] | None) -> dict[str, str]:
    """The values of --arg by flag name."""
    flags = {}
    for option_text in items or ():
        name, separator, value = option_text.partition("=")
        if not name:
            usage_error(f"--arg takes FLAG=VALUE, not {option_text!r}.")
        flags[name.removeprefix("--")] = value if separator else "true"
    return flags


def environment_variables(items: list[str] | None) -> dict[str, str]:
    """The values of --env by name."""
    variables = {}
    for option_text in items or ():
        name, separator, value = option_text.partition("=")
        if not name or not separator:
            # The value may be a secret, so the message does not repeat it.
            usage_error("--env takes NAME=VALUE.")
        variables[name] = value
    return variables


def timeout_seconds(text: str) -> float:
    """The seconds of a duration such as 10m; negative durations never end."""
    from gateway.domain.units import duration

    try:
        seconds = duration(text)
    except ValueError as error:
        usage_error(f"--timeout: {error}.")
    return math.inf if seconds < 0 else seconds


def absolute_source(source: str | None) -> str | None:
    """A folder becomes an absolute path: the gateway may run in another folder. A `config.json`
    stands for its folder, and a file is not a repository."""
    source = source and model_folder(source)
    if source and (source.startswith((".", "~", "/")) or Path(source).exists()):
        return str(Path(source).expanduser().absolute())
    if source and "/" in source and (parent := Path(source).parent).is_dir():
        print_message(
            f"note: there is no folder {source} in {Path.cwd()}, although there is {parent}. The"
            " source is taken for a Hugging Face repository."
        )
    return source


def read_wish(**fields: object) -> Wish:
    """The Wish with these fields. Raises BadRequest."""
    from gateway.domain import Wish
    from gateway.domain.base import ValidationError
    from gateway.domain.value import first_problem

    try:
        return Wish.model_validate({"name": "plan", **fields})
    except ValidationError as error:
        problem = first_problem(error).replace("goal: must be", "--for takes", 1)
        raise BadRequest(f"{problem}.", hint="`fitserve plan --help` lists the options.") from None


def read_tokens(option: str, text: str | None) -> int | None:
    """The tokens of an option's value. Ends the command where the value is not a number of
    tokens."""
    try:
        return None if text is None else token_count(text)
    except ValueError as error:
        usage_error(f"{option}: {error}; {text!r} does not.")


def usage_error(message: str) -> NoReturn:
    """Print the message and exit with code 2."""
    print_message(f"fitserve: {message}")
    raise typer.Exit(2)


# The base class of typer's errors about a command line; it has no public name in every version.
TYPO_ERROR: type[Any] = typer.BadParameter.__mro__[2]


# Options of other programs: what to write instead.
_FOREIGN_OPTIONS = {
    "-v": "`fitserve --version` prints the version.",
    "--ttl": "Write --keep-alive 300s. The 0 of llama-swap is --keep-alive -1.",
    "--keepalive": "Write --keep-alive 5m.",
    "--max-model-len": "Write --context 32k.",
    "--context-length": "Write --context 32k.",
    "--num-ctx": "Write --context 32k.",
    "--ctx-size": "Write --context 32k.",
    "--tensor-parallel-size": "Write --tp 2.",
    "--tp-size": "Write --tp 2.",
    "--lora-modules": "Write --lora NAME=SOURCE.",
    "--gpu-memory-utilization": (
        "The plan sizes the memory. Leave the option out, or write --arg"
        " gpu-memory-utilization=0.9."
    ),
    "--served-model-name": "The name of the model is an argument. Write --alias for more names.",
}


def mistyped_message(error: Any) -> str:
    """The problem of a command line, where its options are described, and the option meant."""
    output = io.StringIO()
    if isinstance(error, typer.BadParameter):
        error.message = plain_problem(error.message)
    error.show(file=output)
    message = output.getvalue().rstrip()
    hint = _hint(error)
    return f"{message}\n{hint}" if hint else message


def _hint(error: Any) -> str:
    """The words to write instead; "": unknown."""
    option = getattr(error, "option_name", "")
    if option in _FOREIGN_OPTIONS:
        return _FOREIGN_OPTIONS[option]
    if error.ctx is None:
        return ""
    command = error.ctx.command
    if command.name == "serve":
        return "`fitserve serve` starts the gateway, and `fitserve add NAME MODEL` a model in it."
    options = {name for parameter in command.params for name in parameter.opts}
    if option.startswith("--") and "--arg" in options:
        return f"A flag of the engine is written --arg {option.lstrip('-')}=VALUE."
    return ""
