"""Command line and environment of a machine's raylet, and of programs that call Ray.

Sources: `ray start --help` of Ray 2.60.0 and ray_config_def.h there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from gateway.hosts.cluster.membership import PORTS, Membership
from gateway.hosts.cluster.relay import SOCKET_VARIABLE

RAY_VERSION = "2.60.0"
HEAD_ANSWER = "gateway.hosts.cluster.head_answer"
"""The module of the program that asks the head."""
RESOURCE = "fitserve-node:"
"""Prefix of the resource that ties an actor to its machine."""
# Only relays use Ray's object store.
_STORE_BYTES = 80 * 1024 * 1024
# The head keeps its connection to a raylet that ended, and tries it again after up to two minutes.
# A new raylet on the same port would count as lost meanwhile, so the next starts have other ports.
_PORT_SETS = 8
_NAMED_PORTS = (
    "node-manager-port",
    "object-manager-port",
    "runtime-env-agent-port",
    "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port",
    "metrics-export-port",
)
# A raylet's workers get its environment, and Ray's token opens every machine. So the environment
# has no keys of the gateway.
_INHERITED_VARIABLES = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "PYTHONPATH",
    "PYTHONDONTWRITEBYTECODE",
)
# Programs of a head that is gone end after this time, then join the next head.
_HEAD_SILENCE_S = "10"
# Ray misses a machine after 3 s of silence in four probes; the defaults take a minute.
_HEALTH = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "300",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "4",
}


def ray_environment(token_file: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program that calls Ray. The token itself is in no environment."""
    variables = {
        name: value
        for name, value in inherited.items()
        if name in _INHERITED_VARIABLES or name.startswith("RAY_")
    }
    variables.pop("RAY_AUTH_TOKEN", None)
    return variables | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_gcs_rpc_server_reconnect_timeout_s": _HEAD_SILENCE_S,
    }


def raylet_environment(
    membership: Membership, socket: Path, inherited: Mapping[str, str]
) -> dict[str, str]:
    """A raylet that ends takes no process along that is not Ray's."""
    return {
        **ray_environment(membership.token_file, inherited),
        **(_HEALTH if membership.role == "head" else {}),
        "RAY_kill_child_processes_on_worker_exit": "0",
        "RAY_worker_niceness": "0",
        SOCKET_VARIABLE: str(socket),
    }


def raylet_command(
    membership: Membership, temp_dir: Path, answer_file: Path, start_number: int
) -> list[str]:
    """`ray start` in the foreground, on a node after a question to the head. Ray's servers listen
    on every interface, on ports of one range; the dashboard is off.

    answer_file: gets an answer that forbids the start.
    start_number: the number of starts of this machine's raylet so far, which selects its ports.
    """
    first_port = membership.first_port
    first_named_port = first_port + start_number % _PORT_SETS * len(_NAMED_PORTS)
    port = membership.head.rpartition(":")[2]
    return [
        sys.executable,
        "-m",
        *([HEAD_ANSWER, membership.head, str(answer_file)] if membership.role == "node" else []),
        "ray.scripts.scripts",
        "start",
        "--block",
        *(
            [
                "--head",
                f"--port={port}",
                "--include-dashboard=false",
                "--no-monitor",
            ]
            if membership.role == "head"
            else [f"--address={membership.head}"]
        ),
        "--include-log-monitor=false",
        f"--node-ip-address={membership.address}",
        f"--temp-dir={temp_dir}",
        "--num-cpus=0",
        "--num-gpus=0",
        f"--object-store-memory={_STORE_BYTES}",
        "--disable-usage-stats",
        f"--resources={json.dumps({RESOURCE + membership.name: 1})}",
        *(f"--{name}={first_named_port + number}" for number, name in enumerate(_NAMED_PORTS)),
        f"--min-worker-port={first_port + _PORT_SETS * len(_NAMED_PORTS)}",
        f"--max-worker-port={first_port + PORTS - 1}",
    ]
