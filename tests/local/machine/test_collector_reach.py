"""Whether a collector answers, by its address, and whether the libraries for it are there."""

from __future__ import annotations

import socket
import sys

import pytest

from gateway.machine.collector_reach import connection_problem, missing_library
from tests.support.dataplane import address, refused_url


def test_a_listener_answers_and_a_closed_port_has_a_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert connection_problem(f"{address(server)}/v1") == ""
    assert connection_problem(refused_url()) == "Connection refused"


@pytest.mark.parametrize("place", ["127.0.0.1:99999", "a..b:4318", f"{'a' * 64}.example:4318"])
def test_an_address_that_no_machine_can_have_has_a_reason(place: str) -> None:
    assert connection_problem(f"http://{place}")


@pytest.mark.parametrize("module", ["opentelemetry", "opentelemetry.exporter.otlp.proto.http"])
def test_a_library_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    for name in [name for name in sys.modules if name.startswith(module)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    assert missing_library() in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto")
