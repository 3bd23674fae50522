"""A backup is one moment of the data folder under any writes; a restored one is whole, or nothing
is touched."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import sqlite3
import tarfile
import threading
import time
from pathlib import Path

import pytest

from gateway.domain import Wish
from gateway.domain.grant import Grant
from gateway.errors import BadRequest, SettingsError, StoreError
from gateway.store.backup import restore_backup, write_backup
from gateway.store.database import Database, foreign_part
from gateway.store.schema import SCHEMA, VERSION
from gateway.store.store import Store


def data_folder(path: Path) -> tuple[Path, Store]:
    path.mkdir(mode=0o700)
    (path / "installation").write_text("abc")
    return path, Store(path / "fitserve.db")


def make_archive(data: Path, file: Path) -> Path:
    with file.open("wb") as into:
        write_backup(data, into, "1.2.3")
    return file


def test_a_backup_made_under_writes_is_one_consistent_moment(tmp_path: Path) -> None:
    data, store = data_folder(tmp_path / "data")
    end_event, model_names = threading.Event(), []

    def write() -> None:
        """Two models in each step, which are there together or not at all."""
        number = 0
        while not end_event.is_set():
            with store._database.change() as db:
                for name in (f"a{number}", f"b{number}"):
                    wish = Wish(name=name, source="x/y").model_dump_json()
                    db.execute(
                        "INSERT INTO models (name, wish, created_at) VALUES (?, ?, 1)", (name, wish)
                    )
            number += 1
            model_names.append(number)

    writer = threading.Thread(target=write)
    writer.start()
    counts = []
    try:
        for round_ in range(5):
            before = len(model_names)
            archive = make_archive(data, tmp_path / f"{round_}.tar.gz")
            (empty := tmp_path / f"to{round_}").mkdir()
            restored_backup = restore_backup(empty, archive)
            second_store = Store(empty / "fitserve.db")
            names = {wish.name for wish, *_ in second_store.models()}
            second_store.close()
            assert len(names) == restored_backup.models
            assert {name[1:] for name in names if name[0] == "a"} == {
                name[1:] for name in names if name[0] == "b"
            }
            assert restored_backup.models >= 2 * before
            counts.append(restored_backup.models)
    finally:
        end_event.set()
        writer.join()
        store.close()
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]
    assert not [path.name for path in data.iterdir() if path.name.startswith("backup")]


def test_a_restored_backup_is_the_former_state_with_digests_of_keys(tmp_path: Path) -> None:
    data, store = data_folder(tmp_path / "data")
    store.add_model(Wish(name="m", source="x/y"), 1.0)
    store.add_key(Grant(name="good", scopes=("admin",)), b"g" * 32, 1.0)
    store.add_key(Grant(name="revoked"), b"r" * 32, 2.0)
    # Revoked while the disk was full: struck in the file, still in the database.
    struck_rows = [{"grant": {"name": "revoked"}, "digest": "0" * 64, "created_at": 2.0}]
    (data / "keys.json").write_text(json.dumps(struck_rows))
    (data / "learned/engines/vllm").mkdir(parents=True)
    (data / "learned/engines/vllm/1.yaml").write_text("kind: vllm\n")
    (data / "logs").mkdir()
    (data / "logs/secret.log").write_text("words of a client")
    archive = make_archive(data, tmp_path / "a.tar.gz")
    store.close()
    with tarfile.open(archive) as entries:
        assert entries.getnames() == [
            "manifest.json",
            "fitserve.db",
            "installation",
            "learned/engines/vllm/1.yaml",
        ]
    # Into the same folder, stopped: its files go aside.
    restored_backup = restore_backup(data, archive)
    assert (restored_backup.fitserve, restored_backup.models, restored_backup.keys) == (
        "1.2.3",
        1,
        1,
    )
    assert restored_backup.former_folder is not None
    assert {path.name for path in restored_backup.former_folder.iterdir()} >= {
        "fitserve.db",
        "keys.json",
        "learned",
    }
    second_store = Store(data / "fitserve.db")
    assert [(grant.name, digest) for grant, digest, _ in second_store.grants()] == [
        ("good", b"g" * 32)
    ]
    assert second_store.instance
    second_store.close()
    assert (data / "logs/secret.log").exists()
    assert (data / "learned/engines/vllm/1.yaml").exists()


def test_a_folder_of_another_installation_is_left_alone(tmp_path: Path) -> None:
    data, store = data_folder(tmp_path / "data")
    archive = make_archive(data, tmp_path / "a.tar.gz")
    store.close()
    other_folder, store = data_folder(tmp_path / "other")
    store.close()
    (other_folder / "installation").write_text("def")
    with pytest.raises(SettingsError, match="belongs to another installation"):
        restore_backup(other_folder, archive)
    assert sorted(path.name for path in other_folder.iterdir()) == ["fitserve.db", "installation"]


def change_archive(archive: Path, **files: bytes | None) -> Path:
    """The archive with other contents of some files; None: without it."""
    new_name = archive.with_name("changed.tar.gz")
    with tarfile.open(archive) as old_archive, tarfile.open(new_name, "w:gz") as new:
        for entry in old_archive:
            content = old_archive.extractfile(entry)
            text = content.read() if content is not None else b""
            name = entry.name.partition(".")[0]
            text_or_none = files.get(name, text)
            if text_or_none is not None:
                entry.size = len(text_or_none)
                new.addfile(entry, io.BytesIO(text_or_none))
        if "other" in files:
            entry = tarfile.TarInfo("../other")
            new.addfile(entry)
    return new_name


def test_an_incomplete_backup_changes_nothing(tmp_path: Path) -> None:
    data, store = data_folder(tmp_path / "data")
    store.add_model(Wish(name="m", source="x/y"), 1.0)
    archive = make_archive(data, tmp_path / "a.tar.gz")
    store.close()
    whole = archive.read_bytes()
    (cut := tmp_path / "cut.tar.gz").write_bytes(whole[: len(whole) // 2])
    (text := tmp_path / "text.tar.gz").write_text("no archive")
    with contextlib.closing(sqlite3.connect(data / "fitserve.db")) as database:
        torn_bytes = bytearray(database.serialize())
    torn_bytes[torn_bytes.index(b"x/y")] ^= 1
    newer = json.dumps({"fitserve": "9.0", "database": VERSION + 1, "made_at": 1}).encode()
    manifest = b'{"fitserve": "1.2.3", "database": 1, "made_at": %b}'
    cases: list[tuple[Path, type[Exception], str]] = [
        (cut, BadRequest, "is not a complete backup"),
        (text, BadRequest, "is not a complete backup"),
        (tmp_path / "none", BadRequest, "cannot be read: No such file"),
        (change_archive(archive, other=b""), BadRequest, "'../other' does not belong in one"),
    ]
    for path, kind, words in cases:
        with pytest.raises(kind, match=words):
            restore_backup(data, path)
    for files, kind, words in (
        ({"fitserve": None}, BadRequest, "it has no database"),
        ({"manifest": None}, BadRequest, "does not belong in one"),
        (
            {"manifest": newer},
            SettingsError,
            f"fitserve 9.0, whose database has version {VERSION + 1}",
        ),
        ({"fitserve": bytes(torn_bytes)}, BadRequest, "its database is damaged: a row of models"),
        (
            {"fitserve": b"words" * 9000},
            BadRequest,
            "its database is damaged: file is not a database",
        ),
        ({"manifest": b"{}"}, BadRequest, "is not a complete backup"),
        ({"manifest": b"[]"}, BadRequest, "is not a complete backup"),
        ({"manifest": b'{"a":' * 9000}, BadRequest, "is not a complete backup"),
        ({"manifest": manifest % b"NaN"}, BadRequest, "is not a complete backup"),
        ({"manifest": manifest % b"1e300"}, BadRequest, "is not a complete backup"),
        (
            {"manifest": manifest % (b"1" + b" " * 1_000_000)},
            BadRequest,
            "is not a complete backup",
        ),
    ):
        with pytest.raises(kind, match=words):
            restore_backup(data, change_archive(archive, **files))
    second_store = Store(data / "fitserve.db")
    assert [wish.name for wish, *_ in second_store.models()] == ["m"]
    second_store.close()
    assert {path.name for path in data.iterdir()} == {
        "fitserve.db",
        "fitserve.db.mirror",
        "installation",
    }


def test_names_that_are_bombs_are_not_read(tmp_path: Path) -> None:
    """A header of an archive may be gigabytes, of which the archive itself has megabytes."""
    data, store = data_folder(tmp_path / "data")
    archive = make_archive(data, tmp_path / "a.tar.gz")
    store.close()
    with (
        tarfile.open(tmp_path / "bomb.tar.gz", "w:gz") as bomb,
        tarfile.open(archive) as old_archive,
    ):
        entry = tarfile.TarInfo("learned/a.yaml")
        entry.pax_headers = {"comment": "x" * 1_000_000}
        for member in old_archive:
            bomb.addfile(member, old_archive.extractfile(member))
        bomb.addfile(entry)
    with pytest.raises(BadRequest, match="the names in it are too long"):
        restore_backup(data, tmp_path / "bomb.tar.gz")


LEARNED = "learned/a.yaml"
SPARSE_MAP = {"GNU.sparse.map": f"{2**32 - 1},1", "GNU.sparse.size": str(2**32)}
SPARSE = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(2**32)}


def file_entry(name: str, **changes: object) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    for field, value in changes.items():
        setattr(entry, field, value)
    return entry


HOSTILE = {
    **{
        f"{kind} {name}": [file_entry(name, type=code, linkname="/etc/passwd")]
        for name in (LEARNED, "models-file.json")
        for kind, code in (
            ("symbolic link", tarfile.SYMTYPE),
            ("hard link", tarfile.LNKTYPE),
            ("character device", tarfile.CHRTYPE),
            ("block device", tarfile.BLKTYPE),
            ("pipe", tarfile.FIFOTYPE),
            ("folder", tarfile.DIRTYPE),
            ("old sparse file", tarfile.GNUTYPE_SPARSE),
        )
    },
    **{
        repr(name): [file_entry(name)]
        for name in (
            "learned/../../x.yaml",
            "/learned/x.yaml",
            "./learned/x.yaml",
            "learned//x.yaml",
            "learned/./x.yaml",
            "learned\\..\\x.yaml",
            "learned/a\nb.yaml",
            "learned/\x1b[2J.yaml",
            "learned/\udcff.yaml",
            f"learned/{'a' * 300}.yaml",
            f"learned/{'a/' * 3000}x.yaml",
            "fitserve.db/x.yaml",
            "fitserve.db-wal",
        )
    },
    "a name twice": [file_entry(LEARNED), file_entry(LEARNED)],
    "two databases": [file_entry("fitserve.db")],
    "two manifests": [file_entry("manifest.json")],
    "sparse map": [file_entry(LEARNED, size=1, pax_headers=SPARSE_MAP)],
    "sparse": [file_entry(LEARNED, size=512, pax_headers=SPARSE)],
    "size": [file_entry(LEARNED, size=1, pax_headers={"size": str(2**62)})],
    "many": [file_entry(f"learned/{number}.yaml") for number in range(10_001)],
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_entries_of_an_archive_are_refused_in_words(tmp_path: Path, kind: str) -> None:
    data, store = data_folder(tmp_path / "data")
    archive = make_archive(data, tmp_path / "a.tar.gz")
    store.close()
    with (
        tarfile.open(tmp_path / "h.tar.gz", "w:gz") as hostile_archive,
        tarfile.open(archive) as old_archive,
    ):
        for member in old_archive:
            hostile_archive.addfile(member, old_archive.extractfile(member))
        for entry in HOSTILE[kind]:
            hostile_archive.addfile(entry, io.BytesIO(b"1\n4294967295\n1\n" + b"\0" * 512))
    (target := tmp_path / "target").mkdir()
    with pytest.raises(BadRequest, match="is not a complete backup") as error:
        restore_backup(target, tmp_path / "h.tar.gz")
    assert str(error.value).isprintable()
    assert "recursion" not in str(error.value)
    assert list(target.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"data", "target", "a.tar.gz", "h.tar.gz"}


class Zeros(io.RawIOBase):
    """Bytes that a compressed archive has for little."""

    def read(self, size: int = -1) -> bytes:
        return bytes(size)


@pytest.mark.parametrize(
    ("mebibytes", "free", "kind", "words"),
    [
        (257, 2**40, BadRequest, "does not belong in one"),
        (100, 2**27, StoreError, "has 100 MiB, and the disk of .* has 128 MiB free"),
    ],
)
def test_few_bytes_that_stand_for_many_fill_no_disk(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mebibytes: int,
    free: int,
    kind: type[Exception],
    words: str,
) -> None:
    data, store = data_folder(tmp_path / "data")
    archive = make_archive(data, tmp_path / "a.tar.gz")
    store.close()
    with (
        tarfile.open(tmp_path / "h.tar.gz", "w:gz", compresslevel=1) as large_archive,
        tarfile.open(archive) as old_archive,
    ):
        for member in old_archive:
            large_archive.addfile(member, old_archive.extractfile(member))
        large_archive.addfile(file_entry(LEARNED, size=mebibytes * 2**20), Zeros())
    monkeypatch.setattr(
        "gateway.store.backup.shutil.disk_usage", lambda _: shutil._ntuple_diskusage(free, 0, free)
    )
    (target := tmp_path / "target").mkdir()
    with pytest.raises(kind, match=words):
        restore_backup(target, tmp_path / "h.tar.gz")
    assert list(target.iterdir()) == []


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER t AFTER UPDATE ON meta BEGIN DELETE FROM models; END",
        "CREATE VIEW v AS SELECT * FROM keys",
        "CREATE TABLE other (x)",
        "CREATE INDEX other ON meta (value)",
        "ALTER TABLE meta ADD COLUMN g TEXT AS (hex(zeroblob(1000000000)))",
        "ALTER TABLE meta ADD COLUMN c TEXT CHECK (length(hex(randomblob(9))) > 0)",
        "DROP INDEX attempts_of; CREATE INDEX attempts_of ON attempts (hex(zeroblob(9)))",
    ],
)
def test_a_database_that_runs_code_of_its_own_is_refused(tmp_path: Path, statement: str) -> None:
    data, store = data_folder(tmp_path / "data")
    archive = make_archive(data, tmp_path / "a.tar.gz")
    store.close()
    with contextlib.closing(sqlite3.connect(data / "fitserve.db")) as database:
        database.executescript(statement)
        database.commit()
        hostile = database.serialize()
    with pytest.raises(BadRequest, match="is not one of fitserve"):
        restore_backup(data, change_archive(archive, fitserve=hostile))


def test_a_disk_that_is_full_is_not_the_archives_fault(tmp_path: Path) -> None:
    data, store = data_folder(tmp_path / "data")
    archive = make_archive(data, tmp_path / "a.tar.gz")
    store.close()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(
            StoreError, match=r"cannot be unpacked: File too large\. Nothing was changed"
        ):
            restore_backup(data, archive)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_folder_without_a_database_has_nothing_to_keep(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="There is no database"):
        make_archive(tmp_path, tmp_path / "a.tar.gz")


def test_remains_of_a_killed_backup_are_removed_by_the_next_one(tmp_path: Path) -> None:
    data, store = data_folder(tmp_path / "data")
    store.close()
    remains = [
        data / "backup-1.db",
        data / "backup-1.db-journal",
        data / "restore-1/learned/one.yaml",
    ]
    at_work = [data / "backup-2.db", data / "restore-2/fitserve.db"]
    for path in (*remains, *at_work):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("half")
    for path in (*remains[:2], data / "restore-1"):
        os.utime(path, (days_ago := time.time() - 2 * 86_400, days_ago))

    make_archive(data, tmp_path / "one.tar.gz")

    assert not any(path.exists() for path in (*remains, data / "restore-1"))
    assert all(path.exists() for path in at_work)


def test_a_backup_of_an_older_version_is_none_of_others(tmp_path: Path) -> None:
    old = tmp_path / "old.db"
    with contextlib.closing(sqlite3.connect(old)) as database:
        database.executescript(f"{SCHEMA} PRAGMA user_version=2")
        database.execute("INSERT INTO meta VALUES ('instance', 'x')")
        database.commit()
    assert foreign_part(old) is None
    Database(old, is_mirrored=False).close()
    assert foreign_part(old) is None
