"""A process that has imported an engine, and forks engines on request.

    python -c BEGIN FOLDER_OF_INSIDE FOLDER 0

Any Python from 3.10 on, standard library only. FOLDER (0700) holds:

    order.json    spec of the gateway: {"modules": [...], "env": {...}, "idle_s": 300}
    learned, refused.json    of import_watch.py
    socket        where the gateway asks (0600); only processes of this user are answered

A connection carries lines of JSON, each request with one answer:

    {"do": "status"}  -> {"pid", "modules", "read", "refused", "cgroup"}
    {"do": "start", "argv", "env", "cwd", "log", "exit_file", "forked_calls",
     "kernel_warmups", "kernel_builds"}
                      -> {"pid"} or {"refused": reason}

The engine waits for one more byte of its connection. Without that byte it ends, and has done
nothing. So no engine exists that its gateway has not recorded.

An open connection keeps the process alive. The process ends `idle_s` after the last one, at
SIGTERM, and when a later process takes over the socket. While engines of it live, it becomes a
small program that only notes their exit codes.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import time
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import exit_codes, forked_calls, kernel_builds, kernel_warmups
from .import_watch import ImportWatch, LearningFinder, Unforkable, restart

MAX_REQUEST = 4 * 1024 * 1024
HASHES = ("triton.runtime.cache:triton_key", "torch._inductor.codecache:torch_key")
"""Functions that read all files of a package, for the names of caches, and keep the answer. Those
of torch 2.11.0 and triton 3.6.0 took half a second of each start."""
GO_S = 10.0
"""Seconds that a forked engine waits for its byte."""
_CREDENTIALS = struct.Struct("3i")
_OOM_SCORE = Path("/proc/self/oom_score_adj")


def main(folder: Path, restarts: int) -> None:
    """Import the modules of the spec, then serve requests until nobody needs them."""
    spec = json.loads((folder / "order.json").read_text())
    watch = ImportWatch(folder)
    try:
        watch.import_all(spec["modules"])
    except Unforkable as error:
        print(f"A module is left to the fork: {error}.", file=sys.stderr)  # noqa: T201
        restart(restarts)
    cache_hashes(HASHES)
    gc.collect()
    gc.freeze()
    server = ForkServer(folder, watch, changes(spec["env"], os.environ))
    argv = server.serve(float(spec["idle_s"]))
    if argv is None:
        exit_codes.become_writer(server.engines)
    else:
        run(argv)


def cache_hashes(names: Iterable[str]) -> None:
    """Call the functions `MODULE:NAME` of imported modules, which keep their answer for forks."""
    for name in names:
        module_name, _, attribute = name.partition(":")
        function = getattr(sys.modules.get(module_name), attribute, None)
        if callable(function):
            # The engine calls the function again, and meets the error itself.
            with suppress(Exception):
                function()


class ForkServer:
    """Answers requests, one after the other. Forks engines, and notes how they end.

    changes: the changes that imports make to the environment, as changes() returns them.
    """

    def __init__(self, folder: Path, watch: ImportWatch, changes: dict[str, str | None]) -> None:
        self._folder = folder
        self._watch = watch
        self._changes = changes
        self._connections: dict[int, tuple[socket.socket, bytearray]] = {}
        self.engines: dict[int, str] = {}
        """Living engines: pid -> the file for their exit code."""
        self._ends = False
        # Where memory is short, Linux ends this process before any other.
        self._oom_score = _OOM_SCORE.read_text()
        _OOM_SCORE.write_text("1000")
        self._woken, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        self._listener = listen(folder / "socket")
        self._inode = (folder / "socket").stat().st_ino
        self._poll = select.poll()
        for number in (self._woken, self._listener.fileno()):
            self._poll.register(number, select.POLLIN)

    def _stop(self, *_: object) -> None:
        self._ends = True

    def serve(self, idle_s: float) -> list[str] | None:
        """None at the end. In a fork: the command line of the engine that this process is now."""
        used_at = time.monotonic()
        while not self._ends and self._is_reachable() and time.monotonic() - used_at < idle_s:
            for number, _ in self._poll.poll(1000):
                if number == self._woken:
                    with suppress(BlockingIOError):
                        os.read(self._woken, 4096)
                elif number == self._listener.fileno():
                    self._accept()
                elif (argv := self._read(number)) is not None:
                    return argv
            exit_codes.write_exit_codes(self.engines)
            if self._connections:
                used_at = time.monotonic()
        if self._is_reachable():
            (self._folder / "socket").unlink(missing_ok=True)
        return None

    def _is_reachable(self) -> bool:
        """Whether the socket in the folder is that of this process, and not of a later one."""
        try:
            return (self._folder / "socket").stat().st_ino == self._inode
        except OSError:
            return False

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            if _CREDENTIALS.unpack(credentials)[1] != os.geteuid():
                connection.close()
                return
            connection.setblocking(False)
            self._connections[connection.fileno()] = connection, bytearray()
            self._poll.register(connection.fileno(), select.POLLIN)

    def _read(self, number: int) -> list[str] | None:
        """Answer the question of this connection. In a fork: the command line of its engine."""
        connection, received_bytes = self._connections[number]
        try:
            data = connection.recv(65536)
        except OSError:
            data = b""
        received_bytes += data
        if not data or len(received_bytes) > MAX_REQUEST:
            self._close(number)
            return None
        line, end, tail = received_bytes.partition(b"\n")
        if not end:
            return None
        received_bytes[:] = tail
        try:
            request = json.loads(line)
            if request["do"] == "start":
                return self._fork(connection, request)
            send(connection, self._status())
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"A request failed: {error!r}", file=sys.stderr)  # noqa: T201
            self._close(number)
        return None

    def _close(self, number: int) -> None:
        connection, _ = self._connections.pop(number)
        self._poll.unregister(number)
        connection.close()

    def _status(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "modules": len(sys.modules),
            "read": sorted(self._watch.read),
            "refused": self._watch.refused_names,
            "cgroup": Path("/proc/self/cgroup").read_text(),
        }

    def _fork(self, connection: socket.socket, request: dict[str, Any]) -> list[str] | None:
        """Fork the engine of a request. Only the child returns a command."""
        if not self._watch.is_current:
            send(connection, {"refused": "a file of the engine has changed since its import"})
            return None
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            self.engines[pid] = request["exit_file"]
            self._close(connection.fileno())
            return None
        try:
            os.setsid()
            self._leave(connection)
            start_engine(connection, request, self._oom_score)
            change_environment(self._changes)
            forked_calls.replace_calls(request["forked_calls"])
            sys.meta_path.insert(0, LearningFinder(self._folder / "learned"))
            kernel_warmups.compile_side_by_side(request["kernel_warmups"])
            kernel_builds.build_at_choice(request["kernel_builds"])
        except BaseException as error:
            with suppress(OSError):
                send(connection, {"refused": f"the fork failed: {error!r}"})
            os._exit(70)
        argv: list[str] = request["argv"]
        return argv

    def _leave(self, connection: socket.socket) -> None:
        """Close the parent's files and sockets, and take back its signal handlers."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._listener.close()
        os.close(self._woken)
        os.close(self._waker)
        for open_connection, _ in self._connections.values():
            if open_connection is not connection:
                open_connection.close()
        self._connections.clear()
        self.engines.clear()


