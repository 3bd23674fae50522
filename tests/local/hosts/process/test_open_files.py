"""The limit on open files: raised for the gateway, never lowered, and unchanged for engines."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.paths import ROOT

CODE = """
import resource, subprocess, sys
from gateway.hosts.process import open_files
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
print(open_files.raise_fd_limit({wanted}), open_files.raise_fd_limit(60))
script = (
    "import resource, sys; sys.stdin.read();"
    " print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
)
asking = [sys.executable, "-c", script]
child = subprocess.Popen(asking, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
open_files.restore_fd_limit(child.pid)
print(child.communicate()[0].strip())
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "wish", "allowed"),
    [(100, 300, 300), (100, 900, 500), (400, 300, 400)],
    ids=["raised", "up to the hard limit", "never lowered"],
)
def test_the_gateways_limit_is_raised_and_a_child_has_the_first(
    soft: int, wish: int, allowed: int
) -> None:
    code = CODE.format(soft=soft, hard=500, wanted=wish)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.split("\n")
    assert result[:3] == [f"{allowed} {allowed}", f"{soft} 500", f"{allowed}"]
