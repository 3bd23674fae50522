"""The gateway on a machine with GPUs, case by case, as lines of JSON.

    python -m benchmarks.drill FOLDER --engines DATA/engines [--engine vllm==0.26.0]
                               [--seconds 540] [--case sleep --case kill] [--env NAME=VALUE]

The cases are parallel starts, deaths, sleep, a foreign process and two GPUs. FOLDER keeps the two
models (13.0 and 1.7 GiB), the gateway's data and log, and `results.jsonl`. The same command
continues with the missing cases. A case that needs more GPUs is left out. `--rehearse` runs all
cases with simulated engines (tests/support/memory_engine.py), on a machine without GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from gateway.cli.demo.checkpoint import ModelShape, make_model
from tests.e2e.boot_storm import BootStorm
from tests.e2e.conftest import Gateway, wait_for
from tests.e2e.scripted import engines

LARGE: dict[str, Any] = {
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "intermediate": 14336,
    "max_len": 131072,
}
SMALL: dict[str, Any] = {
    "layers": 16,
    "hidden": 2048,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 64,
    "intermediate": 8192,
    "max_len": 131072,
}
# A cold start builds kernels.
START_S = 600.0
# The share of a GPU, so that one of two models must leave for the other.
MOST = ("--arg", "gpu-memory-utilization=0.7")
_FOREIGN = """
import sys, torch
held = [
    torch.empty(
        int(torch.cuda.mem_get_info(i)[1] * float(sys.argv[1])), dtype=torch.uint8, device=i
    )
    for i in range(torch.cuda.device_count())
]
print("held", flush=True)
sys.stdin.read()
"""

Figures = dict[str, Any]


class Late(Exception):
    """The time of this run is over."""


class Drill:
    """models: folders by name, `large` and `small`. python: of the engine's environment, for the
        foreign process; None: it
    cannot take memory. until: by time.monotonic(). env: NAME=VALUE for each engine."""

    def __init__(
        self,
        gateway: Gateway,
        models: Mapping[str, Path],
        engine: str,
        python: Path | None,
        until: float,
        env: Sequence[str] = (),
    ) -> None:
        self.gateway = gateway
        self.models = models
        self.engine = engine
        self.python = python
        self._until = until
        self._options = ("--engine", engine, *(part for one in env for part in ("--env", one)))
        self.warm: dict[str, float] = {}

    def add(self, name: str, model: str, *options: str) -> Figures:
        """Until it is ready, or is known not to be."""
        began = time.monotonic()
        wait = max(1, min(START_S, self._until - began))
        done = self.begin(name, model, *options, "--wait", "--timeout", f"{wait:.0f}s")
        if time.monotonic() >= self._until:
            raise Late
        found = {"seconds": elapsed_s(began), "exit": done.returncode, **self.outcome(name)}
        return (
            found
            if done.returncode == 0
            else {**found, "said": (done.stdout + done.stderr)[-1500:]}
        )

    def begin(self, name: str, model: str, *options: str) -> subprocess.CompletedProcess[str]:
        return self.gateway.cli("add", name, str(self.models[model]), *self._options, *options)

    def outcome(self, name: str) -> Figures:
        view = self.gateway.show(name)
        plan = view.get("plan") or {}
        tried = [
            [attempt["state"], *([attempt["failure"]["kind"]] if attempt["failure"] else [])]
            for attempt in view["attempts"]
        ]
        return {
            "state": view["state"],
            "attempts": tried,
            "kv_tokens": plan.get("memory", {}).get("kv_tokens"),
        }

    def remove(self, *names: str) -> None:
        for name in names:
            self.gateway.client.delete(f"/admin/models/{name}").raise_for_status()
        wait_for("all engines are gone", lambda: not engines(self.gateway), every_s=0.02)
        wait_for(
            "all models are gone",
            lambda: not self.gateway.client.get("/admin/models").json()["data"],
            every_s=0.02,
        )

    def ask(self, name: str, timeout_s: float = START_S) -> Figures:
        """One streamed answer: seconds to its first text and to its end, or what was said
        instead."""
        began, first = time.monotonic(), None
        body = {"model": name, "prompt": "hi", "max_tokens": 8, "stream": True}
        try:
            with self.gateway.client.stream(
                "POST", "/v1/completions", json=body, timeout=timeout_s
            ) as answer:
                if answer.status_code != httpx.codes.OK:
                    return {
                        "status": answer.status_code,
                        "said": answer.read()[:300].decode(errors="replace"),
                    }
                for line in answer.iter_lines():
                    if first is None and line.startswith("data: {"):
                        first = elapsed_s(began)
        except httpx.HTTPError as error:
            return {"status": 0, "said": repr(error)}
        return {"status": 200, "first_s": first, "whole_s": elapsed_s(began)}

    def first_gpu(self) -> str:
        gpus = self.gateway.client.get("/admin/hardware").json()["gpus"]
        return str(min(gpus, key=lambda gpu: gpu["index"])["uuid"])

    def states(self) -> dict[str, str]:
        return {name: self.gateway.show(name)["state"] for name in self.models}

    def core(self, name: str) -> int:
        """The process that computes: vLLM's core, or where there is none the engine itself."""
        (instance,) = {
            attempt["instance"]
            for attempt in self.gateway.show(name)["attempts"]
            if attempt["state"] == "ready"
        } & set(self._running())
        pids = self._running()[instance]
        return next(
            (
                pid
                for pid in pids
                if "EngineCore" in Path(f"/proc/{pid}/comm").read_text() + _command(pid)
            ),
            min(pids),
        )

    def _running(self) -> dict[str, list[int]]:
        return engines(self.gateway)

    def wait(self, what: str, check: Callable[[], Any]) -> Any:
        return wait_for(what, check, min(START_S, self._until - time.monotonic()), 0.02)

    @contextlib.contextmanager
    def constant_requests(self, name: str) -> Iterator[list[tuple[float, int]]]:
        """Two clients ask all the time. Gives when each answer came, and its status."""
        answers: list[tuple[float, int]] = []
        over = threading.Event()

        def client() -> None:
            while not over.is_set():
                status = self.ask(name, 20.0)["status"]
                answers.append((time.monotonic(), status))
                over.wait(0.02 if status == httpx.codes.OK else 0.2)

        clients = [threading.Thread(target=client) for _ in range(2)]
        for one in clients:
            one.start()
        try:
            yield answers
        finally:
            over.set()
            for one in clients:
                one.join()


