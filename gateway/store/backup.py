"""Backup of the data folder of a running gateway, and its restore.

    manifest.json       the fitserve that made it, the time, and the version of the database
    fitserve.db         models, attempts, facts, measurements, digests of keys, at one moment (by
                        SQLite's online backup)
    installation        the id that marks the engines of this installation
    models-file.json    the models that came from the file of models
    learned/            the answers of images about themselves

Weights, engines, logs and compiled kernels can be restored from their sources and are left out. So
is a revoked key that a full disk still keeps in the database.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import shutil
import sqlite3
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Annotated, NamedTuple, Self

import msgspec

from gateway.disk_fault import unwritten_error
from gateway.errors import BadRequest, SettingsError, StoreError
from gateway.store import database_files
from gateway.store.database import DamagedDatabaseError, Database, foreign_part
from gateway.store.schema import VERSION

_DATABASE = "fitserve.db"
_MANIFEST = "manifest.json"
_FILES = ("installation", "models-file.json")
_FOLDER = "learned"
# The files that a restore replaces: the database, its journals, and files with the same content.
_REPLACED_FILES = (
    _DATABASE,
    f"{_DATABASE}-wal",
    f"{_DATABASE}-shm",
    *(f"{_DATABASE}.mirror{ending}" for ending in ("", "-wal", "-shm")),
    "keys.json",
    "models-file.json",
    "live",
    _FOLDER,
)
# A hundred times a backup of thousands of models with all their attempts.
_MAX_BACKUP_BYTES = 8 * 1024**3
# All files other than the database, and their number: a hundred times those of all known images.
_MAX_LEARNED_BYTES = 256 * 1024**2
_MAX_FILES = 10_000
# Room on the disk that a restore leaves to the engines' logs.
_SPARE_BYTES = 64 * 1024**2
_PIECE = 1024 * 1024
_MAX_HEADER_BYTES = 64 * 1024
# The year 9999.
_MAX_TIME_S = 253_402_300_800.0
_REVOKED_DIGEST = "0" * 64
# No backup takes so long. An older draft was left by a killed one.
_DRAFT_AGE_S = 24 * 3600


class _Manifest(msgspec.Struct):
    fitserve: Annotated[str, msgspec.Meta(max_length=100)]
    database: int
    made_at: Annotated[float, msgspec.Meta(ge=0, lt=_MAX_TIME_S)]


class _ArchiveEntry(tarfile.TarInfo):
    """An entry whose headers, which are read whole, must not be larger than any name."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        entry = super().frombuf(buf, encoding, errors)
        if entry.type not in tarfile.REGULAR_TYPES and entry.size > _MAX_HEADER_BYTES:
            raise tarfile.ReadError("the names in it are too long")
        return entry


class RestoreResult(NamedTuple):
    """The result of a restore. former_folder: the folder of the former files; None for none."""

    fitserve: str
    made_at: float
    models: int
    keys: int
    facts: int
    former_folder: Path | None


def write_backup(data: Path, output: IO[bytes], version: str) -> None:
    """Back up the data folder, whether or not a gateway uses it. Raises StoreError.

    version: the version of this fitserve.
    """
    copy = data / f"backup-{time.time_ns()}.db"
    _remove_drafts(data)
    try:
        _copy_database(data, copy)
        manifest = {"fitserve": version, "database": VERSION, "made_at": time.time()}
        with tarfile.open(fileobj=output, mode="w:gz", compresslevel=6) as archive:
            _add_file(archive, _MANIFEST, json.dumps(manifest).encode())
            archive.add(copy, _DATABASE, recursive=False)
            for name in _FILES:
                with contextlib.suppress(FileNotFoundError):
                    _add_file(archive, name, (data / name).read_bytes())
            for path in sorted((data / _FOLDER).rglob("*.yaml")):
                _add_file(archive, str(path.relative_to(data)), path.read_bytes())
    except OSError as error:
        raise unwritten_error("The backup could not be written", data, error, "") from None
    finally:
        for path in (
            copy,
            *(copy.with_name(copy.name + ending) for ending in ("-wal", "-shm", "-journal")),
        ):
            path.unlink(missing_ok=True)


