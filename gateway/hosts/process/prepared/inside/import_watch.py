"""The imports of an engine, watched for effects that no fork survives, and for reads of the
environment."""

from __future__ import annotations

import ctypes
import importlib
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

MAX_RESTARTS = 20
MAX_TRIALS = 60
MAX_NAMES = 20_000
PATIENCE_S = 10.0
"""Seconds in which a process that a module starts may end."""
_POLL_S = 0.02
_THREAD = "starts a thread"
_PROCESS = "starts a process"
_CUDA_DRIVER = "libcuda.so.1"
_PR_SET_PDEATHSIG = 1
_NOT_INITIALIZED_CODE = 3
"""CUDA_ERROR_NOT_INITIALIZED of cuda.h: the answer to every call before cuInit."""
_LOADERS: tuple[Any, ...] = (
    importlib.machinery.SourceFileLoader,
    importlib.machinery.ExtensionFileLoader,
)


class Unforkable(Exception):
    """A module changed the process in a way that no fork survives."""


class EnvironmentReader(type(os.environ)):  # type: ignore[misc]
    """The environment, which notes the names that are looked up."""

    names: ClassVar[set[str]] = set()

    def __getitem__(self, name: str) -> str:
        self.names.add(str(name))
        value: str = super().__getitem__(name)
        return value


