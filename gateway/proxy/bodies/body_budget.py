"""Memory for the bodies of requests, shared by all connections.

Every byte of a request beyond SMALL_BYTES is counted, for the caller's key and in all. Waiting
requests count too: for the rest of the body, a turn, a replica, or an engine that reads.

    bytes of a key                       its next growing body
    no more than is still free           is read on
    more than is still free              waits unread; one body of the key may exceed it
    more than is free of twice as much   503: many connections had one read each before a check

So a single key takes at most half of the memory, and leaves as much to the next. One body of a key
always completes. While a body waits, the others must move at PRESSED_BYTES_S. A slower body is
refused after PATIENCE_S, the oldest first, until no body waits.

A body is kept until it is complete, because `model` may be its last field: SDKs put it after the
messages.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from gateway.errors import Busy, FitserveError, TooSlow

# A body up to this size is not counted: connections are limited too, and small requests never wait
# for large ones.
SMALL_BYTES = 64 * 1024
PATIENCE_S = 4.0
PRESSED_BYTES_S = 32 * 1024
# The most bytes of one read of a connection.
_READ_BYTES = 256 * 1024
# The least size of the budget, even if the largest body is small.
_MIN_BYTES = 32 * 1024 * 1024


class BodyOwner(Protocol):
    """A request with a body in memory. `moved_bytes`: a number that grows with each byte that
    arrives or leaves."""

    @property
    def account(self) -> str:
        """The name of the caller's key."""

    @property
    def moved_bytes(self) -> int: ...

    def continue_body(self) -> None:
        """Read more of the body, for which there is room now."""

    def reject(self, error: FitserveError) -> None:
        """Refuse the request, for whose body there is no room left."""


@dataclass(slots=True)
class _Share:
    """Memory of one request.

    is_pressed: its speed depends on the peer.
    checked_at: time of the last check, None before the first.
    """

    size: int = 0
    is_pressed: bool = False
    is_waiting: bool = False
    checked_at: float | None = None
    moved_bytes: int = 0


class BodyBudget:
    """Shares the memory for bodies among connections.

    body_bytes: the largest body.
    wait_s: how long a body may wait for room.
    """

    def __init__(self, body_bytes: int, wait_s: float) -> None:
        self.size = max(2 * body_bytes, _MIN_BYTES)
        self.used_bytes = 0
        self._wait_s = wait_s
        self._by_account: Counter[str] = Counter()
        self._shares: dict[BodyOwner, _Share] = {}
        self._growing: dict[BodyOwner, _Share] = {}  # owners of incomplete bodies, the oldest first
        # The owner that exceeds the free memory, by key.
        self._owners_beyond_limit: dict[str, BodyOwner] = {}
        self._waiting_count = 0

    def grow(self, owner: BodyOwner, size: int) -> bool:
        """Count `size` bytes of an incomplete body. Returns whether more may come now; otherwise
        `continue_body` is called later.

        Raises Busy if there is no room for the present bytes.
        """
        share = self._count_bytes(owner, size)
        if share.is_waiting:
            return False
        self._growing[owner] = share
        share.is_pressed = True
        if self._free(owner) >= 0:
            return True
        if self.is_crowded(owner.account):
            self.release(owner)
            raise full_budget_error()
        if self._owners_beyond_limit.setdefault(owner.account, owner) is owner:
            return True
        share.is_waiting = True
        share.checked_at = None
        self._waiting_count += 1
        return False

    def add(self, owner: BodyOwner, size: int, *, is_pressed: bool = False) -> None:
        """Count `size` bytes of a body that is complete. `is_pressed`: they are on their way to
        the engine."""
        share = self._count_bytes(owner, size)
        self._stop_waiting(share)
        share.is_pressed = is_pressed
        share.checked_at = None
        self._growing.pop(owner, None)
        self._continue_waiting()

    def release(self, owner: BodyOwner) -> None:
        """End the count of a body, if any."""
        share = self._shares.pop(owner, None)
        if share is None:
            return
        self._add_bytes(owner, -share.size)
        if not self._by_account[owner.account]:
            del self._by_account[owner.account]
        if self._owners_beyond_limit.get(owner.account) is owner:
            del self._owners_beyond_limit[owner.account]
        self._stop_waiting(share)
        self._growing.pop(owner, None)
        self._continue_waiting()

    def is_crowded(self, account: str) -> bool:
        """Whether the key has more bytes than may be kept for it at all."""
        return self._by_account[account] > 2 * self.size - self.used_bytes

    def sweep(self, time: float) -> None:
        """Refuse bodies that waited too long, and slow bodies while others wait. Called twice a
        second."""
        for owner, share in list(self._shares.items()):
            if not self._waiting_count or not (share.is_waiting or share.is_pressed):
                share.checked_at = None
            elif share.checked_at is None:
                share.checked_at = time
                share.moved_bytes = owner.moved_bytes
            elif share.is_waiting:
                if time - share.checked_at >= self._wait_s:
                    owner.reject(full_budget_error())
            elif time - share.checked_at >= PATIENCE_S:
                moved_bytes = owner.moved_bytes
                if moved_bytes - share.moved_bytes < PATIENCE_S * PRESSED_BYTES_S:
                    hint = (
                        f"Send large bodies at {PRESSED_BYTES_S // 1024} KiB/s at least, or when"
                        " the gateway is less busy."
                    )
                    owner.reject(
                        TooSlow(
                            "The body moved too slowly while other requests waited for its memory.",
                            hint=hint,
                        )
                    )
                else:
                    share.checked_at = time
                    share.moved_bytes = moved_bytes

    def _count_bytes(self, owner: BodyOwner, size: int) -> _Share:
        share = self._shares.get(owner)
        if share is None:
            share = self._shares[owner] = _Share()
        self._add_bytes(owner, size - share.size)
        share.size = size
        return share

    def _add_bytes(self, owner: BodyOwner, size: int) -> None:
        self.used_bytes += size
        self._by_account[owner.account] += size

    def _free(self, owner: BodyOwner) -> int:
        """The bytes that the key may still keep, below 0 if it keeps too many."""
        return self.size - self.used_bytes - self._by_account[owner.account]

    def _stop_waiting(self, share: _Share) -> None:
        if share.is_waiting:
            share.is_waiting = False
            self._waiting_count -= 1

    def _continue_waiting(self) -> None:
        """Continue waiting bodies in their order, as far as there is room for one read each."""
        if not self._waiting_count:
            return
        promised_bytes = 0
        for owner, share in list(self._growing.items()):
            if share.is_waiting and (
                self._free(owner) >= promised_bytes
                or self._owners_beyond_limit.setdefault(owner.account, owner) is owner
            ):
                promised_bytes += _READ_BYTES
                self._stop_waiting(share)
                share.checked_at = None
                owner.continue_body()


def full_budget_error() -> Busy:
    return Busy(
        "The gateway has no memory for this body now: other bodies are large too.",
        hint="Try again in a few seconds.",
        retry_after_s=5,
    )
