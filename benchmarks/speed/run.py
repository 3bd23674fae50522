"""The grid on this machine's GPUs.

    python benchmarks/speed/run.py FOLDER --seconds 540 [--gpus 0,1] [--only MODEL/SETTING ...]

Each GPU gets an engine with its own cores and port. Settings on several GPUs wait until they are
free. With --together 3, up to three engines start on a GPU together, each with the KV cache for its
loads, and are measured one after the other: a start takes five times as long as its loads. Each
setting's line of JSON is appended to FOLDER/results.jsonl, and FOLDER/logs has its log. The
same command continues after its time limit with the missing settings. Only the standard library:
this runs in the engine's Python.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from speed import models, start_engine
from speed.grid import GRID, LOADS, Load, Setting

HERE = Path(__file__).parent
PORT = 18400
START_S, START_SEVERAL_S = 210, 330
WORTH_STARTING_S = 50
FEW = 192  # requests of a load before it is measured
PASSES, SAME = 4, 0.05  # of all loads, until their times agree
TOGETHER_GIB = 125  # of an H200's 140
SAID = re.compile(
    r"(KV cache size|Available KV cache|Graph captur|torch\.compile took|Compiling a graph|[Uu]sing"
    r" .*(backend|[Kk]ernel|FlashAttention|MoE|Runner)"
    r"|Model loading took|init engine|scheduling is|max_num_batched|Maximum"
    r" concurrency|all-?reduce|spawn)"
)
KV_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")
STAMP = re.compile(r"^\S* *\(\S+ pid=\d+\) *|^[A-Z]+ \d\d-\d\d [\d:]+ *|\x1b\[[\d;]*m")


class Options(NamedTuple):
    """The values shared by all settings of a run."""

    folder: Path
    until: float
    gpus: list[int]
    together: int
    cores: list[int]
    loads: tuple[Load, ...]
    flags: tuple[str, ...]


class Cut(Exception):
    """The run's time is over."""


class Failed(Exception):
    """The engine did not become ready."""


class Standing:
    """Engines of one GPU, which are measured one after the other when none of them starts any
    more."""

    def __init__(self, engines: int) -> None:
        self.engines, self.starting = engines, engines
        self.change, self.loads = threading.Condition(), threading.Lock()

    def note_start(self) -> None:
        """This engine stands, or will not."""
        with self.change:
            self.starting -= 1
            self.change.notify_all()

    def wait(self, cut: threading.Event) -> None:
        with self.change:
            while self.starting > 0 and not cut.is_set():
                self.change.wait(1)


class Engine:
    """One engine in a process group of its own, told what to serve when its imports are done."""

    def __init__(self, folder: Path) -> None:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        self.ahead = (folder / "logs/imports.log").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "start_engine.py")], stdin=subprocess.PIPE,
            stdout=self.ahead, stderr=self.ahead,
            start_new_session=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip

    def serve(self, argv: list[str], env: dict[str, str], cores: list[int], log: Path) -> None:
        assert self.process.stdin is not None
        said = {"argv": argv, "env": env, "cores": cores, "log": str(log)}
        self.process.stdin.write(json.dumps(said).encode() + b"\n")
        self.process.stdin.close()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.ahead.close()


