"""CPU and memory of proxies in front of one fake engine.

    python benchmarks/proxies/run.py [--quick] [--only fitserve,nginx] [--parts request,chunk]
                                     [--rounds 5] [--before TREE] [--write [SECTION]]

The proxies are fitserve, nginx, two Rust routers and LiteLLM. Parts: request, chunk, latency (in
turn, median of the rounds after a warm-up), streams, idle, body (once, alone). CPU is read from a
target's whole process tree, so it holds on a busy machine; latencies and rates do not. `direct` is
the fake engine without a proxy. --write puts the table into benchmarks/notebook/performance.md. A
full run takes about 15 minutes on 2 idle cores. --quick, by default with nginx, fitserve and
direct, takes 2 minutes. A target that cannot run is named with the reason, and the run goes on.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import parts
import processes
import report
import targets

PAGE = targets.ROOT / "benchmarks" / "notebook" / "performance.md"
DIRECT = "direct"
QUICKLY = "nginx,fitserve,direct"
INTRODUCTION = """{command}, {date}, {cpu}, load {load} at the start.

Medians of {rounds} rounds, targets in turn, in front of one fake engine on the same machine. CPU is
that of the target's process tree, in user and kernel mode; `direct` is the fake engine itself.
Figures of CPU hold on a busy machine, latencies less so; ratios are to nginx of the same run.\
{notes}"""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def running_engine() -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A fake engine of its own for whoever asks: (port, process)."""
    port = processes.free_port()
    command = [sys.executable, str(targets.HERE / "fake_engine.py"), str(port)]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        if not processes.wait_until(port, "/health", process, 20):
            raise SystemExit("The fake engine did not start.")
        yield port, process
    finally:
        processes.stop(process)


