"""The command `fitserve`: its groups, and the commands without a file of their own.

Exit codes: 0 ok, 1 failed, 2 usage, 3 no plan or not ready, 4 unknown. Heavy imports stand inside
the commands: `fitserve plan` must not load a web server.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.cli.client import call, gateway_url
from gateway.cli.commands.add import add
from gateway.cli.commands.bench import bench
from gateway.cli.commands.change import set_model, update
from gateway.cli.commands.engine import app as engine_app
from gateway.cli.commands.facts import app as facts_app
from gateway.cli.commands.keys import app as keys_app
from gateway.cli.commands.model import logs, retry, rm, show, start, stop
from gateway.cli.commands.plan import matrix, plan
from gateway.cli.options import MISTYPED, Json, mistyped_message, usage_error
from gateway.cli.present import print_paragraph, print_table, show_disk
from gateway.cli.terminal import print_message, say
from gateway.errors import FitserveError
from gateway.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (plan, matrix, bench, add, show, logs, retry, stop, start, rm, update):
    app.command()(command)
app.command("set")(set_model)
app.add_typer(engine_app, name="engine")
app.add_typer(facts_app, name="facts")
app.add_typer(keys_app, name="keys")


def main() -> None:
    """Run the command line. Expected errors end with two sentences and their exit code."""
    try:
        # Without standalone mode, typer raises usage errors here and returns exit codes.
        sys.exit(app(standalone_mode=False, prog_name="fitserve"))
    except FitserveError as error:
        print_message(f"fitserve: {error}")
        sys.exit(error.exit_code)
    except typer.Abort:
        print_message("fitserve: nothing was done.")
        sys.exit(1)
    except MISTYPED as error:
        print_message(mistyped_message(error))
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)


def _print_version(requested: bool) -> None:
    if requested:
        say(__version__)
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address of a remote gateway: HOST, HOST:PORT or a URL; or set FITSERVE_URL."
        ),
    ] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port of the gateway.")] = None,
    key: Annotated[
        str | None,
        typer.Option(
            help="Key for the gateway. FITSERVE_KEY is safer: process lists do not show it."
        ),
    ] = None,
) -> None:
    """Serve language models on your GPUs: fitserve plans, starts, checks and repairs engines, and
    routes requests to them."""
    if host is not None or port is not None:
        os.environ["FITSERVE_URL"] = gateway_url(host, port)
    if key is not None:
        os.environ["FITSERVE_KEY"] = key


class _CommandWithSettings(typer.core.TyperCommand):
    """A command whose help ends with the list of settings."""

    # The base class names the parameter `ctx`.
    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        from gateway.settings import listed

        with formatter.section(
            "Settings: environment variables, or keys without FITSERVE_ in the YAML file that"
            " FITSERVE_CONFIG names"
        ):
            formatter.write_dl(listed())


@app.command(cls=_CommandWithSettings)
def serve(
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Processes for inference requests; FITSERVE_WORKERS."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; FITSERVE_HOST.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on; FITSERVE_PORT.")
    ] = None,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help=(
                "Replace the gateway that runs on the data folder, without refused connections or"
                " broken answers."
            ),
        ),
    ] = False,
) -> None:
    """Run the gateway."""
    options = {"WORKERS": workers, "HOST": host, "PORT": port}
    os.environ.update(
        {f"FITSERVE_{name}": str(value) for name, value in options.items() if value is not None}
    )
    # A new process image: the gateway runs for months and must not keep the command line's memory.
    os.execv(  # noqa: S606 - no shell is wanted
        sys.executable,
        [
            sys.executable,
            "-m",
            "gateway.__main__",
            "serve",
            *(["--take-over"] if take_over else []),
        ],
    )


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def demo(
    model: Annotated[
        list[str] | None, typer.Argument(help="NAME SOURCE, and options of `fitserve add`.")
    ] = None,
) -> None:
    """Serve a tiny model from nothing, until Ctrl-C. The command installs an engine, starts a
    gateway, serves the model (or NAME SOURCE) and prints a curl command. Needs no Docker."""
    from gateway.cli.demo.demo_server import serve_demo

    if model is not None and len(model) == 1:
        usage_error("`fitserve demo` takes a name and a source, or neither.")
    raise typer.Exit(serve_demo(tuple(model or ()), say))


@app.command()
def agent() -> None:
    """Run the agent, which starts engines in Docker. Its gateway has FITSERVE_HOST_KIND=agent."""
    from gateway.cli.commands.agent import run
    from gateway.logging import configure_logging
    from gateway.settings import load_settings

    settings = load_settings()
    configure_logging(settings.log_level)
    run(settings)


@app.command()
def probe(as_json: Json = False) -> None:
    """Show the hardware of this machine."""
    from gateway.machine.gpu_watch import allowed_devices
    from gateway.machine.probe import probe as read
    from gateway.planner.explain import machine
    from gateway.settings import load_settings

    settings = load_settings()
    hardware = allowed_devices(Path.cwd(), settings.gpus, settings.ram_bytes).mark(read(Path.cwd()))
    if as_json:
        say(hardware.model_dump_json(indent=2))
        return
    print_table(("", "", "", ""), machine(hardware))
    for note in hardware.notes:
        print_paragraph(f"note: {note}", indent=4)


@app.command()
def diagnose(
    log: Annotated[str, typer.Argument(help="Log file of an engine; - for standard input.")],
    engine: Annotated[
        str | None,
        typer.Option(help="Engine that wrote the log, KIND or KIND==VERSION; default: any engine."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Name the failure in an engine's log, with proof and cure. Exit code 1 for a failure, 4 when
    the log does not tell."""
    from gateway.cli.commands.diagnose import lines, read_log, report
    from gateway.profiles.profiles import Profiles

    extra = os.environ.get("FITSERVE_PROFILES_DIR")
    diagnosis = read_log(log, engine, Profiles(Path(extra) if extra else None))
    if as_json:
        say(json.dumps(report(diagnosis), indent=2))
    else:
        for line in lines(diagnosis):
            print_paragraph(line)
    if not diagnosis.healthy:
        raise typer.Exit(4 if diagnosis.healthy is None else 1)


