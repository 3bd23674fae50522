"""A gateway that is killed again and again while models come and go; then a look at what is left.

`python -m tests.e2e.storm --rounds 200` prints what docs/reliability.md quotes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import httpx

from tests.e2e.conftest import wait_for
from tests.e2e.scripted import ENGINE, engines, scripted_gateway
from tests.running import model_folder

NAMES = ("a", "b", "c")


class Storm:
    """`wanted` is what was acknowledged: name -> whether the last change that got an answer added it."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.gateway = scripted_gateway(folder, FITSERVE_STOP_GRACE_S="0.5")
        self.chance = chance
        self.source = model_folder(folder / "model")
        self.wanted: dict[str, bool] = {}
        self.unsure: set[str] = set()
        self.kills = 0
        self.adopted_s: list[float] = []

    def rounds(self, count: int) -> None:
        for _ in range(count):
            began = time.monotonic()
            running = engines(self.gateway)
            self.gateway.start()
            if running:
                self._time_adoption(began)
            until = time.monotonic() + self.chance.uniform(0, 1.2)
            while time.monotonic() < until:
                self._change()
            self.gateway.kill()
            self.kills += 1

    def _time_adoption(self, began: float) -> None:
        """Only of models that were ready: what was still starting has yet to be verified."""
        listed = self.gateway.client.get("/v1/models").json()["data"]
        if listed:
            self.adopted_s.append(time.monotonic() - began)

    def _change(self) -> None:
        name = self.chance.choice(NAMES)
        add = self.chance.random() < 0.7
        self.unsure.add(name)
        try:
            if add:
                body = {"name": name, "source": str(self.source), "engines": [ENGINE]}
                answer = self.gateway.client.post("/admin/models", json=body)
            else:
                answer = self.gateway.client.delete(f"/admin/models/{name}")
        except httpx.HTTPError:
            return
        if answer.status_code == 202:
            self.wanted[name] = add
            self.unsure.discard(name)
        elif answer.status_code in (404, 409):
            # It is there already, or still being removed: nothing changed.
            self.unsure.discard(name)
        time.sleep(self.chance.uniform(0, 0.3))

    def settle(self) -> dict[str, int]:
        """Start once more and wait until nothing moves. Raises AssertionError for a lost change, an orphan or a twin."""
        self.gateway.start()
        wanted = {name for name, there in self.wanted.items() if there and name not in self.unsure}
        try:
            listed = wait_for("all models settle", self._settled, 60)
        except AssertionError as error:
            states = {
                one["name"]: (one["state"], one["detail"]) for one in self.gateway.client.get("/admin/models").json()["data"]
            }
            log = self.gateway.log.read_text()[-6000:]
            raise AssertionError(f"{error}: {states}, engines {engines(self.gateway)}\n{log}") from None
        names = {model["name"] for model in listed}
        lost, extra = wanted - names, names - wanted - self.unsure
        assert not lost, f"acknowledged and lost: {lost}"
        assert not extra, f"removed and still there: {extra}"
        running = engines(self.gateway)
        instances = {self.gateway.show(name)["attempts"][-1]["instance"] for name in names}
        assert set(running) == instances, f"orphans or twins: {sorted(set(running) ^ instances)}"
        assert all(len(pids) == 1 for pids in running.values()), running
        return {"models": len(names), "engines": len(running)}

    def _settled(self) -> list[dict[str, str]] | None:
        data: list[dict[str, str]] = self.gateway.client.get("/admin/models").json()["data"]
        return data if all(model["state"] == "ready" for model in data) and len(engines(self.gateway)) == len(data) else None

    def close(self) -> None:
        self.gateway.close()
        assert not engines(self.gateway), "engines of removed models run on"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--settle-every", type=int, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        storm = Storm(Path(folder), random.Random(args.seed))
        settled = 0
        while storm.kills < args.rounds:
            storm.rounds(min(args.settle_every, args.rounds - storm.kills))
            storm.settle()
            settled += 1
            storm.gateway.kill()
        storm.close()
    adopted = sorted(storm.adopted_s)
    slowest = f"{adopted[-1]:.2f}" if adopted else "-"
    sys.stdout.write(
        json.dumps(
            {"kills": storm.kills, "settled": settled, "orphans": 0, "twins": 0, "lost": 0, "slowest adoption s": slowest}
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
