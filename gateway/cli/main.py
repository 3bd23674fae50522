"""The command `fitserve`. Exit codes: 0 ok, 1 failed, 2 usage, 3 no plan or not ready, 4 it cannot
    be told.

Heavy imports stand inside the commands: `fitserve plan` must not pay for a web server.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.cli.client import call, of_model, url_of
from gateway.cli.commands.bench import bench
from gateway.cli.commands.change import set_model, update
from gateway.cli.commands.engine import app as engine_app
from gateway.cli.commands.facts import app as facts_app
from gateway.cli.commands.keys import app as keys_app
from gateway.cli.commands.plan import matrix, plan
from gateway.cli.options import (
    MISTYPED,
    EndpointKey,
    Json,
    KeepAlive,
    Priority,
    absolute,
    mistake,
    seconds,
    usage,
    wishing,
)
from gateway.cli.present import (
    print_paragraph,
    removed_weights,
    show_decision,
    show_disk,
    show_model,
    status_text,
    table,
)
from gateway.cli.terminal import pour, say, told
from gateway.errors import FitserveError
from gateway.version import __version__
from gateway.visible import visible_line

# An endpoint runs, or does not: nothing is loaded for it.
_ENDPOINT_S = 60.0

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(plan)
app.command()(matrix)
app.command()(bench)
app.command("set")(set_model)
app.command()(update)
app.add_typer(engine_app, name="engine")
app.add_typer(facts_app, name="facts")
app.add_typer(keys_app, name="keys")


def main() -> None:
    """Entry point: our own errors end with their exit code and two sentences, never a traceback."""
    try:
        # Without standalone mode what was mistyped comes here, and the exit code of `typer.Exit` is
        # returned.
        sys.exit(app(standalone_mode=False, prog_name="fitserve"))
    except FitserveError as error:
        told(f"fitserve: {error}")
        sys.exit(error.exit_code)
    except typer.Abort:
        told("fitserve: nothing was done.")
        sys.exit(1)
    except MISTYPED as error:
        told(mistake(error))
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        say(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,  # noqa: ARG001 - its callback prints it
    host: Annotated[
        str | None,
        typer.Option(help="Of a gateway elsewhere: HOST, HOST:PORT or a URL; FITSERVE_URL."),
    ] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Of the gateway.")] = None,
    key: Annotated[
        str | None,
        typer.Option(help="Of the gateway; FITSERVE_KEY does not show in the list of processes."),
    ] = None,
) -> None:
    """Serve language models on the GPUs you have: fitserve plans, launches, verifies, recovers and
    routes."""
    if host is not None or port is not None:
        os.environ["FITSERVE_URL"] = url_of(host, port)
    if key is not None:
        os.environ["FITSERVE_KEY"] = key


class _WithSettings(typer.core.TyperCommand):
    """Its help ends with the settings."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - the base class names it
        from gateway.settings import listed

        with formatter.section(
            "Settings, as variables or without FITSERVE_ in the YAML file that FITSERVE_CONFIG"
            " names"
        ):
            formatter.write_dl(listed())


@app.command(cls=_WithSettings)
def serve(
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Processes that answer inference; FITSERVE_WORKERS."),
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
                "From the gateway that runs on the data folder: no connection is refused, no answer"
                " broken off."
            ),
        ),
    ] = False,
) -> None:
    """Run the gateway."""
    given = {"WORKERS": workers, "HOST": host, "PORT": port}
    os.environ.update(
        {f"FITSERVE_{name}": str(value) for name, value in given.items() if value is not None}
    )
    # Anew, for the command line's memory would stay as long as the gateway.
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
    wanted: Annotated[
        list[str] | None, typer.Argument(help="NAME SOURCE, and further options of `fitserve add`.")
    ] = None,
) -> None:
    """From nothing, without Docker: install an engine, start a gateway, serve a tiny model (or NAME
    SOURCE), and say how to ask it; until Ctrl-C."""
    from gateway.cli.demo.demo_server import serve_demo

    if wanted is not None and len(wanted) == 1:
        usage("`fitserve demo` takes a name and a source, or neither.")
    raise typer.Exit(serve_demo(tuple(wanted or ()), say))


@app.command()
def agent() -> None:
    """Run the agent: it alone reaches Docker, and starts engines for a gateway with
    FITSERVE_HOST_KIND=agent."""
    from gateway.cli.commands.agent import run
    from gateway.logging import configure_logging
    from gateway.settings import load_settings

    settings = load_settings()
    configure_logging(settings.log_level)
    run(settings)


