"""The flag for the hosts that an engine may fetch media from. Pure.

The gateway sees only the URL of a request. An engine that knows the hosts refuses a redirect to
another one too, and no name of a request leads it elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gateway.domain import Engine

# A list of exact names. Source: vllm/multimodal/media/connector.py of 0.32.0 (IPv6 addresses in
# brackets), sglang srt/utils/common.py of 0.5.23 (with or without).
FLAG = "allowed-media-domains"
HOST = re.compile(r"[a-z0-9_.][a-z0-9_.-]{0,252}|\[[0-9a-f:.]{2,45}\]")


def host_arguments(
    engine: Engine, hosts: Sequence[str], planned_flags: Sequence[str]
) -> tuple[str, ...]:
    """Command-line items that name the hosts; () if the engine has no such flag, or a user gave
    it."""
    if not hosts or FLAG not in engine.flags:
        return ()
    if any(flag.partition("=")[0] == f"--{FLAG}" for flag in planned_flags):
        return ()
    return f"--{FLAG}", *hosts