class Run:
    """The settings that are left, the GPUs that are free, and engines that import ahead."""

    def __init__(self, options: Options, settings: list[Setting]) -> None:
        self.options, self.left = options, settings
        self.free = set(options.gpus)
        self.change = threading.Condition()
        self.spare = [Engine(options.folder) for _ in range(len(options.gpus) * options.together)]
        self.running: set[Engine] = set()
        self.began = time.time()
        self.cut = threading.Event()
        self.method = "fork"

    def say(self, *words: object) -> None:
        print(f"[{time.time() - self.began:6.1f}]", *words, flush=True)

    def run_all(self) -> None:
        """Settings in order; the first of those left waits for its GPUs."""
        workers = []
        while self.left:
            group = self.group()
            with self.change:
                while not self.cut.is_set() and (gpus := self.fitting(group[0].gpus)) is None:
                    self.change.wait(1)
                    self.stop_in_time()
                if (
                    self.cut.is_set()
                    or gpus is None
                    or self.options.until - time.time() < WORTH_STARTING_S
                ):
                    break
                self.free -= set(gpus)
            self.left = [one for one in self.left if one not in group]
            workers.append(threading.Thread(target=self.side_by_side, args=(group, gpus)))
            workers[-1].start()
        for worker in workers:
            while worker.is_alive():
                worker.join(1)
                self.stop_in_time()
        for engine in self.spare:
            engine.kill()

    def stop_in_time(self) -> None:
        """What runs ends with its engine: its loads have errors, and are not counted."""
        if time.time() > self.options.until and not self.cut.is_set():
            self.cut.set()
            for engine in list(self.running):
                engine.kill()

    def fitting(self, count: int) -> list[int] | None:
        """GPUs next to each other."""
        for first in range(0, len(self.options.gpus), count):
            gpus = self.options.gpus[first : first + count]
            if len(gpus) == count and self.free >= set(gpus):
                return gpus
        return None

    def group(self) -> list[Setting]:
        """The next setting, and others that fit on the same GPU."""
        group = [self.left[0]]
        room = TOGETHER_GIB - models.gib(group[0].model)
        for one in self.left[1:]:
            if (
                group[0].gpus == one.gpus == 1
                and len(group) < self.options.together
                and models.gib(one.model) <= room
            ):
                group.append(one)
                room -= models.gib(one.model)
        return group

    def side_by_side(self, group: list[Setting], gpus: list[int]) -> None:
        standing = Standing(len(group))
        workers = [
            threading.Thread(target=self.run_setting, args=(one, gpus, slot, standing))
            for slot, one in enumerate(group)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        with self.change:
            self.free |= set(gpus)
            self.change.notify_all()

    def run_setting(self, setting: Setting, gpus: list[int], slot: int, standing: Standing) -> None:
        began = time.time()
        result: dict[str, Any] = {
            "model": setting.model,
            "setting": setting.name,
            "flags": list(setting.flags),
            "gpus": setting.gpus,
            "together": standing.engines,
        }
        log = self.options.folder / "logs" / f"{setting.model}--{setting.name}.log"
        # A fork of a process with several GPUs' workers is not what the engine is made for.
        for method in (
            [self.method, "spawn"] if setting.gpus == 1 and self.method == "fork" else ["spawn"]
        ):
            log.unlink(missing_ok=True)
            result.pop("failed", None)
            with self.change:
                engine = self.spare.pop(0) if self.spare else Engine(self.options.folder)
                self.running.add(engine)
            try:
                self.measure(setting, gpus, slot, standing, engine, method, log, result)
            except Exception as error:  # a fault of one setting does not end the run
                result["failed"] = str(error) if isinstance(error, Failed) else repr(error)
            finally:
                with self.change:
                    self.running.discard(engine)
                engine.kill()
            if "loads" in result or self.cut.is_set():
                if method == "spawn" and setting.gpus == 1:
                    self.method = method  # forks do not start here
                break
        if self.cut.is_set():
            result["cut"] = True
        words = log.read_text(errors="replace").splitlines() if log.is_file() else []
        said = [
            STAMP.sub("", STAMP.sub("", line)).strip()[:200] for line in words if SAID.search(line)
        ]
        result["said"] = list(
            dict.fromkeys(
                line
                for line in said
                if "non-default args" not in line and "with config:" not in line
            )
        )[:40]
        result["whole_s"] = round(time.time() - began, 1)
        with self.change, (self.options.folder / "results.jsonl").open("a") as results:
            results.write(json.dumps(result) + "\n")
        self.say(
            setting.model,
            setting.name,
            "failed: " + result["failed"][-300:] if "failed" in result else brief(result),
        )

    def measure(
        self,
        setting: Setting,
        gpus: list[int],
        slot: int,
        standing: Standing,
        engine: Engine,
        method: str,
        log: Path,
        result: dict[str, Any],
    ) -> None:
        options = self.options
        port = PORT + 20 * gpus[0] + slot
        share, first = len(options.cores) // len(options.gpus), options.gpus.index(gpus[0])
        cores = options.cores[first * share : (first + len(gpus)) * share] or options.cores
        folder = models.write(options.folder / "models", setting.model)
        argv = [
            "serve",
            str(folder),
            "--served-model-name=m",
            "--host=127.0.0.1",
            f"--port={port}",
            "--load-format=dummy",
        ]
        argv += [*options.flags, *setting.flags]
        # A measurement of a GPU while others load is not a measure of memory.
        if standing.engines > 1:
            argv += [
                f"--kv-cache-memory-bytes={models.cache_bytes(setting.model)}",
                "--gpu-memory-utilization=0.02",
            ]
        # A router of random weights sends most tokens to the same few experts; a trained one
        # spreads them. The engine's own means would take another kernel where the kernel itself
        # chooses the experts.
        spread = (
            start_engine.SPREAD
            if setting.model in models.KERNEL_ROUTED
            else "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"
        )
        routing = {spread: "uniform_random"}
        env = {
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
            "VLLM_WORKER_MULTIPROC_METHOD": method,
            **routing,
        }
        began = time.time()
        engine.serve(argv, env, cores, log)
        with self.change:
            if not self.cut.is_set():
                self.spare.append(Engine(options.folder))
        limit_s = (
            START_S * (2 if standing.engines > 1 else 1) if setting.gpus == 1 else START_SEVERAL_S
        )
        try:
            self.until_ready(engine, port, log, began + limit_s)
        finally:
            standing.note_start()
        result["ready_s"] = round(time.time() - began, 1)
        if sizes := KV_TOKENS.findall(log.read_text(errors="replace")):
            result["kv_tokens"] = int(sizes[-1].replace(",", ""))
        vocabulary = models.config(setting.model)["vocab_size"]
        standing.wait(self.cut)
        with standing.loads:
            # All loads before any counts, and again until two passes agree: what is only built or
            # compiled at the first request of a size is not a speed of the setting.
            for number, load in enumerate(options.loads):
                once = load._replace(requests=min(load.requests, max(load.concurrency, FEW)))
                result.setdefault("first", {})[load.name] = run_load(
                    once, port, 100 + number, vocabulary, cores
                )
            for attempt in range(PASSES):
                figures = {
                    load.name: run_load(load, port, 1 + number + 1000 * attempt, vocabulary, cores)
                    for number, load in enumerate(options.loads)
                }
                if self.cut.is_set():
                    raise Cut
                before = result.get("loads")
                result.setdefault("passes", []).append(
                    {name: brief_figures(one) for name, one in figures.items()}
                )
                result["loads"] = figures
                if before is not None and agree(before, figures):
                    break

    def until_ready(self, engine: Engine, port: int, log: Path, until: float) -> None:
        while True:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer,
            ):
                if answer.status == 200:
                    return
            if self.cut.is_set():
                raise Cut
            if engine.process.poll() is not None or time.time() > until:
                why = "ended" if engine.process.poll() is not None else "was not ready in time"
                words = log.read_text(errors="replace").splitlines() if log.is_file() else []
                errors = [line for line in words if "Error" in line or "error" in line]
                raise Failed(
                    f"the engine {why}: "
                    + " | ".join(line[-300:] for line in [*errors[:4], *words[-3:]])
                )
            time.sleep(0.1)


