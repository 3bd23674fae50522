"""The check of the port, with a gateway and with another program on it."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from gateway.cli.doctor.examination import _check_port
from gateway.settings import Settings


class _Answer(http.server.BaseHTTPRequestHandler):
    source = "gateway"

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("x-gateway-source", self.source)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(params=["gateway", "other"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    answer = type("_Program", (_Answer,), {"source": request.param})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), answer) as program:
        threading.Thread(target=program.serve_forever, daemon=True).start()
        yield request.param, program.server_port
        program.shutdown()


def test_the_own_gateway_on_the_port_is_no_problem(server: tuple[str, int]) -> None:
    source, port = server
    check = _check_port(Settings(port=port))
    if source == "gateway":
        assert (check.state, check.finding) == (
            "ok",
            f"a fitserve gateway answers at 127.0.0.1:{port}",
        )
    else:
        assert check.state == "warn"
        assert check.do == "Another program has this port. Set FITSERVE_PORT to a free one."
