"""The programs and questions behind `fitserve cluster`."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from gateway.domain import NodeView
from gateway.errors import AgentAway, BadRequest, Conflict, SettingsError
from gateway.hosts.agent.agent_server import stop_event
from gateway.hosts.agent.host import AgentHost
from gateway.hosts.cluster.head_check import check_head, check_ray
from gateway.hosts.cluster.host import ClusterHost, node_states
from gateway.hosts.cluster.link_process import LinkProcess
from gateway.hosts.cluster.membership import (
    Membership,
    check_token,
    node_socket,
    read_membership,
    remove_membership,
    write_membership,
)
from gateway.hosts.cluster.node_service import NodeService
from gateway.hosts.cluster.supervisor import supervise
from gateway.hosts.host import Host
from gateway.hosts.process.host import ProcessHost
from gateway.logging import Logger
from gateway.models.catalog.hub_cache import HubCache
from gateway.settings import Settings
from gateway.store.data_folder import lock_exclusively, lock_file

log = Logger("fitserve.cluster")

T = TypeVar("T")

_LEAVE_S = 120.0
_POLL_S = 0.2
# The first call over a link starts an actor on the machine: 5 s, and more on a busy one.
_ANSWER_S = 60.0
_sleep = time.sleep


def run(settings: Settings, membership: Membership) -> None:
    """Run the node service until SIGTERM or SIGINT. Engines keep running. Raises SettingsError."""
    lock_fd = lock_exclusively(settings.data / "node.lock", "node service")
    try:
        asyncio.run(_serve(settings, membership))
    finally:
        os.close(lock_fd)


async def _serve(settings: Settings, membership: Membership) -> None:
    stop = stop_event()
    host = ProcessHost(settings.data, settings.prepared_engines, membership.address)
    disk = HubCache(settings.models, settings.data / "hub")
    service = NodeService(host, membership, settings.data, disk, settings.stop_grace_s)
    try:
        async with service.running():
            log.info("the node service listens", node=membership.name, address=membership.address)
            await stop.wait()
    finally:
        await host.close()


def run_supervisor(data: Path, fields: dict[str, object]) -> None:
    """Join, and keep this machine in the cluster until SIGTERM. Raises SettingsError."""
    try:
        membership = Membership.model_validate(fields)
    except ValidationError as error:
        field_names = ", ".join(str(fault["loc"][0]) for fault in error.errors())
        raise BadRequest(
            f"The membership is not valid: {field_names}.",
            hint="A name has lower-case letters, digits and `-`; the head is ADDRESS:PORT.",
        ) from None
    check_ray()
    check_token(membership.token_file)
    lock_fd = lock_exclusively(data / "cluster.lock", "machine of a cluster")
    try:
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, str(os.getpid()).encode(), 0)
        asyncio.run(_join_cluster(data, membership))
    finally:
        os.close(lock_fd)


async def _join_cluster(data: Path, membership: Membership) -> None:
    """Join the cluster until a signal. A refusal restores the former membership."""
    stop = stop_event()
    former_membership: Membership | None = None
    with suppress(SettingsError):
        former_membership = read_membership(data)
    write_membership(data, membership)
    join_event = asyncio.Event()
    supervision = asyncio.ensure_future(supervise(membership, data, join_event))
    stop_wait = asyncio.ensure_future(stop.wait())
    await asyncio.wait({supervision, stop_wait}, return_when=asyncio.FIRST_COMPLETED)
    stop_wait.cancel()
    if not supervision.done():
        supervision.cancel()
        await asyncio.gather(supervision, return_exceptions=True)
        return
    failure = supervision.exception()
    if isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    # Another failure is none of the head's: the machine stays a member.
    if isinstance(failure, SettingsError) and not join_event.is_set():
        if former_membership is None:
            remove_membership(data)
        else:
            write_membership(data, former_membership)
    if failure is not None:
        raise failure


def leave_cluster(data: Path, membership: Membership) -> None:
    """End the supervisor and forget the membership.

    Raises Conflict while engines run, and SettingsError where a program of the cluster hangs.
    """
    _refuse_engines(membership, _running_engines(data, membership))
    lock_fd = _stop_supervisor(data / "cluster.lock", membership)
    try:
        # A gateway may have started one since.
        _refuse_engines(membership, _names_of_running(ProcessHost(data, 0, membership.address)))
        # The lock is held, so that no machine joins meanwhile and is forgotten.
        remove_membership(data)
    finally:
        os.close(lock_fd)


def _refuse_engines(membership: Membership, engines: Sequence[str]) -> None:
    if engines:
        raise Conflict(
            f"Engines run on {membership.name}: {', '.join(engines)}.",
            hint=(
                f"Run `fitserve cluster drain {membership.name}`, then stop its models. Where"
                " `fitserve cluster join` has ended, start it again before."
            ),
        )


def _names_of_running(host: Host) -> Sequence[str]:
    return [instance.name for instance in asyncio.run(host.list()) if instance.state == "running"]


def _running_engines(data: Path, membership: Membership) -> Sequence[str]:
    """The names of the engines that run here, also without supervisor: engines outlive it.

    Raises SettingsError.
    """
    deadline = time.monotonic() + _LEAVE_S
    while True:
        try:
            os.close(lock_file(data / "cluster.lock"))
            host: Host = ProcessHost(data, 0, membership.address)
        except BlockingIOError:
            host = AgentHost(node_socket(data))
        try:
            return _names_of_running(host)
        except AgentAway:
            # The supervisor starts a node service that ended again.
            if time.monotonic() > deadline:
                raise SettingsError(
                    f"The engines of {membership.name} are unknown: its node service does not"
                    f" answer within {_LEAVE_S:.0f} s.",
                    hint="End the program `fitserve cluster join` of this machine, then try again.",
                ) from None
            _sleep(_POLL_S)


def _stop_supervisor(lock: Path, membership: Membership) -> int:
    """End the program that has the lock, and return the lock. Raises SettingsError.

    The program gets one signal: a second one could kill it after its own work, while Python ends.
    """
    deadline = time.monotonic() + _LEAVE_S
    signalled = set[int]()
    while time.monotonic() < deadline:
        try:
            return lock_file(lock)
        except BlockingIOError:
            with suppress(ValueError, OSError):
                pid = int(lock.read_text())
                if pid not in signalled:
                    os.kill(pid, signal.SIGTERM)
                    signalled.add(pid)
            _sleep(_POLL_S)
    raise SettingsError(
        f"The supervisor of {membership.name} does not end within {_LEAVE_S:.0f} s.",
        hint="End the program `fitserve cluster join` of this machine, then try again.",
    )


def query_machines(membership: Membership) -> tuple[dict[str, str], Sequence[NodeView]]:
    """The states of all machines by name, and the views of those that answer."""

    async def query(link: Path) -> tuple[dict[str, str], Sequence[NodeView]]:
        return await node_states(link), await ClusterHost(link, "", answer_s=_ANSWER_S).views()

    return _query_over_link(membership, query)


def drain_machine(membership: Membership, name: str, *, is_drained: bool) -> NodeView:
    async def query(link: Path) -> NodeView | None:
        return (
            await ClusterHost(link, "", answer_s=_ANSWER_S).node(name).drain(is_drained=is_drained)
        )

    view = _query_over_link(membership, query)
    assert view is not None  # noqa: S101 - a node answers with its view
    return view


def _query_over_link(membership: Membership, query: Callable[[Path], Awaitable[T]]) -> T:
    """The answer to a question over a link of this command."""

    async def query_link(path: Path) -> T:
        await check_head(membership, os.environ)
        link = LinkProcess(membership, path)
        await link.start()
        try:
            return await query(path)
        finally:
            await link.close()

    with tempfile.TemporaryDirectory(prefix="fitserve-") as temporary:
        return asyncio.run(query_link(Path(temporary) / "link.sock"))
