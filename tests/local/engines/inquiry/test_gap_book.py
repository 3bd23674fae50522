"""Rule gaps on disk: each once, for their owner alone, and no more than are kept."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from gateway.engines.inquiry import gap_book
from gateway.engines.inquiry.gap_book import RuleGapStore
from tests.support.gap import GAP


def test_a_gap_is_kept_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    book = RuleGapStore(tmp_path / "gaps")
    assert book.load() == []
    book.store([GAP, GAP])
    book.store([GAP])
    assert RuleGapStore(tmp_path / "gaps").load() == [GAP]
    (path,) = (tmp_path / "gaps").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_oldest_rows_are_dropped_and_unreadable_ones_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gap_book, "_MAX_FILES", 3)
    book = RuleGapStore(tmp_path)
    book.store(GAP.evolve(subject=f"kernel of {number}") for number in range(5))
    assert len(book.load()) == 3
    next(tmp_path.glob("*.json")).write_text("{")
    assert len(book.load()) == 2


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    RuleGapStore(tmp_path / "file").store([GAP])
    assert RuleGapStore(tmp_path / "file").load() == []
