"""Weights on the disk of a node, and the answers to calls about them."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import shutil
import threading
from io import FileIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from gateway.errors import AgentAway, HostError
from gateway.hosts.agent.calls import (
    CHUNK_BYTES,
    CommitCall,
    DoneAnswer,
    MissingCall,
    ProgressAnswer,
    ReceiveCall,
    SendCall,
    WeightsFile,
)
from gateway.hosts.cluster import weights_server
from gateway.hosts.cluster.weights_server import WeightsServer
from gateway.hosts.cluster.weights_store import CopyWriter, WeightsStore
from gateway.models.catalog import commit_files
from tests.support.hub_commits import COMMIT, REPO, disk_of, put_commit

pytestmark = pytest.mark.anyio

CALL = CommitCall(repo=REPO, commit=COMMIT)
NAME = "model.safetensors"
CONTENT = os.urandom(2 * CHUNK_BYTES + 7)


def file_of(content: bytes, name: str = NAME) -> WeightsFile:
    digest = hashlib.sha256(content).hexdigest()
    return WeightsFile(name=name, size=len(content), digest=digest)


def put_beginning(store: WeightsStore, size: int) -> None:
    """Leave an unfinished copy of the file."""
    copy = store.writer(CALL, file_of(CONTENT), 0)
    copy.write(CONTENT[:size])
    copy.close()


def unfinished_files(folder: Path) -> list[Path]:
    return [*folder.rglob("*.fitserve-copy")]


@pytest.fixture
def store(tmp_path: Path) -> WeightsStore:
    return WeightsStore(disk_of(tmp_path), "one")


def test_bytes_of_an_unfinished_copy_need_no_more_space(
    store: WeightsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_files, "MARGIN_BYTES", 0)
    free = SimpleNamespace(free=len(CONTENT) - CHUNK_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(HostError, match="are free at"):
        store.check(CALL, [file_of(CONTENT)])
    put_beginning(store, CHUNK_BYTES)
    store.check(CALL, [file_of(CONTENT)])
    free.free -= 1
    with pytest.raises(HostError, match="are free at"):
        store.check(CALL, [file_of(CONTENT)])


def test_a_file_that_was_replaced_is_compared_once_more(
    store: WeightsStore, tmp_path: Path
) -> None:
    folder = put_commit(disk_of(tmp_path), {NAME: CONTENT})
    assert store.missing_file(CALL, file_of(CONTENT)) is None
    draft = tmp_path / "draft"
    draft.write_bytes(bytes(len(CONTENT)))
    draft.replace((folder / NAME).resolve())
    missing_file = store.missing_file(CALL, file_of(CONTENT))
    assert missing_file is not None
    assert missing_file.offset == 0


def test_a_file_that_another_copy_finished_is_not_cut(
    store: WeightsStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_beginning(store, CHUNK_BYTES)
    (draft,) = unfinished_files(tmp_path)
    finished_path = draft.with_name("finished")
    lock = fcntl.flock

    def finish(descriptor: int, operation: int) -> None:
        if not finished_path.exists():
            draft.rename(finished_path)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", finish)
    copy = store.writer(CALL, file_of(CONTENT), 0)
    copy.write(CONTENT)
    copy.close()
    assert finished_path.read_bytes() == CONTENT[:CHUNK_BYTES]
    assert draft.read_bytes() == CONTENT


async def test_a_copy_answers_before_it_reads_a_byte(
    store: WeightsStore, tmp_path: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_server, "_REPORT_S", 0)
    call = ReceiveCall(repo=REPO, commit=COMMIT, file=file_of(CONTENT), offset=2 * CHUNK_BYTES)
    progress = ProgressAnswer(text=str(call.offset))
    answers = WeightsServer(store).receive(call, asyncio.StreamReader())
    assert await anext(answers) == progress
    assert unfinished_files(tmp_path) == []
    put_beginning(store, call.offset)
    # The beginning is read chunk by chunk, and the other machine has sent nothing yet.
    assert [await anext(answers), await anext(answers)] == [progress, progress]
    await answers.aclose()


async def test_a_comparison_answers_before_and_after_each_file(
    store: WeightsStore, tmp_path: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_files, "MARGIN_BYTES", 0)
    contents = {"config.json": b"{}", NAME: CONTENT}
    put_commit(disk_of(tmp_path), {"config.json": b"{}"})
    files = tuple(file_of(content, name) for name, content in contents.items())
    call = MissingCall(repo=REPO, commit=COMMIT, files=files)
    answers = [answer async for answer in WeightsServer(store).answers(call)]
    reports, last_answer = answers[:-1], answers[-1]
    assert reports == [ProgressAnswer(text=name) for name in ("", *contents)]
    assert isinstance(last_answer, DoneAnswer)
    assert [row.file.name for row in last_answer.missing] == [NAME]


async def test_files_are_opened_and_closed_by_threads(
    store: WeightsStore, tmp_path: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    open_file, close = WeightsStore.open_file, CopyWriter.close

    def note_open(store: WeightsStore, call: CommitCall, name: str) -> FileIO:
        threads.append(threading.current_thread())
        return open_file(store, call, name)

    def note_close(copy: CopyWriter) -> None:
        threads.append(threading.current_thread())
        close(copy)

    monkeypatch.setattr(WeightsStore, "open_file", note_open)
    monkeypatch.setattr(CopyWriter, "close", note_close)
    put_commit(disk_of(tmp_path), {"config.json": b"{}"})
    server = WeightsServer(store)
    send = SendCall(repo=REPO, commit=COMMIT, name="config.json")
    assert len([answer async for answer in server.answers(send)]) == 2
    reader = asyncio.StreamReader()
    reader.feed_eof()
    receive = ReceiveCall(repo=REPO, commit=COMMIT, file=file_of(CONTENT))
    with pytest.raises(AgentAway):
        async for _ in server.receive(receive, reader):
            pass
    assert len(threads) == 2
    assert threading.main_thread() not in threads
