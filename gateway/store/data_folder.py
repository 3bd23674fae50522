"""The data folder, which other users of the machine can neither read nor lock.

The logs contain prompts, and the records keys of engines. A reader could also lock the database's
shared memory and stop every change. So the folder has mode 0700, and the program's umask gives
files 0600. Two folders inside are readable by all. One has downloaded weights, because an engine's
container runs as another user (`gateway.models.catalog.fetch`). The other has packages of engines,
which are links into uv's cache.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from gateway.disk_fault import disk_fault
from gateway.errors import SettingsError
from gateway.logging import Logger

log = Logger("fitserve.store")

_FOREIGN_ACCESS = 0o077
_SHARED_FOLDERS = ("models", "engines")
# Longest wait for the lock of a dead owner, and its rest between two tries.
_DEATH_S = 10.0
_LOCK_POLL_S = 0.05


def is_in_use(data: Path, proc: Path = Path("/proc")) -> bool:
    """Whether a gateway uses the data folder, by the kernel's list of locks.

    To try the lock could keep a gateway from starting.
    """
    try:
        status = (data / "gateway.lock").stat()
        locks = (proc / "locks").read_text()
    except OSError:
        return False
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any(
        {"FLOCK", "WRITE", file} <= set(line.split()) and "->" not in line
        for line in locks.splitlines()
    )


def close_data_folder(data: Path) -> None:
    """Make the data folder, or close an open one and its files to others.

    Raises OSError, SettingsError.
    """
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = data.stat().st_mode
    if mode & stat.S_ISVTX:
        raise SettingsError(
            f"All users of this machine share the folder {data}, so it cannot be the data folder.",
            hint="Set FITSERVE_DATA_DIR to a folder that only the gateway uses.",
        )
    if not mode & _FOREIGN_ACCESS:
        return
    former_mode = oct(stat.S_IMODE(mode))
    try:
        # The folder first, so that no other process opens its files.
        data.chmod(stat.S_IMODE(mode) & ~_FOREIGN_ACCESS)
    except OSError as error:
        log.warning(
            "other users can open the data folder, and it could not be closed",
            data=str(data),
            mode=former_mode,
            error=str(error),
        )
    else:
        files = sum(_close(entry) for entry in _inside(data))
        log.warning(
            "other users could open the data folder; it was closed",
            data=str(data),
            mode=former_mode,
            files=files,
        )


def lock(data: Path) -> int:
    """Lock the data folder for this process. Raises SettingsError if another gateway has it.

    A program that a gateway was starting at its death shares the lock until it runs by itself. So
    the lock of a dead owner is awaited for some seconds.
    """
    file = data / "gateway.lock"
    deadline = time.monotonic() + _DEATH_S
    while True:
        try:
            descriptor = lock_file(file)
            break
        except BlockingIOError:
            owner = re.sub(r"\D", "", file.read_text(errors="replace")[:32])
            if _exists(owner) or time.monotonic() > deadline:
                busy = SettingsError(
                    f"Another gateway (process {owner or 'unknown'}) uses the data folder {data}.",
                    hint="Stop that gateway, or set another FITSERVE_DATA_DIR.",
                )
                busy.exit_code = 3
                raise busy from None
        time.sleep(_LOCK_POLL_S)
    own_lock(descriptor)
    return descriptor


def _exists(pid: str) -> bool:
    """Whether there is such a process; True where the text names none."""
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except (PermissionError, ValueError):
        return True
    return True


def own_lock(descriptor: int) -> None:
    """Write this process into the lock file.

    The lock also holds without it, so a full or read-only disk does not stop the gateway.
    """
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)


def has_lock(data: Path, descriptor: int) -> bool:
    """Whether this process owns the data folder: its lock file is still the one in the folder and
    names no other process. A removed lock file has no other owner."""
    with contextlib.suppress(OSError):
        if not os.path.samestat(os.fstat(descriptor), (data / "gateway.lock").stat()):
            return False
        owner = os.pread(descriptor, 32, 0)
        # On a read-only disk the file names an earlier process.
        is_writable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        return not (is_writable and owner.isdigit()) or int(owner) == os.getpid()
    return True


def lock_file(file: Path) -> int:
    """Open and lock a file in the data folder. Returns its descriptor.

    Raises SettingsError, and BlockingIOError if another process has the lock.
    """
    data = file.parent
    try:
        close_data_folder(data)
        descriptor = _lock_file(file)
    except OSError as error:
        fault = disk_fault(data if data.exists() else data.parent, error)
        cause = fault.cause if fault is not None else f"{error.strerror}"
        raise SettingsError(
            f"The data folder {data} cannot be used: {cause}.",
            hint="Set FITSERVE_DATA_DIR to a folder that you can write.",
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor


def lock_exclusively(file: Path, program: str) -> int:
    """`hold` for a program of which a data folder has one. Raises SettingsError if it runs."""
    try:
        return lock_file(file)
    except BlockingIOError:
        raise SettingsError(
            f"Another {program} uses the data folder {file.parent}.",
            hint="Stop it, or set another FITSERVE_DATA_DIR.",
        ) from None


def _lock_file(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.EROFS or not path.exists():
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _inside(data: Path) -> Iterator[os.DirEntry[str]]:
    """Files and folders in the data folder, except behind links and in shared folders."""
    folders = [str(data)]
    while folders:
        # Running engines may remove their files meanwhile.
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_symlink() or (
                    entry.name in _SHARED_FOLDERS and Path(entry.path).parent == data
                ):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                yield entry


def _close(entry: os.DirEntry[str]) -> bool:
    """Close the entry to others. Returns whether it was open."""
    with contextlib.suppress(OSError):
        mode = stat.S_IMODE(entry.stat(follow_symlinks=False).st_mode)
        if mode & _FOREIGN_ACCESS:
            os.chmod(entry.path, mode & ~_FOREIGN_ACCESS)  # noqa: PTH101 - of scandir
            return True
    return False
