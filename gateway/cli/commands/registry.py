"""The commands of this folder, for the program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.cli.commands.apply import apply
from gateway.cli.commands.backup import backup, restore
from gateway.cli.commands.completion import completion
from gateway.cli.commands.config import app as config_app
from gateway.cli.commands.events import events
from gateway.cli.commands.export import export
from gateway.cli.commands.listing import list_models, ps
from gateway.cli.commands.pull import pull
from gateway.cli.commands.run import run
from gateway.cli.commands.usage import usage

if TYPE_CHECKING:
    import typer


def add_to(app: typer.Typer) -> None:
    for command in (run, pull, ps, apply, backup, restore, events, usage, export, completion):
        app.command()(command)
    app.command("list")(list_models)
    app.add_typer(config_app, name="config")


def keep_only(app: typer.Typer, name: str = "") -> None:
    """Leave the command of this name alone, where there is one that needs no others: to make the
    parsers of all takes longer than to plan."""
    named = [
        one
        for one in app.registered_commands
        if one.callback and (one.name or one.callback.__name__) == name
    ]
    if named and named[0].callback is not completion:
        app.registered_commands, app.registered_groups = named, []
