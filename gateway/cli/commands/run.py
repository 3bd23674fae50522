"""`fitserve run`: a conversation with a model, which is planned, downloaded and added if new."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from gateway.cli.chat import Chat
from gateway.cli.client import call, model_path
from gateway.cli.commands.model import WaitReports
from gateway.cli.commands.pull import download
from gateway.cli.options import Json, WishOptions, absolute_source, expand_options
from gateway.cli.present import show_decision
from gateway.cli.terminal import StandardStreams, print_message, read_stdin, status
from gateway.domain.wish import NAME_PATTERN
from gateway.errors import BadRequest, NotFound, NotReady, near_name
from gateway.visible import visible_line

# The exit code of a command that Ctrl-C ended.
_INTERRUPT_EXIT_CODE = 130
_POLL_S = 0.3
_STOP_STATES = ("stopping", "stopped")
_FINAL_STATES = ("quarantined",)
# A request gets an answer or an error in these states.
_ANSWER_STATES = ("ready", "no_plan", "unreachable")


@expand_options
def run(
    model: Annotated[
        str,
        typer.Argument(help="Model of the gateway, model folder or Hugging Face repository."),
    ],
    wish: WishOptions,
    prompt: Annotated[
        list[str] | None, typer.Argument(help="One prompt; default: a conversation.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="Name of a model that is added."),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print the tokens/s of each answer.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Talk with MODEL, adding it first if it is new. /bye or Ctrl-D ends the conversation, Ctrl-C
    stops an answer. Piped input is one prompt. The model keeps serving afterwards."""
    interactive = StandardStreams.detect().is_input_terminal
    text = " ".join(prompt or ())
    if not interactive and (piped := read_stdin().strip()):
        text = f"{text}\n\n{piped}" if text else piped
    if not interactive and not text:
        raise BadRequest(
            "There is no prompt.",
            hint='Give a prompt: `fitserve run MODEL "Hello"`, or through a pipe.',
        )
    try:
        view = _wait_until_ready(_find_or_add(model, name, wish.fields()))
    except KeyboardInterrupt:
        print_message("\nThe gateway continues to load the model; `fitserve ps` shows its state.")
        raise typer.Exit(_INTERRUPT_EXIT_CODE) from None
    if view["plan"] is not None and view["plan"]["model"]["task"] != "generate":
        raise BadRequest(
            f"{view['name']} does not generate text.", hint="Use a model that generates text."
        )
    chat = Chat(view["name"], system, is_verbose=verbose)
    if not text:
        chat.talk()
    elif not chat.answer(text, as_json=as_json):
        raise typer.Exit(_INTERRUPT_EXIT_CODE)


def _find_or_add(model: str, name: str | None, fields: dict[str, Any]) -> str:
    """The name of the model with this name or source, which is added if there is none."""
    source = absolute_source(model)
    views = call("GET", "/admin/models")["data"]
    # Ollama's clients and users add this tag.
    served_names = {alias for view in views for alias in (view["name"], *view["wish"]["aliases"])}
    if model not in served_names and model.removesuffix(":latest") in served_names:
        model = model.removesuffix(":latest")
    for view in views:
        wish = view["wish"]
        if model in (view["name"], *wish["aliases"]) or (
            wish["source"] == source and name in (None, view["name"])
        ):
            return str(view["name"])
    # Neither a folder nor a repository: probably the name of a served model.
    if "/" not in model and source == model and (suggestion := near_name(model, served_names)):
        raise NotFound(
            f"{model} is not a served model, folder or repository.",
            hint=f"Did you mean {suggestion}? `fitserve ps` lists the models.",
        )
    from gateway.domain import Decision

    body = {"name": name or _default_name(model), "source": source, **fields}
    decision = Decision.model_validate(call("POST", "/admin/models?dry_run=true", body))
    if not decision.plans:
        show_decision(decision, as_json=False)
        raise typer.Exit(3)
    from gateway.planner.explain import headline

    print_message(headline(decision))
    planned_model = decision.plans[0].model
    if planned_model.revision is not None:
        download(planned_model.source, planned_model.revision)
    return str(call("POST", "/admin/models", body)["name"])


def _default_name(model: str) -> str:
    """The name of the repository or folder. Raises BadRequest."""
    plain_name = (
        model if re.fullmatch(NAME_PATTERN, model) else model.rstrip("/").rpartition("/")[2]
    )
    if not re.fullmatch(NAME_PATTERN, plain_name):
        raise BadRequest(f"{model!r} gives no valid model name.", hint="Set one with --name.")
    return plain_name


def _wait_until_ready(name: str) -> Any:
    """The view of the model once it can answer. Raises NotReady if it cannot be served."""
    import time

    # Only a model that was stopped before is loaded. Its owner may stop it during the wait.
    may_load = True
    was_loading = False
    reports = WaitReports(name)
    with status() as show_status:
        while True:
            view = call("GET", model_path(name))
            if view["state"] in _ANSWER_STATES:
                return view
            if view["state"] == "stopped" and may_load:
                may_load = False
                call("POST", model_path(name, "/start"))
            elif view["state"] in _FINAL_STATES or (view["state"] == "stopped" and was_loading):
                raise NotReady(
                    f"{name} cannot be served: {visible_line(view['detail']).rstrip('.')}.",
                    hint=f"`fitserve show {name}` shows the details.",
                )
            if view["state"] not in _STOP_STATES:
                may_load = False
                was_loading = True
            if line := reports.line(view, time.monotonic()):
                show_status(line)
            time.sleep(_POLL_S)