def elapsed_s(began: float) -> float:
    return round(time.monotonic() - began, 2)


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")


def alone(drill: Drill) -> Figures:
    """Each model by itself on the same GPU, cold, and again when its kernels are kept."""
    figures: Figures = {}
    first = drill.first_gpu()
    for name in drill.models:
        for start in ("cold", "warm"):
            figures[f"{name}_{start}"] = drill.add(name, name, "--gpu", first)
            figures[f"{name}_{start}"]["ask"] = drill.ask(name)
            drill.remove(name)
    return figures


def together(drill: Drill) -> Figures:
    """Two models added concurrently on the same GPU."""
    figures: Figures = {}
    first = drill.first_gpu()

    def add_model(name: str) -> None:
        with contextlib.suppress(Late):
            figures[name] = drill.add(name, name, "--gpu", first)

    adding = [threading.Thread(target=add_model, args=(name,)) for name in drill.models]
    began = time.monotonic()
    for thread in adding:
        thread.start()
    for thread in adding:
        thread.join()
    if len(figures) < len(drill.models):
        raise Late
    drill.remove(*drill.models)
    return {**figures, "seconds": elapsed_s(began)}


def _injure(drill: Drill, number: signal.Signals) -> Figures:
    start = drill.add("large", "large")
    with drill.constant_requests("large") as answers:
        drill.wait("an answer", lambda: answers)
        began = time.monotonic()
        os.kill(drill.core("large"), number)
        drill.wait("it is noticed", lambda: drill.gateway.show("large")["state"] != "ready")
        noticed = elapsed_s(began)
        drill.wait("it serves again", lambda: drill.gateway.show("large")["state"] == "ready")
        ready = elapsed_s(began)
        drill.wait(
            "an answer after it",
            lambda: answers[-1][1] == httpx.codes.OK and answers[-1][0] > began + ready,
        )
    refused = [status for when, status in answers if when > began and status != httpx.codes.OK]
    found = {
        "start_s": start["seconds"],
        "noticed_s": noticed,
        "again_s": ready,
        "refused": len(refused),
        **drill.outcome("large"),
    }
    drill.remove("large")
    return found


