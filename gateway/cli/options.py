"""The options that commands of `fitserve` share, and how their values are read."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from gateway.cli.terminal import told
from gateway.errors import BadRequest

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Engines = Annotated[
    list[str] | None,
    typer.Option("--engine", help="Allowed engine, KIND or KIND==VERSION; repeatable."),
]
Image = Annotated[
    str | None,
    typer.Option(
        help="Image that holds the engine, instead of its project's; without --engine it is asked."
    ),
]
Tp = Annotated[int | None, typer.Option("--tp", min=1, help="Tensor parallel size.")]
Goal = Annotated[
    str | None,
    typer.Option(
        "--for", help="What it is for: balanced (the default), latency, throughput or context."
    ),
]
Concurrency = Annotated[int | None, typer.Option(min=1, help="Requests at once that are expected.")]
Gpus = Annotated[
    str | None,
    typer.Option(help="GPUs that it may take: all, few, a number, or UUIDs with commas between."),
]
Gpu = Annotated[
    list[str] | None,
    typer.Option(
        "--gpu", help="GPU that it may take: its number in nvidia-smi, or its UUID; repeatable."
    ),
]
Aliases = Annotated[
    list[str] | None, typer.Option("--alias", help="Another name that clients may use; repeatable.")
]
Dtype = Annotated[
    str | None, typer.Option(help="Type of the weights: auto, bfloat16, float16 or float32.")
]
Template = Annotated[
    Path | None,
    typer.Option(
        "--chat-template",
        help="Jinja file that makes messages a prompt, instead of the model's own.",
    ),
]
EndpointKey = Annotated[
    str | None,
    typer.Option(
        help=(
            "Where the gateway has the key for them: env:FITSERVE_ENDPOINT_KEY_NAME, or file:NAME"
            " in DATA_DIR/endpoint-keys."
        )
    ),
]
Loras = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        help=(
            "LoRA adapter, NAME=SOURCE: a folder or a repository, served under that name;"
            " repeatable."
        ),
    ),
]
Context = Annotated[
    int | None, typer.Option(min=1, help="Tokens of context; plans with as many come first.")
]
MinContext = Annotated[
    int | None, typer.Option(min=1, help="Refuse plans with fewer tokens of context.")
]
MaxContext = Annotated[int | None, typer.Option(min=1, help="Never plan more tokens of context.")]
Args = Annotated[
    list[str] | None,
    typer.Option("--arg", help="Engine flag that wins over the planner, FLAG=VALUE; repeatable."),
]
Env = Annotated[
    list[str] | None,
    typer.Option("--env", help="Environment variable of the engine, NAME=VALUE; repeatable."),
]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a Hugging Face repository.")
]
KeepAlive = Annotated[
    str | None,
    typer.Option(
        help="How long it stays loaded without a request: 5m, 1h30m, 300, 0, -1 (for ever)."
    ),
]
Priority = Annotated[
    int | None,
    typer.Option(
        min=-100, max=100, help="Of models that could give way to another, the lowest goes first."
    ),
]
Drafter = Annotated[
    str | None, typer.Option(help="Model that drafts tokens for this one: folder or repository.")
]
Speculative = Annotated[
    str | None, typer.Option(help="Draft tokens without a drafter: auto, mtp, ngram or off.")
]
Hardwares = Annotated[
    str | None,
    typer.Option(
        "--hardware", help="Snapshots (2x3090, a file), comma-separated; else this machine."
    ),
]


def _wished(
    engine: Engines = None,
    image: Image = None,
    goal: Goal = None,
    concurrency: Concurrency = None,
    gpus: Gpus = None,
    gpu: Gpu = None,
    alias: Aliases = None,
    dtype: Dtype = None,
    context: Context = None,
    tp: Tp = None,
    min_context: MinContext = None,
    max_context: MaxContext = None,
    arg: Args = None,
    env: Env = None,
    chat_template: Template = None,
    lora: Loras = None,
    drafter: Drafter = None,
    speculative: Speculative = None,
    revision: Revision = None,
) -> dict[str, Any]:
    """What the options that make a wish say, as fields of a Wish; what was not given is not
    there."""
    given: dict[str, Any] = {
        "engines": engine or None,
        "args": pairs(arg) or None,
        "env": variables(env) or None,
        "image": image,
        "goal": goal,
        "concurrency": concurrency,
        "gpus": _gpus(gpus, gpu),
        "aliases": alias or None,
        "dtype": dtype,
        "context": context,
        "tensor_parallel": tp,
        "min_context": min_context,
        "max_context": max_context,
        "loras": _loras(lora) or None,
        "chat_template": _template(chat_template) if chat_template is not None else None,
        "drafter": absolute(drafter),
        "speculative": speculative,
        "revision": revision,
    }
    return {name: value for name, value in given.items() if value is not None}


def _gpus(text: str | None, named: list[str] | None) -> str | int | list[str] | None:
    if named:
        if text is not None:
            usage("--gpus says how many, and --gpu which: give one of them.")
        return [part for one in named for part in one.split(",")]
    if text is None or text in ("all", "few"):
        return text
    if not text.isdecimal():
        return [part.strip() for part in text.split(",")]
    if int(text) < 1:
        usage("--gpus takes all, few, a number from 1 on, or UUIDs with commas between.")
    return int(text)


def _template(file: Path) -> dict[str, str]:
    """Its content: the gateway may run elsewhere, and what is written into the file later changes
    nothing."""
    try:
        text = file.read_bytes().decode()
    except OSError as error:
        usage(f"{file} cannot be read: {error.strerror}.")
    except ValueError:
        usage(f"{file} is not text in UTF-8.")
    return {"text": text, "name": re.sub(r"[^\w. -]", "_", file.name)[:100]}


def _loras(items: list[str] | None) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for item in items or ():
        name, equals, source = item.partition("=")
        if not name or not equals or not source:
            usage(f"--lora takes NAME=SOURCE, not {item!r}.")
        found[name] = absolute(source)
    return found


def wishing(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of `_wished` in the place of its parameter `wished`, which gets
    what they say."""
    own, shared = signature(command, eval_str=True), signature(_wished, eval_str=True).parameters

    @wraps(command)
    def run(**given: Any) -> None:
        wished = _wished(**{name: given.pop(name) for name in shared})
        command(**given, wished=wished)

    parameters = [
        option
        for name, given in own.parameters.items()
        for option in (shared.values() if name == "wished" else [given])
    ]
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def pairs(items: list[str] | None) -> dict[str, str]:
    pairs = {}
    for item in items or ():
        name, equals, value = item.partition("=")
        if not name:
            usage(f"--arg takes FLAG=VALUE, not {item!r}.")
        pairs[name.removeprefix("--")] = value if equals else "true"
    return pairs


