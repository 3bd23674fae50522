"""`fitserve plan` and `fitserve matrix`: plans that start nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.client import call
from gateway.cli.options import (
    AllRows,
    Engines,
    Hardwares,
    Json,
    MaxContext,
    MinContext,
    WishOptions,
    absolute_source,
    expand_options,
    read_tokens,
    read_wish,
    usage_error,
)
from gateway.cli.present import (
    FULL_DETAIL,
    SHORT_DETAIL,
    show_decision,
    show_decisions,
    show_matrix,
)
from gateway.cli.terminal import print_message
from gateway.errors import BadModel, FitserveError, NeedsRemoteCode
from gateway.model_folder import model_folder

if TYPE_CHECKING:
    from gateway.domain import Decision, Hardware, MeasuredStart, Wish
    from gateway.planner.service.neighbours import JointPlanning
    from gateway.planner.service.startable import Startable
    from gateway.profiles.profiles import Profiles


def _list_hardware(value: str | None) -> str | None:
    """Print the names for `--hardware`, for the value `list`."""
    if value != "list":
        return value
    from gateway.cli.present import show_hardware_names
    from gateway.planner.service.offline import OfflinePlanner

    profiles = OfflinePlanner.read_environment().profiles
    show_hardware_names(profiles.snapshot_names(), profiles.card_table.cards)
    raise typer.Exit


@expand_options
def plan(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Model folder or Hugging Face repository; several share the machine.",
        ),
    ],
    options: WishOptions,
    hardware: Annotated[
        str | None,
        typer.Option(
            help="Cards (h100, 6x4090, 3090+4090), a file, or machines (2xgb10, 4x(8xh100))"
            " instead of this machine; list: print the names.",
            callback=_list_hardware,
            is_eager=True,
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(help="Network between machines: 200gbit,2us,roce. Default: unknown."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check", help="Ask the code of installed engines; takes about 20 s."
        ),
    ] = False,
    shows_all: AllRows = False,
    as_json: Json = False,
) -> None:
    """Show the plan for a model with its reasons, and start nothing. Several models are planned
    together, in their order. Exit code 3 without a plan."""
    if len(models) > 1:
        if check:
            usage_error("--check asks the engines about one model.")
        wishes = [read_wish(source=absolute_source(model), **options.fields()) for model in models]
        _show_together(wishes, hardware, network, as_json=as_json, shows_all=shows_all)
        return
    (model,) = models
    source = absolute_source(model)
    wish = read_wish(source=model_folder(model), **options.fields())
    decision = _plan_for_cluster(wish, hardware, network, asks_engine=check) if hardware else None
    if network and decision is None:
        usage_error("--network needs several machines, such as --hardware 2xgb10.")
    if hardware is None and not check:
        decision = _query_gateway(wish.evolve(source=source))
    if decision is None:
        wish = _add_image_engine(wish)
        if check:
            decision = _plan_with_check(wish, hardware)
        elif hardware is None:
            decision = _plan_here(wish)
        else:
            decision = _plan_for_snapshot(wish, hardware)
    show_decision(decision, as_json=as_json, detail=FULL_DETAIL if shows_all else SHORT_DETAIL)
    if not decision.plans:
        raise typer.Exit(3)


def _query_gateway(wish: Wish) -> Decision | None:
    """The decision of the running gateway, which knows its engines and facts. None without one."""
    import os

    from gateway.domain import Decision
    from gateway.settings import load_settings
    from gateway.store.data_folder import is_in_use

    if not os.environ.get("FITSERVE_URL") and not is_in_use(load_settings().data):
        return None
    try:
        return Decision.model_validate(call("POST", "/admin/plan", wish.model_dump(mode="json")))
    except FitserveError as error:
        if error.code in (BadModel.code, NeedsRemoteCode.code):
            # The same exit code as without a gateway: the model is wrong, not the command line.
            error.exit_code = BadModel.exit_code
        if error.status not in (401, 403, 503):
            raise
        print_message(
            f"note: this plan ignores the engines of the running gateway: {error.message}"
        )
        return None


def _plan_here(wish: Wish) -> Decision:
    """The decision for this machine, with the engines and facts of this data folder."""
    from gateway.planner.service.offline import OfflinePlanner
    from gateway.store.recovery import records_at_rest

    planner = OfflinePlanner.read_environment()
    startable = _startable(wish, planner.profiles)
    facts, starts = records_at_rest(startable.data / "fitserve.db")
    decision = planner.decide_here(wish, startable, facts)
    planner.profiles.documents.save()
    return _add_start(decision, starts)


def _add_start(decision: Decision, starts: list[MeasuredStart]) -> Decision:
    """The decision with the expected start of its first plan, by the record of a gateway."""
    from gateway.diagnosis.start_times import expected_start
    from gateway.diagnosis.starts_elsewhere import start_elsewhere
    from gateway.domain import ExpectedStart, StartConditions

    if not decision.plans:
        return decision
    conditions = StartConditions()
    plan = decision.plans[0]
    time = expected_start(plan, conditions, starts) or start_elsewhere(plan, conditions)
    return decision.evolve(start=ExpectedStart(conditions=conditions, time=time))


def _show_together(
    wishes: list[Wish], hardware: str | None, network: str | None, *, as_json: bool, shows_all: bool
) -> None:
    """Print the plans of models that share a machine: on this machine or another."""
    neighbourhood = _neighbourhood(wishes[0], hardware, network)
    decisions = neighbourhood.plan([_add_image_engine(wish) for wish in wishes])
    show_decisions(
        decisions,
        neighbourhood.machine,
        "" if as_json else neighbourhood.advice(wishes, decisions),
        as_json=as_json,
        detail=FULL_DETAIL if shows_all else SHORT_DETAIL,
    )
    if not all(decision.plans for decision in decisions):
        raise typer.Exit(3)


def _neighbourhood(wish: Wish, hardware: str | None, network: str | None) -> JointPlanning:
    """The machine for several models. wish: of one of them, for the engines that can start."""
    from functools import partial

    from gateway.planner.service.neighbours import JointPlanning
    from gateway.planner.service.offline import OfflinePlanner
    from gateway.store.recovery import records_at_rest

    planner = OfflinePlanner.read_environment()
    if network or (hardware and planner.profiles.cluster(hardware, None) is not None):
        usage_error("Several models are planned together for one machine only.")
    name, machine = planner.machine(hardware)
    if hardware is not None:
        _say_assumptions(name, machine)
        return JointPlanning(planner.decide_request, name, machine)
    startable = _startable(wish, planner.profiles)
    facts, _ = records_at_rest(startable.data / "fitserve.db")
    decide = partial(planner.decide_request, startable=startable, facts=facts)
    return JointPlanning(decide, "", machine)


def _plan_for_cluster(
    wish: Wish, hardware: str, network: str | None, *, asks_engine: bool
) -> Decision | None:
    """The decision for several machines; None: `hardware` is one machine."""
    from gateway.planner.service.offline import OfflinePlanner
    from gateway.profiles.cluster_forms import parse_network

    planner = OfflinePlanner.read_environment()
    cluster = planner.profiles.cluster(hardware, parse_network(network) if network else None)
    if cluster is None:
        return None
    if asks_engine:
        usage_error("--check asks the engines for one machine; leave it out, or name one machine.")
    decision = planner.decide_on_cluster(_add_image_engine(wish), hardware, cluster)
    planner.profiles.documents.save()
    return decision


def _plan_for_snapshot(wish: Wish, hardware: str) -> Decision:
    """The decision for a machine by its name or file."""
    from gateway.planner.service.offline import OfflinePlanner

    planner = OfflinePlanner.read_environment()
    name, machine = planner.machine(hardware)
    _say_assumptions(name, machine)
    decision = planner.decide_on(wish, name, machine, include_alternatives=True)
    planner.profiles.documents.save()
    return decision


def _say_assumptions(name: str, machine: Hardware) -> None:
    """Print the card that the name of a machine was taken for."""
    from gateway.domain.hardware import ASSUMED_CARD

    for note in machine.notes:
        if note.startswith(ASSUMED_CARD):
            print_message(f"{name}: {note}")


def _startable(wish: Wish, profiles: Profiles) -> Startable:
    """The engines that a gateway with these settings could start. `server/host_choice.py` chooses
    the host in the same way."""
    from gateway.hosts.docker.client import is_listening
    from gateway.planner.service.startable import Startable
    from gateway.settings import load_settings

    settings = load_settings()
    process = settings.runs_processes or (
        settings.host_kind == "auto" and not is_listening() and wish.image is None
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
    """Show which engine versions run which models, and why. Several machines can be compared. Exit
    code 3 when nothing runs."""
    from gateway.planner.matrix import cells

    wish = read_wish(
        engines=tuple(engine or ()),
        min_context=read_tokens("--min-context", min_context),
        max_context=read_tokens("--max-context", max_context),
    )
    machines: list[str | None] = [None]
    if hardware is not None:
        machines = [name.strip() for name in hardware.split(",") if name.strip()]
        if not machines:
            usage_error(
                "--hardware names no machine. Give comma-separated snapshots, such as"
                " 2x3090,8xh100."
            )
    matrix_cells = [
        cell
        for engines, decision in _decisions(wish, models, machines)
        for cell in cells(decision, engines)
    ]
    show_matrix(matrix_cells, as_json=as_json)
    if all(cell.state == "failing" for cell in matrix_cells):
        raise typer.Exit(3)


def _add_image_engine(wish: Wish) -> Wish:
    """The wish with the engine of its image, which is asked if the wish names no engine."""
    if wish.image is None:
        return wish
    import asyncio

    from gateway.cli.engine_inquiry import allowed_images, inquirer
    from gateway.planner.service.images import add_image_engine
    from gateway.planner.service.offline import OfflinePlanner

    return asyncio.run(
        add_image_engine(
            wish,
            allowed_images(),
            OfflinePlanner.read_environment().profiles,
            inquirer(image=wish.image),
        )
    )


def _plan_with_check(wish: Wish, hardware: str | None) -> Decision:
    """The decision after an inquiry to the installed engines. Failed inquiries are printed to
    standard error."""
    import asyncio

    from gateway.cli.engine_inquiry import inquirer
    from gateway.planner.service.offline import OfflinePlanner

    planner = OfflinePlanner.read_environment()
    name, machine = planner.machine(hardware)
    startable = _startable(wish, planner.profiles) if hardware is None else None
    decision, inquiry = asyncio.run(
        planner.check_on(wish, name, machine, inquirer(image=wish.image), startable)
    )
    for problem in inquiry.problems.values():
        print_message(f"not checked: {problem}")
    return decision


def _decisions(
    wish: Wish, models: list[str], machines: list[str | None]
) -> list[tuple[list[str], Decision]]:
    """The considered engines and the decision for each model and machine (None: this one)."""
    from gateway.planner.service.offline import OfflinePlanner

    planner = OfflinePlanner.read_environment()
    snapshots = [planner.machine(name) for name in machines]
    decisions = []
    for model_wish in (wish.evolve(source=model) for model in models):
        for name, machine in snapshots:
            engines = [engine.ref for engine in planner.engines(model_wish, machine)]
            decisions.append((engines, planner.decide_on(model_wish, name, machine)))
    planner.profiles.documents.save()
    return decisions
