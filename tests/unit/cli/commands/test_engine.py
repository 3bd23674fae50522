"""The words of `fitserve engine install` about the host that uses the environment."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.cli.commands.engine import _say_other_host
from gateway.settings import Settings


@pytest.mark.parametrize(
    ("fields", "has_docker", "words"),
    [
        ({"host_kind": "auto"}, True, "Docker listens here, so a gateway"),
        ({"host_kind": "auto"}, False, ""),
        ({"host_kind": "docker"}, False, "FITSERVE_HOST_KIND is docker, so a gateway"),
        ({"host_kind": "process"}, True, ""),
    ],
)
def test_an_environment_that_docker_stands_before_is_said_to_be_unused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fields: dict[str, Any],
    has_docker: bool,
    words: str,
) -> None:
    monkeypatch.setattr("gateway.hosts.docker.client.is_listening", lambda: has_docker)
    _say_other_host(Settings(**fields))
    output = " ".join(capsys.readouterr().out.split())
    assert output.startswith(words)
    assert ("FITSERVE_HOST_KIND=process" in output) is bool(words)
