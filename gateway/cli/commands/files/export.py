"""`fitserve export`: the start of a model's engine without the gateway."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.cli.client import call, model_path
from gateway.cli.options import Engines, Json, read_wish, usage_error
from gateway.cli.terminal import say
from gateway.errors import BadModel, NotReady

if TYPE_CHECKING:
    from gateway.domain import Plan
    from gateway.planner.service.offline import OfflinePlanner


class Format(StrEnum):
    ARGV = "argv"
    COMPOSE = "compose"
    KUBERNETES = "kubernetes"


def export(
    name: Annotated[str, typer.Argument(help="A planned model of the gateway.")],
    form: Annotated[
        Format,
        typer.Option(
            "--format", help="Command line, Compose file, or Kubernetes Deployment with Service."
        ),
    ] = Format.ARGV,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the engine.")] = 8000,
    hardware: Annotated[
        str | None,
        typer.Option(help="Machines (2x(8xh100)) for a model folder, for --format kubernetes."),
    ] = None,
    network: Annotated[
        str | None, typer.Option(help="Network between machines: 200gbit,2us,roce.")
    ] = None,
    engine: Engines = None,
    as_json: Json = False,
) -> None:
    """Print how to start a model's engine without fitserve. The output has image, flags,
    environment, GPUs and mounts, but no keys. --json prints a list of words or JSON documents.
    With --hardware, NAME is a model folder, planned for machines that need no gateway."""
    if hardware is not None:
        if form is not Format.KUBERNETES:
            usage_error(
                "--hardware needs --format kubernetes. `fitserve plan MODEL --hardware NAME` prints"
                " the flags of an engine for one machine."
            )
        documents = _machine_documents(name, hardware, network, engine, port)
        _print_documents(documents, as_json=as_json)
        return
    if network or engine:
        usage_error("--network and --engine need --hardware.")
    from gateway.wishes.export.command_line import command_line, text
    from gateway.wishes.export.compose import compose
    from gateway.wishes.export.engine_start import EngineStart
    from gateway.wishes.export.kubernetes import kubernetes

    site = "machine" if form is Format.ARGV else "container"
    start = EngineStart.model_validate(
        call("GET", model_path(name, f"/launch?port={port}&place={site}"))
    )
    if form is Format.ARGV:
        say(json.dumps(command_line(start), indent=2) if as_json else text(start))
        return
    if form is Format.COMPOSE and as_json:
        say(json.dumps(compose(start), indent=2))
        return
    documents = [compose(start)] if form is Format.COMPOSE else kubernetes(start)
    _print_documents(documents, as_json=as_json)


def _print_documents(documents: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        say(json.dumps(documents, indent=2))
        return
    from gateway.wishes.export.yaml_text import yaml_text

    say(yaml_text(documents))


def _machine_plan(
    planner: OfflinePlanner,
    source: str,
    hardware: str,
    network: str | None,
    engines: list[str] | None,
) -> Plan:
    """The best plan for a model folder on machines, all of which it gets. Raises NotReady."""
    from gateway.profiles.cluster_forms import parse_network

    cluster = planner.profiles.cluster(hardware, parse_network(network) if network else None)
    if cluster is None:
        usage_error("--hardware of an export is several machines, such as 2xgb10 or 2x(8xh100).")
    wish = read_wish(source=str(Path(source).absolute()), engines=tuple(engines or ()), gpus="all")
    decision = planner.decide_on_cluster(wish, hardware, cluster)
    if not decision.plans:
        raise NotReady(
            f"There is no plan for {source} on {hardware}.",
            hint=f"`fitserve plan {source} --hardware {hardware}` says why.",
        )
    return decision.plans[0]


def _machine_documents(
    source: str, hardware: str, network: str | None, engines: list[str] | None, port: int
) -> list[dict[str, Any]]:
    """The documents for a model folder on machines. Raises BadModel, NotReady."""
    from gateway.domain import Mount
    from gateway.engines.common.engine_auth import drop_dev_endpoints
    from gateway.engines.common.expert_warmups import drop_skips
    from gateway.engines.registry import engine_kind
    from gateway.planner.flags import LaunchInputs, launch_spec
    from gateway.planner.nodes.pod_group import pod_plan
    from gateway.planner.service.offline import OfflinePlanner
    from gateway.wishes.export.engine_start import engine_start
    from gateway.wishes.export.kubernetes import kubernetes
    from gateway.wishes.export.leader_worker_set import LEADER, PLACE, leader_worker_set

    folder = Path(source).absolute()
    if not folder.is_dir():
        raise BadModel(
            f"{source} is not a folder on this machine.",
            hint="With --hardware, give the folder that the nodes will have the model in.",
        )
    planner = OfflinePlanner.read_environment()
    best_plan = _machine_plan(planner, source, hardware, network, engines)
    plan = drop_skips(drop_dev_endpoints(best_plan))
    is_spanning = plan.span > 1
    mount = Mount(source=str(folder), target=str(folder))
    spec = launch_spec(
        pod_plan(plan, LEADER, PLACE) if is_spanning else plan,
        planner.profiles.engine(str(plan.engine)),
        LaunchInputs(str(folder), mounts=(mount,)),
        name=folder.name,
        model=folder.name,
        attempt=0,
        port=port,
    )
    kind = engine_kind(plan.engine.kind)
    if not is_spanning:
        served_spec = spec.evolve(argv=kind.serve_command(spec.argv))
        return kubernetes(
            engine_start(served_spec, is_in_container=True), copies=plan.replicas.value
        )
    leader, worker = (
        engine_start(
            spec.evolve(
                argv=kind.serve_command(node_launch.argv),
                env=node_launch.env,
                gpus=node_launch.gpus,
            ),
            is_in_container=True,
        )
        for node_launch in spec.nodes[:2]
    )
    return leader_worker_set(leader, worker, kind.address_env, plan.span, plan.replicas.value)
