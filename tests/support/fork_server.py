"""Runs as a process of its own without threads: imports all that modules of `gateway` import, then
forks a process for each request.

A request on the socket of its first argument: JSON (module, arguments, environment, folder, umask,
terminal, asks), with four descriptors: standard input, output and error, and where it tells the pid
of the new process, and its exit status as subprocess does once it has ended. A process that `asks`
has a socket of its own for requests, by which a gateway has its planner forked.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import termios
import threading
import time
from typing import Any, TextIO

from gateway.cli.registry import SECTIONS
from gateway.engines.inquiry.script import pack
from gateway.planner.service import plan_process
from gateway.profiles.profile_tables import shipped_profiles
from gateway.profiles.profiles import Profiles
from tests.support import forked, kept_work

# Nothing that reads its environment when it is imported, as the library of the Hub does.
IMPORTED = (
    "httpx",
    "gateway.planner.service.plan_program",
    "gateway.cli.main",
    "gateway.__main__",
    "gateway.server.server",
    "gateway.hosts.agent.agent_server",
    # Imported late: the loop of a gateway, and the planner.
    "uvicorn.lifespan.on",
    "uvicorn.loops.auto",
    "gateway.proxy.workers.orphaned_workers",
    "gateway.planner.service.offline",
    "gateway.engines.sglang.engine",
    "gateway.engines.vllm.engine",
    # Modules that measure an engine.
    "gateway.measuring.bench.measure",
    *sorted(
        f"gateway.cli.commands.{place.rpartition('.')[0]}"
        for section in SECTIONS.values()
        for place in section.values()
    ),
)
MAX_BYTES = 1 << 20


def main() -> None:
    if os.fork():
        os._exit(0)
    server = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTED:
        importlib.import_module(name)
    assert "huggingface_hub" not in sys.modules
    kept_work.keep()
    pack()
    profiles = Profiles()
    profiles.signatures  # noqa: B018
    for path in shipped_profiles().rglob("*.yaml"):
        profiles.documents.read(path)
    gc.collect()
    gc.freeze()
    serving = serve(server)
    if serving is not None:
        sys.modules.pop(serving, None)
        run_to_the_end(serving)


def run_to_the_end(module: str) -> None:
    """Run a module as a program, and end as programs do but for one thing: modules are not
    destroyed. That would write to each page of memory that the process shares with its server,
    which costs more than a whole command."""
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        code = end.code or 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # A failed write ends the process as Python does.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def serve(server: socket.socket) -> str | None:
    """In the server None, when nobody can ask any more; in a forked process the module that it is
    to be."""
    wake_end, wakes = socket.socketpair()
    wake_end.setblocking(False)
    wakes.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno())
    running: dict[int, socket.socket] = {}
    askers = {server}
    while True:
        ready, _, _ = select.select([*askers, wake_end], [], [])
        if wake_end in ready:
            wake_end.recv(4096)
            report_ended_children(running)
        for asker in askers.intersection(ready):
            message, descriptors, _, _ = socket.recv_fds(asker, MAX_BYTES, 4)
            if message:
                break
            if asker is server:
                return None
            askers.remove(asker)
            asker.close()
        else:
            continue
        *streams, report = descriptors
        document = json.loads(message)
        server_end, client_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if pid := os.fork():
            running[pid] = socket.socket(fileno=report)
            tell(running[pid], pid)
            for descriptor in streams:
                os.close(descriptor)
            client_end.close()
            if document["asks"]:
                askers.add(server_end)
            else:
                server_end.close()
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # A shell that runs the tests in the background has it ignored, in all that they start.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.close(report)
        for endpoint in (*askers, server_end, wake_end, wakes, *running.values()):
            endpoint.close()
        if document["asks"]:
            forked.servers[:] = [client_end]
            setattr(plan_process, "spawn", forked.spawn)  # noqa: B010 - it is not its own
        else:
            client_end.close()
        return become(document, streams)


def report_ended_children(running: dict[int, socket.socket]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with running.pop(pid) as report:
            tell(report, os.waitstatus_to_exitcode(status))


def tell(report: socket.socket, number: int) -> None:
    """The requester of the process may have ended."""
    with contextlib.suppress(ConnectionError):
        report.send(b"%d" % number)


def become(request: dict[str, Any], streams: list[int]) -> str:
    """As after exec: session, standard streams, environment, folder, arguments."""
    os.setsid()
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if request["terminal"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    sys.stdin = stream(0, "r", "strict")
    sys.stdout = stream(1, "w", "strict")
    sys.stderr = stream(2, "w", "backslashreplace")
    sys.path[0] = request["folder"]
    sys.argv[1:] = request["arguments"]
    return str(request["module"])


def stream(number: int, mode: str, errors: str) -> TextIO:
    return open(
        number,
        mode,
        encoding="utf-8",
        errors=errors,
        buffering=1 if number == 2 else -1,
        closefd=False,
    )  # type: ignore[return-value]


if __name__ == "__main__":
    main()
