"""Clusters by a short form of their machines and their network.

    2x(8xh100)        two machines of the snapshot 8xh100
    2x(gb10)+(4x3090) unlike machines
    2xgb10            two machines: the GPU of a gb10 is part of its processor

A snapshot of the whole name wins: 2x3090 is one machine with two GPUs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from gateway.domain import Cluster, Hardware, Network, Node
from gateway.errors import BadRequest
from gateway.profiles.machine_names import plain_name, split_counts

_TERM = r"(?:(\d{1,4})x)?\(([^()]+)\)"
_FORM = re.compile(rf"{_TERM}(?:\+{_TERM})*")
_MAX_NODES = 1024
_BITS = re.compile(r"(\d+(?:\.\d+)?)(g|m)bit", re.IGNORECASE)
_TIME = re.compile(r"(\d+(?:\.\d+)?)(us|ms)")
_RDMA = {"roce": "roce", "infiniband": "infiniband", "tcp": "none"}
_UNITS = {"g": 1e9, "m": 1e6, "us": 1e-6, "ms": 1e-3}


def read_machines(form: str, snapshot: Callable[[str], Hardware | None]) -> list[Hardware] | None:
    """The machines of a form; None: the text has another form. Raises BadRequest, NotFound.

    snapshot: a function that reads a snapshot by name; its None means that none exists.
    """
    if _FORM.fullmatch(form):
        terms = [(int(count or 1), name) for count, name in re.findall(_TERM, form)]
    else:
        counts, words = split_counts(plain_name(form))
        terms = [(math.prod(counts), words)]
        machine = snapshot(words) if counts and words else None
        # A second GPU of another kind could be in the same machine.
        if machine is None or any(gpu.memory_kind != "unified" for gpu in machine.gpus):
            return None
    if not 0 < sum(count for count, _ in terms) <= _MAX_NODES:
        raise BadRequest(
            f"{form} has no machine, or more than {_MAX_NODES}.",
            hint="Name fewer machines.",
            param="hardware",
        )
    machines = []
    for count, name in terms:
        machine = snapshot(name)
        if machine is None:
            return None
        machines += [machine] * count
    return machines


def build_cluster(machines: list[Hardware], network: Network) -> Cluster:
    """The cluster of these machines, as node-1, node-2 and so on."""
    nodes = []
    for number, machine in enumerate(machines, start=1):
        gpus = tuple(gpu.evolve(uuid=f"{gpu.uuid}-node-{number}") for gpu in machine.gpus)
        nodes.append(Node(name=f"node-{number}", hardware=machine.evolve(gpus=gpus)))
    return Cluster(nodes=tuple(nodes), network=network)


def parse_network(text: str) -> Network:
    """The network of `200gbit,2us,roce`; a missing part is unknown. Raises BadRequest."""
    fields: dict[str, Any] = {}
    for part in text.split(","):
        word = part.strip().lower()
        if match := _BITS.fullmatch(word):
            fields["bytes_s"] = float(match[1]) * _UNITS[match[2]] / 8
        elif match := _TIME.fullmatch(word):
            fields["latency_s"] = float(match[1]) * _UNITS[match[2]]
        elif word in _RDMA:
            fields["rdma"] = _RDMA[word]
        elif word != "unknown":
            raise BadRequest(
                f"The network {text[:80]!r} cannot be read: {word[:40]!r} is not part of one.",
                hint=(
                    "Give bandwidth, latency and kind, such as 200gbit,2us,roce or 10gbit,tcp."
                    " What is left out is unknown."
                ),
                param="network",
            )
    if fields.get("bytes_s") == 0:
        raise BadRequest(
            "A network of 0 bit/s carries nothing.",
            hint="Leave the bandwidth out.",
            param="network",
        )
    return Network(**fields)
