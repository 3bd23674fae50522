"""The ways through the package: files and functions that a command or a call runs.

    python -m benchmarks.call_paths [plan | add]

plan: `fitserve plan` of Llama-3.1-8B on 2x3090 over all engine versions. add: `POST /admin/models`
to its answer, and from there until the model is ready, with a scripted engine; its planning runs in
a process of its own and is not counted. Bodies of modules and classes are not counted. Passes of
the loop are, so calls of `add` are upper bounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.domain import LaunchSpec
    from tests.support.scripted_engine import EngineScript

ROOT = Path(__file__).parent.parent
PACKAGE = f"{ROOT / 'gateway'}/"


class CallCount:
    """Calls by function of the package, and steps from one file to another."""

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.crossings = 0

    def record(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_function = event == "call" and code.co_flags & inspect.CO_OPTIMIZED
        if not is_function or not code.co_filename.startswith(PACKAGE):
            return
        self.calls[code] += 1
        caller = frame.f_back
        self.crossings += caller is None or caller.f_code.co_filename != code.co_filename

    def __str__(self) -> str:
        files = {code.co_filename for code in self.calls}
        return (
            f"{len(files)} files, {len(self.calls)} functions, {self.calls.total():,} calls,"
            f" {self.crossings:,} from file to file"
        )

    def __add__(self, later: CallCount) -> CallCount:
        both = CallCount()
        both.calls, both.crossings = self.calls + later.calls, self.crossings + later.crossings
        return both


class CallCounter:
    """Counts the calls of this thread and of threads that begin later, one part after another."""

    def __init__(self) -> None:
        self.part = CallCount()
        threading.setprofile(self._record)
        sys.setprofile(self._record)

    def next_part(self) -> CallCount:
        """The count so far; a new one begins."""
        ended, self.part = self.part, CallCount()
        return ended

    def end(self) -> CallCount:
        sys.setprofile(None)
        threading.setprofile(None)
        return self.part

    def _record(self, frame: FrameType, event: str, value: object) -> None:
        self.part.record(frame, event, value)


def plan(folder: Path) -> None:
    os.environ["FITSERVE_DATA_DIR"] = str(folder / "data")
    shutil.copy(ROOT / "tests/models/llama-3.1-8b.json", folder / "config.json")
    sys.argv = ["fitserve", "plan", str(folder), "--hardware", "2x3090"]
    counter = CallCounter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        from gateway.__main__ import main as fitserve

        fitserve()
    print(f"fitserve plan: {counter.end()}")


async def add(folder: Path) -> None:
    from tests.support import running, scripted_engine

    def healthy(spec: LaunchSpec) -> EngineScript:
        return scripted_engine.EngineScript(model=spec.model)

    counter = CallCounter()
    async with running.running(folder, healthy) as gateway:
        source = running.model_folder(folder / "model")
        counter.next_part()
        await gateway.add("m", source)
        answered = counter.next_part()
        await gateway.until("m", "ready")
        ready = counter.end()
    print(f"POST /admin/models to its answer: {answered}")
    print(f"from the answer to ready: {ready}")
    print(f"both: {answered + ready}")


def main() -> None:
    if sys.argv[1:] not in (["plan"], ["add"]):
        # Each part has its own process: modules that one imports change the way of the other.
        for part in ("plan", "add"):
            subprocess.run([sys.executable, "-m", "benchmarks.call_paths", part], check=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        if sys.argv[1] == "add":
            asyncio.run(add(Path(folder)))
        else:
            plan(Path(folder))


if __name__ == "__main__":
    main()