@app.command()
def calibrate(as_json: Json = False) -> None:
    """Measure the speed of the idle GPUs, for better plans. Exit code 3 when nothing could be
    measured."""
    from gateway.cli.commands.calibrate import fact_rows, run_calibration

    result = run_calibration()
    if as_json:
        say(json.dumps(result, indent=2))
    else:
        print_table(("GPU", "MEASURED", "VALUE", "BY"), fact_rows(result["facts"]))
        for uuid, reason in result["left_alone"].items():
            print_paragraph(f"not measured: {uuid}: {reason}", indent=4)
        for problem in result["problems"]:
            print_paragraph(f"note: {problem}", indent=4)
    if not result["facts"]:
        raise typer.Exit(3)


@app.command()
def df(as_json: Json = False) -> None:
    """Show the disk usage of models and engines. Data that no model needs is marked."""
    usage = call("GET", "/admin/disk", timeout_s=None)
    if as_json:
        say(json.dumps(usage, indent=2))
    else:
        show_disk(usage)


@app.command()
def doctor(
    fix: Annotated[
        bool,
        typer.Option(
            "--fix", help="Create the gateway's folders and close them to others; nothing else."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Check this machine for everything that the gateway needs. Exit code 1 for a failed check;
    UNKNOWN is no failure."""
    from gateway.cli.doctor.examination import examine
    from gateway.settings import load_settings

    checks = examine(load_settings(), fix=fix)
    if as_json:
        say(json.dumps([check.fields() for check in checks], indent=2))
    else:
        rows = [
            (
                check.state.upper(),
                check.name,
                check.finding + (f" ({check.fixed})" if check.fixed else ""),
                check.do,
            )
            for check in checks
        ]
        print_table(("", "CHECK", "FOUND", "DO"), rows)
    if any(check.state == "fail" for check in checks):
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
