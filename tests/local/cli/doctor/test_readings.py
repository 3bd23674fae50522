"""Answers of a Hub to `fitserve doctor`, over a socket."""

from __future__ import annotations

import email.utils
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from gateway.cli.doctor import checks
from gateway.cli.doctor.readings import HubAnswer, hub
from gateway.secret import Secret

TOKEN = "hf_secret_of_the_test"


@contextmanager
def answering(status: int, body: bytes, *, late_s: float = 0) -> Iterator[tuple[str, list[Any]]]:
    """A Hub whose clock is behind by so much, and its requests."""
    requests: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append((self.path, self.headers.get("authorization")))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def date_time_string(self, timestamp: float | None = None) -> str:
            del timestamp
            return email.utils.formatdate(time.time() - late_s, usegmt=True)

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def states(answer: HubAnswer) -> list[str]:
    return [check.state for check in checks.hub(answer)]


def test_a_hub_reports_the_owner_of_the_token_and_the_time() -> None:
    document = {
        "name": "me",
        "auth": {
            "accessToken": {"role": "fineGrained", "fineGrained": {"canReadGatedRepos": False}}
        },
    }
    with answering(200, json.dumps(document).encode(), late_s=100) as (place, requests):
        readings = hub(Secret(place), Secret(TOKEN))
    assert requests == [("/api/whoami-v2", f"Bearer {TOKEN}")]
    assert (readings.status, readings.user, readings.is_gated) == (200, "me", False)
    assert states(readings) == ["ok", "warn", "warn"]
    assert TOKEN not in repr(readings)


def test_no_secret_is_asked_for_without_a_token() -> None:
    with answering(200, b"[]") as (place, requests):
        readings = hub(Secret(place), None)
    assert requests == [("/api/models?limit=1", None)]
    assert states(readings) == ["ok", "ok", "ok"]


def test_no_answer_of_a_hub_is_a_crash() -> None:
    for status, body in (
        (401, b"{}"),
        (200, b"not json"),
        (200, b"[1]"),
        (200, b'{"name": 3, "auth": "x"}'),
        (503, b""),
    ):
        with answering(status, body) as (place, _):
            assert all(
                state in ("ok", "warn", "fail", "unknown")
                for state in states(hub(Secret(place), Secret(TOKEN)))
            )
    for place in ("http://127.0.0.1:9", "nonsense", "http://[", "ftp://x"):
        assert states(hub(Secret(place), Secret(TOKEN))) == ["warn", "unknown"]
