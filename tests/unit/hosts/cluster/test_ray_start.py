"""The ports of a machine's raylet, of one range and other ones at each start."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.hosts.cluster.membership import PORTS, Membership, count_raylet_start
from gateway.hosts.cluster.ray_start import raylet_command

MEMBERSHIP = Membership(
    name="two", role="node", head="10.0.0.1:6379", address="10.0.0.2", token_file=Path("/token")
)


def ports(start_number: int) -> dict[str, int]:
    """The ports of a start by the names of their options."""
    command = raylet_command(MEMBERSHIP, Path("/tmp/ray"), Path("/answer"), start_number)
    pairs = (argument.partition("=")[::2] for argument in command)
    return {name: int(value) for name, value in pairs if name.endswith("-port")}


def test_a_raylet_has_no_port_of_its_last_starts() -> None:
    """The head would wait on its connection to the former raylet, and miss the new one."""
    last_starts = [set(named_ports(number).values()) for number in range(8)]
    assert len(set.union(*last_starts)) == sum(map(len, last_starts))
    assert named_ports(8) == named_ports(0)


def named_ports(start_number: int) -> dict[str, int]:
    """The ports without those of workers, which Ray shuffles."""
    return {name: port for name, port in ports(start_number).items() if "worker" not in name}


@pytest.mark.parametrize("start_number", range(9))
def test_all_ports_of_ray_are_in_the_range_of_the_firewall(start_number: int) -> None:
    first_port = MEMBERSHIP.first_port
    range_of_ray = range(first_port, first_port + PORTS)
    named = named_ports(start_number).values()
    workers = range(
        ports(start_number)["--min-worker-port"], ports(start_number)["--max-worker-port"] + 1
    )
    assert {*named, *workers} <= {*range_of_ray}
    assert not {*named} & {*workers}
    assert len(workers) >= 50


def test_starts_are_counted_over_the_life_of_a_supervisor(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    assert [count_raylet_start(tmp_path) for _ in range(3)] == [0, 1, 2]
    (tmp_path / "cluster/raylet-starts").write_text("damaged")
    assert [count_raylet_start(tmp_path) for _ in range(2)] == [0, 1]
