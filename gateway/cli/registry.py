"""Every command of the program with its section in `fitserve --help`, its module and its function.

A command line that begins with a command's name imports only that command: the parsers of all
commands cost more time than a plan.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer

from gateway.cli.plain_values import PlainCommand, PlainGroup
from gateway.errors import BadRequest

# Section: command: function, or `app` of a group, in gateway/cli/commands.
SECTIONS = {
    "Start": {
        "serve": "serve.serve",
        "demo": "demo.demo",
        "agent": "agent.agent",
        "cluster": "cluster.app",
        "doctor": "doctor.doctor",
    },
    "Find and plan, without a gateway": {
        "fits": "catalog.search.fits",
        "search": "catalog.search.search",
        "probe": "probe.probe",
        "plan": "plan.plan",
        "matrix": "plan.matrix",
        "calibrate": "calibrate.calibrate",
        "diagnose": "diagnose.diagnose",
    },
    "Serve models": {
        "run": "run.run",
        "pull": "pull.pull",
        "add": "add.add",
        "set": "change.set_model",
        "update": "change.update",
        "rollback": "history.rollback",
        "stop": "model.stop",
        "unload": "model.unload",
        "start": "model.start",
        "retry": "model.retry",
        "rm": "model.rm",
        "keys": "keys.app",
    },
    "Look": {
        "ps": "listing.ps",
        "list": "listing.list_models",
        "show": "model.show",
        "logs": "model.logs",
        "events": "events.events",
        "history": "history.history",
        "usage": "usage.usage",
        "batches": "batches.app",
        "transcripts": "files.transcripts.app",
        "bench": "speed.bench.bench",
        "tune": "speed.tune.tune",
        "df": "listing.df",
        "facts": "facts.app",
    },
    "Files and engines": {
        "apply": "files.apply.apply",
        "import": "catalog.import_models.import_models",
        "config": "files.config.app",
        "export": "files.export.export",
        "backup": "files.backup.backup",
        "restore": "files.backup.restore",
        "engine": "engine.app",
        "knowledge": "knowledge.app",
        "completion": "completion.completion",
    },
}

EXAMPLES = """\
Examples:
  fitserve plan Qwen/Qwen3-8B --hardware 2x3090   plan for another machine
  fitserve doctor                                 check this machine
  fitserve serve                                  run the gateway
  fitserve add qwen Qwen/Qwen3-8B --wait          serve a model with it
  fitserve run qwen                               talk with the model

Commands under "Serve models" and "Look" ask the running gateway
(FITSERVE_URL).

Exit codes: 0 success, 1 refused or failed, 2 wrong usage, 3 no plan or not
ready, 4 a log that proves nothing."""


# Commands of Ollama, LM Studio and vLLM: what to type here.
FOREIGN_COMMANDS = {
    "create": "`fitserve import Modelfile` writes a file of models, `fitserve add` takes options.",
    "cp": "A second name is `fitserve set NAME --alias OTHER`.",
    "copy": "A second name is `fitserve set NAME --alias OTHER`.",
    "help": "`fitserve --help` lists the commands, `fitserve run --help` describes one.",
    "version": "`fitserve --version` prints it.",
    "chat": "`fitserve run MODEL` begins a conversation.",
    "load": "`fitserve start NAME` loads a stopped model, `fitserve add NAME SOURCE` a new one.",
    "models": "`fitserve list` lists the models, `fitserve ps` those with an engine.",
    "status": "`fitserve ps` lists the models, `fitserve doctor` checks the machine.",
    "download": "`fitserve pull MODEL` downloads the weights.",
    "remove": "`fitserve rm NAME` removes a model.",
    "delete": "`fitserve rm NAME` removes a model.",
    "get": "`fitserve pull MODEL` downloads, `fitserve search WORDS` finds models.",
    "deploy": "`fitserve add NAME SOURCE` serves a model.",
    "server": "`fitserve serve` runs the gateway.",
    "up": "`fitserve serve` runs the gateway, `docker compose up -d` runs it in Docker.",
    "install": "`fitserve engine install KIND==VERSION` installs an engine.",
    "upgrade": "`fitserve update NAME --engine KIND==VERSION` changes the engine of a model.",
    "run-batch": "`fitserve batches --help` describes files of requests.",
    "reload-config": "`fitserve apply FILE` makes the models match a file.",
    "worker": "`fitserve cluster join` adds a machine.",
    "launch": "Apps take http://HOST:PORT/v1 as their base URL; docs/apps.md has their settings.",
    "signin": "No account is needed. FITSERVE_HF_TOKEN opens gated models of the Hub.",
    "signout": "No account is needed. FITSERVE_HF_TOKEN opens gated models of the Hub.",
    "login": "No account is needed. FITSERVE_HF_TOKEN opens gated models of the Hub.",
    "log": "`fitserve logs NAME` prints the log of an engine.",
    "inspect": "`fitserve show NAME` explains a model.",
    "info": "`fitserve show NAME` explains a model.",
    "complete": "`fitserve run MODEL PROMPT` answers one prompt.",
    "collect-env": "`fitserve doctor` checks the machine, `fitserve probe` shows it.",
    "push": "Models are not published from here; the Hugging Face Hub has a client for that.",
}


class SectionedGroup(PlainGroup):
    """The program, whose help lists commands by section and ends with examples."""

    # The base class names the parameters `ctx` and `args`.
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[:1] == ["ls"]:
            args = ["list", *args[1:]]
        if args and args[0] in FOREIGN_COMMANDS:
            raise BadRequest(f"There is no command {args[0]}.", hint=FOREIGN_COMMANDS[args[0]])
        return super().resolve_command(ctx, args)

    # The base class names the parameter `ctx`.
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [
                        (name, command.get_short_help_str(formatter.width))
                        for name in commands
                        if (command := self.get_command(ctx, name)) is not None
                    ]
                )

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        formatter.write(f"\n{EXAMPLES}\n")


class CommandWithSettings(PlainCommand):
    """A command whose help ends with the list of settings."""

    # The base class names the parameter `ctx`.
    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        from gateway.settings import list_variables

        with formatter.section(
            "Settings: variables, or keys of the FITSERVE_CONFIG file without FITSERVE_"
        ):
            formatter.write_dl(list_variables())


OPTIONS: dict[str, dict[str, Any]] = {
    "serve": {"cls": CommandWithSettings},
    # Options after NAME SOURCE are those of `fitserve add`.
    "demo": {
        "context_settings": {"ignore_unknown_options": True, "allow_interspersed_args": False}
    },
}


def add_commands(app: typer.Typer, command_name: str = "") -> None:
    """Add the command with this name to the program, or all where none has it."""
    commands = {
        name: location for section in SECTIONS.values() for name, location in section.items()
    }
    # Completion lists every command.
    is_single = command_name in commands and command_name != "completion"
    for name, location in (
        {command_name: commands[command_name]}.items() if is_single else commands.items()
    ):
        module, _, attribute = location.rpartition(".")
        command = getattr(import_module(f"gateway.cli.commands.{module}"), attribute)
        if isinstance(command, typer.Typer):
            for subcommand in command.registered_commands:
                subcommand.cls = PlainCommand
            app.add_typer(command, name=name, cls=PlainGroup)
        else:
            app.command(name, **{"cls": PlainCommand, **OPTIONS.get(name, {})})(command)
