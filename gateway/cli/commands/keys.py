"""`fitserve keys`: keys of the running gateway, with scopes and limits."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from gateway.cli.budget_options import BudgetOptions, describe_use
from gateway.cli.client import call, path_segment
from gateway.cli.options import Json, expand_options, usage_error
from gateway.cli.terminal import print_message, say
from gateway.cli.text_tables import print_table
from gateway.domain.record import FrozenRecord
from gateway.keys import PRIORITIES, SCOPES

_FIRST_KEY_WARNING = (
    "from now on every program needs a key, including this command line and other programs on this"
    " machine."
)
_CLASS_HELP = (
    "Order of waiting requests: interactive, normal, batch, or a number (small ones go first)."
)

app = typer.Typer(no_args_is_help=True, help="Keys with scopes and limits.", rich_markup_mode=None)


class LimitOptions(FrozenRecord, frozen=True):
    """Scopes, models and limits of a key."""

    scope: Annotated[
        list[str] | None, typer.Option(help="inference (the default), read or admin; repeatable.")
    ] = None
    model: Annotated[
        list[str] | None, typer.Option(help="Allowed model; repeatable. Default: all.")
    ] = None
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Limit of requests.")] = (
        None
    )
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Limit for prompts and answers together.")
    ] = None
    max_in_flight: Annotated[
        int | None, typer.Option(min=1, help="Limit of concurrent requests.")
    ] = None
    priority_class: Annotated[str, typer.Option("--class", help=_CLASS_HELP)] = "normal"
    group: Annotated[
        str | None, typer.Option(help="Group whose budget the key shares; new ones have none.")
    ] = None
    expires: Annotated[
        str | None, typer.Option(metavar="YYYY-MM-DD", help="Last day of UTC. Default: no end.")
    ] = None

    record: Annotated[
        bool, typer.Option("--record", help="Keep transcripts of its requests and answers.")
    ] = False

    def fields(self) -> dict[str, Any]:
        """The fields of the request."""
        return {
            "scopes": _check_scopes(self.scope or ["inference"]),
            "models": self.model or None,
            "requests_per_minute": self.requests_per_minute,
            "tokens_per_minute": self.tokens_per_minute,
            "max_in_flight": self.max_in_flight,
            "priority_class": _read_class(self.priority_class),
            "group": self.group,
            "expires": self.expires,
            "is_recorded": self.record or None,
        }


@app.command("add")
@expand_options
def add(
    name: Annotated[str, typer.Argument(help="Name for `keys ls` and `keys rm`.")],
    limits: LimitOptions,
    budget: BudgetOptions,
    as_json: Json = False,
) -> None:
    """Create a key and print it once. The key itself is not stored."""
    grant = {"name": name, **limits.fields(), "budget": budget.fields() or None}
    is_first = not call("GET", "/admin/keys")["data"]
    if is_first and sys.stdin.isatty() and sys.stderr.isatty():
        print_message(f"This is the first key: {_FIRST_KEY_WARNING}")
        typer.confirm("Create it?", abort=True, err=True)
    # The first key closes the gateway to this command.
    missing_models = _missing_models(limits.model or ())
    created_key = call(
        "POST",
        "/admin/keys",
        {field: value for field, value in grant.items() if value is not None},
    )
    say(json.dumps(created_key, indent=2) if as_json else created_key["key"])
    if missing_models:
        print_message(
            f"note: no model is named {', '.join(missing_models)} now. `fitserve ps` lists the"
            f" models, and `fitserve keys rm {name}` removes the key."
        )
    if is_first:
        print_message(
            f"fitserve: This was the first key: {_FIRST_KEY_WARNING} For this shell: export"
            f" FITSERVE_KEY={created_key['key']}"
        )


def _check_scopes(scopes: list[str]) -> list[str]:
    if unknown_scopes := set(scopes) - SCOPES:
        usage_error(
            f"There is no scope {min(unknown_scopes)}; a key may have {', '.join(sorted(SCOPES))}."
        )
    return scopes


def _read_class(text: str) -> str | int | None:
    """The class for the API. None: the usual one."""
    if re.fullmatch("-?[0-9]{1,4}", text):
        return int(text)
    if text not in PRIORITIES:
        usage_error(f"There is no class {text}; a key has {', '.join(PRIORITIES)}, or a number.")
    return None if text == "normal" else text


def _missing_models(models: Sequence[str]) -> list[str]:
    """The names that no model of the gateway has. Keys may come before their models."""
    wishes = [view["wish"] for view in call("GET", "/admin/models")["data"]] if models else []
    names = {name for wish in wishes for name in (wish["name"], *wish["aliases"], *wish["loras"])}
    return [name for name in models if name not in names]


@app.command("ls")
def ls(as_json: Json = False) -> None:
    """List the names and limits of keys, those of the settings first."""
    listing = call("GET", "/admin/keys")
    groups = call("GET", "/admin/key-groups")["data"]
    if as_json:
        say(json.dumps({**listing, "groups": groups}, indent=2))
        return
    rows = [
        (
            key["name"],
            ", ".join(key["scopes"]),
            ", ".join(key["models"] or ("all",)),
            _limits_text(key),
        )
        for key in listing["data"]
    ]
    print_table(
        ("NAME", "SCOPES", "MODELS", "LIMITS"),
        rows,
        empty="There are no keys. The first one, the administrator's, closes the gateway to callers"
        " without a key: `fitserve keys add NAME --scope admin`.",
    )
    if groups:
        group_rows = [
            (group["name"], ", ".join(group["keys"]) or "none", _budget(group) or "none")
            for group in groups
        ]
        say("")
        print_table(("GROUP", "KEYS", "USED"), group_rows)


@app.command("budget")
@expand_options
def budget(
    name: Annotated[str, typer.Argument(help="Name of the key.")],
    options: BudgetOptions,
    as_json: Json = False,
) -> None:
    """Replace the budget of a key. Without options the key has none."""
    answer = call("PUT", f"/admin/keys/{path_segment(name)}/budget", options.fields())
    say(json.dumps(answer, indent=2) if as_json else f"key {name}: budget set")


@app.command("group")
@expand_options
def group(
    name: Annotated[str, typer.Argument(help="Name of the group.")],
    options: BudgetOptions,
    remove: Annotated[bool, typer.Option("--rm", help="Remove a group without keys.")] = False,
    as_json: Json = False,
) -> None:
    """Make a group of keys, or replace the budget that its keys share."""
    path = f"/admin/key-groups/{path_segment(name)}"
    if remove:
        answer = call("DELETE", path)
        say(json.dumps(answer, indent=2) if as_json else f"group {name}: removed")
        return
    answer = call("PUT", path, options.fields())
    say(json.dumps(answer, indent=2) if as_json else f"group {name}: budget set")


@app.command("rm")
def rm(
    name: Annotated[str, typer.Argument(help="Name of the key.")], as_json: Json = False
) -> None:
    """Revoke a key immediately. Exit code 1 if the disk could not be written: a restart would
    restore the key."""
    answer = call("DELETE", f"/admin/keys/{path_segment(name)}")
    say(json.dumps(answer, indent=2) if as_json else f"key {name}: removed")
    if not answer["durable"]:
        print_message(
            "fitserve: The gateway cannot write its disk, so a restart would restore the key"
            f" {name}. The gateway retries every few seconds. Free disk space or repair the"
            " permissions of FITSERVE_DATA_DIR."
        )
        raise typer.Exit(1)


def _limits_text(key: dict[str, Any]) -> str:
    units = (
        ("requests_per_minute", "requests/min"),
        ("tokens_per_minute", "tokens/min"),
        ("max_in_flight", "concurrent"),
    )
    limits = [f"{key[name]:,} {unit}" for name, unit in units if key[name] is not None]
    if key["priority_class"] != "normal":
        limits.append(f"class {key['priority_class']}")
    if "group" in key:
        limits.append(f"group {key['group']}")
    if budget_text := _budget(key):
        limits.append(budget_text)
    if key.get("is_recorded"):
        limits.append("RECORDED")
    if key["expires"] is not None:
        limits.append(f"until {key['expires']}")
    return ", ".join(limits) or "none"


def _budget(owner: dict[str, Any]) -> str:
    """The used part of the budget of a key or a group."""
    suffix = " (soft)" if (owner.get("budget") or {}).get("is_soft") else ""
    return ", ".join(f"{text}{suffix}" for text in describe_use(owner.get("used", [])))
