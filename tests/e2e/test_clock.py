"""The clock of the machine jumps by a day, forth and back, under a gateway that runs, and while it
is away: nothing is restarted for it, and no
wait becomes longer or ends because of it."""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Gateway, wait_for
from tests.e2e.scripted import ENGINE, engines, scripted_gateway, starts
from tests.support.patience import HANG_S, Patience, hang_s
from tests.support.running import model_folder

FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
DAY_S = 86400
LIMIT_S = 60
"""The time of a limit."""
ADMIN = "an-admin-key-of-the-settings-that-nobody-guesses"

pytestmark = [
    pytest.mark.skipif(
        FAKETIME is None, reason="libfaketime (Debian: faketime) moves the clock of one process"
    )
]

Jump = Callable[[int], None]


@pytest.fixture
def gateway_with_clock(tmp_path: Path) -> Iterator[tuple[Gateway, Jump]]:
    """A gateway with the ready model m, and a function that sets its clock so many seconds off the
    right time."""
    offset = tmp_path / "offset"

    def jump(seconds: int) -> None:
        new = offset.with_suffix(".new")
        new.write_text(f"{seconds:+d}\n")
        new.rename(offset)

    jump(0)
    clock = {
        "LD_PRELOAD": str(FAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_NO_CACHE": "1",
        # Files keep their times, as they do where a clock is set. Each start would
        # compile all modules again otherwise, and leave them stale for other tests.
        "NO_FAKE_STAT": "1",
    }
    # The kernel's monotonic clock does not jump. An idle connection is kept for longer than a test
    # takes on a busy machine, and for less than a jump.
    clock |= {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "FITSERVE_KEEP_ALIVE_S": str(10 * HANG_S)}
    new_scripted_gateway = scripted_gateway(
        tmp_path, ["--hold", str(tmp_path / "hold")], FITSERVE_ADMIN_KEY=ADMIN, **clock
    )
    new_scripted_gateway.forks = False  # a library is loaded before it at its start alone
    new_scripted_gateway.client.headers["authorization"] = f"Bearer {ADMIN}"
    with contextlib.closing(new_scripted_gateway) as gateway:
        gateway.start()
        source = str(model_folder(tmp_path / "model"))
        response = gateway.client.post(
            "/admin/models", json={"name": "m", "source": source, "engines": [ENGINE]}
        )
        assert response.status_code == 202, response.text
        gateway.until("m", "ready")
        yield gateway, jump


def clock_offset(gateway: Gateway) -> float:
    """Seconds that the clock of the gateway is off, by the date that it tells its clients."""
    date = gateway.client.get("/healthz").headers["date"]
    return email.utils.parsedate_to_datetime(date).timestamp() - time.time()


def looks(gateway: Gateway) -> None:
    """The loop has looked at everything more than once: it has brought a model and taken it away
    again."""
    response = gateway.client.post(
        "/admin/models", json={"name": "other", "endpoints": ["http://127.0.0.1:9/v1"]}
    )
    assert response.status_code == 202, response.text
    gateway.client.delete("/admin/models/other")
    wait_for("it is gone", lambda: gateway.client.get("/admin/models/other").status_code == 404)


def ask(
    client: http.client.HTTPConnection, key: str, *, stream: bool = False
) -> http.client.HTTPResponse:
    body = json.dumps({"model": "m", "prompt": "hi", "max_tokens": 3, "stream": stream})
    client.request("POST", "/v1/completions", body, {"authorization": f"Bearer {key}"})
    return client.getresponse()


def refusal(gateway: Gateway, key: str) -> http.client.HTTPResponse | None:
    """The answer to a key whose limit is used up; None: it is not, and one more is taken."""
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=hang_s())
    ) as connection:
        answer = ask(connection, key, stream=True)
        return answer if answer.status == 429 else None


def keeps_limits(
    gateway: Gateway, jump: Jump, offsets: tuple[int, int], keys: tuple[str, ...]
) -> bool:
    """Jump from one offset to the other, with the limits of the keys used up: none comes back, and
    none lasts longer than its minute. False: on a busy machine the minute was over."""
    former_offset, offset = offsets
    jump(former_offset)
    wait_for_clock(gateway, former_offset)
    began = time.monotonic()
    for key in keys:
        wait_for("the limit is used up", lambda key=key: refusal(gateway, key))  # type: ignore[misc]
    jump(offset)
    wait_for_clock(gateway, offset)
    looks(gateway)
    refusals = [refusal(gateway, key) for key in keys]
    if time.monotonic() - began > LIMIT_S:
        return False
    for answer in refusals:
        assert answer is not None
        assert 0 < int(answer.headers["retry-after"]) <= LIMIT_S
    return True


def wait_for_clock(gateway: Gateway, offset: int) -> None:
    wait_for("it has the new time", lambda: abs(clock_offset(gateway) - offset) < DAY_S / 2)


def test_a_clock_that_jumps_restarts_nothing_and_changes_no_limit(
    gateway_with_clock: tuple[Gateway, Jump], tmp_path: Path
) -> None:
    gateway, jump = gateway_with_clock
    engines_before = engines(gateway)
    limited_key, unlimited = (
        gateway.client.post("/admin/keys", json=wish).json()["key"]
        for wish in ({"name": "k", "requests_per_minute": 1}, {"name": "unlimited"})
    )
    connection, streaming = (
        http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=hang_s()) for _ in range(2)
    )
    with contextlib.closing(connection), contextlib.closing(streaming):
        wait_for(
            "the key is known",
            lambda: (answer := ask(connection, limited_key)).read() and answer.status == 200,
        )
        keys = (limited_key, "a-wrong-key")
        (tmp_path / "hold").touch()
        stream_answer = ask(streaming, ADMIN, stream=True)
        assert stream_answer.readline()
        sockets = (connection.sock, streaming.sock)
        former_offset = 0
        for offset in (DAY_S, -DAY_S, 0, -400 * DAY_S, 400 * DAY_S):
            patience = Patience()
            while not keeps_limits(gateway, jump, (former_offset, offset), keys):
                assert not patience.is_over(), "each jump took a minute"
            former_offset = offset
            # A key that was made at another time is as good as before, and connections are kept.
            headers = {"authorization": f"Bearer {unlimited}"}
            connection.request("GET", "/v1/models", headers=headers)
            response = connection.getresponse()
            assert (response.status, bool(response.read())) == (200, True)
            assert (connection.sock, streaming.sock) == sockets
            assert gateway.client.get("/readyz").status_code == 200
            assert (engines(gateway), starts(gateway)) == (engines_before, 1)
        (tmp_path / "hold").unlink()
        assert b"data: [DONE]" in stream_answer.read()


def kill(gateway: Gateway) -> None:
    for pids in engines(gateway).values():
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("offset", [DAY_S, -DAY_S])
def test_a_dead_engine_is_restarted_once_at_any_clock(
    gateway_with_clock: tuple[Gateway, Jump], offset: int
) -> None:
    gateway, jump = gateway_with_clock
    kill(gateway)
    jump(offset)
    wait_for("another attempt", lambda: len(gateway.show("m")["attempts"]) == 2)
    gateway.until("m", "ready")
    looks(gateway)
    assert starts(gateway) == 2
    # A gateway that was away meanwhile does the same: it adopts running engines.
    running = engines(gateway)
    gateway.kill()
    jump(-offset)
    gateway.start()
    gateway.until("m", "ready")
    looks(gateway)
    assert (engines(gateway), starts(gateway)) == (running, 2)
