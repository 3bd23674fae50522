"""Files and batches on the disk: owners, quotas, and the state after a crash."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gateway.errors import Conflict, NotFound, NotReady, QuotaReachedError, TooLarge
from gateway.server.batches import file_store
from gateway.server.batches.file_store import FileStore, NewFile, Quotas, new_id
from gateway.server.batches.records import BatchRecord, FileRecord

QUOTAS = Quotas(file_bytes=100, key_bytes=150, total_bytes=250, days=30)


def store_at(folder: Path) -> FileStore:
    store = FileStore(folder, QUOTAS)
    store.load()
    return store


def add(store: FileStore, content: bytes, owner: str = "a", lifetime_s: float = 1000) -> FileRecord:
    new_file = NewFile(store, owner)
    try:
        new_file.write(content)
        return new_file.store("input.jsonl", "batch", lifetime_s)
    finally:
        new_file.close()


def batch_of(file: FileRecord) -> BatchRecord:
    return BatchRecord(
        id=new_id("batch_"),
        owner=file.owner,
        key_name="app",
        endpoint="/v1/completions",
        input_file_id=file.id,
        completion_window="24h",
        metadata=None,
        made_at=time.time(),
        expires_at=time.time() + 1000,
        output_id=new_id("file-"),
        error_id=new_id("file-"),
        output_s=1000,
    )


def test_files_outlive_the_store_and_are_those_of_their_owner(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    record = add(store, b"one")
    other_record = add(store, b"two", owner="b")
    for opened_store in (store, store_at(tmp_path)):
        assert opened_store.files("a") == [record]
        assert opened_store.file("a", record.id) == record
        assert opened_store.path(record.id).read_bytes() == b"one"
        assert opened_store.used_bytes("a") == 3
        for owner, id_ in (("a", other_record.id), ("a", "file-x"), ("", record.id)):
            with pytest.raises(NotFound):
                opened_store.file(owner, id_)
    assert {path.stat().st_mode & 0o077 for path in tmp_path.rglob("*") if path.is_file()} == {0}


def test_an_upload_that_breaks_off_leaves_nothing(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    new_file = NewFile(store, "a")
    new_file.write(b"half")
    assert store.used_bytes("a") == 4
    new_file.close()
    assert (store.used_bytes("a"), store.files("a")) == (0, [])
    interrupted_file = NewFile(store, "a")
    interrupted_file.write(b"half")
    (tmp_path / "files" / "file-without-record").touch()
    store = store_at(tmp_path)
    assert (store.used_bytes("a"), list((tmp_path / "files").iterdir())) == (0, [])
    interrupted_file.close()


def test_quotas_hold_for_a_file_a_key_and_all(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    with pytest.raises(TooLarge, match="over 100 bytes"):
        add(store, b"x" * 101)
    record = add(store, b"x" * 100)
    with pytest.raises(QuotaReachedError, match="this key would take more than 150"):
        add(store, b"x" * 51)
    add(store, b"x" * 100, owner="b")
    with pytest.raises(QuotaReachedError, match="all keys would take more than 250"):
        add(store, b"x" * 51, owner="c")
    store.delete_file("a", record.id)
    add(store, b"x" * 51, owner="c")


def test_a_key_has_a_bounded_number_of_files_and_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_store, "MAX_FILES", 1)
    monkeypatch.setattr(file_store, "MAX_RUNS", 1)
    store = store_at(tmp_path)
    record = add(store, b"x")
    with pytest.raises(QuotaReachedError):
        add(store, b"x")
    batch = batch_of(record)
    store.add_batch(batch)
    with pytest.raises(QuotaReachedError):
        store.add_batch(batch_of(record))
    store.save_batch(batch.evolve(status="cancelled"))
    store.add_batch(batch_of(record))


def test_the_input_of_a_batch_that_runs_is_kept(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    record = add(store, b"x", lifetime_s=0.0)
    with pytest.raises(NotFound):
        store.add_batch(batch_of(record))  # it has expired
    record = add(store, b"x")
    batch = batch_of(record)
    store.add_batch(batch)
    with pytest.raises(Conflict, match=batch.id):
        store.delete_file("a", record.id)
    store.save_batch(batch.evolve(status="completed"))
    store.delete_file("a", record.id)
    assert not store.path(record.id).exists()


def test_files_and_batches_end_with_their_time(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    record = add(store, b"x")
    for status, age_days in (("completed", 31), ("cancelled", 29), ("in_progress", 31)):
        batch = batch_of(record)
        times = {status: time.time() - age_days * 86_400}
        store.add_batch(batch)
        store.save_batch(batch.evolve(status=status, times=times))
    add(store, b"y", owner="b", lifetime_s=0.0)
    store.sweep()
    assert [batch.status for batch in store.batches("a")] == ["cancelled", "in_progress"]
    assert (store.used_bytes("b"), store.used_bytes("a")) == (0, 1)
    assert store_at(tmp_path).batches("a") == store.batches("a")


def test_a_damaged_record_costs_no_other(tmp_path: Path) -> None:
    record = add(store_at(tmp_path), b"x")
    (tmp_path / "files" / f"{new_id('file-')}.json").write_text("{")
    assert store_at(tmp_path).files("a") == [record]


def test_a_store_that_was_handed_over_takes_nothing(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.is_closed = True
    with pytest.raises(NotReady):
        add(store, b"x")
    assert store_at(tmp_path).files("a") == []


def test_bytes_of_an_unreadable_record_are_kept_for_another_version(tmp_path: Path) -> None:
    record = add(store_at(tmp_path), b"x")
    path = tmp_path / "files" / f"{record.id}.json"
    content = path.read_text()
    path.write_text(content.replace('"bytes"', '"byte_count"'))
    assert store_at(tmp_path).files("a") == []
    path.write_text(content)
    store = store_at(tmp_path)
    assert store.files("a") == [record]
    assert store.path(record.id).read_bytes() == b"x"


def test_results_of_an_unreadable_batch_are_kept(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    batch = batch_of(add(store, b"x"))
    store.add_batch(batch)
    store.path(batch.output_id).write_bytes(b"result")
    upload = store.path(f"{new_id('file-')}.part")
    upload.touch()
    path = tmp_path / "batches" / f"{batch.id}.json"
    path.write_text(path.read_text().replace('"owner"', '"key"'))
    store = store_at(tmp_path)
    assert store.path(batch.output_id).read_bytes() == b"result"
    assert not upload.exists()
    path.unlink()
    assert not store_at(tmp_path).path(batch.output_id).exists()


def test_results_of_a_run_that_restarts_are_counted_once(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.count_results("a", "file-1", 10)
    store.grow("a", 5)
    store.count_results("a", "file-1", 15)
    assert store.used_bytes("a") == 15


def test_an_upload_after_the_next_gateway_has_begun_is_refused_in_words(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    new_file, late_file = NewFile(store, "a"), NewFile(store, "a")
    check = store.check_open

    def hand_over() -> None:
        check()
        store.is_closed = True
        store_at(tmp_path)  # removes uploads under way

    store.check_open = hand_over  # type: ignore[method-assign]
    with pytest.raises(NotReady):
        new_file.store("input.jsonl", "batch", 1000)
    store.check_open = check  # type: ignore[method-assign]
    with pytest.raises(NotReady):
        late_file.store("input.jsonl", "batch", 1000)
    for file in (new_file, late_file):
        file.close()
    assert list((tmp_path / "files").iterdir()) == []


def test_a_store_that_was_handed_over_changes_no_record(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    record = add(store, b"x", lifetime_s=1000)
    old_record = add(store, b"y", lifetime_s=0.0)
    batch = batch_of(record)
    store.add_batch(batch)
    store.is_closed = True
    with pytest.raises(NotReady):
        store.delete_file("a", old_record.id)
    with pytest.raises(NotReady):
        store.save_batch(batch.evolve(status="cancelled"))
    store.sweep()
    assert store.path(old_record.id).exists()
    assert store_at(tmp_path).batches("a") == [batch]