@contextmanager
def running(
    name: str, engine: tuple[int, subprocess.Popen[bytes]], about: dict[str, str]
) -> Iterator[parts.Subject]:
    """Raises targets.Missing."""
    port, process = engine
    if name == DIRECT:
        yield parts.Subject(name, f"http://127.0.0.1:{port}/v1", process, port)
        return
    with tempfile.TemporaryDirectory(prefix=f"bench-{name}-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)  # nginx's worker is another user
        started = targets.STARTERS[name](targets.Where(port, processes.free_port(), Path(folder)))
        about[name] = started.about
        try:
            yield parts.Subject(name, started.url, started.process, port)
        finally:
            processes.stop(started.process)


class Run:
    """All figures of one run: `rounds` by target, and why a target has none."""

    def __init__(self, names: list[str], wanted: list[str], size: parts.Size) -> None:
        self.names = names
        self.wanted = wanted
        self.size = size
        self.about: dict[str, str] = {}
        self.load = f"{os.getloadavg()[0]:.1f}"
        self.rounds: dict[str, list[parts.Figures]] = {name: [] for name in names}
        self.alone: dict[str, parts.Figures] = {name: {} for name in names}
        self.missing: dict[str, str] = {}
        self.wrong: dict[str, str] = {}

    def in_turn(self) -> None:
        """Rounds; the first warms everything up and is not counted."""
        measures = [measure for name, measure in parts.IN_TURN.items() if name in self.wanted]
        if not measures:
            return
        with running_engine() as engine, ExitStack() as stack:
            subjects = {}
            for name in self.names:
                try:
                    subjects[name] = stack.enter_context(running(name, engine, self.about))
                except targets.Missing as error:
                    self.missing[name] = str(error)
                    say(f"{name}: {error}")
            for round_ in range(self.size.rounds + 1):
                for name, subject in subjects.items():
                    figures: parts.Figures = {}
                    for measure in measures:
                        figures |= measure(subject, self.size)
                    if round_:
                        self.rounds[name].append(figures)
                    say(
                        f"round {round_} {name}: "
                        + " ".join(
                            f"{key}={report.number(value, 2)}" for key, value in figures.items()
                        )
                    )
            self._note(*subjects.values())

    def one_by_one(self) -> None:
        for part, measure in parts.ALONE.items():
            if part not in self.wanted:
                continue
            for name in self.names:
                if name in self.missing:
                    continue
                try:
                    with running_engine() as engine, running(name, engine, self.about) as subject:
                        figures = measure(subject, self.size)
                except targets.Missing as error:
                    self.missing[name] = str(error)
                    say(f"{name}: {error}")
                    continue
                self.alone[name] |= figures
                self._note(subject)
                say(
                    f"{part} {name}: "
                    + " ".join(f"{key}={report.number(value, 2)}" for key, value in figures.items())
                )

    def _note(self, *subjects: parts.Subject) -> None:
        for subject in subjects:
            if subject.error:
                self.wrong.setdefault(subject.name, subject.error)

    def medians(self) -> dict[str, parts.Figures]:
        found: dict[str, parts.Figures] = {}
        for name in self.names:
            if name in self.missing:
                continue
            figures: parts.Figures = {}
            for key in {key for round_ in self.rounds[name] for key in round_}:
                values = [
                    value for round_ in self.rounds[name] if (value := round_[key]) is not None
                ]
                figures[key] = statistics.median(values) if values else None
            found[name] = figures | self.alone[name]
        return found


def text_of(run: Run, command: str) -> str:
    notes = "".join(f"\n`{name}` is missing: {why}" for name, why in run.missing.items())
    notes += "".join(
        f"\n`{name}` had errors, the first: `{why}`" for name, why in run.wrong.items()
    )
    cpu = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    introduction = INTRODUCTION.format(
        command=command, date=today, cpu=cpu, load=run.load, rounds=run.size.rounds, notes=notes
    )
    results = run.medians()
    lines = [introduction, "", report.table(results, run.size, run.about), ""]
    return "\n".join(lines + [f"* {line}" for line in report.verdicts(results)])


def choose_targets(text: str, known: list[str], what: str) -> list[str]:
    asked = [name for name in text.split(",") if name] or known
    if unknown := sorted(set(asked) - set(known)):
        raise SystemExit(f"There is no {what} {', '.join(unknown)}; known are {', '.join(known)}.")
    return [name for name in known if name in asked]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="targets, comma separated")
    parser.add_argument("--parts", default="", help="parts, comma separated")
    parser.add_argument("--rounds", type=int)
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds, streams and seconds, and fewer targets"
    )
    parser.add_argument(
        "--before",
        type=Path,
        metavar="TREE",
        help="another checkout of fitserve, measured as the target `before`",
    )
    parser.add_argument(
        "--write",
        nargs="?",
        const="Data plane",
        metavar="SECTION",
        help="put the table into benchmarks/notebook/performance.md, under this heading",
    )
    parser.add_argument("--json", type=Path, help="write every round's figures here")
    options = parser.parse_args()
    if options.before:
        targets.STARTERS["before"] = partial(targets.fitserve, tree=options.before.resolve())
    names = choose_targets(
        options.only or (QUICKLY if options.quick else ""), [*targets.STARTERS, DIRECT], "target"
    )
    wanted = choose_targets(options.parts, [*parts.IN_TURN, *parts.ALONE], "part")
    size = parts.QUICK if options.quick else parts.FULL
    size = replace(size, rounds=options.rounds) if options.rounds else size
    files = processes.raise_file_limit()
    if files < 2 * size.idle + 200:
        say(
            f"Only {files} files may be open: idle streams are {(files - 200) // 2}. Raise the"
            f" limit (ulimit -n) for all {size.idle}."
        )
    run = Run(names, wanted, size)
    run.in_turn()
    run.one_by_one()
    text = text_of(
        run, " ".join(["`python benchmarks/proxies/run.py", *sys.argv[1:]]).strip() + "`"
    )
    print(text)
    if options.json:
        options.json.write_text(
            json.dumps(
                {
                    "rounds": run.rounds,
                    "alone": run.alone,
                    "about": run.about,
                    "missing": run.missing,
                }
            )
        )
    if options.write:
        report.put_section(PAGE, options.write, text)


if __name__ == "__main__":
    main()
