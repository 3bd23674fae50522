"""The agreement of a start with the environment that a prepared process imported in."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gateway.domain.engine import Warmup
from gateway.engines.common import expert_warmups
from gateway.engines.common.engine_auth import wrap_command
from gateway.hosts.process.prepared.process_start import ProcessStart, matches_environment
from tests.support.makers import engine

PREPARED = {"HOME": "/home/one", "CUDA_VISIBLE_DEVICES": "GPU-0", "VLLM_READ": "1"}


ARGV = ("python", "-m", "engine")


def start(changes: Mapping[str, str] = {}, argv: tuple[str, ...] = ARGV) -> ProcessStart:
    return ProcessStart(
        engine="vllm==0.26.0",
        identity="i",
        model="m",
        argv=argv,
        env={**PREPARED, **changes},
        key_env="VLLM_API_KEY",
        cwd="/run",
        log="/log",
        exit_file="/exit",
    )


@pytest.mark.parametrize(
    ("changes", "agreed"),
    [
        ({}, True),
        ({"VLLM_API_KEY": "secret"}, True),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1"}, True),
        ({"VLLM_LATER": "1"}, True),
        ({"VLLM_READ": "2"}, False),
        # Native code may have read it.
        ({"OMP_NUM_THREADS": "2"}, False),
        ({"HOME": "/home/two"}, False),
    ],
)
def test_a_fork_agrees_with_a_start_of_known_differences(
    changes: dict[str, str], *, agreed: bool
) -> None:
    assert matches_environment(PREPARED, start(changes), {"VLLM_READ", "PATH"}) is agreed


@pytest.mark.parametrize("name", ["VLLM_API_KEY", "CUDA_VISIBLE_DEVICES"])
def test_nothing_that_was_read_may_differ(name: str) -> None:
    assert not matches_environment(PREPARED, start({name: "other"}), {name})


def test_a_variable_that_is_missing_now_differs() -> None:
    assert not matches_environment({**PREPARED, "OMP_NUM_THREADS": "2"}, start(), set())


def test_the_module_of_a_command_is_found() -> None:
    assert start().module == "engine"
    door = wrap_command(("python", "-m", "vllm.entrypoints.openai.api_server"), "VLLM_API_KEY")
    assert start(argv=door).module == "vllm.entrypoints.openai.api_server"
    warmup = Warmup(shapes="vllm.warm:SHAPES", min_capability="9.0")
    vllm = engine(expert_warmups={"router": warmup})
    skipping = expert_warmups.wrap_command(("python", "-m", "vllm.server"), vllm, "router")
    assert start(argv=skipping).module == "vllm.server"
    assert start(argv=("python", "file.py", "x")).module is None
    assert start(argv=("engine",)).module is None


def test_the_slot_tells_environments_apart_and_no_keys() -> None:
    assert start({"VLLM_API_KEY": "a"}).slot("c") == start({"VLLM_API_KEY": "b"}).slot("c")
    assert start({"HOME": "/other"}).slot("c") != start().slot("c")
    assert start().slot("d") != start().slot("c")