def kill(drill: Drill) -> Figures:
    """SIGKILL to the process that computes."""
    return _injure(drill, signal.SIGKILL)


def freeze(drill: Drill) -> Figures:
    """SIGSTOP to it: out of the routes, and replaced."""
    return _injure(drill, signal.SIGSTOP)


def power(drill: Drill) -> Figures:
    """SIGKILL to the gateway: the engine goes on, and the next gateway adopts it."""
    drill.add("small", "small")
    before = engines(drill.gateway)
    drill.gateway.kill()
    began = time.monotonic()
    drill.gateway.start()
    drill.wait("an answer", lambda: drill.ask("small", 20.0)["status"] == httpx.codes.OK)
    found = {"answers_s": elapsed_s(began), "same_engine": engines(drill.gateway) == before}
    drill.remove("small")
    return found


def remove_while_starting(drill: Drill) -> Figures:
    """`rm` of a model whose engine starts."""
    drill.begin("large", "large")
    drill.wait("its engine starts", lambda: engines(drill.gateway))
    time.sleep(min(10.0, drill.warm.get("large", 2.0) / 2))
    began = time.monotonic()
    drill.gateway.cli("rm", "large", "--wait")
    told = elapsed_s(began)
    drill.wait("its engine is gone", lambda: not engines(drill.gateway))
    return {"told_s": told, "gone_s": elapsed_s(began)}


def sleep(drill: Drill) -> Figures:
    """Two models of which one fits: they take turns, by sleep where the engine has it."""
    figures: Figures = {}
    first = drill.first_gpu()
    for name in drill.models:
        figures[name] = drill.add(name, name, "--gpu", first, "--keep-alive", "10m", *MOST)
    turns = [
        {"asked": name, **drill.ask(name), "then": drill.states()} for name in [*drill.models] * 3
    ]
    attempts = [
        attempt for name in drill.models for attempt in drill.gateway.show(name)["attempts"]
    ]
    figures |= {
        "turns": turns,
        "starts": len(attempts),
        "asleep": [each_attempt["asleep"] for each_attempt in attempts if each_attempt["asleep"]],
    }
    facts = drill.gateway.client.get("/admin/facts").json()["data"]
    figures["facts"] = [fact["fact"] for fact in facts if fact["fact"]["kind"].startswith("sleep")]
    drill.remove(*drill.models)
    return figures


