"""The start of a cluster's host in a gateway, which runs on a machine of the cluster."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from gateway.errors import SettingsError
from gateway.hosts.cluster.head_check import HeadAway, check_head
from gateway.hosts.cluster.host import ClusterHost
from gateway.hosts.cluster.link_process import LinkProcess
from gateway.hosts.cluster.membership import Membership, folder, read_membership
from gateway.hosts.nodes_host import NodesHost


def load_membership(data: Path) -> Membership:
    """The membership of this machine. Raises SettingsError where it belongs to no cluster."""
    membership = read_membership(data)
    if membership is None:
        raise SettingsError(
            f"This machine belongs to no cluster ({data} has no membership).",
            hint="Run `fitserve cluster init` on the first machine, `fitserve cluster join` here.",
        )
    return membership


async def host_of_cluster(data: Path, owner: str) -> NodesHost:
    """The host, also while the head does not answer: engines run on without it.

    Raises SettingsError where this machine cannot join the head.
    """
    membership = load_membership(data)
    with suppress(HeadAway):
        await check_head(membership, os.environ)
    link = LinkProcess(membership, folder(data) / "link.sock")
    link.spawn()
    return NodesHost(ClusterHost(link.path, owner, link, data))
