"""Which host is chosen."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.domain.image_name import AllowedImages
from gateway.errors import HostError
from gateway.hosts.process import procfs
from gateway.hosts.process.instance_records import Record, Records, records_folder
from gateway.server.host_choice import choose_host
from gateway.settings import Settings


@pytest.mark.anyio
async def test_a_docker_that_is_long_in_answering_is_not_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "docker.sock"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    hosts = [await choose_host(Settings(data_dir=tmp_path), "me", AllowedImages(()))]
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        hosts.append(await choose_host(Settings(data_dir=tmp_path), "me", AllowedImages(())))
    assert [host.kind for host in hosts] == ["process", "docker"]
    for host in hosts:
        await host.close()


@pytest.fixture
def engine() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as process:
        yield process
        process.kill()


@pytest.mark.anyio
async def test_running_processes_of_an_earlier_run_are_adopted_where_docker_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: subprocess.Popen[bytes]
) -> None:
    path = tmp_path / "docker.sock"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    settings = Settings(data_dir=tmp_path)
    (folder := records_folder(tmp_path)).mkdir()
    (folder / "foreign.json").write_text("{}")
    record_engine(folder, engine.pid)
    kinds = []
    with socket.socket(socket.AF_UNIX) as docker:
        docker.bind(str(path))
        docker.listen()
        for _ in ("it runs", "it has ended"):
            host = await choose_host(settings, "me", AllowedImages(()))
            kinds.append(host.kind)
            await host.close()
            engine.kill()
            engine.wait()
    assert kinds == ["process", "docker"]


def record_engine(folder: Path, pid: int) -> None:
    """Record a process as the engine of an earlier gateway."""
    process = procfs.read(pid)
    assert process is not None
    Records(folder).write(
        Record(
            name="m-r0-a1",
            model="m",
            attempt=1,
            fingerprint="f",
            port=1,
            pid=pid,
            start_ticks=process.start_ticks,
            boot_id=procfs.boot_id(),
        )
    )


@pytest.mark.anyio
async def test_docker_itself_is_left_alone_with_an_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No socket of Docker is looked at, and engines share one models folder, for the agent mounts
    no other."""
    monkeypatch.setenv("DOCKER_HOST", "tcp://nowhere:1")
    settings = Settings(data_dir=tmp_path, models_dir=tmp_path / "models", host_kind="agent")
    host = await choose_host(settings, "me", AllowedImages(()))
    with pytest.raises(
        HostError, match=f"The agent does not answer: there is no socket {tmp_path}/agent.sock"
    ):
        await host.list()
    assert host.kind == "docker"
    assert settings.shared_models == str(tmp_path / "models")
    assert Settings(data_dir=tmp_path, host_kind="docker").shared_models is None
