"""`fitserve cluster`: several machines as one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.options import Json
from gateway.cli.terminal import say

if TYPE_CHECKING:
    from gateway.domain import MachineView, NodeLink
    from gateway.hosts.cluster.membership import Membership
    from gateway.settings import Settings

app = typer.Typer(
    no_args_is_help=True, help="Several machines as one, on Ray.", rich_markup_mode=None
)

_TokenFile = Annotated[
    Path | None,
    typer.Option(help="File with the cluster's token, mode 600. Default: DATA_DIR/cluster/token."),
]
_Name = Annotated[str | None, typer.Option(help="Name of this machine. Default: its host name.")]
_Address = Annotated[str, typer.Option(help="Address of this machine in the cluster's network.")]
_Port = Annotated[int, typer.Option(min=1024, max=65435, help="First of 100 ports of Ray.")]
_Lease = Annotated[
    float,
    typer.Option(min=5, max=86400, help="Seconds until engines without a gateway are stopped."),
]


@app.command("init")
def init(
    address: _Address,
    name: _Name = None,
    port: Annotated[int, typer.Option(min=1024, max=65535, help="Port of Ray's head.")] = 6379,
    token_file: _TokenFile = None,
    first_port: _Port = 19_900,
    lease_s: _Lease = 300.0,
) -> None:
    """Run the first machine of a cluster. Makes the token, and runs until SIGTERM or Ctrl-C."""
    from gateway.hosts.cluster.membership import make_token

    settings = _cluster_settings()
    token = _token_file(settings, token_file)
    make_token(token)
    say(f"Copy {token} to each machine with its mode, then run there:")
    say(f"  fitserve cluster join {address}:{port} --address ADDRESS")
    _run_supervisor(
        settings,
        {
            "name": name or _host_name(),
            "role": "head",
            "head": f"{address}:{port}",
            "address": address,
            "token_file": token,
            "first_port": first_port,
            "lease_s": lease_s,
        },
    )


@app.command("join")
def join(
    head: Annotated[str, typer.Argument(help="ADDRESS:PORT of the first machine.")],
    address: _Address,
    name: _Name = None,
    token_file: _TokenFile = None,
    first_port: _Port = 19_900,
    lease_s: _Lease = 300.0,
) -> None:
    """Run this machine in a cluster, until SIGTERM or Ctrl-C."""
    settings = _cluster_settings()
    _run_supervisor(
        settings,
        {
            "name": name or _host_name(),
            "role": "node",
            "head": head,
            "address": address,
            "token_file": _token_file(settings, token_file),
            "first_port": first_port,
            "lease_s": lease_s,
        },
    )


@app.command("node", hidden=True)
def node() -> None:
    """Run the node service. `init` and `join` start it."""
    from gateway.hosts.cluster.commands import run
    from gateway.logging import configure_logging

    settings = _cluster_settings()
    configure_logging(settings.log_level)
    run(settings, _read_membership(settings))


@app.command("leave")
def leave() -> None:
    """Take this machine out. Its engines must have ended."""
    from gateway.hosts.cluster.commands import leave_cluster

    settings = _cluster_settings()
    membership = _read_membership(settings)
    leave_cluster(settings.data, membership)
    say(f"{membership.name} has left the cluster at {membership.head}.")


@app.command("status")
def status(as_json: Json = False) -> None:
    """Show the machines of the cluster."""
    from gateway.cli.text_tables import print_table
    from gateway.hosts.cluster.commands import query_machines
    from gateway.hosts.cluster.machine_views import machine_views, node_of
    from gateway.planner.nodes.measured_networks import MeasuredNetworks
    from gateway.store.measured_facts import measured_facts

    settings = _cluster_settings()
    states, views = query_machines(_read_membership(settings))
    facts = measured_facts(settings.data / "fitserve.db", "network_speed")
    links = MeasuredNetworks(facts).links([node_of(view) for view in views])
    if as_json:
        import json

        fields = {view.name: view.model_dump(mode="json") for view in views}
        for link in links:
            for name, peer in ((link.a, link.b), (link.b, link.a)):
                row = link.model_dump(mode="json", exclude={"a", "b"})
                fields[name].setdefault("links", {})[peer] = row
        say(json.dumps({name: {"state": states[name], **fields.get(name, {})} for name in states}))
        return
    print_table(
        ("MACHINE", "STATE", "ADDRESS", "GPUS", "ENGINES", "GATEWAY"),
        [_machine_row(machine) for machine in machine_views(states, views)],
    )
    if links:
        print_table(("NETWORK", "SPEED", "MEASURED"), [_link_row(link) for link in links])


@app.command("drain")
def drain(
    name: Annotated[str, typer.Argument(help="Machine, as `cluster status` shows it.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let it start engines again.")] = False,
) -> None:
    """Let a machine start no more engines. Running engines go on."""
    from gateway.hosts.cluster.commands import drain_machine

    settings = _cluster_settings()
    view = drain_machine(_read_membership(settings), name, is_drained=not undo)
    say(
        f"{name} starts engines again."
        if undo
        else f"{name} starts no engines. Running engines: {len(view.engines)}."
    )


def _link_row(link: NodeLink) -> tuple[object, ...]:
    from datetime import UTC, datetime

    from gateway.planner.nodes.words import link_words

    day = datetime.fromtimestamp(link.measured_at, UTC) if link.measured_at is not None else None
    return f"{link.a} - {link.b}", link_words(link), f"{day:%Y-%m-%d}" if day is not None else ""


def _machine_row(machine: MachineView) -> tuple[object, ...]:
    if not machine.address:
        return machine.name, machine.state, "", "", "", ""
    gpus = ", ".join(machine.gpus) or "none"
    gateway = machine.owner or "none"
    return (
        machine.name,
        machine.state,
        machine.address,
        gpus,
        len(machine.engines),
        gateway,
    )


def _run_supervisor(settings: Settings, fields: dict[str, object]) -> None:
    from gateway.hosts.cluster.commands import run_supervisor
    from gateway.logging import configure_logging

    configure_logging(settings.log_level)
    run_supervisor(settings.data, fields)


def _cluster_settings() -> Settings:
    from gateway.settings import load_settings

    return load_settings()


def _token_file(settings: Settings, file: Path | None) -> Path:
    return (file or settings.data / "cluster" / "token").expanduser().absolute()


def _host_name() -> str:
    return os.uname().nodename.partition(".")[0].lower()


def _read_membership(settings: Settings) -> Membership:
    from gateway.hosts.cluster.gateway_side import load_membership

    return load_membership(settings.data)
