"""The data folder belongs to one user: other users of the machine can neither read nor lock what is
in it.

The database holds wishes, logs hold words of clients, records hold the keys of engines; and a lock
on the database's shared memory, for which reading is enough, stops every change. So the folder is
0700. What the gateway makes in it is 0600, and 0700 for folders, because the program sets its umask
first. Two things are readable by all behind the closed folder: downloaded weights, because an
engine's container runs as another user (`gateway.models.catalog.fetch`), and packages of engines,
which are links into the cache of uv.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from gateway.errors import SettingsError
from gateway.logging import Logger

log = Logger("fitserve.store")

_OTHERS = 0o077
_SHARED = ("models", "engines")


def in_use(data: Path, proc: Path = Path("/proc")) -> bool:
    """Whether a gateway holds the data folder. Read in the kernel's list of locks: who tried the
    lock would keep a gateway from starting."""
    try:
        held = (data / "gateway.lock").stat()
        locks = (proc / "locks").read_text()
    except OSError:
        return False
    file = f"{os.major(held.st_dev):02x}:{os.minor(held.st_dev):02x}:{held.st_ino}"
    return any(
        {"FLOCK", "WRITE", file} <= set(line.split()) and "->" not in line
        for line in locks.splitlines()
    )


def close_data_folder(data: Path) -> None:
    """Make the data folder where there is none, and close an open one with all that is in it.
    Raises OSError, SettingsError."""
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = data.stat().st_mode
    if mode & stat.S_ISVTX:
        raise SettingsError(
            f"All users of this machine share the folder {data}, so it cannot be the data folder.",
            hint="Set FITSERVE_DATA_DIR to a folder of its own.",
        )
    if not mode & _OTHERS:
        return
    was = oct(stat.S_IMODE(mode))
    try:
        # The folder first: from then on nobody else opens what is in it.
        data.chmod(stat.S_IMODE(mode) & ~_OTHERS)
    except OSError as error:
        log.warning(
            "other users can open the data folder, and it could not be closed",
            data=str(data),
            mode=was,
            error=str(error),
        )
    else:
        files = sum(_close(entry) for entry in _inside(data))
        log.warning(
            "other users could open the data folder; it was closed",
            data=str(data),
            mode=was,
            files=files,
        )


def lock(data: Path) -> int:
    """Hold the data folder for this process. Raises SettingsError naming the gateway that has
    it."""
    file = data / "gateway.lock"
    try:
        descriptor = hold(file)
    except BlockingIOError:
        owner = re.sub(r"\D", "", file.read_text(errors="replace")[:32]) or "unknown"
        busy = SettingsError(
            f"Another gateway (process {owner}) uses the data folder {data}.",
            hint="Stop it, or set another FITSERVE_DATA_DIR.",
        )
        busy.exit_code = 3
        raise busy from None
    own_lock(descriptor)
    return descriptor


def own_lock(descriptor: int) -> None:
    """Write into the lock file that this process has the lock. A disk that is full or read-only
    must not keep a gateway from what runs: the lock
    holds without that too."""
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)


def hold(file: Path) -> int:
    """A file in the data folder, open and locked for as long. Raises SettingsError, and
    BlockingIOError where another process has it."""
    data = file.parent
    try:
        close_data_folder(data)
        descriptor = _lock_file(file)
    except OSError as error:
        raise SettingsError(
            f"The data folder {data} cannot be used: {error.strerror}.",
            hint="Set FITSERVE_DATA_DIR to a folder you can write.",
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor


def _lock_file(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _inside(data: Path) -> Iterator[os.DirEntry[str]]:
    """Files and folders in the data folder, without those behind links and those that all may
    read."""
    folders = [str(data)]
    while folders:
        # What runs may remove its files meanwhile.
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_symlink() or (
                    entry.name in _SHARED and Path(entry.path).parent == data
                ):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                yield entry


def _close(entry: os.DirEntry[str]) -> bool:
    """Whether the entry was open to others, and is closed now."""
    with contextlib.suppress(OSError):
        mode = stat.S_IMODE(entry.stat(follow_symlinks=False).st_mode)
        if mode & _OTHERS:
            os.chmod(entry.path, mode & ~_OTHERS)  # noqa: PTH101 - an entry of scandir is no Path
            return True
    return False