def brief_figures(figures: dict[str, Any]) -> dict[str, float]:
    """What is compared of a load: of one with errors nothing."""
    return (
        {}
        if figures["errors"]
        else {name: figures[name] for name in ("tokens_s", "tpot_ms", "ttft_ms") if name in figures}
    )


def agree(before: dict[str, Any], now: dict[str, Any]) -> bool:
    return all(abs(now[name]["seconds"] / before[name]["seconds"] - 1) <= SAME for name in now)


def run_load(load: Load, port: int, seed: int, vocabulary: int, cores: list[int]) -> dict[str, Any]:
    numbers = [
        port,
        load.concurrency,
        load.requests,
        load.tokens_in,
        load.tokens_out,
        seed,
        vocabulary,
    ]
    command = [sys.executable, str(HERE / "load.py"), ",".join(map(str, cores)), *map(str, numbers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        return {"errors": load.requests, "error": done.stderr[-300:]}
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def brief(result: dict[str, Any]) -> str:
    loads = result.get("loads", {})
    rates = " ".join(
        f"{name}: {figures.get('tokens_s', '-')}"
        for name, figures in loads.items()
        if not name.startswith("ttft")
    )
    errors = sum(figures["errors"] for figures in loads.values())
    return (
        f"ready {result.get('ready_s')} s, {result.get('kv_tokens')} KV tokens, tokens/s {rates},"
        f" {errors} errors, {result['whole_s']} s"
    )


def finished_settings(folder: Path) -> set[tuple[str, str]]:
    """Measured settings, and settings that failed twice."""
    failures: dict[tuple[str, str], int] = {}
    found = set()
    file = folder / "results.jsonl"
    for line in file.read_text().splitlines() if file.is_file() else []:
        result = json.loads(line)
        key = result["model"], result["setting"]
        if result.get("cut"):
            continue
        if "failed" in result:
            failures[key] = failures.get(key, 0) + 1
        if "failed" not in result or failures[key] > 1:
            found.add(key)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, required=True, help="then everything is stopped")
    parser.add_argument(
        "--gpus",
        type=lambda text: [int(one) for one in text.split(",")],
        default=[0, 1, 2, 3],
        help="which",
    )
    parser.add_argument(
        "--together", type=int, default=1, help="engines that start on a GPU together"
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        help="MODEL, SETTING or MODEL/SETTING, in this order; default: the whole grid",
    )
    parser.add_argument(
        "--flag", action="append", default=[], help="a flag of the engine for all settings"
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="a tiny model and small loads, for machines without GPUs",
    )
    args = parser.parse_args()
    until = time.time() + args.seconds
    args.folder.mkdir(parents=True, exist_ok=True)
    settings = list(GRID)
    loads: tuple[Load, ...] = LOADS
    if args.rehearse:
        settings = [
            one._replace(model="tiny", gpus=min(one.gpus, len(args.gpus)))
            for one in GRID
            if one.model == "llama-3.1-8b"
        ]
        loads = tuple(
            Load(
                load.name,
                min(8, load.concurrency),
                min(16, load.requests),
                load.tokens_in // 8,
                min(8, load.tokens_out),
            )
            for load in LOADS
        )
    wanted, asked_for = set(args.only), {name: place for place, name in enumerate(args.only)}
    known = finished_settings(args.folder)
    settings = [
        one for one in sorted(settings, key=lambda one: asked_for.get(f"{one.model}/{one.name}", 0))
        if (not wanted or wanted & {one.model, one.name, f"{one.model}/{one.name}"})
        and one.gpus <= len(args.gpus) and (one.model, one.name) not in known
    ]  # fmt: skip
    options = Options(
        args.folder,
        until,
        args.gpus,
        args.together,
        sorted(os.sched_getaffinity(0)),
        loads,
        tuple(args.flag),
    )
    for model in dict.fromkeys(one.model for one in settings):
        models.write(args.folder / "models", model)
    run = Run(options, settings)
    run.say(f"{len(settings)} settings, {len(known)} known already, {len(options.cores)} cores")
    run.run_all()
    run.say(f"== ended, {len(run.left)} settings left, cut: {run.cut.is_set()}")


if __name__ == "__main__":
    main()
