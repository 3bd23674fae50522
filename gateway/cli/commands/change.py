"""`fitserve set` and `fitserve update`: change a model of the running gateway."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from gateway.cli.client import call, model_path
from gateway.cli.options import (
    Copies,
    EndpointOptions,
    Json,
    KeepAlive,
    ModelName,
    Priority,
    WishOptions,
    absolute_source,
    drop_none,
    expand_options,
    serving_fields,
    usage_error,
)
from gateway.cli.terminal import print_message, say
from gateway.cli.text_tables import print_paragraph, show_changes, wish_and_plan
from gateway.domain.record import FrozenRecord

# Options whose field of a wish has another name.
_FIELDS = {
    "engine": "engines",
    "for": "goal",
    "tp": "tensor_parallel",
    "draft-tokens": "num_speculative_tokens",
    "arg": "args",
    "endpoint": "endpoints",
    "alias": "aliases",
    "gpu": "gpus",
    "lora": "loras",
}
_POLICY = ("allow_remote_code", "wait_s", "max_attempts", "keep_alive", "pinned", "priority")

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the changes; make none.")]
Wait = Annotated[
    bool,
    typer.Option("--wait", help="Return when the change is done (exit 0) or has failed (exit 1)."),
]


class ServingChanges(FrozenRecord, frozen=True):
    """Changes of replicas and policy, and options to reset."""

    replicas: Annotated[int | None, typer.Option(min=1, help="Number of replicas.")] = None
    copies: Copies = None
    allow_remote_code: Annotated[
        bool | None,
        typer.Option(
            "--allow-remote-code/--no-allow-remote-code",
            help="Let the engine run the repository's code.",
        ),
    ] = None
    check: Annotated[
        bool | None,
        typer.Option("--check/--no-check", help="Ask the engine's own code before the start."),
    ] = None
    keep_alive: KeepAlive = None
    pinned: Annotated[
        bool | None, typer.Option("--pinned/--no-pinned", help="Never unload the model.")
    ] = None
    priority: Priority = None
    unset: Annotated[
        list[str] | None,
        typer.Option(
            "--unset",
            help=(
                "Option to reset to its default, such as context, or arg.FLAG for one flag;"
                " repeatable."
            ),
        ),
    ] = None

    def fields(self) -> dict[str, Any]:
        """The fields of the patch, without those that were not given."""
        return serving_fields(
            replicas=self.replicas,
            copies=self.copies,
            check=self.check,
            allow_remote_code=self.allow_remote_code,
            keep_alive=self.keep_alive,
            pinned=self.pinned,
            priority=self.priority,
        )


class ChangeOptions(FrozenRecord, frozen=True):
    """Whether the change is made, and whether the command waits for it."""

    dry_run: DryRun = False
    wait: Wait = False


@expand_options
def set_model(
    name: ModelName,
    endpoints: EndpointOptions,
    wish: WishOptions,
    serving: ServingChanges,
    change: ChangeOptions,
    source: Annotated[
        str | None, typer.Option(help="Another model folder or repository under the same name.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Change a running model; options not given keep their value.

    The new engine starts alongside the old one where memory allows, otherwise in its place. If it
    fails, the old engine comes back.
    """
    patch: dict[str, Any] = {
        **wish.fields(),
        **drop_none(
            {
                "source": absolute_source(source),
                "endpoints": endpoints.endpoint,
                "endpoint_key": endpoints.endpoint_key,
            }
        ),
        **serving.fields(),
    }
    for option in serving.unset or ():
        _reset_option(patch, option)
    if not patch:
        usage_error("there is nothing to change; `fitserve set --help` lists the options.")
    send_change(name, ("PATCH", ""), patch, change, as_json=as_json)


