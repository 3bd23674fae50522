"""A gateway on the first machine of a cluster, as a process of its own."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from typing import Any

import httpx

from tests.support.cluster_nodes import ClusterNodes
from tests.support.patience import hang_s

_PORT = 8000
_ADMIN_KEY = "the-admin-key-of-a-cluster-that-ends-soon"


class ClusterGateway:
    """`fitserve serve` on the first machine, and a client for it in the hub."""

    def __init__(self, nodes: ClusterNodes, **settings: str) -> None:
        """settings: further environment variables."""
        self._head = nodes.head
        self._settings = {
            "FITSERVE_HOST_KIND": "cluster",
            "FITSERVE_HOST": nodes.head.address,
            "FITSERVE_PORT": str(_PORT),
            "FITSERVE_ADMIN_KEY": _ADMIN_KEY,
            **settings,
        }
        self.log = nodes.folder / "gateway.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://{nodes.head.address}:{_PORT}"
        self.client = httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {_ADMIN_KEY}"},
            trust_env=False,
            timeout=hang_s(),
        )

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._head.command("gateway.__main__", "serve"),
                env=self._head.environment(**self._settings),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(hang_s())
            self._process = None

    def close(self) -> None:
        self.stop()
        self.client.close()

    def read(self, path: str) -> Any:
        """The answer of the admin API; None: it does not answer, or refuses."""
        with contextlib.suppress(httpx.HTTPError):
            answer = self.client.get(path)
            return answer.json() if answer.is_success else None
        return None

    def machines(self) -> dict[str, str]:
        """The states of the machines by name."""
        answer = self.read("/admin/machines")
        return {machine["name"]: machine["state"] for machine in answer["data"]} if answer else {}
