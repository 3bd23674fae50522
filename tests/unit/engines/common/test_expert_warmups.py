"""A dense model's start without the warm-ups of experts' kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.domain import Engine, Experts, ModelSpec
from gateway.domain.engine import Warmup
from gateway.engines.common import engine_auth
from gateway.engines.common.expert_warmups import (
    VARIABLE,
    drop_skips,
    skipped_warmups,
    wrap_command,
)
from gateway.profiles.profiles import Profiles
from tests.support.makers import engine, plan, spec
from tests.support.patience import hang_s

PLACE = "served.warm:SHAPES"
ENGINE = engine(
    expert_warmups={
        "router": Warmup(shapes=PLACE, min_capability="9.0", routers=((7168, 256), (7168, 384)))
    }
)
DENSE = spec().evolve(hidden=7168)


def mixture(hidden: int, count: int) -> ModelSpec:
    experts = Experts(count=count, per_token=8, intermediate=768)
    return spec().evolve(hidden=hidden, experts=experts)


def test_a_model_without_experts_skips_them() -> None:
    for has_graphs in (True, False):
        choice = skipped_warmups(ENGINE, "9.0", DENSE, has_graphs=has_graphs)[VARIABLE]
        assert choice.value == "router"
        assert "without experts" in choice.reason


def test_a_mixture_skips_the_kernels_of_other_routers() -> None:
    choice = skipped_warmups(ENGINE, "9.0", mixture(2048, 128), has_graphs=True)[VARIABLE]
    assert choice.value == "router"
    assert "128 experts from 2048 values" in choice.reason


@pytest.mark.parametrize(
    ("engine_", "capability", "spec_", "has_graphs"),
    [
        (ENGINE, "9.0", mixture(7168, 256), True),
        # Nothing else compiles its kernels before the first requests without graphs.
        (ENGINE, "9.0", mixture(2048, 128), False),
        (ENGINE, "9.0", spec().evolve(guessed=("experts",)), True),
        (
            engine(expert_warmups={"router": Warmup(shapes=PLACE, min_capability="9.0")}),
            "9.0",
            mixture(2048, 128),
            True,
        ),
        (ENGINE, "8.6", DENSE, True),
        (ENGINE, None, DENSE, True),
        (engine(), "9.0", DENSE, True),
    ],
)
def test_no_warmup_is_skipped_if_none_would_run_in_vain(
    engine_: Engine, capability: str | None, spec_: ModelSpec, has_graphs: bool
) -> None:
    assert skipped_warmups(engine_, capability, spec_, has_graphs=has_graphs) == {}


def test_the_shipped_profile_knows_the_routers_of_its_warmup() -> None:
    """vLLM 0.26.0's list, and a router that is not in it."""
    (warmup,) = Profiles(None).engine("vllm==0.26.0").expert_warmups.values()
    assert (7168, 256) in warmup.routers
    assert (2048, 128) not in warmup.routers


@pytest.fixture
def served_folder(tmp_path: Path) -> Path:
    """An engine that prints, from a fork, the shapes that it would compile."""
    package = tmp_path / "served"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "warm.py").write_text(
        "SHAPES = ((1, 2),)\nOTHERS = (3,)\ndef warm():\n    return [SHAPES, OTHERS]\n"
    )
    (package / "server.py").write_text(
        "import json, os, sys\n"
        "def main():\n"
        "    pid = os.fork()\n"
        "    if pid:\n"
        "        os.waitpid(pid, 0)\n"
        "        return\n"
        "    from served import warm\n"
        "    print(json.dumps([__name__, sys.argv[1:], warm.warm()]), flush=True)\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    return tmp_path


def output(folder: Path, command: tuple[str, ...], *before: str) -> list[object]:
    """The output of the engine in an interpreter that has imported `before`."""
    python, option, program, *arguments = command
    imports = "".join(f"import {name}\n" for name in before)
    result = subprocess.run(
        [python, option, imports + program if option == "-c" else program, *arguments, "--port=1"],
        cwd=folder,
        env={"KEY": "k"},
        capture_output=True,
        text=True,
        check=True,
        timeout=hang_s(),
    )
    document: list[object] = json.loads(result.stdout)
    return document


def test_the_engine_finds_an_empty_list_and_all_else_as_it_was(served_folder: Path) -> None:
    command = (sys.executable, "-m", "served.server")
    assert output(served_folder, command) == ["__main__", ["--port=1"], [[[1, 2]], [3]]]
    skipping = wrap_command(command, ENGINE, "router")
    assert output(served_folder, skipping) == ["__main__", ["--port=1"], [[], [3]]]
    imports = output(served_folder, skipping, "served.warm")
    assert imports == ["__main__", ["--port=1"], [[], [3]]]


def test_the_wrapper_goes_with_the_door(served_folder: Path) -> None:
    door = engine_auth.wrap_command((sys.executable, "-m", "served.server"), "KEY")
    arguments = ["--middleware=fitserve_door.Door", "--port=1"]
    assert output(served_folder, wrap_command(door, ENGINE, "router")) == [
        "__main__",
        arguments,
        [[], [3]],
    ]


@pytest.mark.parametrize("place", ["served.warm:GONE", "served.gone:SHAPES", "served.warm:warm"])
def test_a_version_without_the_list_starts_as_ever(served_folder: Path, place: str) -> None:
    engine_without_list = engine(
        expert_warmups={"router": Warmup(shapes=place, min_capability="9.0")}
    )
    command = wrap_command((sys.executable, "-m", "served.server"), engine_without_list, "router")
    assert output(served_folder, command) == ["__main__", ["--port=1"], [[[1, 2]], [3]]]


def test_names_that_the_profile_lacks_change_no_command() -> None:
    command = ("python3", "-m", "server")
    assert wrap_command(command, ENGINE, "") == command
    assert wrap_command(command, ENGINE, "other") == command
    with pytest.raises(ValueError, match="not a Python program"):
        wrap_command(("python3", "server.py", "x"), ENGINE, "router")


def test_a_start_without_a_gateway_has_the_plain_command() -> None:
    plain = plan("3090")
    assert drop_skips(plain.evolve(env={**plain.env, VARIABLE: "router"})) == plain
    assert drop_skips(plain) is plain
