"""The parts of an engine over several nodes as one instance. Pure.

Each node's host knows its part by a name with the number of the part and of all parts, so that
hosts without a word of each other, listed after a restart of the gateway, show which belong
together.

parts                                   the engine
all run                                 running, at the address of the first
one has exited                          exited, by the part with the most to say
one is missing, or was never started    created: all are restarted, or stopped
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gateway.domain import Instance, LaunchSpec

_PART = re.compile(r"(?P<name>.+)-n(?P<number>\d{1,4})of(?P<count>\d{1,4})")


class PartName(NamedTuple):
    """The name of a part.

    number: 0 is the node that answers requests.
    parts: how many there are.
    """

    name: str
    number: int
    parts: int

    def __str__(self) -> str:
        return f"{self.name}-n{self.number}of{self.parts}"


def part_name(text: str) -> PartName | None:
    """The name read; None: of an engine on one node."""
    match = _PART.fullmatch(text)
    return match and PartName(match["name"], int(match["number"]), int(match["count"]))


def part_specs(spec: LaunchSpec) -> list[LaunchSpec]:
    """The start of each part, in order."""
    count = len(spec.nodes)
    return [
        spec.evolve(
            name=str(PartName(spec.name, number, count)),
            argv=row.argv,
            env=row.env,
            gpus=row.gpus,
            node=row.node,
            nodes=(),
        )
        for number, row in enumerate(spec.nodes)
    ]


def join_parts(instances: Sequence[Instance]) -> list[Instance]:
    """The instances with parts of one engine as one."""
    engines: list[Instance] = []
    groups: dict[tuple[str, int], dict[int, Instance]] = {}
    for instance in instances:
        part = part_name(instance.name)
        if part is None:
            engines.append(instance)
        else:
            groups.setdefault((part.name, part.parts), {})[part.number] = instance
    return [*engines, *(_joined_instance(*group, parts) for group, parts in groups.items())]


def _joined_instance(name: str, count: int, instances: Mapping[int, Instance]) -> Instance:
    exited_instances = [instance for instance in instances.values() if instance.state == "exited"]
    first = instances[min(instances)].evolve(
        name=name, state="created", exit_code=None, is_oom_killed=False
    )
    if exited_instances:
        # A part that was killed for memory, or failed, ends the others, which then may exit well.
        last = min(
            exited_instances,
            key=lambda instance: (not instance.is_oom_killed, instance.exit_code in (None, 0)),
        )
        return first.evolve(
            state="exited", exit_code=last.exit_code, is_oom_killed=last.is_oom_killed
        )
    if len(instances) == count and all(
        instance.state == "running" for instance in instances.values()
    ):
        return first.evolve(state="running")
    return first
