"""The command line and a gateway that says nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gateway.cli.client import call, get_text
from gateway.errors import NotReady


def test_a_gateway_that_is_silent_is_not_said_to_be_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("FITSERVE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(NotReady, match="has not answered for") as error:
            call("GET", "/admin/models", timeout_s=0.1)
    assert "fitserve list" in error.value.hint


@contextmanager
def another_program(status: int, body: bytes) -> Iterator[str]:
    """The URL of a server that gives this answer to everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, b"<h1>File not found</h1>"),
        (404, b'{"error": {"message": "Not Found", "code": 404}}'),
        (200, b"<!doctype html>"),
        (502, b""),
    ],
)
def test_another_program_on_the_port_is_said_to_be_no_fitserve(
    monkeypatch: pytest.MonkeyPatch, status: int, body: bytes
) -> None:
    with another_program(status, body) as url:
        monkeypatch.setenv("FITSERVE_URL", url)
        with pytest.raises(NotReady) as error:
            call("GET", "/admin/models")
        assert error.value.message.startswith(
            f"The server at {url} is not fitserve (status {status})"
        )
        assert "FITSERVE_PORT" in error.value.hint
        if status != 200:
            with pytest.raises(NotReady, match="is not fitserve"):
                get_text("/admin/models/m/logs")
