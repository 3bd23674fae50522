"""`fitserve demo` removes only the model that it added."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gateway import health
from gateway.cli.demo import demo_server
from gateway.errors import FitserveError, SettingsError


class _Program:
    """The commands that the demo runs, with their exit codes by name."""

    def __init__(self, **codes: int) -> None:
        self.codes, self.commands = codes, list[str]()
        self.environments: list[Mapping[str, str]] = []
        self.has_folder = False
        """Whether a gateway uses the data folder."""

    def run(
        self, command: Sequence[str], env: Mapping[str, str], **_: Any
    ) -> subprocess.CompletedProcess[bytes]:
        name = command[len(demo_server._PROGRAM)]
        self.commands.append(name)
        self.environments.append(env)
        return subprocess.CompletedProcess(command, self.codes.get(name, 0))

    def start(self, *_: Any, env: Mapping[str, str], **__: Any) -> mock.Mock:
        """The gateway."""
        self.environments.append(env)
        code = self.codes.get("serve")
        self.has_folder = code is None
        return mock.Mock(returncode=code, **{"poll.return_value": code, "wait.return_value": 0})


def _serve(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    program: _Program,
    say: Callable[[str], None] = lambda _: None,
) -> int:
    monkeypatch.setenv("FITSERVE_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", program.run)
    monkeypatch.setattr(subprocess, "Popen", program.start)
    if "FITSERVE_PORT" not in os.environ:
        monkeypatch.setenv("FITSERVE_PORT", "0")
    monkeypatch.setattr(demo_server, "is_in_use", lambda _: program.has_folder)
    monkeypatch.setattr(health, "is_healthy", lambda *_, **__: True)
    return demo_server.serve_demo(("m", "folder"), say)


def test_the_end_of_the_gateway_is_stated_with_the_next_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    texts: list[str] = []
    assert _serve(monkeypatch, tmp_path, _Program(show=1), texts.append) == 0
    assert texts[-1] == (
        "The gateway has ended with exit code 0. The next one adopts the engines that run on:"
        " `fitserve serve`."
    )


@pytest.mark.parametrize(("code", "removes"), [(1, False), (3, True), (0, True)])
def test_a_model_that_the_demo_did_not_add_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, removes: bool
) -> None:
    program = _Program(show=1, add=code)
    assert _serve(monkeypatch, tmp_path, program) == code
    assert ("rm" in program.commands) is removes


def test_the_settings_of_the_demo_reach_its_programs_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A user's own setting counts."""
    monkeypatch.setenv("FITSERVE_HOST_KIND", "docker")
    monkeypatch.delenv("FITSERVE_PREPARED_ENGINES", raising=False)
    program = _Program(show=1)
    assert _serve(monkeypatch, tmp_path, program) == 0
    assert "FITSERVE_PREPARED_ENGINES" not in os.environ
    assert len(program.environments) == 5
    for environment in program.environments:
        assert environment["FITSERVE_HOST_KIND"] == "docker"
        assert environment["FITSERVE_PREPARED_ENGINES"] == "0"


def test_a_demo_that_began_during_the_installation_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = _Program()

    def install(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[bytes]:
        program.has_folder = True
        return _Program.run(program, *arguments, **options)

    monkeypatch.setattr(program, "run", install)
    with pytest.raises(FitserveError, match="already runs"):
        _serve(monkeypatch, tmp_path, program)
    assert program.commands == ["engine"]


def test_a_taken_port_is_refused_before_an_engine_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = _Program()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("FITSERVE_PORT", str(listener.getsockname()[1]))
        with pytest.raises(SettingsError, match="Address already in use"):
            _serve(monkeypatch, tmp_path, program)
    assert program.commands == []


def test_a_foreign_gateway_at_the_port_gets_no_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = _Program(serve=2)
    assert _serve(monkeypatch, tmp_path, program) == 2
    assert program.commands == ["engine"]


def test_the_program_is_named_as_the_shell_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a first start from a checkout it stands in an environment that no shell knows."""
    program = tmp_path / "bin" / "fitserve"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    monkeypatch.setenv("PATH", "/nowhere")
    assert demo_server._command_text() == str(program)
    monkeypatch.setenv("PATH", str(program.parent))
    assert demo_server._command_text() == "fitserve"
