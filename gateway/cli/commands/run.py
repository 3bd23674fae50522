"""`fitserve run`: talk with a model in the terminal. A model that is not there yet is planned,
downloaded and added first."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from gateway.cli.client import call, of_model
from gateway.cli.commands.chat import Chat
from gateway.cli.commands.pull import pulled
from gateway.cli.options import Json, absolute, wishing
from gateway.cli.present import show_decision, status_text
from gateway.cli.terminal import Talk, everything, status, told
from gateway.domain.wish import NAME_PATTERN
from gateway.errors import BadRequest, NotReady
from gateway.visible import visible_line

# As a shell says that Ctrl-C ended a command.
_INTERRUPTED = 130
_POLL_S = 0.3
_HOPELESS = ("quarantined", "stopping")
# A request may bring such a model back, or hears why not.
_ASKED = ("ready", "no_plan", "unreachable")


@wishing
def run(
    model: Annotated[
        str,
        typer.Argument(
            help="A model of the gateway; else a model folder or Hugging Face repository."
        ),
    ],
    prompt: Annotated[
        list[str] | None, typer.Argument(help="One prompt, to be answered; else you talk.")
    ] = None,
    *,
    wished: dict[str, Any],
    name: Annotated[
        str | None,
        typer.Option("--name", help="Under which it is added, where it is not there yet."),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", help="What the model is told first.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Talk with MODEL: /bye or Ctrl-D leaves, Ctrl-C stops an answer. What comes through a pipe is
    one prompt. The model goes on serving afterwards."""
    talk = Talk.now()
    words = " ".join(prompt or ())
    if not talk.here and (given := everything().strip()):
        words = f"{words}\n\n{given}" if words else given
    if not talk.here and not words:
        raise BadRequest(
            "There is no prompt.", hint='Give one: `fitserve run MODEL "Hello"`, or in a pipe.'
        )
    try:
        view = _ready(_there(model, name, wished))
    except KeyboardInterrupt:
        told("\nThe gateway goes on with it; `fitserve ps` shows how far it is.")
        raise typer.Exit(_INTERRUPTED) from None
    if view["plan"] is not None and view["plan"]["model"]["task"] != "generate":
        raise BadRequest(f"{view['name']} does not generate text.", hint="Take a model that does.")
    chat = Chat(view["name"], system)
    if not words:
        chat.talk()
    elif not chat.answer(words, as_json=as_json):
        raise typer.Exit(_INTERRUPTED)


def _there(model: str, name: str | None, wished: dict[str, Any]) -> str:
    """The name of the model; where there is none of that name or source, it is added."""
    source = absolute(model)
    for view in call("GET", "/admin/models")["data"]:
        wish = view["wish"]
        if model in (view["name"], *wish["aliases"]) or (
            wish["source"] == source and name in (None, view["name"])
        ):
            return str(view["name"])
    from gateway.domain import Decision

    body = {"name": name or _name_of(model), "source": source, **wished}
    decision = Decision.model_validate(call("POST", "/admin/models?dry_run=true", body))
    if not decision.plans:
        show_decision(decision, as_json=False)
        raise typer.Exit(3)
    from gateway.planner.explain import headline

    told(headline(decision))
    planned = decision.plans[0].model
    if planned.revision is not None:
        pulled(planned.source, planned.revision)
    return str(call("POST", "/admin/models", body)["name"])


def _name_of(model: str) -> str:
    """A name for it: that of the repository, or of the folder."""
    plain = model if re.fullmatch(NAME_PATTERN, model) else model.rstrip("/").rpartition("/")[2]
    if not re.fullmatch(NAME_PATTERN, plain):
        raise BadRequest(f"No name can be made of {model!r}.", hint="Give one with --name.")
    return plain


def _ready(name: str) -> Any:
    """The model's view once it can be asked. Raises NotReady where it has no way to be."""
    import time

    begun = False
    with status() as shown:
        while True:
            view = call("GET", of_model(name))
            if view["state"] in _ASKED:
                return view
            if view["state"] == "stopped" and not begun:
                begun = True
                call("POST", of_model(name, "/start"))
            elif view["state"] in _HOPELESS:
                raise NotReady(
                    f"{name} cannot be served: {visible_line(view['detail']).rstrip('.')}.",
                    hint=f"`fitserve show {name}` says more.",
                )
            shown(f"{name}: {status_text(view)}")
            time.sleep(_POLL_S)
