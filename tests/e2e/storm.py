"""A gateway, a worker, an agent or both are killed while writers add and remove models and keys.

`python -m tests.e2e.storm --rounds 200 --writers 3 [--victim gateway | agent | both | worker]`
prints the figures of benchmarks/notebook/reliability.md. `--engine FOLDER`: beside the scripted
engines of the writers one real engine serves, of the environment in this folder. After a failure
the folder with the database, all logs, the records and the state of the machine is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import httpx

from gateway.cli.demo.checkpoint import make_model
from gateway.controller.failpoint import FAILPOINTS
from tests.e2e.agented import AgentGateway
from tests.e2e.conftest import Gateway, wait_for
from tests.e2e.scripted import ENGINE, engines, scripted_gateway, workers
from tests.support.patience import HANG_S, hang_s
from tests.support.running import model_folder

NAMES = ("a", "b", "c")
ADMIN = "an-admin-key-of-the-settings-that-nobody-guesses"
BUSY = "while True: pass"


class Target(NamedTuple):
    """The gateway that writers change, the weights of their models, and the end of a round."""

    url: str
    headers: httpx.Headers
    source: Path
    over: threading.Event


class Writer:
    """Changes models and keys of its own names, one after the other, until the round is over.

    `wanted` is what was acknowledged: (kind, name) -> whether the last change that got an answer
    added it. `unsure`: a change got none.
    """

    def __init__(self, index: int, target: Target, chance: random.Random) -> None:
        self.wanted: dict[tuple[str, str], bool] = {}
        self.unsure: set[tuple[str, str]] = set()
        self.acknowledged = 0
        self._names = tuple(f"{name}{index}" for name in NAMES)
        self._target = target
        self._chance = chance

    def run(self) -> None:
        """Returns when the gateway no longer answers, or is not to be asked any more."""
        url, headers, _, over = self._target
        with httpx.Client(
            base_url=url, headers=headers, trust_env=False, timeout=hang_s()
        ) as client:
            while self._change(client) and not over.wait(self._chance.uniform(0, 0.3)):
                pass

    def _change(self, client: httpx.Client) -> bool:
        kind, name = (
            self._chance.choice(("models", "models", "keys")),
            self._chance.choice(self._names),
        )
        add = self._chance.random() < 0.7
        self.unsure.add((kind, name))
        try:
            if not add:
                answer = client.delete(f"/admin/{kind}/{name}")
            elif kind == "keys":
                answer = client.post("/admin/keys", json={"name": name})
            else:
                body = {"name": name, "source": str(self._target.source), "engines": [ENGINE]}
                answer = client.post("/admin/models", json=body)
        except httpx.HTTPError:
            return False
        if answer.is_success:
            self.acknowledged += 1
            there = add
        elif answer.status_code in (404, 409):
            # Nothing changed, and the refusal says how it is.
            there = answer.status_code == 409 and "still being removed" not in answer.text
        else:
            return True
        self.wanted[kind, name] = there
        self.unsure.discard((kind, name))
        return True


def known_names(writers: Iterable[Writer], kind: str) -> tuple[set[str], set[str]]:
    """The names of which was acknowledged that they are there, and those of which a change got no
    answer."""
    there, unsure = set[str](), set[str]()
    for writer in writers:
        unsure |= {name for of, name in writer.unsure if of == kind}
        there |= {name for (of, name), added in writer.wanted.items() if of == kind and added}
    return there - unsure, unsure


class RealEngine:
    """A real engine that serves all the time. Deaths around it must not touch its processes."""

    name = "real"

    def __init__(self, gateway: Gateway, environment: Path, folder: Path) -> None:
        """environment: made by `fitserve engine install`; its name is KIND-VERSION."""
        self._gateway = gateway
        kind, _, version = environment.name.rpartition("-")
        self._engine = f"{kind}=={version}"
        self._source = folder / "real"
        (gateway.data / "engines" / environment.name).symlink_to(environment)
        make_model(self._source)
        self._pids: list[int] = []

    def start(self) -> None:
        """Add the model and wait until it serves."""
        body = {"name": self.name, "source": str(self._source), "engines": [self._engine]}
        answer = self._gateway.client.post("/admin/models", json={**body, "check": False})
        assert answer.status_code == 202, answer.text
        self._gateway.until(self.name, "ready")
        self._pids = self._find()
        assert self._pids

    def check(self) -> None:
        """Raises AssertionError where it is another process, or generates nothing."""
        assert self._find() == self._pids, "the real engine was started again"
        body = {"model": self.name, "prompt": "hello", "max_tokens": 4}
        answer = self._gateway.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] > 0

    def _find(self) -> list[int]:
        (instance,) = [
            attempt["instance"]
            for attempt in self._gateway.show(self.name)["attempts"]
            if attempt["state"] == "ready"
        ]
        return sorted(engines(self._gateway)[instance])


class Storm:
    """Kills its victim under the writers."""

    def __init__(
        self,
        folder: Path,
        chance: random.Random,
        *,
        writers: int = 1,
        failpoints: bool = False,
        victim: Literal["gateway", "agent", "both", "worker"] | None = None,
        engine: Path | None = None,
    ) -> None:
        """failpoints: in every second round the gateway kills itself, at an effect that is chosen
        at random. victim: of a gateway with an agent; None: the gateway, whose engines are
        processes; worker: one of its two workers, and the gateway itself in every third round.
        engine: the environment of a real engine that serves beside the scripted ones."""
        self.folder = folder
        self.victim = victim
        self.over = threading.Event()
        settings = {"FITSERVE_STOP_GRACE_S": "0.5", "FITSERVE_ADMIN_KEY": ADMIN}
        self._has_agent = victim not in (None, "worker")
        settings |= {"FITSERVE_WORKERS": "2"} if victim == "worker" else {}
        self.gateway = (
            AgentGateway(folder, **settings)
            if self._has_agent
            else scripted_gateway(folder, **settings)
        )
        self.gateway.client.headers["authorization"] = f"Bearer {ADMIN}"
        self.chance = chance
        self.failpoints = failpoints
        self.source = (
            folder / "models" / "model" if self._has_agent else model_folder(folder / "model")
        )
        target = Target(self.gateway.url, self.gateway.client.headers, self.source, self.over)
        self.writers = [
            Writer(index, target, random.Random(chance.random())) for index in range(writers)
        ]
        self.real = RealEngine(self.gateway, engine, folder) if engine is not None else None
        self.kills = 0
        self.suicides = 0
        self.adopted_s: list[float] = []

    def rounds(self, count: int) -> None:
        if self.real is not None and not self.kills:
            self.gateway.start()
            self.real.start()
        for _ in range(count):
            began = time.monotonic()
            starts, running = self.gateway.process is None, self.engines()
            if self.failpoints and self.chance.random() < 0.5:
                self.gateway.environment["FITSERVE_FAILPOINT"] = self.chance.choice(FAILPOINTS)
            if self._has_agent or starts:
                self.gateway.launch()
            wait_for(
                "the gateway answers, or is dead",
                lambda: self.gateway.dead() or self.gateway.answers(),
                HANG_S,
                0.02,
            )
            with contextlib.suppress(httpx.HTTPError):
                if running and starts:
                    self._time_adoption(began)
            self.over.clear()
            writing = [threading.Thread(target=writer.run) for writer in self.writers]
            for thread in writing:
                thread.start()
            time.sleep(self.chance.uniform(0, 1.2))
            died = self.gateway.dead()
            assert not died or "FITSERVE_FAILPOINT" in self.gateway.environment, (
                self.gateway.log.read_text()[-3000:]
            )
            self.suicides += died
            self.kill()
            self.over.set()
            for thread in writing:
                thread.join(2 * hang_s())
                assert not thread.is_alive(), "a writer hangs"
            self.kills += 1
            self.gateway.environment.pop("FITSERVE_FAILPOINT", None)

    def kill(self) -> None:
        pids = workers(self.gateway) if self.victim == "worker" else []
        if pids and self.chance.random() < 2 / 3:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.chance.choice(pids), signal.SIGKILL)
            return
        if isinstance(self.gateway, AgentGateway) and self.victim != "gateway":
            self.gateway.kill_agent()
        if self.victim != "agent":
            self.gateway.kill()

    def engines(self) -> dict[str, list[int]]:
        """Those that run, as the machine has them: pids by name of the instance."""
        return (
            self.gateway.containers()
            if isinstance(self.gateway, AgentGateway)
            else engines(self.gateway)
        )

    def _time_adoption(self, began: float) -> None:
        """Only of models that were ready: what was still starting has yet to be verified."""
        listed = self.gateway.client.get("/v1/models").json()["data"]
        if any(one["state"] == "ready" for one in listed):
            self.adopted_s.append(time.monotonic() - began)

    def count_acknowledgements(self) -> int:
        return sum(writer.acknowledged for writer in self.writers)

    def settle(self) -> dict[str, int]:
        """Start once more and wait until nothing moves. Raises AssertionError for a lost change, an
        orphan or a twin."""
        if self.gateway.process is None or self._has_agent:
            self.gateway.start()
        wait_for("all models settle", self._is_settled, 2 * HANG_S)
        names = {model["name"] for model in self._list_models()}
        keys = {key["name"] for key in self.gateway.client.get("/admin/keys").json()["data"]} - {
            "admin"
        }
        for kind, listed in (("models", names), ("keys", keys)):
            wanted, unsure = known_names(self.writers, kind)
            if kind == "models" and self.real is not None:
                wanted = {*wanted, self.real.name}
            lost, extra = wanted - listed, listed - wanted - unsure
            assert not lost, f"{kind} acknowledged and lost: {lost}"
            assert not extra, f"{kind} removed and still there: {extra}"
        running = self.engines()
        instances = {self.gateway.show(name)["attempts"][-1]["instance"] for name in names}
        assert set(running) == instances, f"orphans or twins: {sorted(set(running) ^ instances)}"
        if self.real is not None:
            self.real.check()
            real = self.gateway.show(self.real.name)["attempts"][-1]["instance"]
            running = {name: pids for name, pids in running.items() if name != real}
        assert all(len(pids) == 1 for pids in running.values()), running
        return {"models": len(names), "keys": len(keys), "engines": len(running)}

    def _list_models(self) -> list[dict[str, str]]:
        data: list[dict[str, str]] = self.gateway.client.get("/admin/models").json()["data"]
        return data

    def _is_settled(self) -> bool:
        """Nothing moves; there may be nothing left to move."""
        data = self._list_models()
        return all(model["state"] == "ready" for model in data) and len(self.engines()) == len(data)

    def evidence(self) -> None:
        """Beside what is in the folder anyway: how the gateway sees it, which processes there are
        and who listens."""
        with contextlib.suppress(httpx.HTTPError):
            shown = [
                self.gateway.show(one["name"])
                for one in self.gateway.client.get("/admin/models").json()["data"]
            ]
            (self.folder / "shown.json").write_text(json.dumps(shown, indent=1))
        known: dict[str, object] = {
            kind: [sorted(names) for names in known_names(self.writers, kind)]
            for kind in ("models", "keys")
        }
        known |= {"kills": self.kills, "engines": self.engines()}
        (self.folder / "known.json").write_text(json.dumps(known, indent=1))
        for name, command in {
            "processes": ["ps", "-eo", "pid,ppid,sid,stat,lstart,time,args"],
            "sockets": ["ss", "-ltnp"],
        }.items():
            with contextlib.suppress(OSError), (self.folder / name).open("wb") as file:
                subprocess.run(command, stdout=file, check=False)

    def end(self) -> None:
        """Leave nothing running, whatever is wrong with it."""
        if self.gateway.process is not None:
            self.gateway.kill()
        if isinstance(self.gateway, AgentGateway):
            self.gateway.sweep()
            return
        for pids in self.engines().values():
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self.gateway.close()
        if not self._has_agent:
            assert not self.engines(), "engines of removed models run on"


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that take all the time they get."""
    hogs = [subprocess.Popen([sys.executable, "-S", "-c", BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def run(storm: Storm, rounds: int, settle_every: int) -> int:
    """How often it settled."""
    settled = 0
    while storm.kills < rounds:
        storm.rounds(min(settle_every, rounds - storm.kills))
        storm.settle()
        settled += 1
        storm.kill()
    storm.close()
    return settled


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--writers", type=int, default=3)
    parser.add_argument("--settle-every", type=int, default=10)
    parser.add_argument(
        "--victim",
        choices=("gateway", "agent", "both", "worker"),
        help="worker: of a gateway with two; others: with an agent and containers",
    )
    parser.add_argument(
        "--failpoints", action="store_true", help="in every second round it dies at an effect"
    )
    parser.add_argument(
        "--engine", type=Path, metavar="FOLDER", help="the environment of a real engine"
    )
    parser.add_argument(
        "--hogs", type=int, default=0, help="processes that keep the machine busy meanwhile"
    )
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="storm-"))
    storm = Storm(
        folder,
        random.Random(args.seed),
        writers=args.writers,
        failpoints=args.failpoints,
        victim=args.victim,
        engine=args.engine,
    )
    try:
        with busy(args.hogs):
            settled = run(storm, args.rounds, args.settle_every)
    except BaseException:
        storm.evidence()
        storm.end()
        sys.stderr.write(f"round {storm.kills}: everything is kept in {folder}\n")
        raise
    shutil.rmtree(folder)
    adopted = sorted(storm.adopted_s)
    figures: dict[str, object] = {
        "victim": args.victim or "gateway, with processes",
        "kills": storm.kills,
        "at an effect": storm.suicides,
        "writers": args.writers,
        "acknowledged": storm.count_acknowledgements(),
        "settled": settled,
        "orphans": 0,
        "twins": 0,
        "lost": 0,
    }
    figures |= {"slowest adoption s": f"{adopted[-1]:.2f}" if adopted else "-"}
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