def start_engine(connection: socket.socket, request: dict[str, Any], oom_score: str) -> None:
    """Give this fork the environment of a plain start, and wait until it may go on."""
    _OOM_SCORE.write_text(oom_score)
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    devnull = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for source, target in ((devnull, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(devnull)
    os.environ.clear()
    os.environ.update(request["env"])
    connection.settimeout(GO_S)
    send(connection, {"pid": os.getpid()})
    if connection.recv(1) != b"!":
        os._exit(0)
    connection.close()
    os.chdir(request["cwd"])


def changes(former_env: Mapping[str, str], new_env: Mapping[str, str]) -> dict[str, str | None]:
    """The variables with another value than before; None: the variable is removed."""
    names = {*former_env, *new_env}
    return {name: new_env.get(name) for name in names if former_env.get(name) != new_env.get(name)}


def change_environment(changes: Mapping[str, str | None]) -> None:
    """Set the variables that imports had set, as `import vllm` does. A plain start sets them
    too."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def listen(path: Path) -> socket.socket:
    """A socket at this path for this user. The path may be too long for an address."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    mask = os.umask(0o177)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.umask(mask)
        os.close(folder)
    listener.listen(16)
    return listener


def send(connection: socket.socket, answer: dict[str, Any]) -> None:
    connection.sendall(json.dumps(answer).encode() + b"\n")


def run(argv: list[str]) -> None:
    """Run `PYTHON -m MODULE ...` or `PYTHON -c CODE ...` in this process."""
    _, option, program, *arguments = argv
    with suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle(" ".join(argv))
    if (numpy := sys.modules.get("numpy")) is not None:
        # Two forks would draw the same numbers otherwise. Python reseeds its own generator.
        numpy.random.seed()
    sys.orig_argv[:] = argv
    if option == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = [program, *arguments]
        # It runs again as the main module, as in a plain start.
        sys.modules.pop(program, None)
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, "")
    sys.argv = ["-c", *arguments]
    main_module = types.ModuleType("__main__")
    sys.modules["__main__"] = main_module
    exec(compile(program, "<string>", "exec"), main_module.__dict__)  # noqa: S102