@expand_options
def update(
    name: ModelName,
    change: ChangeOptions,
    engine: Annotated[
        str | None, typer.Option(help="New engine version, KIND==VERSION; the weights stay.")
    ] = None,
    is_confirmed: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Update a running model to a new commit or engine version. Without --engine, the latest commit
    of its repository is used. The differences are shown first."""
    asks_user = not change.dry_run and not is_confirmed
    patch = (
        _commit_patch(name, asks_user=asks_user, as_json=as_json)
        if engine is None
        else _engine_patch(name, engine, asks_user=asks_user, as_json=as_json)
    )
    if patch is not None:
        send_change(name, ("PATCH", ""), patch, change, as_json=as_json)


def _engine_patch(name: str, engine: str, *, asks_user: bool, as_json: bool) -> dict[str, Any]:
    """The change to another engine version, which is shown. asks_user: the user has to agree."""
    patch: dict[str, Any] = {"engines": [engine]}
    answer = call("PATCH", model_path(name, "?dry_run=true"), patch)
    if not as_json:
        show_changes(wish_and_plan(answer))
    is_possible = answer["wish"] and not answer["reason"]
    if is_possible and asks_user:
        _confirm(name)
    return patch


def _commit_patch(name: str, *, asks_user: bool, as_json: bool) -> dict[str, Any] | None:
    """The change to the latest commits, which are shown; None: the model has them already.

    asks_user: the user has to agree.
    """
    answer = call("PATCH", model_path(name, "?dry_run=true"), {"commits": None})
    old_commits = call("GET", model_path(name))["wish"]["commits"]
    new_commits = answer["commits"]
    if new_commits == old_commits:
        _show_up_to_date(name, answer, old_commits, as_json=as_json)
        return None
    if not as_json:
        changes = [
            {"field": repo, "former": old_commits.get(repo, "-"), "present": commit}
            for repo, commit in new_commits.items()
            if old_commits.get(repo) != commit
        ]
        show_changes(changes)
    if asks_user:
        _confirm(name)
    # Exactly the commits that were shown, even if the branch has moved since.
    return {"commits": {**dict.fromkeys(old_commits.keys() - new_commits.keys()), **new_commits}}


def _confirm(name: str) -> None:
    """Let the user agree to the change. Raises Exit if not."""
    if not typer.confirm(f"Change {name}?"):
        raise typer.Exit(1)


def _show_up_to_date(name: str, answer: Any, commits: dict[str, str], *, as_json: bool) -> None:
    if as_json:
        say(json.dumps(answer, indent=2))
        return
    current_commits = ", ".join(commits.values()) or "its source is a folder"
    print_paragraph(f"{name}: up to date: {current_commits}")


def _reset_option(patch: dict[str, Any], option: str) -> None:
    """Add the reset of an option to the patch."""
    head, _, key = option.removeprefix("--").partition(".")
    field = _FIELDS.get(head, head).replace("-", "_")
    if field in _POLICY:
        field, key = "policy", field
    if not key:
        patch[field] = None
    elif isinstance(patch.setdefault(field, {}), dict):
        patch[field][key] = None


def send_change(
    name: str,
    route: tuple[str, str],
    body: dict[str, Any],
    options: ChangeOptions,
    *,
    as_json: bool,
) -> None:
    """Send a change of a model, print its effects, and wait for it where asked to.

    route: method, and suffix of the model's path.
    """
    method, suffix = route
    query = "?dry_run=true" if options.dry_run else ""
    answer = call(method, model_path(name, f"{suffix}{query}"), body)
    waits = options.wait and not options.dry_run
    if as_json and not options.wait:
        say(json.dumps(answer, indent=2))
    elif not as_json:
        _print_change(name, answer, is_dry_run=options.dry_run)
    if options.dry_run and answer["reason"]:
        raise typer.Exit(3)
    if waits:
        view = _wait_for_change(name)
        if as_json:
            say(json.dumps(view, indent=2))
        if view["change"]:
            print_message(f"fitserve: the change of {name} failed: {view['change']['detail']}")
            raise typer.Exit(1)


def _print_change(name: str, answer: Any, *, is_dry_run: bool) -> None:
    """Print the differences of a change, and its effect on the engines."""
    if differences := wish_and_plan(answer):
        show_changes(differences)
    if answer["reason"]:
        print_paragraph(f"No plan: {answer['reason']}")
    elif not answer["wish"]:
        print_paragraph(f"{name}: no change: the model has these values already")
    elif not answer["restarts_engines"]:
        reason = answer.get("no_effect", "")
        effect = f"; the plan stays: {reason}" if reason else ""
        print_paragraph(f"{name}: no engine has to restart{effect}")
    elif not is_dry_run:
        print_paragraph(f"{name}: change started; `fitserve show {name}` shows its progress")


def _wait_for_change(name: str) -> Any:
    """The view of the model once no change is in progress."""
    import time

    while True:
        view = call("GET", model_path(name))
        if view["change"] is None or view["change"]["state"] == "refused":
            return view
        time.sleep(0.5)
