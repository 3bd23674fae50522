"""The head's answer to this machine, asked with Ray's own client. Only Ray is imported.

    python -m gateway.hosts.cluster.head_answer HEAD                      prints the answer
    python -m gateway.hosts.cluster.head_answer HEAD FILE MODULE ...      runs a module of Ray next

The second form writes an answer that forbids the start to FILE, and ends with REFUSAL_CODE.
Question and raylet share one import of Ray, which takes seconds.
"""

from __future__ import annotations

import json
import platform
import runpy
import socket
import sys
from pathlib import Path

REFUSAL_CODE = 86
"""The exit code of a start that the answer forbids. `ray start` has no such code."""
_CONNECT_S = 3.0


def main() -> int:
    head, *start_arguments = sys.argv[1:]
    answer = _query_address(head)
    if not start_arguments:
        sys.stdout.write(json.dumps(answer))
        return 0
    file, module, *arguments = start_arguments
    if not _allows_start(answer):
        Path(file).write_text(json.dumps(answer))
        return REFUSAL_CODE
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def _allows_start(answer: dict[str, str]) -> bool:
    if answer["state"] != "ok":
        return False
    import ray

    return (answer["ray"], answer["python"]) == (ray.__version__, platform.python_version())


def _query_address(address: str) -> dict[str, str]:
    """The state of the head at an address: away, without the right token, or its versions."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError as error:
        return {"state": "away", "why": str(error.strerror or error)}
    from ray._raylet import GcsClient
    from ray.exceptions import AuthenticationError, RayError

    try:
        # Source: check_version_info in ray/_private/node.py.
        client = GcsClient(address=address)
        text = client.internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster", timeout=_CONNECT_S)
    except AuthenticationError:
        return {"state": "token"}
    except RayError as error:
        return {"state": "away", "why": type(error).__name__}
    if text is None:
        return {"state": "away", "why": "it is starting"}
    metadata = json.loads(text)
    return {
        "state": "ok",
        "ray": metadata["ray_version"],
        "python": metadata["python_version"],
    }


if __name__ == "__main__":
    sys.exit(main())
