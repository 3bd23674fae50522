"""The process of the link, as a program that ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gateway.hosts.cluster import restart_pause
from gateway.hosts.cluster.link_process import LinkProcess
from gateway.hosts.cluster.membership import Membership
from tests.contract.harness import until
from tests.support.log_lines import capture_logs

pytestmark = pytest.mark.anyio

LINK = """#!/bin/sh
echo >> {runs}
test $(wc -l < {runs}) = 3 && echo ready
exit 1
"""


async def test_a_link_that_ends_often_is_logged_once_until_it_has_answered(
    tmp_path: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, program = tmp_path / "runs", tmp_path / "program"
    program.write_text(LINK.format(runs=runs))
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(restart_pause, "_FIRST_PAUSE_S", 0.0)
    membership = Membership(
        name="one",
        role="node",
        head="127.0.0.1:6379",
        address="127.0.0.1",
        token_file=tmp_path / "token",
    )
    link = LinkProcess(membership, tmp_path / "link.sock")

    async def has_run_often() -> bool:
        return runs.exists() and len(runs.read_text().splitlines()) >= 6

    with capture_logs() as lines:
        link.spawn()
        await until("the link has ended six times", has_run_often)
        await link.close()
    events = [line["event"] for line in lines if line["log_level"] == "warning"]
    # Once before and once after the answer of the third run.
    assert events == ["the link to the cluster ended"] * 2
