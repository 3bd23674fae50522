"""Commands of this folder that the program adds to those of `main`."""

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
    """Add the commands of this folder."""
    for command in (run, pull, ps, apply, backup, restore, events, usage, export, completion):
        app.command()(command)
    app.command("list")(list_models)
    app.add_typer(config_app, name="config")


def keep_only(app: typer.Typer, name: str = "") -> None:
    """Remove all commands but this one, if it exists: the parsers of all cost more time than a
    plan. Completion needs all of them."""
    matches = [
        command
        for command in app.registered_commands
        if command.callback and (command.name or command.callback.__name__) == name
    ]
    if matches and matches[0].callback is not completion:
        app.registered_commands, app.registered_groups = matches, []
