"""The process host with prepared processes: an engine that is a module, and looks at it from
outside."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gateway.domain import LaunchSpec, PreparedView
from gateway.hosts.process.host import ProcessHost
from gateway.hosts.process.prepared.pool import PreparedEngines
from tests.support.paths import FAKE_ENGINE

from .harness import until
from .process_harness import ProcessHarness

# The program describes the properties that a start decides, and then is the fake engine.
_MODULE = """
import asyncio, json, os, pathlib, signal, sys
import described, fake_engine

def main():
    print("DESCRIBED " + json.dumps({
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "leads": os.getsid(0) == os.getpid(),
        "path": sys.path,
        "name": __name__,
        "spec": __spec__.name if __spec__ else None,
        "main": sys.modules["__main__"].__dict__ is globals(),
        "files": [os.readlink(f"/proc/self/fd/{n}").rpartition("/")[0] for n in range(3)],
        "number": len(os.listdir("/proc/self/fd")),
        "oom": pathlib.Path("/proc/self/oom_score_adj").read_text(),
        "nice": os.nice(0),
        "signals": [str(signal.getsignal(n)) for n in (15, signal.SIGINT, signal.SIGCHLD)],
        "read": described.READ,
    }), flush=True)
    script, host, port = fake_engine.parse(sys.argv[1:])
    if "--late" in sys.argv:
        import later
    sys.exit(asyncio.run(fake_engine.run(script, host, port)))

if __name__ == "__main__":
    main()
"""
_DESCRIBED = """
import os
READ = os.environ.get("VLLM_READ_AT_IMPORT")
os.environ.setdefault("SET_BY_IMPORT", "1")
os.environ.pop("DROPPED_BY_IMPORT", None)
"""


class PreparedHarness(ProcessHarness):
    """Its engine is `python -m told_engine`, found by PYTHONPATH."""

    def __init__(self, data_dir: Path, limit: int = 1) -> None:
        super().__init__(data_dir)
        self.limit = limit
        self.packages = data_dir / "packages"
        self.packages.mkdir()
        (self.packages / "told_engine.py").write_text(_MODULE)
        (self.packages / "described.py").write_text(_DESCRIBED)
        self.restart()

    def restart(self) -> ProcessHost:
        """Another gateway. The end of the former closes its connections."""
        if self.host._prepared_engines is not None:
            self.host._prepared_engines.close()
        self.host = ProcessHost(self.data_dir, self.limit)
        return self.host

    def make_spec(
        self, name: str, fingerprint: str = "f1", script: Sequence[str] = (), port: int = 0
    ) -> LaunchSpec:
        spec = super().make_spec(name, fingerprint, script, port)
        paths = os.pathsep.join([str(self.packages), str(FAKE_ENGINE.parent)])
        return spec.evolve(
            argv=(sys.executable, "-m", "told_engine", *spec.argv[3:]),
            env={"PYTHONPATH": paths, "DROPPED_BY_IMPORT": "1"},
            key_env="VLLM_API_KEY",
        )

    def is_forked(self, name: str) -> bool:
        """Whether a prepared process is the engine's parent, as its record has it."""
        return bool(json.loads(self.record(name).read_text())["forked"])

    def description(self, name: str) -> dict[str, Any]:
        """The engine's description of itself."""
        log = (self.data_dir / "logs" / f"{name}.log").read_text()
        line = next(line for line in log.splitlines() if line.startswith("DESCRIBED "))
        document: dict[str, Any] = json.loads(line.removeprefix("DESCRIBED "))
        return document

    def views(self) -> tuple[PreparedView, ...]:
        """The prepared processes, as another program sees them."""
        looker = PreparedEngines(self.data_dir, self.limit)
        try:
            return looker.views()
        finally:
            looker.close()

    async def prepared_pids(self, count: int = 1, unlike: Sequence[int] = ()) -> list[int]:
        """The pids of the prepared processes, once there are so many beside `unlike`."""

        pids: list[int] = []

        async def are_there() -> bool:
            await self.host.list()
            pids[:] = [view.pid for view in self.views() if view.pid not in unlike]
            return len(pids) == count

        await until(f"{count} prepared processes", are_there)
        return pids

    def processes(self) -> Iterator[int]:
        """All processes whose command line or working directory is in the data folder."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    place = str((entry / "cwd").readlink())
                    command = (entry / "cmdline").read_bytes().decode(errors="replace")
                except OSError:
                    continue
                if str(self.data_dir) in place or str(self.data_dir) in command:
                    yield int(entry.name)

    async def cleanup(self) -> None:
        await super().cleanup()
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
