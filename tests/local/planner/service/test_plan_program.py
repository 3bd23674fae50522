"""The plan process: model folders of hostile authors, and its end with the gateway."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.hostile.folders import FolderJudge
from tests.support.forked import Forked

FOLDERS = 100


def test_hostile_folders_are_planned_or_refused_and_lead_nowhere(tmp_path: Path) -> None:
    tally = FolderJudge(tmp_path.resolve()).run(FOLDERS, seed=36)
    assert not tally.violations, "\n".join(tally.violations)
    assert tally.folders == FOLDERS
    # Both kinds of answer are judged.
    assert {"planned", "BadModel"} <= tally.outcomes.keys()


def test_the_judge_finds_words_of_another_file_and_errors_of_the_planner(tmp_path: Path) -> None:
    judge = FolderJudge(tmp_path.resolve())
    request = judge.request(judge.outside / "folder")
    assert any("another file" in problem for problem in judge.problems(request))
    judge.worker.plan = None  # type: ignore[assignment]
    assert any("NoneType" in problem for problem in judge.problems(request))


@pytest.mark.parametrize("unread", [b"", b"an answer"])
@pytest.mark.parametrize("beginning", [b"", b"\0\0", b"\0\0\0\x09{"])
def test_the_planning_process_ends_with_the_gateway_during_any_request(
    unread: bytes, beginning: bytes
) -> None:
    """A socket that is closed with an unread answer resets the connection."""
    gateway_socket, program_socket = socket.socketpair()
    with gateway_socket, program_socket:
        process = Forked(
            "gateway.planner.service.plan_program",
            (),
            os.environ,
            (program_socket.fileno(),) * 2 + (2,),
        )
        gateway_socket.sendall(beginning)
        program_socket.sendall(unread)
    assert process.wait() == 0
