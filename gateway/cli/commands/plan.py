"""`fitserve plan` and `fitserve matrix`: what would be done; nothing is started. The gateway that
runs is asked for a plan on this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gateway.cli.client import call
from gateway.cli.options import (
    Engines,
    Hardwares,
    Json,
    MaxContext,
    MinContext,
    absolute,
    read_wish,
    usage,
    wishing,
)
from gateway.cli.present import show_decision, show_matrix
from gateway.cli.terminal import told
from gateway.errors import BadModel, FitserveError, NeedsRemoteCode


@wishing
def plan(
    model: Annotated[str, typer.Argument(help="Model folder or Hugging Face repository.")],
    hardware: Annotated[
        str | None, typer.Option(help="A snapshot (2x3090, a file) instead of this machine.")
    ] = None,
    *,
    wished: dict[str, Any],
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check", help="Ask the code of engines that are here; about 20 s."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show how MODEL would be served, and why; start nothing. Exit code 3 when there is no way."""
    wish = read_wish(source=model, **wished)
    decision = None
    if hardware is None and not check:
        decision = _of_the_gateway(wish.evolve(source=absolute(model)))
    if decision is None:
        wish = _named(wish)
        decision = (
            _checked(wish, hardware)
            if check
            else _here(wish)
            if hardware is None
            else _on(wish, hardware)
        )
    show_decision(decision, as_json=as_json)
    if not decision.plans:
        raise typer.Exit(3)


def _of_the_gateway(wish: Any) -> Any | None:
    """The decision of the gateway that runs: only this gateway knows what it runs and has learned.
    None where none can be asked."""
    import os

    from gateway.domain import Decision
    from gateway.settings import load_settings
    from gateway.store.data_folder import in_use

    if not os.environ.get("FITSERVE_URL") and not in_use(load_settings().data):
        return None
    try:
        return Decision.model_validate(call("POST", "/admin/plan", wish.model_dump(mode="json")))
    except FitserveError as error:
        if error.code in (BadModel.code, NeedsRemoteCode.code):
            # As where no gateway is asked: the command line is right, the model is not.
            error.exit_code = BadModel.exit_code
        if error.status not in (401, 403, 503):
            raise
        told(
            f"note: the gateway was not asked, so what it runs does not count here: {error.message}"
        )
        return None


def _here(wish: Any) -> Any:
    """The decision for this machine, by what a gateway with this data folder could start and has
    learned."""
    from gateway.planner.service.offline import OfflinePlanner
    from gateway.store.recovery import facts_at_rest

    planner = OfflinePlanner.from_environment()
    startable = _startable(wish, planner.profiles)
    decision = planner.decide_here(wish, startable, facts_at_rest(startable.data / "fitserve.db"))
    planner.profiles.documents.save()
    return decision


def _on(wish: Any, hardware: str) -> Any:
    """The decision for the machine of a snapshot."""
    from gateway.planner.service.offline import OfflinePlanner

    planner = OfflinePlanner.from_environment()
    name, machine = planner.machine(hardware)
    decision = planner.explained(planner.decide_on(wish, name, machine), wish, machine)
    planner.profiles.documents.save()
    return decision


def _startable(wish: Any, profiles: Any) -> Any:
    """What a gateway of these settings could start. It chooses its host alike
    (`server/host_choice.py`); an image is named for a container."""
    from gateway.hosts.docker.client import listening
    from gateway.planner.service.startable import Startable
    from gateway.settings import load_settings

    settings = load_settings()
    process = settings.host_kind == "process" or (
        settings.host_kind == "auto" and not listening() and wish.image is None
    )
    images = (
        None
        if process or settings.host_kind == "agent"
        else profiles.allowed_images(settings.allowed_images)
    )
    return Startable(settings.data, process, images)


def matrix(
    models: Annotated[
        list[str], typer.Argument(help="Model folders or Hugging Face repositories.")
    ],
    hardware: Hardwares = None,
    engine: Engines = None,
    min_context: MinContext = None,
    max_context: MaxContext = None,
    as_json: Json = False,
) -> None:
    """Show which engine version runs which model on which machine, and why not. Exit code 3 when
    nothing runs."""
    from gateway.planner.matrix import cells

    wish = read_wish(engines=tuple(engine or ()), min_context=min_context, max_context=max_context)
    machines: list[str | None] = [None]
    if hardware is not None:
        machines = [name.strip() for name in hardware.split(",") if name.strip()]
        if not machines:
            usage(
                "--hardware names no machine. Give snapshots with commas between them, such as"
                " 2x3090,8xh100."
            )
    found = [
        cell
        for engines, decision in _decisions(wish, models, machines)
        for cell in cells(decision, engines)
    ]
    show_matrix(found, as_json=as_json)
    if all(cell.state == "failing" for cell in found):
        raise typer.Exit(3)


def _named(wish: Any) -> Any:
    """The wish with the engine that its image holds: the image is asked where only that is
    named."""
    if wish.image is None:
        return wish
    import asyncio

    from gateway.cli.engine_inquiry import allowed_images, inquirer
    from gateway.planner.service.images import named
    from gateway.planner.service.offline import OfflinePlanner

    return asyncio.run(
        named(
            wish,
            allowed_images(),
            OfflinePlanner.from_environment().profiles,
            inquirer(image=wish.image),
        )
    )


def _checked(wish: Any, hardware: str | None) -> Any:
    """The decision, once the engines that are here were asked; what could not be asked is said on
    standard error."""
    import asyncio

    from gateway.cli.engine_inquiry import inquirer
    from gateway.planner.service.offline import OfflinePlanner

    planner = OfflinePlanner.from_environment()
    name, machine = planner.machine(hardware)
    startable = _startable(wish, planner.profiles) if hardware is None else None
    decision, asked = asyncio.run(
        planner.check_on(wish, name, machine, inquirer(image=wish.image), startable)
    )
    for problem in asked.problems.values():
        told(f"not checked: {problem}")
    return decision


def _decisions(
    wish: Any, models: list[str], machines: list[str | None]
) -> list[tuple[list[str], Any]]:
    """For each model and machine (None: this one): the engines that were considered, and the
    decision."""
    from gateway.planner.service.offline import OfflinePlanner

    planner = OfflinePlanner.from_environment()
    here = [planner.machine(name) for name in machines]
    found = []
    for wanted in (wish.evolve(source=model) for model in models):
        for name, machine in here:
            engines = [engine.ref for engine in planner.engines(wanted, machine)]
            found.append((engines, planner.decide_on(wanted, name, machine)))
    planner.profiles.documents.save()
    return found
