"""Lists of folders are bounded, and a file system that hangs keeps nobody else waiting."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path

import pytest

from gateway.errors import Busy, NotReady
from gateway.models.catalog import folder_browser
from gateway.models.catalog.folder_browser import FolderBrowser, FolderList, FolderRow, list_folder
from tests.support.patience import Patience, hang_s

pytestmark = pytest.mark.anyio


def test_a_folder_of_many_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(12):
        (tmp_path / f"model-{number:02}").mkdir()
    monkeypatch.setattr(folder_browser, "_MAX_ROWS", 10)
    listing = list_folder(str(tmp_path), [tmp_path])
    assert ([row.name for row in listing.folders], listing.is_cut) == (
        [f"model-{number:02}" for number in range(10)],
        True,
    )
    monkeypatch.setattr(folder_browser, "_MAX_ROWS", 12)
    assert not list_folder(str(tmp_path), [tmp_path]).is_cut
    monkeypatch.setattr(folder_browser, "_MAX_ENTRIES", 11)
    listing = list_folder(str(tmp_path), [tmp_path])
    assert (len(listing.folders), listing.is_cut) == (11, True)


def test_names_that_are_no_text_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    (Path(str(tmp_path)) / b"bad\xff".decode("utf-8", "surrogateescape")).mkdir()
    (tmp_path / "line\nbreak").mkdir()
    assert [row.name for row in list_folder(str(tmp_path), [tmp_path]).folders] == ["good"]


async def test_a_hanging_folder_keeps_no_other_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, calls = threading.Event(), []

    def hang(path: str, roots: tuple[Path, ...]) -> FolderList:
        calls.append(path)
        if path.startswith("/hanging"):
            end.wait()
        return FolderList(path, "", (), is_cut=not roots)

    monkeypatch.setattr(folder_browser, "list_folder", hang)
    monkeypatch.setattr(folder_browser, "PATIENCE_S", 0.01)
    browser = FolderBrowser([tmp_path])
    try:
        for _ in range(2):
            for number in range(4):
                with pytest.raises(NotReady, match="no answer of the file system"):
                    await browser.folders(f"/hanging/{number}")
        # One thread for each hanging folder, and no more than four.
        assert sorted(calls) == [f"/hanging/{number}" for number in range(4)]
        with pytest.raises(Busy):
            await browser.folders("/answering")
    finally:
        end.set()
    # The folders that answer have all the time that a busy machine takes.
    monkeypatch.setattr(folder_browser, "PATIENCE_S", hang_s())
    for reader in browser._readers.values():
        reader._patience_s = hang_s()
    answers = [browser.folders(f"/hanging/{number}") for number in range(4)]
    assert [answer.path for answer in await asyncio.gather(*answers)] == sorted(set(calls))
    assert (await browser.folders("/answering")).path == "/answering"


async def test_an_unreadable_folder_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, roots: tuple[Path, ...]) -> FolderList:
        raise PermissionError(13, f"Permission denied below {len(roots)} root", path)

    monkeypatch.setattr(folder_browser, "list_folder", refuse)
    with pytest.raises(NotReady, match="Permission denied below 1 root"):
        await FolderBrowser([tmp_path]).folders(str(tmp_path))


async def test_a_slow_folder_keeps_its_place_only_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = threading.Event()

    def wait(path: str, roots: tuple[Path, ...]) -> FolderList:
        if path.startswith("/slow"):
            end.wait()
        return FolderList(path, "", (), is_cut=not roots)

    monkeypatch.setattr(folder_browser, "list_folder", wait)
    monkeypatch.setattr(folder_browser, "PATIENCE_S", 0.01)
    browser = FolderBrowser([tmp_path])
    for number in range(4):
        with pytest.raises(NotReady):
            await browser.folders(f"/slow/{number}")
    monkeypatch.setattr(folder_browser, "PATIENCE_S", hang_s())
    end.set()
    patience = Patience(hang_s())
    listing = None
    while listing is None:
        assert not patience.is_over()
        with contextlib.suppress(Busy):
            listing = await browser.folders("/quick")
        await asyncio.sleep(patience.pause_s(0.01))
    assert listing.path == "/quick"


async def test_a_root_that_hangs_or_is_missing_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, read_root = threading.Event(), folder_browser.read_root

    def hang(root: Path) -> FolderRow | None:
        if root.name == "hanging":
            end.wait()
        return read_root(root)

    monkeypatch.setattr(folder_browser, "read_root", hang)
    (tmp_path / "models").mkdir()
    roots = [tmp_path / name for name in ("hanging", "missing", "models")]
    browser = FolderBrowser(roots)
    # The others have all the time that a busy machine takes.
    for reader, patience_s in zip(browser._root_readers, (0.05, hang_s(), hang_s()), strict=True):
        reader._patience_s = patience_s
    try:
        rows = (await browser.folders("")).folders
    finally:
        end.set()
    assert [row.name for row in rows] == [str(tmp_path / "models")]


def test_the_nearest_root_opens_a_folder(tmp_path: Path) -> None:
    (tmp_path / "disk" / "model").mkdir(parents=True)
    (tmp_path / "models").mkdir()
    link = tmp_path / "models" / "nas"
    link.symlink_to(tmp_path / "disk")
    listing = list_folder(str(link), [tmp_path / "models", link])
    assert [row.name for row in listing.folders] == ["model"]