def restore_backup(
    data: Path, archive: Path, confirm: Callable[[], None] = lambda: None
) -> RestoreResult:
    """Restore into a folder that no gateway uses; its former files are set aside.

    The caller holds the lock of the folder. confirm: called before anything changes, once the
    archive is known to be sound; it may raise. Raises BadRequest for a wrong archive,
    SettingsError, StoreError.
    """
    draft = data / f"restore-{time.time_ns()}"
    _remove_drafts(data)
    draft.mkdir(mode=0o700)
    try:
        manifest = _unpack(archive, draft)
        _check_installation(data, draft, archive)
        counts = _check_database(draft / _DATABASE, archive)
        confirm()
        former_folder = _set_aside(data)
        for path in sorted(draft.iterdir()):
            path.rename(data / path.name)
        return RestoreResult(manifest.fitserve, manifest.made_at, *counts, former_folder)
    except OSError as error:
        raise unwritten_error(f"{data} cannot be written", data.parent, error, "") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _remove_drafts(data: Path) -> None:
    """Remove drafts of killed backups and restores."""
    for path in [*data.glob("backup-*.db*"), *data.glob("restore-*")]:
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _DRAFT_AGE_S:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _copy_database(data: Path, copy: Path) -> None:
    """Copy the database as of one moment, although a gateway may write to it."""
    source = data / _DATABASE
    if not source.is_file():
        raise StoreError(
            f"There is no database {source}.",
            hint="Set FITSERVE_DATA_DIR to the folder of a gateway.",
        )
    try:
        with (
            contextlib.closing(database_files.reader(source, timeout_s=30)) as file,
            contextlib.closing(sqlite3.connect(copy)) as target,
        ):
            file.backup(target)
            target.execute("PRAGMA journal_mode=DELETE")
            # A revoked key is marked in keys.json before it is deleted from the database.
            target.executemany(
                "DELETE FROM keys WHERE name=? AND created_at=?", _revocations(data / "keys.json")
            )
            target.commit()
            problem = target.execute("PRAGMA integrity_check(1)").fetchone()[0]
    except sqlite3.Error as error:
        raise unwritten_error(
            f"The database {source} could not be copied", copy.parent, error, ""
        ) from None
    if problem != "ok":
        raise StoreError(
            f"The database {source} is damaged: {problem}.",
            hint="Use an older backup instead.",
        )


def _revocations(file: Path) -> Iterator[tuple[str, float]]:
    """Name and creation time of each key that is marked as revoked."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        for key in json.loads(file.read_bytes()):
            if key["digest"] == _REVOKED_DIGEST:
                yield key["grant"]["name"], key["created_at"]


def _add_file(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o600
    archive.addfile(entry, io.BytesIO(content))


def _unpack(archive: Path, draft: Path) -> _Manifest:
    """Unpack the archive into `draft`. Returns its manifest."""
    manifest: _Manifest | None = None
    disk_space = _DiskSpace(draft)
    try:
        with (
            archive.open("rb") as file,
            tarfile.open(fileobj=file, mode="r|gz", tarinfo=_ArchiveEntry) as entries,
        ):
            for entry in entries:
                is_good = _belongs(entry) and disk_space.reserve(entry)
                content = entries.extractfile(entry) if is_good else None
                if content is None or (manifest is None) != (entry.name == _MANIFEST):
                    raise _no_backup_error(archive, f"{entry.name[:100]!r} does not belong in one")
                if manifest is None:
                    manifest = msgspec.json.decode(content.read(_MAX_HEADER_BYTES), type=_Manifest)
                    _check_version(manifest)
                else:
                    _write_out(content, draft / entry.name, archive)
    except RecursionError:
        raise _no_backup_error(archive, "its folders are nested too deeply") from None
    except (tarfile.TarError, EOFError, zlib.error, ValueError) as error:
        raise _no_backup_error(archive, str(error) or type(error).__name__) from None
    except OSError as error:
        if error.errno is None:  # gzip's own error over its contents
            raise _no_backup_error(archive, str(error)) from None
        raise BadRequest(
            f"{archive} cannot be read: {error.strerror}.",
            hint="Give a file that `fitserve backup` wrote.",
        ) from None
    if manifest is None or not (draft / _DATABASE).is_file():
        raise _no_backup_error(archive, "it has no database")
    return manifest


def _write_out(content: IO[bytes], path: Path, archive: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            while piece := content.read(_PIECE):
                file.write(piece)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.ENAMETOOLONG):
            raise _no_backup_error(
                archive, f"{path.name[:100]!r} cannot be in it ({error.strerror})"
            ) from None
        if error.errno is None:
            raise
        raise StoreError(
            f"The backup cannot be unpacked: {error.strerror}. Nothing was changed.",
            hint=f"Free disk space, or repair the permissions of {path.parent}.",
        ) from None


class _DiskSpace:
    """The disk space for the files of an archive. A few bytes of it can stand for gigabytes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = _MAX_FILES
        self._learned_bytes = _MAX_LEARNED_BYTES
        self._bytes_left = _MAX_BACKUP_BYTES

    def reserve(self, entry: tarfile.TarInfo) -> bool:
        """Count an entry. Returns whether an archive may have it.

        Raises StoreError where the disk is too small.
        """
        self._files -= 1
        self._bytes_left -= entry.size
        if entry.name != _DATABASE:
            self._learned_bytes -= entry.size
        if min(self._files, self._learned_bytes, self._bytes_left) < 0:
            return False
        free_bytes = shutil.disk_usage(self._folder).free
        if entry.size > free_bytes - _SPARE_BYTES and entry.size > _PIECE:
            raise StoreError(
                f"The backup cannot be unpacked: {entry.name[:100]} has"
                f" {entry.size / 1024**2:,.0f} MiB, and the disk of {self._folder.parent} has"
                f" {free_bytes / 1024**2:,.0f} MiB free. Nothing was changed.",
                hint="Free disk space, then try again.",
            )
        return True


