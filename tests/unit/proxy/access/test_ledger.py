"""The ledger of budgets: counts of many processes, which outlive every one of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from gateway.errors import StoreError
from gateway.proxy.access import ledger as ledger_module
from gateway.proxy.access.ledger import (
    FILE,
    NO_AMOUNTS,
    Amounts,
    Calendar,
    Ledger,
    LedgerRows,
    Usage,
)

TODAY = Calendar(20_000, 24_322)
COST = Amounts(1, 7, 1_000, 9)


def no_usage(_today: Calendar) -> Usage:
    return Usage()


def row_in(folder: Path, owner: str = "key app") -> tuple[Ledger, int]:
    ledger = Ledger(folder)
    return ledger, LedgerRows(ledger).row_of(owner, no_usage)


def set_date(monkeypatch: pytest.MonkeyPatch, date: Calendar) -> None:
    monkeypatch.setattr(Calendar, "today", lambda: date)


def test_a_row_keeps_its_counts_over_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_date(monkeypatch, TODAY)
    ledger, row = row_in(tmp_path)
    other_row = LedgerRows(ledger).row_of("group team", no_usage)
    assert row != other_row
    ledger.add(row, TODAY, COST, COST)
    ledger.close()
    ledger, row = row_in(tmp_path)
    assert ledger.read(row, TODAY) == Usage(COST, COST)
    assert ledger.read(other_row, TODAY) == Usage()


def test_a_new_row_begins_with_the_stored_usage(tmp_path: Path) -> None:
    usage = Usage(Amounts(1), Amounts(5))
    rows = LedgerRows(Ledger(tmp_path))
    row = rows.row_of("key app", lambda _today: usage)
    assert rows.ledger.read(row, Calendar.today()) == usage
    assert LedgerRows(Ledger(tmp_path)).row_of("key app", no_usage) == row
    assert rows.ledger.read(row, Calendar.today()) == usage


def test_a_day_and_a_month_begin_with_nothing(tmp_path: Path) -> None:
    ledger, row = row_in(tmp_path)
    ledger.add(row, TODAY, COST, COST)
    tomorrow = TODAY._replace(day=TODAY.day + 1)
    ledger.add(row, tomorrow, COST, COST)
    assert ledger.read(row, tomorrow) == Usage(COST, COST.plus(COST))
    next_month = Calendar(TODAY.day + 31, TODAY.month + 1)
    assert ledger.read(row, next_month) == Usage()


@pytest.mark.parametrize(("days", "counts"), [(-1, COST), (-2, NO_AMOUNTS), (-400, NO_AMOUNTS)])
def test_a_clock_that_steps_back_a_little_gives_no_second_budget(
    tmp_path: Path, days: int, counts: Amounts
) -> None:
    ledger, row = row_in(tmp_path)
    ledger.add(row, TODAY, COST, COST)
    assert ledger.read(row, TODAY._replace(day=TODAY.day + days)).day == counts


def test_a_refund_leaves_no_debt(tmp_path: Path) -> None:
    ledger, row = row_in(tmp_path)
    ledger.add(row, TODAY, NO_AMOUNTS.minus(COST), NO_AMOUNTS.minus(COST))
    assert ledger.read(row, TODAY) == Usage()


def test_a_killed_process_loses_no_count_and_processes_lose_none_of_each_other(
    tmp_path: Path,
) -> None:
    ledger, row = row_in(tmp_path)
    children = []
    for _ in range(4):
        child = os.fork()
        if not child:
            own_ledger = Ledger(tmp_path)
            for _ in range(200):
                own_ledger.add(row, TODAY, COST, COST)
            os.kill(os.getpid(), signal.SIGKILL)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    assert ledger.read(row, TODAY).day == Amounts(*(800 * amount for amount in COST))


def test_threads_of_one_process_lose_no_count_of_each_other(tmp_path: Path) -> None:
    ledger, row = row_in(tmp_path)

    def add() -> None:
        for _ in range(500):
            ledger.add(row, TODAY, COST, COST)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.read(row, TODAY).day.requests == 2_000


def test_an_owner_gets_its_row_only_with_the_stored_usage(tmp_path: Path) -> None:
    rows = LedgerRows(Ledger(tmp_path))

    def fail(_today: Calendar) -> Usage:
        raise StoreError("The store is away.", hint="Try again.")

    with pytest.raises(StoreError):
        rows.row_of("key app", fail)
    usage = Usage(Amounts(1), Amounts(5))
    row = rows.row_of("key app", lambda _today: usage)
    assert rows.ledger.read(row, Calendar.today()) == usage


def test_a_folder_that_cannot_be_written_has_counts_in_memory(tmp_path: Path) -> None:
    ledger, row = row_in(tmp_path / "missing")
    ledger.add(row, TODAY, COST, COST)
    assert ledger.read(row, TODAY) == Usage(COST, COST)
    assert not (tmp_path / "missing").exists()


def test_a_gateway_without_budgets_makes_no_file(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    LedgerRows(ledger)
    ledger.close()
    assert not (tmp_path / FILE).exists()


def test_rows_end_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "ROWS", 2)
    rows = LedgerRows(Ledger(tmp_path))
    assert {rows.row_of(owner, no_usage) for owner in ("a", "b", "a")} == {0, 1}
    with pytest.raises(StoreError, match="2 budgets"):
        rows.row_of("c", no_usage)


def test_rows_without_a_count_of_this_month_are_given_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "ROWS", 3)
    set_date(monkeypatch, TODAY)
    rows = LedgerRows(Ledger(tmp_path))
    old_row, used_row, _ = (rows.row_of(owner, no_usage) for owner in ("a", "b", "c"))
    rows.rows_in_use = lambda: {used_row}
    next_month = Calendar(TODAY.day + 30, TODAY.month + 1)
    set_date(monkeypatch, next_month)
    present_row = rows.row_of("c", no_usage)
    rows.ledger.add(present_row, next_month, COST, COST)
    assert rows.row_of("d", no_usage) == old_row
    assert rows.ledger.read(present_row, next_month) == Usage(COST, COST)
    with pytest.raises(StoreError, match="all of this month"):
        rows.row_of("a", no_usage)
    # After a restart every owner has its row still.
    rows = LedgerRows(Ledger(tmp_path))
    assert [rows.row_of(owner, no_usage) for owner in ("d", "c")] == [old_row, present_row]


def test_a_row_that_counted_yesterday_is_given_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of yesterday's month may end today."""
    monkeypatch.setattr(ledger_module, "ROWS", 1)
    set_date(monkeypatch, TODAY)
    rows = LedgerRows(Ledger(tmp_path))
    row = rows.row_of("a", no_usage)
    set_date(monkeypatch, Calendar(TODAY.day + 1, TODAY.month + 1))
    with pytest.raises(StoreError):
        rows.row_of("b", no_usage)
    set_date(monkeypatch, Calendar(TODAY.day + 2, TODAY.month + 1))
    assert rows.row_of("b", no_usage) == row


def test_a_row_of_a_former_month_begins_with_the_stored_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_date(monkeypatch, TODAY)
    rows = LedgerRows(Ledger(tmp_path))
    assert rows.find("a") is None
    row = rows.row_of("a", no_usage)
    assert rows.find("a") == row
    next_month = Calendar(TODAY.day + 30, TODAY.month + 1)
    set_date(monkeypatch, next_month)
    assert rows.find("a") is None
    usage = Usage(Amounts(1), Amounts(5))
    assert rows.row_of("a", lambda _today: usage) == row
    assert rows.ledger.read(row, next_month) == usage


def test_the_calendar_counts_days_and_months_of_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 86_400.0 * 31)
    assert Calendar.today() == Calendar(31, 12 * 1970 + 1)
