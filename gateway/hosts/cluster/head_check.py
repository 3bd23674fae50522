"""The question whether this machine can join a head: its port, token, and versions.

Ray reports a wrong token as a lost connection after 20 s. Ray's own client for the head's store
names it immediately. Another program asks (head_answer.py); here the answer is judged.
"""

from __future__ import annotations

import asyncio
import json
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from gateway.errors import SettingsError
from gateway.hosts.cluster.membership import Membership, check_token
from gateway.hosts.cluster.ray_start import HEAD_ANSWER, RAY_VERSION, ray_environment

_ANSWER_S = 60.0


class HeadAway(SettingsError):
    """The head of the cluster does not answer."""

    code = "head_away"


def check_ray() -> None:
    """Check that Ray is installed in its one version. Raises SettingsError."""
    try:
        ray_version = version("ray")
    except PackageNotFoundError:
        ray_version = "none"
    if ray_version != RAY_VERSION:
        raise SettingsError(
            f"A cluster needs Ray {RAY_VERSION}; installed is {ray_version}.",
            hint="Run `pip install '.[cluster]'` in a clone of the repository.",
        )


async def check_head(membership: Membership, inherited: Mapping[str, str]) -> None:
    """Check that the head answers and fits this machine. Raises HeadAway, and SettingsError where a
    try later would fail too."""
    check_ray()
    check_token(membership.token_file)
    asking_process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        HEAD_ANSWER,
        membership.head,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=ray_environment(membership.token_file, inherited),
    )
    try:
        async with asyncio.timeout(_ANSWER_S):
            output, _ = await asking_process.communicate()
        answer = json.loads(output)
    except (TimeoutError, ValueError):
        answer = {"state": "away", "why": "it gives no answer"}
    finally:
        if asking_process.returncode is None:
            asking_process.kill()
            await asking_process.wait()
    judge(membership, answer, local_versions())


def local_versions() -> dict[str, str]:
    """The versions that have to equal those of the head."""
    return {"ray": RAY_VERSION, "python": platform.python_version()}


def judge(membership: Membership, answer: Mapping[str, Any], versions: Mapping[str, str]) -> None:
    """Compare the head's answer with this machine's versions. Raises HeadAway, SettingsError."""
    if answer["state"] == "away":
        raise HeadAway(
            f"The head of the cluster does not answer at {membership.head}: {answer['why']}.",
            hint=(
                "See that `fitserve cluster init` runs there, and that the firewall lets this"
                " machine in."
            ),
        )
    if answer["state"] == "token":
        path = membership.token_file
        raise SettingsError(
            f"The token in {path} is not that of the cluster at {membership.head}.",
            hint=f"Copy the head's token file with its mode: scp -p HEAD:TOKEN_FILE {path}",
        )
    for name, title in (("ray", "Ray"), ("python", "Python")):
        at_head = answer[name]
        local_version = versions[name]
        if at_head != local_version:
            raise SettingsError(
                f"The head runs {title} {at_head}, and this machine {local_version}. All machines"
                " of a cluster need the same.",
                hint=f"Install fitserve with {title} {at_head} here, or {local_version} there.",
            )
