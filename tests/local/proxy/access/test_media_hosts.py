"""Public addresses that are this machine's own, in a network namespace that has one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None,
    reason="only root can make a network with public addresses",
)

_ASKS = """
import ipaddress
from gateway.proxy.access.media_hosts import MediaHosts
hosts = MediaHosts(["public"])
for host in ("8.8.8.8", "::ffff:8.8.8.8", "2606:2800:220:1::1", "8.8.4.4", "2606:2800:220:1::2"):
    print(hosts.verdict(host, 0.0), end=" ")
"""


def test_media_on_a_public_address_of_this_machine_are_not_fetched() -> None:
    setup = (
        "ip link set lo up; ip addr add 8.8.8.8/32 dev lo; ip addr add 2606:2800:220:1::1 dev lo"
    )
    result = subprocess.run(
        ["unshare", "-n", "sh", "-ec", f'{setup}; exec "$0" -c "$1"', sys.executable, _ASKS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.split() == ["False", "False", "False", "True", "True"], result.stderr
