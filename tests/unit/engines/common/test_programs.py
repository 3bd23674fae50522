"""A start without the gateway is the command that the engine's documentation shows."""

from __future__ import annotations

import pytest

from gateway.domain import Engine
from gateway.engines.common.programs import replace_program
from gateway.engines.registry import engine_kind
from gateway.profiles.profiles import Profiles

FLAGS = ("--model=/models/m", "--max-model-len=4096")
ENGINES = [Profiles().engine(ref) for ref in Profiles().engine_files]
COMMANDS = {
    "vllm": ("vllm", "serve", "/models/m", "--max-model-len=4096"),
    "sglang": ("sglang", "serve", *FLAGS),
    "vllm-cpu": ("python3", "-m", "vllm.entrypoints.openai.api_server", *FLAGS),
}


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: str(engine.ref))
def test_every_shipped_engine_starts_as_its_documentation_says(engine: Engine) -> None:
    kind = engine_kind(engine.kind)
    command = kind.serve_command((*engine.container_command, *FLAGS))
    assert command == COMMANDS[engine.kind]
    program, *rest = kind.serve_command((*engine.process_command, *FLAGS))
    folder, _, name = program.rpartition("/")
    assert folder == "{env}/bin"
    assert (name.replace("python", "python3"), *rest) == command


def test_a_rank_without_a_server_starts_by_the_same_program() -> None:
    kind = engine_kind("vllm")
    rank = kind.rank_command(("python3", "-m", "vllm.entrypoints.openai.api_server"))
    command = kind.serve_command((*rank, "--headless", *FLAGS))
    assert command == ("vllm", "serve", "/models/m", "--headless", "--max-model-len=4096")


@pytest.mark.parametrize("argv", [("own", "--model=/m"), ("python3", "-m", "own", "--model=/m")])
def test_a_command_of_another_program_stays(argv: tuple[str, ...]) -> None:
    assert engine_kind("vllm").serve_command(argv) == argv
    assert replace_program(argv, (("module",),), ("program",)) == argv
