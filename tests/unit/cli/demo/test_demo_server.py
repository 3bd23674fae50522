"""`fitserve demo` removes only the model that it added."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gateway import health
from gateway.cli.demo import demo_server
from gateway.errors import FitserveError


class _Program:
    """The commands that the demo runs, with their exit codes by name."""

    def __init__(self, **codes: int) -> None:
        self.codes, self.commands = codes, list[str]()

    def run(self, command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        name = command[len(demo_server._PROGRAM)]
        self.commands.append(name)
        return subprocess.CompletedProcess(command, self.codes.get(name, 0))


def _serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: _Program) -> int:
    monkeypatch.setenv("FITSERVE_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", program.run)
    gateway = mock.Mock(**{"poll.return_value": None, "wait.return_value": 0})
    monkeypatch.setattr(subprocess, "Popen", mock.Mock(return_value=gateway))
    monkeypatch.setattr(health, "main", lambda: 0)
    return demo_server.serve_demo(("m", "folder"), lambda _: None)


@pytest.mark.parametrize(("code", "removes"), [(1, False), (3, True), (0, True)])
def test_a_model_that_the_demo_did_not_add_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, removes: bool
) -> None:
    program = _Program(show=1, add=code)
    assert _serve(monkeypatch, tmp_path, program) == code
    assert ("rm" in program.commands) is removes


def test_a_demo_that_began_during_the_installation_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = _Program()
    monkeypatch.setattr(demo_server, "in_use", lambda _: "engine" in program.commands)
    with pytest.raises(FitserveError, match="already runs"):
        _serve(monkeypatch, tmp_path, program)
    assert program.commands == ["engine"]