@app.command()
def probe(as_json: Json = False) -> None:
    """Show what is in this machine."""
    from gateway.machine.gpu_watch import kept_here
    from gateway.machine.probe import probe as read
    from gateway.planner.explain import machine
    from gateway.settings import load_settings

    settings = load_settings()
    hardware = kept_here(Path.cwd(), settings.gpus, settings.ram_bytes).mark(read(Path.cwd()))
    if as_json:
        say(hardware.model_dump_json(indent=2))
        return
    table(("", "", "", ""), machine(hardware))
    for note in hardware.notes:
        print_paragraph(f"note: {note}", indent=4)


@app.command()
@wishing
def add(
    name: Annotated[str, typer.Argument(help="Name that clients put in `model`.")],
    source: Annotated[
        str | None, typer.Argument(help="Model folder or Hugging Face repository.")
    ] = None,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(help="Base URL of an engine that runs elsewhere; repeatable."),
    ] = None,
    endpoint_key: EndpointKey = None,
    *,
    wished: dict[str, Any],
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Copies; else as many as the plan finds useful.")
    ] = None,
    allow_remote_code: Annotated[
        bool, typer.Option("--allow-remote-code", help="Let the engine run the repository's code.")
    ] = False,
    keep_alive: KeepAlive = None,
    pinned: Annotated[
        bool,
        typer.Option("--pinned", help="Never unload it, neither when idle nor for another model."),
    ] = False,
    priority: Priority = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Ask the engine's own code before its start.")
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan; add nothing.")] = False,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", help="Return when the model is ready (exit 0) or has no way to be (exit 3)."
        ),
    ] = False,
    timeout: Annotated[
        str | None,
        typer.Option(
            help=(
                "How long --wait waits: 10m, 90 (seconds); default: for ever, and 1m for an"
                " endpoint."
            )
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Add a model to the running gateway."""
    patience_s = seconds(timeout) if timeout else _ENDPOINT_S if endpoint else math.inf
    given = {"source": absolute(source), "endpoint_key": endpoint_key, "replicas": replicas}
    body: dict[str, Any] = {"name": name, "endpoints": endpoint or [], **wished}
    body |= {key: value for key, value in given.items() if value is not None}
    policy: dict[str, Any] = {
        "allow_remote_code": allow_remote_code or None,
        "keep_alive": keep_alive,
        "pinned": pinned or None,
    }
    policy |= {"priority": priority}
    if said := {key: value for key, value in policy.items() if value is not None}:
        body["policy"] = said
    if not check:
        body["check"] = False
    if dry_run:
        from gateway.domain import Decision

        decision = Decision.model_validate(call("POST", "/admin/models?dry_run=true", body))
        show_decision(decision, as_json=as_json)
        if not decision.plans:
            raise typer.Exit(3)
        return
    view = call("POST", "/admin/models", body)
    if wait:
        view = _wait_ready(name, patience_s, quiet=as_json)
    _print(view, as_json, f"{name}: {status_text(view)}")


@app.command()
def show(name: str, as_json: Json = False) -> None:
    """Show a model: state, plan with reasons, attempts with evidence. Exit code 3 while it is not
    ready."""
    view = call("GET", of_model(name))
    if as_json:
        say(json.dumps(view, indent=2))
    else:
        gpus = (
            call("GET", "/admin/hardware")["gpus"] if view["plan"] or view["wish"]["gpus"] else []
        )
        show_model(view, {gpu["uuid"]: gpu["index"] for gpu in gpus})
    if view["state"] != "ready":
        raise typer.Exit(3)


@app.command()
def logs(
    name: str,
    attempt: Annotated[
        int | None, typer.Option(help="Number of an attempt; default: the latest.")
    ] = None,
    tail: Annotated[int | None, typer.Option(min=1, help="Only the last lines.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the engine ends.")
    ] = False,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Just the bytes that the engine wrote, escape sequences too."),
    ] = False,
) -> None:
    """Print the log of a model's engine. What would steer the terminal is shown as \\x1b, and not
    sent."""
    from gateway.cli.client import stream

    query = {"attempt": attempt, "tail": tail, "follow": "true" if follow else None}
    pour(
        stream(
            of_model(name, "/logs"),
            {key: value for key, value in query.items() if value is not None},
        ),
        raw=raw,
    )


@app.command()
def diagnose(
    log: Annotated[str, typer.Argument(help="Log file of an engine; - for standard input.")],
    engine: Annotated[
        str | None,
        typer.Option(help="KIND or KIND==VERSION that wrote it; else every text counts."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Name the failure in an engine's log, the line that proves it and the cure. Exit code 1 when
    there is one, 4 when nobody can tell."""
    from gateway.cli.commands.diagnose import lines, read_log, report
    from gateway.profiles.profiles import Profiles

    extra = os.environ.get("FITSERVE_PROFILES_DIR")
    found = read_log(log, engine, Profiles(Path(extra) if extra else None))
    if as_json:
        say(json.dumps(report(found), indent=2))
    else:
        for line in lines(found):
            print_paragraph(line)
    if not found.healthy:
        raise typer.Exit(4 if found.healthy is None else 1)


@app.command()
def calibrate(as_json: Json = False) -> None:
    """Measure the GPUs that nobody uses, for plans to know how fast they are. Exit code 3 when
    nothing could be measured."""
    from gateway.cli.commands.calibrate import asked, rows

    found = asked()
    if as_json:
        say(json.dumps(found, indent=2))
    else:
        table(("GPU", "MEASURED", "VALUE", "BY"), rows(found["facts"]))
        for uuid, why in found["left_alone"].items():
            print_paragraph(f"left alone: {uuid}: {why}", indent=4)
        for problem in found["problems"]:
            print_paragraph(f"note: {problem}", indent=4)
    if not found["facts"]:
        raise typer.Exit(3)


@app.command()
def retry(name: str, as_json: Json = False) -> None:
    """Try a model again that was given up, or that waits for its next start, from what the names of
    its images mean now."""
    view = call("POST", of_model(name, "/retry"))
    _print(view, as_json, f"{name}: {status_text(view)}")


@app.command()
def stop(name: str, as_json: Json = False) -> None:
    """Stop a model without forgetting it: once it has answered what it works on. It is not loaded
    again until `fitserve start`."""
    view = call("POST", of_model(name, "/stop"))
    _print(view, as_json, f"{name}: {status_text(view)}")


@app.command()
def start(name: str, as_json: Json = False) -> None:
    """Load a model again that was stopped."""
    view = call("POST", of_model(name, "/start"))
    _print(view, as_json, f"{name}: {status_text(view)}")


@app.command()
def rm(
    name: str,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when nothing of it runs any more.")
    ] = False,
    weights: Annotated[
        bool,
        typer.Option(
            "--weights",
            help="Remove its weights from the disk too, as far as no other model needs them.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Stop a model's engines and forget it."""
    import time

    if weights:
        answer = call("DELETE", of_model(name, "?weights=true"), timeout_s=None)
        _print(answer, as_json, removed_weights(answer))
        return
    answer = call("DELETE", of_model(name))
    while wait and any(model["name"] == name for model in call("GET", "/admin/models")["data"]):
        time.sleep(0.2)
    _print(answer, as_json, f"{name}: {'removed' if wait else 'stopping'}")


@app.command()
def df(as_json: Json = False) -> None:
    """Show what models and engines take on the disk, when they were last used, and what no model
    needs."""
    found = call("GET", "/admin/disk", timeout_s=None)
    if as_json:
        say(json.dumps(found, indent=2))
    else:
        show_disk(found)


@app.command()
def doctor(
    fix: Annotated[
        bool,
        typer.Option("--fix", help="Make and close the gateway's folders; change nothing else."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Check what the gateway needs on this machine, and say what to do. Exit code 1 when something
    must be mended; what could not be checked is
    UNKNOWN, which is no failure."""
    from gateway.cli.doctor.examination import examine
    from gateway.settings import load_settings

    checks = examine(load_settings(), fix=fix)
    if as_json:
        say(json.dumps([check._asdict() for check in checks], indent=2))
    else:
        table(
            ("", "CHECK", "FOUND", "DO"),
            [
                (
                    check.state.upper(),
                    check.name,
                    check.found + (f" ({check.fixed})" if check.fixed else ""),
                    check.do,
                )
                for check in checks
            ],
        )
    if any(check.state == "fail" for check in checks):
        raise typer.Exit(1)


# --- helpers ---


def _wait_ready(name: str, patience_s: float, *, quiet: bool) -> Any:
    """Poll until ready. Exits 3 when the gateway has given up, or the time is over."""
    import time

    reported, until = "", time.monotonic() + patience_s
    while True:
        view = call("GET", of_model(name))
        # Who sleeps, or has no room now, comes when it is asked.
        if view["state"] in ("ready", "asleep") or (
            view["state"] == "stopped" and view["on_request"]
        ):
            return view
        if view["state"] in ("no_plan", "quarantined", "stopped", "stopping"):
            told(f"fitserve: {name} cannot be served: {visible_line(view['detail'])}")
            raise typer.Exit(3)
        if status_text(view) != reported and not quiet:
            reported = status_text(view)
            told(f"{name}: {reported}")
        if time.monotonic() > until:
            told(
                f"fitserve: {name} is not ready yet; the gateway goes on with it. `fitserve show"
                f" {name}` tells more."
            )
            raise typer.Exit(3)
        time.sleep(0.5)


def _print(value: Any, as_json: bool, text: str) -> None:
    if as_json:
        say(json.dumps(value, indent=2))
    else:
        print_paragraph(text)


if __name__ == "__main__":
    main()
