"""Which host is chosen."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from gateway.domain.image_name import AllowedImages
from gateway.errors import HostError
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
