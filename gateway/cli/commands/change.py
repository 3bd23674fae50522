"""`fitserve set` and `fitserve update`: another wish for a model that is there."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from gateway.cli.client import call, of_model
from gateway.cli.options import EndpointKey, Json, KeepAlive, Priority, absolute, usage, wishing
from gateway.cli.present import print_paragraph, show_differences
from gateway.cli.terminal import say, told

# Options whose field of a wish has another name.
_FIELDS = {
    "engine": "engines",
    "for": "goal",
    "tp": "tensor_parallel",
    "arg": "args",
    "endpoint": "endpoints",
    "alias": "aliases",
    "gpu": "gpus",
    "lora": "loras",
}

Unset = Annotated[
    list[str] | None,
    typer.Option(
        "--unset",
        help=(
            "Option that goes back to its default, as context, or arg.FLAG for one flag;"
            " repeatable."
        ),
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be otherwise; change nothing.")
]
Wait = Annotated[
    bool,
    typer.Option(
        "--wait", help="Return when the change is done (exit 0) or was given up (exit 1)."
    ),
]


@wishing
def set_model(
    name: Annotated[str, typer.Argument(help="The model.")],
    source: Annotated[
        str | None, typer.Option(help="Another model folder or repository under the same name.")
    ] = None,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(help="Base URL of an engine that runs elsewhere; repeatable."),
    ] = None,
    endpoint_key: EndpointKey = None,
    *,
    wished: dict[str, Any],
    replicas: Annotated[int | None, typer.Option(min=1, help="Copies.")] = None,
    allow_remote_code: Annotated[
        bool | None,
        typer.Option(
            "--allow-remote-code/--no-allow-remote-code",
            help="Let the engine run the repository's code.",
        ),
    ] = None,
    check: Annotated[
        bool | None,
        typer.Option("--check/--no-check", help="Ask the engine's own code before its start."),
    ] = None,
    keep_alive: KeepAlive = None,
    pinned: Annotated[
        bool | None, typer.Option("--pinned/--no-pinned", help="Never unload it.")
    ] = None,
    priority: Priority = None,
    unset: Unset = None,
    dry_run: DryRun = False,
    wait: Wait = False,
    as_json: Json = False,
) -> None:
    """Change a model while it serves: what is given here is otherwise from now on, all else stays.
    The new engine starts beside the old one where there
    is room, else in its place; where it fails, the old one comes back."""
    given: dict[str, Any] = {
        "source": absolute(source),
        "endpoints": endpoint,
        "endpoint_key": endpoint_key,
    }
    given |= {"replicas": replicas, "check": check}
    patch: dict[str, Any] = {
        **wished,
        **{field: value for field, value in given.items() if value is not None},
    }
    policy = {
        "allow_remote_code": allow_remote_code,
        "keep_alive": keep_alive,
        "pinned": pinned,
        "priority": priority,
    }
    if said := {field: value for field, value in policy.items() if value is not None}:
        patch["policy"] = said
    for option in unset or ():
        _take_back(patch, option)
    if not patch:
        usage("there is nothing to change; `fitserve set --help` lists the options.")
    _change(name, patch, dry_run=dry_run, wait=wait, as_json=as_json)


def update(
    name: Annotated[str, typer.Argument(help="The model.")],
    engine: Annotated[
        str | None, typer.Option(help="Engine version to go to, KIND==VERSION; the weights stay.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: DryRun = False,
    wait: Wait = False,
    as_json: Json = False,
) -> None:
    """Take the present commit of a model's repository, or another engine version, while it serves.
    What is there and what would be is shown first."""
    patch: dict[str, Any] = {"engines": [engine]} if engine is not None else {"commits": None}
    answer = call("PATCH", of_model(name, "?dry_run=true"), patch)
    if engine is not None:
        if not as_json:
            show_differences(answer["wish"] + answer["plan"])
        if (
            answer["wish"]
            and not answer["reason"]
            and not dry_run
            and not yes
            and not typer.confirm(f"Change {name}?")
        ):
            raise typer.Exit(1)
    else:
        before = call("GET", of_model(name))["wish"]["commits"]
        after = answer["commits"]
        if after == before:
            if as_json:
                say(json.dumps(answer, indent=2))
            else:
                print_paragraph(
                    f"{name}: nothing newer:"
                    f" {', '.join(before.values()) or 'its source is a folder'}"
                )
            return
        if not as_json:
            moved = [
                (repo, before.get(repo, "-"), commit)
                for repo, commit in after.items()
                if before.get(repo) != commit
            ]
            show_differences([{"what": repo, "old": old, "new": new} for repo, old, new in moved])
        if not dry_run and not yes and not typer.confirm(f"Change {name}?"):
            raise typer.Exit(1)
        # What was shown, wherever the branch moves meanwhile.
        patch = {"commits": {**dict.fromkeys(before.keys() - after.keys()), **after}}
    _change(name, patch, dry_run=dry_run, wait=wait, as_json=as_json)


def _take_back(patch: dict[str, Any], option: str) -> None:
    head, _, one = option.removeprefix("--").partition(".")
    field = _FIELDS.get(head, head).replace("-", "_")
    if field in ("allow_remote_code", "wait_s", "max_attempts", "keep_alive", "pinned", "priority"):
        field, one = "policy", field
    if not one:
        patch[field] = None
    elif isinstance(patch.setdefault(field, {}), dict):
        patch[field][one] = None


def _change(name: str, patch: dict[str, Any], *, dry_run: bool, wait: bool, as_json: bool) -> None:
    answer = call("PATCH", of_model(name, "?dry_run=true" if dry_run else ""), patch)
    if as_json and not wait:
        say(json.dumps(answer, indent=2))
    elif not as_json:
        show_differences(answer["wish"] + answer["plan"])
        if answer["reason"]:
            print_paragraph(f"No plan: {answer['reason']}")
        elif not answer["wish"]:
            print_paragraph(f"{name}: nothing is otherwise")
        elif not answer["anew"]:
            print_paragraph(f"{name}: no engine has to be started anew")
        elif not dry_run:
            print_paragraph(f"{name}: being changed; `fitserve show {name}` tells how far it is")
    if dry_run and answer["reason"]:
        raise typer.Exit(3)
    if wait and not dry_run:
        view = _settled(name)
        if as_json:
            say(json.dumps(view, indent=2))
        if view["change"]:
            told(f"fitserve: the change of {name} was given up: {view['change']['detail']}")
            raise typer.Exit(1)


def _settled(name: str) -> Any:
    import time

    while True:
        view = call("GET", of_model(name))
        if view["change"] is None or view["change"]["state"] == "refused":
            return view
        time.sleep(0.5)
