"""The agent in the contract suite: a real agent process before a real Docker Engine, asked over its
socket."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from gateway.domain import Engine, Flag, LaunchSpec, Mount
from gateway.domain.units import GIB
from gateway.hosts.agent.host import AgentHost
from gateway.hosts.host import Host
from tests.contract.docker_harness import BASE_IMAGE, PROGRAM, DockerHarness, answering_docker
from tests.support.forked import Forked
from tests.support.patience import HANG_S, Patience, hang_s

# The engine of the agent's one profile: the scripted engine, which mounts itself as a model.
ENGINE = Engine(
    kind="fake",
    version="1",
    device="cuda",
    image=BASE_IMAGE,
    container_command=("python3", "-S", "/models/fake_engine.py"),
    process_command=("python3",),
    flags={
        "script": Flag(type="json"),
        "embed-dim": Flag(type="int"),
        "middleware": Flag(type="str", is_reserved=True),
    },
    env={"A": "1"},
    user_env=("OMP_NUM_THREADS",),
    scratch=("/tmp",),
)


class AgentHarness(DockerHarness):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "agent" / "agent.sock"
        self.log = folder / "agent.log"
        self.models = folder / "shared"
        self.agent: Forked | None = None
        super().__init__()
        self.models.mkdir()
        for file in PROGRAM:
            shutil.copy(file, self.models)
        profile = folder / "profiles" / "engines" / "fake" / "1.yaml"
        profile.parent.mkdir(parents=True)
        profile.write_text(ENGINE.model_dump_json())
        self.socket.parent.mkdir()
        (self.socket.parent / "installation").write_text(self.instance)
        self.start_agent()

    def start_agent(self) -> None:
        settings = {
            "DATA_DIR": str(self.socket.parent),
            "MODELS_DIR": "/models",
            "MODELS_SOURCE": str(self.models),
            "PROFILES_DIR": str(self.folder / "profiles"),
            "DOCKER_NETWORK": self.network,
        }
        keep = {
            name: value for name, value in os.environ.items() if not name.startswith("FITSERVE_")
        }
        before = self.log.read_text().count("listening") if self.log.exists() else 0
        with self.log.open("ab") as log:
            environment = {
                **keep,
                **{f"FITSERVE_{name}": value for name, value in settings.items()},
            }
            self.agent = Forked("gateway.__main__", ["agent"], environment, (0, 1, log.fileno()))
        patience = Patience()
        while self.log.read_text().count("listening") == before:
            assert self.agent.poll() is None, self.log.read_text()
            assert not patience.is_over(), "the agent does not listen"
            time.sleep(0.02)

    def kill_agent(self, number: signal.Signals = signal.SIGKILL) -> int:
        assert self.agent is not None
        self.agent.send_signal(number)
        agent, self.agent = self.agent, None
        return agent.wait(hang_s())

    def make_spec(
        self, name: str, fingerprint: str = "f1", script: Sequence[str] = (), port: int = 0
    ) -> LaunchSpec:
        port = port or 8000
        arguments = (
            "--model=/models/m",
            "--served-model-name=m",
            "--host=0.0.0.0",
            f"--port={port}",
        )
        return (
            super()
            .make_spec(name, fingerprint, port=port)
            .evolve(
                argv=(*ENGINE.container_command, f"--script={json.dumps([*script])}", *arguments),
                env={"A": "1"},
                mounts=(Mount(source=str(self.models), target="/models"),),
                memory_bytes=GIB,
                pids=1000,
                scratch=ENGINE.scratch,
            )
        )

    def restart(self, base_url: str | None = None, timeout_s: float = HANG_S) -> Host:
        """The gateway's side; the agent goes on. There is no other Docker for it."""
        assert base_url is None
        self.host = AgentHost(self.socket, timeout_s=timeout_s)
        self.hosts.append(self.host)
        return self.host

    async def cleanup(self) -> None:
        if self.agent is not None:
            self.kill_agent(signal.SIGTERM)
        await super().cleanup()


def agent_harness(folder: Path) -> AgentHarness:
    """Skips the test where there is no Docker Engine, unless REQUIRE_DOCKER says that there must
    be."""
    answering_docker()
    return AgentHarness(folder)
