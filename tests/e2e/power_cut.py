"""Power cuts, simulated: writes and syncs of the store are recorded, and every disk that a cut
might have left is opened again.

`python -m tests.e2e.power_cut --points 500` prints the figures of
benchmarks/notebook/reliability.md. Needs strace.

A cut keeps bytes that were synced before it. Of a file's bytes since its last sync, any sectors may
be there; of the changes to a folder (a name made, renamed, removed) since its own last sync, the
first few. Shared memory (`-shm`) is never there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from gateway.domain import Fact
from gateway.domain.grant import Grant
from gateway.store.recovery import installation_id, open_store
from gateway.store.running_engines import RunningEngine, RunningEngines
from gateway.store.store import Store
from tests.support.makers import plan, wish
from tests.support.paths import ROOT

SECTOR = 512
# Memory that SQLite's processes share; as a file it never matters.
SHARED = "-shm"
CALLS = "openat,write,pwrite64,ftruncate,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat"
_LINE = re.compile(r"(?:\d+ +)?(\w+)\((.*)\) += (\d+)")
_TEXT = re.compile(r"(?:\\x[0-9a-f]{2})+")


# --- the writer: changes one after the other, each said on standard output once the store has
# returned ---


def write(data: Path, changes: int) -> None:
    store = open_store(data / "fitserve.db")
    installation_id(data / "fitserve.db", store)
    live, new_plan = RunningEngines(data), plan()
    acknowledge(store)
    for number in range(changes):
        kind, name = number % 6, f"m{number // 6}"
        match kind:
            case 0:
                store.add_model(wish(name=name), float(number))
            case 1:
                attempt = store.add_attempt(name, 0, new_plan, 8000, float(number))
            case 2:
                live.write(
                    attempt.instance_name,
                    RunningEngine(wish=wish(name=name), created_at=0.0, attempt=attempt),
                )
                fact = Fact(
                    kind="plan_verified",
                    scope={"fingerprint": name},
                    grade="verified",
                    source="it works",
                    attempt=attempt.id,
                )
                store.save_attempt(attempt.evolve(state="ready", ready_at=float(number)), fact)
            case 3:
                store.add_key(Grant(name=name), os.urandom(32), float(number))
            case 4:
                store.mark_deleting(name)
            case 5 if number // 6 % 2:
                live.remove(attempt.instance_name)
                store.remove_model(name)
            case 5:
                store.remove_key(name)
        acknowledge(store)
    # No orderly end: the last checkpoint would sync everything.
    os._exit(0)


def acknowledge(store: Store) -> None:
    os.write(1, json.dumps(content(store)).encode() + b"\n")


def content(store: Store) -> list[object]:
    """All that a user was told would be kept, in few words."""
    models = [[wish.name, deleting] for wish, _, deleting, _ in store.models()]
    attempts = [[attempt.id, attempt.state] for attempt in store.attempts()]
    return [models, attempts, len(store.facts()), [grant.name for grant, *_ in store.grants()]]


# --- the disk ---


class Call(NamedTuple):
    """One call, of the recorded process: its name, the file that it is about, and the rest."""

    name: str
    path: str
    data: bytes = b""
    offset: int = 0
    target: str = ""


@dataclass
class File:
    """`content` are the synced bytes; `since` are the writes after that, (offset, data), and cuts,
    (size, None)."""

    content: bytes = b""
    since: list[tuple[int, bytes | None]] = field(default_factory=list)

    def sync(self) -> None:
        self.content, self.since = self.content_after_cut(None), []

    def content_after_cut(self, chance: random.Random | None) -> bytes:
        """The content with all later writes, or with their part that a cut leaves."""
        now = bytearray(self.content)
        for offset, data in self.since:
            if data is None:
                if chance is None or chance.random() < 0.5:
                    now[:] = now[:offset].ljust(offset, b"\0")
                continue
            for at in range(0, len(data), SECTOR):
                piece = data[at : at + SECTOR]
                if chance is None or chance.random() < 0.5:
                    now[:] = now.ljust(offset + at, b"\0")
                    now[offset + at : offset + at + len(piece)] = piece
        return bytes(now)


class Disk:
    """Plays calls. `names` are as the process sees them, `files` as they were synced with their
    folder; `changes` are since then."""

    def __init__(self) -> None:
        self.names: dict[str, File] = {}
        self.files: dict[str, File] = {}
        self.changes: list[tuple[str, File | None]] = []

    def play(self, call: Call) -> None:
        match call.name:
            case "create" if call.path not in self.names:
                self._name(call.path, File())
            case "create" if call.data:
                self.names[call.path].since.append((0, None))
            case "write":
                self.names[call.path].since.append((call.offset, call.data))
            case "cut":
                self.names[call.path].since.append((call.offset, None))
            case "rename":
                self._name(call.target, self.names[call.path])
                self._name(call.path, None)
            case "unlink":
                self._name(call.path, None)
            case "sync" if call.path in self.names:
                self.names[call.path].sync()
            case "sync":
                for path, file in self.changes:
                    if str(Path(path).parent) == call.path:
                        _check_name(self.files, path, file)
                self.changes = [
                    change for change in self.changes if str(Path(change[0]).parent) != call.path
                ]

    def _name(self, path: str, file: File | None) -> None:
        _check_name(self.names, path, file)
        self.changes.append((path, file))

    def leave(self, folder: Path, chance: random.Random) -> None:
        """Make the remains of a cut."""
        names = dict(self.files)
        for path, file in self.changes[: chance.randint(0, len(self.changes))]:
            _check_name(names, path, file)
        for path, file in names.items():
            if not path.endswith(SHARED):
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.content_after_cut(chance))


def _check_name(names: dict[str, File], path: str, file: File | None) -> None:
    if file is None:
        names.pop(path, None)
    else:
        names[path] = file


# --- the recording ---


def record(folder: Path, changes: int) -> list[Call]:
    """The calls of a process that makes so many changes, with its output in between (`said`)."""
    trace = folder / "trace"
    tool = ["strace", "-f", "-y", "-xx", "-s", "10000000", "-e", f"trace={CALLS}", "-o", str(trace)]
    command = [
        sys.executable,
        "-m",
        "tests.e2e.power_cut",
        "--write",
        str(folder / "data"),
        "--changes",
        str(changes),
    ]
    subprocess.run([*tool, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    with trace.open() as lines:
        return list(calls(lines, folder / "data"))


def calls(lines: Iterable[str], folder: Path) -> Iterator[Call]:
    """Of strace's lines those about files below this folder, and the output; paths are from
    there."""
    positions: dict[str, int] = {}
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            continue
        name, result = match[1], int(match[3])
        texts = [bytes.fromhex(text.replace("\\x", "")) for text in _TEXT.findall(match[2])]
        numbers = [int(number) for number in re.findall(r", (\d+)", match[2])]
        if name == "write" and match[2].startswith("1<"):
            yield Call("said", "", texts[1])
            continue
        paths = [Path(os.fsdecode(text)) for text in texts[1 if name == "openat" else 0 :][:2]]
        if not paths or not paths[0].is_relative_to(folder):
            continue
        path = str(paths[0].relative_to(folder))
        match name:
            case "openat" if "O_CREAT" in match[2]:
                positions[path] = 0
                yield Call("create", path, b"anew" if "O_TRUNC" in match[2] else b"")
            case "write":
                yield Call("write", path, texts[1][:result], positions.get(path, 0))
                positions[path] = positions.get(path, 0) + result
            case "pwrite64":
                yield Call("write", path, texts[1][:result], numbers[-1])
            case "ftruncate":
                yield Call("cut", path, offset=numbers[-1])
            case "fsync" | "fdatasync":
                yield Call("sync", path)
            case "rename" | "renameat" | "renameat2":
                yield Call("rename", path, target=str(paths[1].relative_to(folder)))
            case "unlink" | "unlinkat":
                yield Call("unlink", path)


# --- the cuts ---


def cuts(folder: Path, recorded: list[Call], points: int, seed: int = 1) -> dict[str, int]:
    """Cut the power at so many points, opening the remains each time. Raises AssertionError for
    anything that was lost."""
    chance = random.Random(seed)
    at = sorted(chance.choices(range(len(recorded) + 1), k=points))
    acknowledgements = [
        (number, json.loads(call.data))
        for number, call in enumerate(recorded)
        if call.name == "said"
    ]
    disk, played, unsynced = Disk(), 0, 0
    for number, point in enumerate(at):
        while played < point:
            disk.play(recorded[played])
            played += 1
        unsynced += any(
            file.since for path, file in disk.names.items() if not path.endswith(SHARED)
        )
        remaining_path = folder / f"cut-{number}"
        disk.leave(remaining_path, chance)
        states_before = [state for number, state in acknowledgements if number < point]
        # A change under way may be there or not.
        allowed = (
            states_before[-1:]
            + [state for number, state in acknowledgements if number >= point][:1]
        )
        remaining_path.mkdir(parents=True, exist_ok=True)
        check(remaining_path, allowed, is_open=bool(states_before))
        shutil.rmtree(remaining_path)
    syncs = sum(call.name == "sync" for call in recorded)
    figures = {
        "changes": len(acknowledgements) - 1,
        "calls": len(recorded),
        "syncs": syncs,
        "cuts": points,
    }
    return figures | {"with unsynced writes": unsynced, "lost": 0}


def check(folder: Path, allowed: list[list[object]], *, is_open: bool) -> None:
    """The database opens as it is, with all that was acknowledged."""
    store = open_store(folder / "fitserve.db")
    try:
        assert store.problem is None, f"{folder}: {store.problem}"
        stored_content = content(store)
        assert stored_content in allowed or not (is_open or any(stored_content)), (
            f"{folder}: {stored_content} and not {allowed}"
        )
        assert len(RunningEngines(folder).entries()) == len(
            list((folder / "live").glob("*.json"))
        ), f"{folder}: half a record"
    finally:
        store.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=500)
    parser.add_argument("--changes", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write is not None:
        write(args.write, args.changes)
    with tempfile.TemporaryDirectory() as folder:
        calls = record(Path(folder), args.changes)
        sys.stdout.write(
            json.dumps(cuts(Path(folder) / "cuts", calls, args.points, args.seed)) + "\n"
        )


if __name__ == "__main__":
    main()
