"""The gateway dies while a copy for the load starts, and while one drains: the next one adopts all
that runs, starts no twin and leaves no orphan."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from tests.e2e.conftest import Gateway, wait_for
from tests.e2e.scripted import ENGINE, engines, scripted_gateway, starts
from tests.support.patience import hang_s
from tests.support.running import model_folder

QUICK = {
    "FITSERVE_COPIES_WAIT_S": "0.2",
    "FITSERVE_COPIES_IDLE_S": "1",
    "FITSERVE_COPIES_PAUSE_S": "0.1",
}


@contextlib.contextmanager
def loaded_gateway(folder: Path, *scripts: Sequence[str]) -> Iterator[Gateway]:
    """A gateway with the model m, of which one copy serves two requests at once."""
    with contextlib.closing(scripted_gateway(folder, *scripts, **QUICK)) as gateway:
        gateway.start()
        body = {
            "name": "m",
            "source": str(model_folder(folder / "model")),
            "engines": [ENGINE],
            "copies": "1-2",
            "args": {"max-num-seqs": 1},
        }
        response = gateway.client.post("/admin/models", json=body)
        assert response.status_code == 202, response.text
        gateway.until("m", "ready")
        yield gateway


def ask(gateway: Gateway, count: int, answers: list[int]) -> list[threading.Thread]:
    """Send requests from threads. A request that the death of the gateway ends has no answer."""

    def send() -> None:
        body = {"model": "m", "prompt": "hi", "max_tokens": 3}
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.post(
                f"{gateway.url}/v1/completions", json=body, trust_env=False, timeout=hang_s()
            )
            answers.append(answer.status_code)

    threads = [threading.Thread(target=send, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


def states(gateway: Gateway) -> list[str]:
    return [replica["state"] for replica in gateway.show("m")["replicas"]]


def wait_for_states(gateway: Gateway, *wanted_states: str) -> None:
    wait_for(f"{wanted_states}", lambda: states(gateway) == [*wanted_states], every_s=0.05)


def kill_and_restart(gateway: Gateway) -> None:
    gateway.kill()
    gateway.start()


def test_a_copy_that_was_starting_is_adopted(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    with loaded_gateway(tmp_path, ["--hold", str(hold)], ["--start-delay", "3"]) as gateway:
        hold.touch()
        # The clients of the killed gateway are gone, so the load is too.
        gateway.environment["FITSERVE_COPIES_IDLE_S"] = "10000"
        ask(gateway, 6, [])
        wait_for("a second engine", lambda: len(engines(gateway)) == 2, every_s=0.05)
        before = engines(gateway)
        kill_and_restart(gateway)
        hold.unlink()
        wait_for_states(gateway, "ready", "ready")
        assert engines(gateway) == before
        assert starts(gateway) == 2
    assert not engines(gateway)


def test_a_copy_that_was_leaving_serves_until_the_next_calm(tmp_path: Path) -> None:
    holds = tmp_path / "hold", tmp_path / "second"
    with loaded_gateway(tmp_path, *(["--hold", str(hold)] for hold in holds)) as gateway:
        holds[0].touch()
        answers: list[int] = []
        first_threads = ask(gateway, 6, answers)
        wait_for_states(gateway, "ready", "ready")
        wait_for("the queue is empty", lambda: len(answers) == 4)
        holds[1].touch()
        ask(gateway, 1, [])
        wait_for("the second copy works", lambda: in_flight(gateway) == 3)
        holds[0].unlink()
        for thread in first_threads:
            thread.join(hang_s())
        assert answers == [200] * 6
        wait_for_states(gateway, "ready", "stopping")
        before = engines(gateway)
        kill_and_restart(gateway)
        assert engines(gateway) == before
        wait_for_states(gateway, "ready", "ready")
        holds[1].unlink()
        wait_for_states(gateway, "ready")
        wait_for("one engine", lambda: len(engines(gateway)) == 1)
        assert starts(gateway) == 2
    assert not engines(gateway)


def in_flight(gateway: Gateway) -> int:
    return len(gateway.client.get("/admin/requests").json()["data"])