def foreign(drill: Drill) -> Figures:
    """A process of somebody else's holds 60 % of each GPU."""
    with subprocess.Popen(
        [str(drill.python), "-c", _FOREIGN, "0.6"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"held\n"
            found = {
                **drill.add("large", "large"),
                "ask": drill.ask("large"),
                "memory": (drill.gateway.show("large")["plan"] or {}).get("memory"),
            }
        finally:
            other.kill()
    drill.remove("large")
    return found


def pair(drill: Drill) -> Figures:
    """Tensor parallel on two GPUs."""
    found = {**drill.add("large", "large", "--tp", "2"), "ask": drill.ask("large")}
    drill.remove("large")
    return found


def replicas(drill: Drill) -> Figures:
    """Of two replicas one dies under load."""
    added = drill.add("small", "small", "--replicas", "2", "--gpus", "2")
    began = time.monotonic()
    drill.wait("both are ready", lambda: _all_ready(drill, "small"))
    added["other_s"] = elapsed_s(began)
    with drill.constant_requests("small") as answers:
        drill.wait("answers", lambda: len(answers) > 20)
        before, victim = len(answers), random.Random(1).choice(sorted(engines(drill.gateway)))
        died = time.monotonic()
        for pid in engines(drill.gateway)[victim]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # The dead one counts as ready until that is noticed.
        drill.wait("one is not ready", lambda: not _all_ready(drill, "small"))
        drill.wait("both are ready again", lambda: _all_ready(drill, "small"))
        again = elapsed_s(died)
    failed = [status for _, status in answers[before:] if status != httpx.codes.OK]
    drill.remove("small")
    return {
        "added": added,
        "answers": len(answers) - before,
        "again_s": again,
        "failed": len(failed),
        "statuses": sorted(set(failed)),
    }


def _all_ready(drill: Drill, name: str) -> bool:
    return all(replica["state"] == "ready" for replica in drill.gateway.show(name)["replicas"])


def traffic(drill: Drill) -> Figures:
    """Traffic of clients corrects the forecast of the plan."""
    expected = drill.add("small", "small")
    before = drill.gateway.show("small")["plan"]["speed"]
    with drill.constant_requests("small") as answers:
        drill.wait(
            "it is learned",
            lambda: drill.gateway.show("small")["plan"]["speed"]["grade"] == "served",
        )
    after = drill.gateway.show("small")["plan"]["speed"]
    facts = [
        one["fact"]
        for one in drill.gateway.client.get("/admin/facts").json()["data"]
        if one["fact"]["kind"] == "speed_ratio"
    ]
    drill.remove("small")
    return {
        "added": expected,
        "answers": len(answers),
        "before": before,
        "after": after,
        "facts": facts,
    }


# The GPUs that each needs.
CASES: dict[Callable[[Drill], Figures], int] = {
    alone: 1, together: 1, sleep: 1, foreign: 1, pair: 2, kill: 1, freeze: 1, replicas: 2, power: 1,
    remove_while_starting: 1,
    traffic: 1,
}  # fmt: skip


def run(drill: Drill, wanted: Sequence[str], results: Path) -> int:
    """The cases missing in `results`. Returns how many have failed."""
    known = (
        {row["case"]: row for row in map(json.loads, results.read_text().splitlines())}
        if results.exists()
        else {}
    )
    if "alone" in known and "large_warm" in known["alone"]:
        drill.warm = {"large": known["alone"]["large_warm"]["seconds"]}
    gpus = len(drill.gateway.client.get("/admin/hardware").json()["gpus"])
    failed = 0
    for case, needed in CASES.items():
        name = case.__name__
        if (
            name in known
            or needed > gpus
            or (wanted and name not in wanted)
            or (case is foreign and drill.python is None)
        ):
            continue
        began = time.monotonic()
        try:
            found_case = case(drill)
        except Late:
            sys.stdout.write(f"{name}: the time is over\n")
            break
        except (AssertionError, httpx.HTTPError, KeyError, OSError, ValueError) as error:
            found_case, failed = {"error": f"{type(error).__name__}: {error}"[:2000]}, failed + 1
            drill.remove(
                *(one["name"] for one in drill.gateway.client.get("/admin/models").json()["data"])
            )
        row = json.dumps(
            {
                "case": name,
                "at": time.strftime("%Y-%m-%d"),
                "took_s": elapsed_s(began),
                **found_case,
            }
        )
        with results.open("a") as file:
            file.write(row + "\n")
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--engines", type=Path, help="a data folder's `engines`, with this engine installed"
    )
    parser.add_argument("--engine", default="vllm==0.26.0")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument(
        "--case", action="append", default=[], choices=[case.__name__ for case in CASES]
    )
    parser.add_argument("--env", action="append", default=[], help="NAME=VALUE for each engine")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    folder: Path = args.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if args.rehearse:
        storm = BootStorm(folder, 0, 2)
        drill = Drill(
            storm.gateway,
            dict.fromkeys(("large", "small"), storm.source),
            "vllm==0.26.0",
            None,
            until,
        )
    else:
        models = {"large": folder / "large", "small": folder / "small"}
        for name, shape in (("large", LARGE), ("small", SMALL)):
            if not (models[name] / "model.safetensors").exists():
                make_model(models[name], ModelShape(**shape))
        data = folder / "data"
        data.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (data / "engines").symlink_to(args.engines.absolute())
        python = data / "engines" / args.engine.replace("==", "-") / "bin/python"
        drill = Drill(
            Gateway(data, folder / "gateway.log"), models, args.engine, python, until, args.env
        )
    with contextlib.closing(drill.gateway):
        drill.gateway.start()
        return min(1, run(drill, args.case, folder / "results.jsonl"))


if __name__ == "__main__":
    sys.exit(main())
