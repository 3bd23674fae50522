"""The command line and a gateway that says nothing."""

from __future__ import annotations

import socket

import pytest

from gateway.cli.client import call
from gateway.errors import NotReady


def test_a_gateway_that_is_silent_is_not_said_to_be_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("FITSERVE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(NotReady, match="has not answered for") as told:
            call("GET", "/admin/models", timeout_s=0.1)
    assert "fitserve list" in told.value.hint
