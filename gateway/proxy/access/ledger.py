"""Usage of budgets by day and month, in a file that all processes of a gateway share.

row of a budget    digest of its owner; day and month of the counts; given warnings; requests,
                   tokens, microseconds of GPUs and billionths of money of the day, and of the month

Each change is written immediately, under a kernel lock of its row. So a killed process loses no
count, and neither does a restart. The control process assigns the rows, and allocates their room
on the disk before their use. Rows of owners without a count in this month are given to others once
all are used. Days and months are of UTC.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from gateway.errors import StoreError
from gateway.proxy.shared_memory import Lock

log = logging.getLogger("fitserve.budgets")

FILE = "budgets"
ROWS = 16 * 1024
GPU_UNITS = 10**6
MONEY_UNITS = 10**9
_DAY_S = 86_400
# The longest time of a request.
_REQUEST_DAYS = 1
_ROW = struct.Struct("<16sIIII8Q")
_ROW_BYTES = 128
_NO_OWNER = bytes(16)
_MAX_AMOUNT = 2**63
# A holder writes to a disk, which may be busy for some time.
_LOCK_TRIES = 20_000


class Amounts(NamedTuple):
    """The cost of requests.

    gpu_time: microseconds of GPUs.
    money: billionths.
    """

    requests: int = 0
    tokens: int = 0
    gpu_time: int = 0
    money: int = 0

    def plus(self, cost: Amounts) -> Amounts:
        """The sums, none of which is below 0."""
        return Amounts(*(min(_MAX_AMOUNT, max(0, a + b)) for a, b in zip(self, cost, strict=True)))

    def minus(self, cost: Amounts) -> Amounts:
        """The differences, which may be below 0."""
        return Amounts(*(a - b for a, b in zip(self, cost, strict=True)))


NO_AMOUNTS = Amounts()


class Usage(NamedTuple):
    """The usage of a budget in its present day and month. warnings: a bit for each given one."""

    day: Amounts = NO_AMOUNTS
    month: Amounts = NO_AMOUNTS
    warnings: int = 0


class Calendar(NamedTuple):
    """A day of UTC, counted from 1970-01-01, and its month, counted from the year 0."""

    day: int
    month: int

    @classmethod
    def today(cls) -> Calendar:
        seconds = time.time()
        date = time.gmtime(seconds)
        return cls(int(seconds) // _DAY_S, 12 * date.tm_year + date.tm_mon - 1)


class Ledger:
    """The rows of all budgets. A folder that cannot be written has them in this process alone.

    data: the gateway's data folder. The file is opened at its first use.
    """

    def __init__(self, data: Path) -> None:
        self._file = data / FILE
        self._descriptor = -1
        self._lock = threading.Lock()

    @property
    def descriptor(self) -> int:
        if self._descriptor < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            try:
                self._descriptor = os.open(self._file, flags, 0o600)
            except OSError as error:
                log.warning(
                    "%s: %s; budgets begin with the stored usage at each start",
                    self._file,
                    error.strerror,
                )
                self._descriptor = os.memfd_create("fitserve-budgets")
        return self._descriptor

    @property
    def exists(self) -> bool:
        """Whether there are rows."""
        return self._descriptor >= 0 or self._file.exists()

    @contextmanager
    def lock(self, row: int) -> Iterator[None]:
        """Hold the lock of a row. The kernel's lock keeps out other processes alone, so threads of
        this one have their own."""
        with self._lock, Lock(self.descriptor, row, _LOCK_TRIES):
            yield

    def read(self, row: int, today: Calendar) -> Usage:
        """The usage of a row. Counts of another day or month are 0. Raises StoreError."""
        _, day, month, warnings, _, *counts = self._unpack(row)
        is_today = _is_current(today.day, day)
        is_month = _is_current(today.month, month)
        return Usage(
            Amounts(*counts[:4]) if is_today else NO_AMOUNTS,
            Amounts(*counts[4:]) if is_month else NO_AMOUNTS,
            warnings & (0x00FF if is_today else 0) | warnings & (0xFF00 if is_month else 0),
        )

    def last_day(self, row: int) -> Calendar:
        """The day of the last change of a row. Raises StoreError."""
        _, day, month, *_ = self._unpack(row)
        return Calendar(day, month)

    def write(self, row: int, today: Calendar, usage: Usage) -> None:
        """Replace the usage of a row. Raises StoreError."""
        self.start(row, self._unpack(row)[0], today, usage)

    def add(self, row: int, today: Calendar, day_cost: Amounts, month_cost: Amounts) -> None:
        """Add to a row, under its lock. Raises StoreError."""
        with self.lock(row):
            usage = self.read(row, today)
            day = usage.day.plus(day_cost)
            month = usage.month.plus(month_cost)
            self.write(row, today, usage._replace(day=day, month=month))

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _unpack(self, row: int) -> tuple[bytes, int, int, int, int, *tuple[int, ...]]:
        try:
            data = os.pread(self.descriptor, _ROW.size, row * _ROW_BYTES)
        except OSError as error:
            raise StoreError(
                f"The usage of a budget cannot be read: {error.strerror}.",
                hint="Repair the disk or the permissions of FITSERVE_DATA_DIR.",
            ) from None
        return _ROW.unpack(data.ljust(_ROW.size, b"\0"))

    def start(self, row: int, owner: bytes, today: Calendar, usage: Usage) -> None:
        """Write a row for the owner of this digest. Raises StoreError."""
        values = (*today, usage.warnings, 0, *usage.day, *usage.month)
        data = _ROW.pack(owner, *values)
        try:
            os.pwrite(self.descriptor, data, row * _ROW_BYTES)
        except OSError as error:
            raise StoreError(
                f"The usage of a budget cannot be written: {error.strerror}.",
                hint="Free disk space or repair the permissions of FITSERVE_DATA_DIR.",
            ) from None


class LedgerRows:
    """The rows of owners, in the control process.

    rows_in_use: gives the rows that keys count in.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.rows_in_use: Callable[[], Collection[int]] = tuple
        self._rows: dict[bytes, int] | None = None

    def find(self, owner: str) -> int | None:
        """The row of an owner that counts the present month. Raises StoreError."""
        if not self.ledger.exists:
            return None
        row = self._present_rows().get(_digest(owner))
        return row if row is not None and self._counts_month(row, Calendar.today()) else None

    def row_of(self, owner: str, seed: Callable[[Calendar], Usage]) -> int:
        """The row of an owner. A row that is new, or without a count in this month, begins with the
        usage that `seed` knows. Raises StoreError."""
        rows = self._present_rows()
        tag = _digest(owner)
        today = Calendar.today()
        row = rows.get(tag)
        if row is not None and self._counts_month(row, today):
            return row
        if row is None:
            row = self._free_row(today)
            self._allocate(row)
        self.ledger.start(row, tag, today, seed(today))
        rows[tag] = row
        return row

    def _counts_month(self, row: int, today: Calendar) -> bool:
        return _is_current(today.month, self.ledger.last_day(row).month)

    def _present_rows(self) -> dict[bytes, int]:
        if self._rows is None:
            self._rows = self._read_owners()
        return self._rows

    def _read_owners(self) -> dict[bytes, int]:
        data = os.pread(self.ledger.descriptor, ROWS * _ROW_BYTES, 0)
        owners = (
            (data[at : at + len(_NO_OWNER)], at // _ROW_BYTES)
            for at in range(0, len(data), _ROW_BYTES)
        )
        return {owner: row for owner, row in owners if owner.strip(b"\0")}

    def _free_row(self, today: Calendar) -> int:
        rows = self._present_rows()
        if len(rows) >= ROWS:
            self._drop_old_rows(today)
        used_rows = set(rows.values())
        row = next((row for row in range(ROWS) if row not in used_rows), None)
        if row is None:
            raise StoreError(
                f"There are {ROWS} budgets of keys, groups and people already, all of this month.",
                hint="Remove the file `budgets` of FITSERVE_DATA_DIR while the gateway is stopped:"
                " owners that are gone leave it, and the others keep their stored usage.",
            )
        return row

    def _drop_old_rows(self, today: Calendar) -> None:
        """Free the rows of owners without a count in this month. A request that began before the
        month may still count for one."""
        rows = self._present_rows()
        rows_in_use = set(self.rows_in_use())
        for tag, row in list(rows.items()):
            date = self.ledger.last_day(row)
            is_old = date.month < today.month and date.day < today.day - _REQUEST_DAYS
            if is_old and row not in rows_in_use:
                del rows[tag]

    def _allocate(self, row: int) -> None:
        """Have the disk keep room for a row. Raises StoreError."""
        try:
            os.posix_fallocate(self.ledger.descriptor, row * _ROW_BYTES, _ROW_BYTES)
        except OSError as error:
            raise StoreError(
                f"The disk has no room for a budget: {error.strerror}.",
                hint="Free disk space or repair the permissions of FITSERVE_DATA_DIR.",
            ) from None


def _digest(owner: str) -> bytes:
    return hashlib.blake2b(owner.encode(), digest_size=16).digest()


def _is_current(number: int, noted_number: int) -> bool:
    """Whether counts of the noted day or month still hold. A clock that steps back by a little
    begins none again; one that was far ahead has left wrong counts."""
    return noted_number in (number, number + 1)