def variables(items: list[str] | None) -> dict[str, str]:
    found = {}
    for item in items or ():
        name, equals, value = item.partition("=")
        if not name or not equals:
            # The value may be a secret, so what was given is not repeated.
            usage("--env takes NAME=VALUE.")
        found[name] = value
    return found


def seconds(text: str) -> float:
    """A duration as policies have it. Usage error for what is none."""
    from gateway.domain.units import duration

    try:
        found = duration(text)
    except ValueError as error:
        usage(f"--timeout: {error}.")
    return math.inf if found < 0 else found


def absolute(source: str | None) -> str | None:
    """A folder is meant from here, not from where the gateway was started."""
    if source and (source.startswith((".", "~", "/")) or Path(source).is_dir()):
        return str(Path(source).expanduser().absolute())
    return source


def read_wish(**fields: Any) -> Any:
    from pydantic import ValidationError

    from gateway.domain import Wish
    from gateway.domain.value import first_problem

    try:
        return Wish(name="plan", **fields)
    except ValidationError as error:
        raise BadRequest(
            f"{first_problem(error)}.", hint="`fitserve plan --help` lists the options."
        ) from None


def usage(message: str) -> NoReturn:
    told(f"fitserve: {message}")
    raise typer.Exit(2)


# What typer raises for a command line that it cannot read: the base class of all such errors, which
# has no public name in every version.
MISTYPED: type[Any] = typer.BadParameter.__mro__[2]


def mistake(error: Any) -> str:
    """What is wrong with a command line, and where its options are described."""
    shown = io.StringIO()
    error.show(file=shown)
    return shown.getvalue().replace("Value error, ", "").rstrip()
