"""A gateway that reaches Docker through an agent alone: both as processes of their own, before
scripted engines in containers."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import uuid
from pathlib import Path

from docker.api import APIClient
from docker.errors import NotFound

from gateway.cli.demo.checkpoint import make_model
from gateway.hosts.docker.client import socket_path
from tests.contract.docker_harness import BASE_IMAGE, PROGRAM
from tests.e2e.conftest import Gateway, wait_for
from tests.support.forked import Forked
from tests.support.makers import engine
from tests.support.patience import HANG_S, hang_s
from tests.support.running import model_folder


class AgentGateway(Gateway):
    """`launch` starts those of both that do not run."""

    def __init__(self, folder: Path, *, real: bool = False, **settings: str) -> None:
        """Not started yet. The model is `folder / "models" / "model"`; its folder holds the program
        of the scripted engine too. real: `folder / "models" / "real"` is one for real engines."""
        self.installation = f"storm-{uuid.uuid4().hex[:8]}"
        self.docker = APIClient(f"unix://{socket_path()}", version="auto", timeout=int(HANG_S))
        self.agent: Forked | subprocess.Popen[bytes] | None = None
        self.network = f"fitserve-{self.installation}"
        _write_scripted_engine(folder)
        if real:
            make_model(folder / "models" / "real")
        path = folder / "agent"
        path.mkdir()
        (path / "installation").write_text(self.installation)
        variables = {
            "FITSERVE_PROFILES_DIR": str(folder / "profiles"),
            "FITSERVE_MODELS_DIR": str(folder / "models"),
        }
        socket = {"FITSERVE_AGENT_SOCKET": str(path / "agent.sock")}
        gateway_settings = {
            "FITSERVE_HOST_KIND": "agent",
            "FITSERVE_TICK_S": "0.1",
            "FITSERVE_BACKOFF_S": "0.2",
        }
        super().__init__(
            folder / "data",
            folder / "gateway.log",
            **{**variables, **socket, **gateway_settings, **settings},
        )
        environment = {"FITSERVE_DATA_DIR": str(path), "FITSERVE_DOCKER_NETWORK": self.network}
        keep = {
            name: value
            for name, value in self.environment.items()
            if not name.startswith("FITSERVE_")
        }
        self._agents = {**keep, **variables, **socket, **environment}

    def launch(self) -> None:
        if self.agent is None or self.agent.poll() is not None:
            self.agent = self.process_of(
                ["-m", "gateway.__main__", "agent"], self._agents, self.data.parent / "agent.log"
            )
        if self.process is None or self.dead():
            super().launch()

    def kill_agent(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self.agent is not None
        agent, self.agent = self.agent, None
        agent.send_signal(number)
        agent.wait(hang_s())

    def containers(self) -> dict[str, list[int]]:
        """The engines that run, as Docker has them: pids by name of the instance."""
        pids: dict[str, list[int]] = {}
        for container in self.docker.containers(
            filters={"label": f"fitserve.instance={self.installation}"}
        ):
            with contextlib.suppress(NotFound):
                pid = self.docker.inspect_container(container["Id"])["State"]["Pid"]
                pids.setdefault(container["Labels"]["fitserve.name"], []).append(pid)
        return pids

    def close(self) -> None:
        try:
            self.launch()
            super().close()
            wait_for("no containers", lambda: not self.containers())
        finally:
            self.sweep()

    def sweep(self) -> None:
        """Leaves nothing: no agent, no container, no network."""
        if self.agent is not None:
            self.kill_agent(signal.SIGTERM)
        labels = (f"fitserve.{of}={self.installation}" for of in ("instance", "inquiry"))
        for label in labels:
            for container in self.docker.containers(all=True, filters={"label": label}):
                with contextlib.suppress(NotFound):
                    self.docker.remove_container(container["Id"], v=True, force=True)
        with contextlib.suppress(NotFound):
            self.docker.remove_network(self.network)
        self.docker.close()


def _write_scripted_engine(folder: Path) -> None:
    """Its model with its program, and its profile."""
    source = model_folder(folder / "models" / "model")
    for file in PROGRAM:
        shutil.copy(file, source)
    program = ("python3", "-S", str(source / PROGRAM[0].name))
    new_engine = engine("cpu", "99.0.0", image=BASE_IMAGE, container_command=program)
    profile = folder / "profiles" / "engines" / new_engine.kind / f"{new_engine.version}.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text(new_engine.model_dump_json())