class ImportWatch:
    """Imports modules, and looks after each whether a fork would survive it.

    folder/learned: modules to import, one a line. folder/refused.json: modules with a reason. A
    module that begins a GPU, a thread or a process is refused with all that were importing it.
    Processes that end within PATIENCE_S, with the threads that wait for them, are awaited.
    Learned modules are tried in forks first. Elsewhere Unforkable is raised: the process must begin
    again without them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack: list[str] = []
        self.read: set[str] = set()
        self._files: dict[str, tuple[int, int, int]] = {}
        self._folders: dict[str, set[str]] = {}
        self.refused_names = self._read_refusals()

    def import_all(self, names: Iterable[str]) -> None:
        """Import the named and the learned modules. Raises Unforkable."""
        self._folders = {path: _entries(path) for path in sys.path}
        with self._watch_imports():
            for name in names:
                self._import(name)
            self._import_learned_names()
        self._files = {path: _identity(path) for path in _module_files()}

    @property
    def is_current(self) -> bool:
        """Whether the files of all imported modules, and the folders of packages, are unchanged."""
        return all(_identity(path) == identity for path, identity in self._files.items()) and all(
            _entries(path) == entries for path, entries in self._folders.items()
        )

    def _read_refusals(self) -> dict[str, str]:
        try:
            refused_names: dict[str, str] = json.loads((self._folder / "refused.json").read_text())
        except (OSError, ValueError):
            return {}
        return refused_names

    def _learned_names(self) -> list[str]:
        try:
            names = (self._folder / "learned").read_text().split()
        except OSError:
            return []
        return list(dict.fromkeys(names))[:MAX_NAMES]

    def _import_learned_names(self) -> None:
        """Import the learned modules, each part after a fork survived it.

        A trial ends at a module that no fork survives, and the next one is without that module.
        """
        for _ in range(MAX_TRIALS):
            names = self._learned_names()
            refused_names = dict(self.refused_names)
            count = self._trial(names)
            self.refused_names |= self._read_refusals()
            for name in names[:count]:
                self._import(name)
            if count == len(names) or self.refused_names == refused_names:
                return

    def _trial(self, names: list[str]) -> int:
        """The number of names that a fork of this process imported before it became unforkable."""
        sys.stdout.flush()
        sys.stderr.flush()
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _stop_with_parent()
                for name in names:
                    self._import(name)
                    os.write(writer, b".")
            except Unforkable as error:
                print(f"A module is left to the fork: {error}.", file=sys.stderr)  # noqa: T201
                kill_children()
            finally:
                sys.stderr.flush()
                os._exit(0)
        os.close(writer)
        os.waitpid(pid, 0)
        # The pipe holds all bytes. A process that a module began may keep its other end open.
        os.set_blocking(reader, False)
        try:
            return len(os.read(reader, MAX_NAMES))
        except BlockingIOError:
            return 0
        finally:
            os.close(reader)

    def _import(self, name: str) -> None:
        if name in sys.modules or self._is_refused(name) or not _is_installed(name):
            return
        try:
            importlib.import_module(name)
        except Unforkable:
            raise
        except BaseException as error:
            # The engine meets the error again, if it needs the module, and its log reports it.
            print(f"{name}: {error!r}", file=sys.stderr)  # noqa: T201
            self.refused_names[name] = f"cannot be imported: {type(error).__name__}"

    def _is_refused(self, name: str) -> bool:
        """Whether the module or one of its packages, which its import runs first, is refused."""
        parts = name.split(".")
        return any(".".join(parts[:end]) in self.refused_names for end in range(1, len(parts) + 1))

    @contextmanager
    def _watch_imports(self) -> Iterator[None]:
        originals = [loader.exec_module for loader in _LOADERS]
        environment = type(os.environ)
        os.environ.__class__ = EnvironmentReader
        for loader, original in zip(_LOADERS, originals, strict=True):
            loader.exec_module = self._watch_loader(original)
        try:
            yield
        finally:
            for loader, original in zip(_LOADERS, originals, strict=True):
                loader.exec_module = original
            os.environ.__class__ = environment
            self.read = set(EnvironmentReader.names)

    def _watch_loader(self, original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def exec_module(loader: Any, module: Any) -> None:
            self._refuse_unforkable()
            self._stack.append(module.__name__)
            try:
                original(loader, module)
                self._refuse_unforkable()
            finally:
                self._stack.pop()

        return exec_module

    def _refuse_unforkable(self) -> None:
        if (reason := lasting_obstacle()) is None:
            return
        culprit = self._stack[-1] if self._stack else "the process itself"
        for name in self._stack:
            self.refused_names.setdefault(name, f"imports {culprit}")
        self.refused_names[culprit] = reason
        # Modules that were imported well are imported for themselves next time.
        known_names = {*self._learned_names(), *self.refused_names}
        well = [name for name in list(sys.modules) if name not in known_names]
        with (self._folder / "learned").open("a") as file:
            file.write("".join(f"{name}\n" for name in well))
        (self._folder / "refused.json").write_text(json.dumps(self.refused_names, indent=1))
        raise Unforkable(f"{culprit} {reason}")


class LearningFinder:
    """A finder that finds nothing, and writes the names of modules that are looked for to a file.

    The next prepared process imports them too.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._names_left = MAX_NAMES

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Always None."""
        if self._names_left > 0:
            self._names_left -= 1
            with suppress(OSError):
                os.write(self._file, f"{name}\n".encode())


def fork_refusal() -> str | None:
    """The reason why no fork of this process could be an engine; None: there is none."""
    for device in ("cuda", "xpu"):
        if getattr(sys.modules.get(f"torch.{device}"), "_initialized", False):
            return f"initialises {device.upper()}"
    if threading.active_count() > 1:
        return _THREAD
    if begins_cuda():
        return "begins CUDA"
    return _PROCESS if children() else None


def lasting_obstacle() -> str | None:
    """The reason of `fork_refusal` that stays, once the processes of imports have ended.

    humming 0.1.10 builds a program in a process of its own at each import, and a thread waits for
    its end. Both are gone after some seconds.
    """
    end_s = time.monotonic() + PATIENCE_S
    while (reason := fork_refusal()) in (_THREAD, _PROCESS):
        if not children() or time.monotonic() >= end_s:
            # The thread of an ended process may end a moment later.
            time.sleep(_POLL_S)
            return fork_refusal()
        time.sleep(_POLL_S)
    return reason


def begins_cuda() -> bool:
    """Whether this process has called cuInit, as the driver itself answers.

    Open devices prove nothing: NVML opens /dev/nvidia-uvm too (driver 580), and forks survive it.
    """
    driver = loaded_library(_CUDA_DRIVER)
    if driver is None:
        return False
    count = ctypes.c_int()
    return bool(driver.cuDeviceGetCount(ctypes.byref(count)) != _NOT_INITIALIZED_CODE)


def loaded_library(name: str) -> ctypes.CDLL | None:
    """The library if this process has loaded it; it is not loaded for the answer."""
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
    except OSError:
        return None


def children() -> list[int]:
    """The processes that this process started, and has not waited for."""
    try:
        text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    except OSError:
        return []
    return [int(pid) for pid in text.split()]


def kill_children() -> None:
    """Kill the processes that this process started."""
    for pid in children():
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _stop_with_parent() -> None:
    """Ask Linux for SIGKILL at the end of the parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def restart(restarts: int) -> None:
    """Replace this process by a new one of the same command. Raises SystemExit after too many."""
    if restarts >= MAX_RESTARTS:
        raise SystemExit(f"{restarts} modules cannot be forked; there may be more.")
    kill_children()
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, *sys.orig_argv[1:-1], str(restarts + 1)]
    os.execv(sys.executable, command)


def _is_installed(name: str) -> bool:
    """Whether the module is a file of this Python or of its packages, as a model's code is not."""
    if name.partition(".")[0] in ("__main__", "__mp_main__", "transformers_modules", "inside"):
        return False
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return False
    if spec is None or spec.origin in (None, "built-in", "frozen"):
        return spec is not None
    return any(Path(spec.origin or "").is_relative_to(path) for path in sys.path if path)


def _module_files() -> Iterator[str]:
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str):
            yield path


def _identity(path: str) -> tuple[int, int, int]:
    try:
        state = os.stat(path)  # noqa: PTH116 - of thousands of files
    except OSError:
        return (0, 0, 0)
    return state.st_ino, state.st_size, state.st_mtime_ns


def _entries(path: str) -> set[str]:
    """The packages in a folder. Imports themselves add the folder of bytecode."""
    try:
        return {*os.listdir(path)} - {"__pycache__"}  # noqa: PTH208 - of the standard library alone
    except OSError:
        return set()
