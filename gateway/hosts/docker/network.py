"""The network of all engines: an internal bridge, made for the first engine."""

from __future__ import annotations

import threading
from datetime import datetime
from typing import TYPE_CHECKING, Any

from gateway.errors import HostError

if TYPE_CHECKING:
    from docker.api import APIClient
    from docker.errors import APIError

_LOCK = threading.Lock()


def ensure_network(client: APIClient, name: str, owner: str) -> None:
    """Make the network if needed. Raises HostError if the name is taken by another kind of network.

    Docker before version 25 makes two networks of one name for concurrent requests, or after a
    killed gateway. Then no engine can start. The oldest stays, and younger ones of ours are
    removed.
    """
    with _LOCK:
        network = _networks(client, name) or _make_network(client, name, owner)
        for extra in network[1:]:
            if (extra["Labels"] or {}).get("fitserve.instance") == owner:
                client.remove_network(extra["Id"])
    if network[0]["Driver"] != "bridge" or not network[0]["Internal"]:
        raise HostError(
            f"The Docker network {name} is not an internal bridge: engines on it could be reached"
            " from outside,"
            " and reach out.",
            hint=(
                f"Remove it (`docker network rm {name}`), or set FITSERVE_DOCKER_NETWORK to another"
                " name."
            ),
        )


def ambiguous_network(error: APIError) -> bool:
    """Whether a second network of the same name has appeared. `ensure_network` removes it."""
    return "is ambiguous" in str(error.explanation)


def _make_network(client: APIClient, name: str, owner: str) -> list[dict[str, Any]]:
    from docker.errors import APIError

    try:
        client.create_network(
            name, "bridge", internal=True, check_duplicate=True, labels={"fitserve.instance": owner}
        )
    except APIError as error:
        # Another program made it just now.
        if error.status_code != 409:
            raise
    return _networks(client, name)


def _networks(client: APIClient, name: str) -> list[dict[str, Any]]:
    """The networks of exactly that name, oldest first."""
    networks = (network for network in client.networks(names=[name]) if network["Name"] == name)
    return sorted(
        networks, key=lambda network: (datetime.fromisoformat(network["Created"]), network["Id"])
    )
