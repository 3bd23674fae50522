"""Parts of an engine over several nodes, read as one instance."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from gateway.domain import Instance
from gateway.hosts.node_group import PartName, join_parts, part_name

State = Literal["created", "running", "exited"]


def part(place: int, state: State = "running", count: int = 2, **fields: Any) -> Instance:
    return Instance(
        name=str(PartName("m-r0-a1", place, count)),
        model="m",
        attempt=1,
        fingerprint="f",
        state=state,
        url=f"http://10.0.0.{place}:8000",
        **fields,
    )


@pytest.mark.parametrize(
    ("parts", "state", "exit_code", "oom_killed"),
    [
        ([part(1), part(0)], "running", None, False),
        ([part(0)], "created", None, False),
        ([part(0), part(1), part(1, count=3)], "running", None, False),
        ([part(0), part(1, "created")], "created", None, False),
        ([part(0), part(1, "exited", exit_code=1)], "exited", 1, False),
        ([part(1, "exited", exit_code=1)], "exited", 1, False),
        (
            [part(0, "exited", exit_code=0), part(1, "exited", exit_code=3)],
            "exited",
            3,
            False,
        ),
        (
            [
                part(0, "exited", exit_code=1),
                part(1, "exited", exit_code=137, oom_killed=True),
            ],
            "exited",
            137,
            True,
        ),
    ],
)
def test_one_node_speaks_for_all_parts(
    parts: list[Instance], state: State, exit_code: int | None, oom_killed: bool
) -> None:
    engine = join_parts(parts)[0]
    assert engine.name == "m-r0-a1"
    assert (engine.state, engine.exit_code, engine.is_oom_killed) == (state, exit_code, oom_killed)
    assert state != "running" or engine.url == "http://10.0.0.0:8000"


def test_engines_on_one_node_stay_as_they_are() -> None:
    lone_part = part(0).evolve(name="n1of2-r0-a3")
    assert join_parts([part(0), lone_part, part(1)]) == [
        lone_part,
        join_parts([part(0), part(1)])[0],
    ]


@pytest.mark.parametrize("name", ["m-r0-a1", "m-n1of2-r0-a1", "m-r0-a1-n1of", "-n1of2"])
def test_names_of_another_form_are_no_parts(name: str) -> None:
    assert part_name(name) is None


def test_the_name_of_a_part_is_read_back() -> None:
    name = PartName("m-n1of2-r0-a1", 3, 12)
    assert part_name(str(name)) == name