def _belongs(entry: tarfile.TarInfo) -> bool:
    """Whether the entry is a plain file with a name of a backup, written in one way only."""
    parts = Path(entry.name).parts
    has_name = entry.name in (_MANIFEST, _DATABASE, *_FILES) or (
        parts[:1] == (_FOLDER,) and entry.name.endswith(".yaml")
    )
    is_plain = entry.isreg() and not entry.issparse()
    is_exact = "/".join(parts) == entry.name and entry.name.isprintable() and ".." not in parts
    return is_plain and has_name and is_exact


def _check_version(manifest: _Manifest) -> None:
    if manifest.database > VERSION:
        raise SettingsError(
            f"The backup was made by fitserve {manifest.fitserve}, whose database has version"
            f" {manifest.database}. This fitserve reads versions up to {VERSION}.",
            hint=f"Restore it with fitserve {manifest.fitserve} or a newer one.",
        )


def _check_installation(data: Path, draft: Path, archive: Path) -> None:
    """Raise SettingsError if the folder is another gateway's, whose engines would be lost."""
    with contextlib.suppress(FileNotFoundError):
        current_path, restored = (folder / "installation" for folder in (data, draft))
        if current_path.read_bytes().strip() != restored.read_bytes().strip():
            raise SettingsError(
                f"{data} belongs to another installation than {archive}.",
                hint="Set FITSERVE_DATA_DIR to an empty folder, or to that of the backup.",
            )


def _check_database(database: Path, archive: Path) -> tuple[int, int, int]:
    """Upgrade a database. Returns its numbers of models, keys and facts.

    Raises BadRequest for a damaged database, StoreError.
    """
    if (problem := foreign_part(database)) is not None:
        raise _no_backup_error(archive, f"its database is damaged: {problem}")
    try:
        opened_database = Database(database, is_mirrored=False)
    except DamagedDatabaseError as error:
        raise _no_backup_error(archive, f"its database is damaged: {error.problem}") from None
    try:
        models, keys, facts = (
            int(opened_database.rows(f"SELECT count(*) FROM {table}")[0][0])  # noqa: S608
            for table in ("models", "keys", "facts")
        )
    finally:
        opened_database.close()
    return models, keys, facts


def _set_aside(data: Path) -> Path | None:
    """Move the former files into a folder, and return it. Records of running engines stay known."""
    present_paths = [data / name for name in _REPLACED_FILES if (data / name).exists()]
    if not present_paths:
        return None
    former_folder = data / f"before-restore-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    former_folder.mkdir(mode=0o700)
    for path in present_paths:
        path.rename(former_folder / path.name)
    return former_folder


def _no_backup_error(archive: Path, reason: str) -> BadRequest:
    return BadRequest(
        f"{archive} is not a complete backup: {reason}. Nothing was changed.",
        hint="Give a file that `fitserve backup` wrote.",
    )
