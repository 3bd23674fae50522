"""Memory for the bodies of requests, shared by all connections: every byte that is kept beyond
SMALL_BYTES of one request is counted here,
for the key of the caller and in all, whatever the request waits for: the rest of its body, its
turn, a replica, or an engine that reads.

    a key keeps                          its next body that grows
    no more than is still free           reads on
    more than is still free              waits unread; but one body of the key may go beyond it, so that one is always completed
    more than is free of twice as much   503, come back: many connections brought one read each before anybody could say no

So one key alone takes half of the memory at most, and leaves as much to the next. While a body
waits, the others have to come in at PRESSED_BYTES_S, or have gone to the engine so fast: who
trickled for PATIENCE_S loses the room, the oldest first, until nobody waits.

`model` may be the last field of a body, and SDKs put it behind the messages; so a body is kept
until it is complete.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from gateway.errors import Busy, FitserveError, TooSlow

# A body up to here is not counted: connections are limited too, and small requests never wait for
# large ones.
SMALL_BYTES = 64 * 1024
PATIENCE_S = 4.0
PRESSED_BYTES_S = 32 * 1024
# What one read of a connection may bring.
_READ_BYTES = 256 * 1024
# So much there is in any case, however small the largest body is.
_LEAST_BYTES = 32 * 1024 * 1024


class Holder(Protocol):
    """The request whose body is kept. `moved`: a number that grows with each byte that comes in,
    and with each byte that goes out."""

    @property
    def account(self) -> str:
        """The name of the key that asks."""

    @property
    def moved(self) -> int: ...

    def go_on(self) -> None:
        """There is room for more of the body."""

    def give_up(self, error: FitserveError) -> None:
        """There is no room for this body any more."""


@dataclass(slots=True)
class _Share:
    """What one request has. `pressed`: somebody else decides how fast its bytes move; `since`: of
    the last look, None: not looked at yet."""

    size: int = 0
    pressed: bool = False
    waits: bool = False
    since: float | None = None
    moved: int = 0


class BodyBudget:
    """`size`: bytes in all. `wait_s`: how long a body may wait for room."""

    def __init__(self, body_bytes: int, wait_s: float) -> None:
        self.size = max(2 * body_bytes, _LEAST_BYTES)
        self.used = 0
        self._wait_s = wait_s
        self._of: Counter[str] = Counter()
        self._shares: dict[Holder, _Share] = {}
        self._growing: dict[
            Holder, _Share
        ] = {}  # those whose body is not whole yet, the oldest first
        self._beyond: dict[str, Holder] = {}  # by key: the one that goes beyond what is free
        self._waiting = 0

    def grow(self, holder: Holder, size: int) -> bool:
        """`holder` keeps `size` bytes now, and more are to come: whether they may come now. If not,
        `go_on` is called once they may.

        Raises Busy where there is no room for the bytes that are here.
        """
        share = self._count(holder, size)
        if share.waits:
            return False
        self._growing[holder] = share
        share.pressed = True
        if self._free(holder) >= 0:
            return True
        if self.crowded(holder.account):
            self.leave(holder)
            raise no_room()
        if self._beyond.setdefault(holder.account, holder) is holder:
            return True
        share.waits, share.since = True, None
        self._waiting += 1
        return False

    def keep(self, holder: Holder, size: int, *, pressed: bool = False) -> None:
        """`holder` keeps `size` bytes, and no more are to come. `pressed`: these are on their way
        to the engine."""
        share = self._count(holder, size)
        self._stop_waiting(share)
        share.pressed, share.since = pressed, None
        self._growing.pop(holder, None)
        self._wake()

    def leave(self, holder: Holder) -> None:
        """`holder` keeps nothing any more, or never did."""
        share = self._shares.pop(holder, None)
        if share is None:
            return
        self._add(holder, -share.size)
        if not self._of[holder.account]:
            del self._of[holder.account]
        if self._beyond.get(holder.account) is holder:
            del self._beyond[holder.account]
        self._stop_waiting(share)
        self._growing.pop(holder, None)
        self._wake()

    def crowded(self, account: str) -> bool:
        """Whether the key has more than may be kept for it at all."""
        return self._of[account] > 2 * self.size - self.used

    def sweep(self, now: float) -> None:
        """Twice a second: who waited for too long, and who is too slow for those that wait."""
        for holder, share in list(self._shares.items()):
            if not self._waiting or not (share.waits or share.pressed):
                share.since = None
            elif share.since is None:
                share.since, share.moved = now, holder.moved
            elif share.waits:
                if now - share.since >= self._wait_s:
                    holder.give_up(no_room())
            elif now - share.since >= PATIENCE_S:
                moved = holder.moved
                if moved - share.moved < PATIENCE_S * PRESSED_BYTES_S:
                    hint = (
                        f"Send large bodies at {PRESSED_BYTES_S // 1024} KiB/s at least, or when"
                        " less is asked."
                    )
                    holder.give_up(
                        TooSlow(
                            "The body moved too slowly while others waited for its memory.",
                            hint=hint,
                        )
                    )
                else:
                    share.since, share.moved = now, moved

    def _count(self, holder: Holder, size: int) -> _Share:
        share = self._shares.get(holder)
        if share is None:
            share = self._shares[holder] = _Share()
        self._add(holder, size - share.size)
        share.size = size
        return share

    def _add(self, holder: Holder, size: int) -> None:
        self.used += size
        self._of[holder.account] += size

    def _free(self, holder: Holder) -> int:
        """How much more the key may keep, below 0 where it keeps too much."""
        return self.size - self.used - self._of[holder.account]

    def _stop_waiting(self, share: _Share) -> None:
        if share.waits:
            share.waits = False
            self._waiting -= 1

    def _wake(self) -> None:
        """Those that waited go on, in the order of asking, as far as there is room for what they
        bring."""
        if not self._waiting:
            return
        promised = 0
        for holder, share in list(self._growing.items()):
            if share.waits and (
                self._free(holder) >= promised
                or self._beyond.setdefault(holder.account, holder) is holder
            ):
                promised += _READ_BYTES
                self._stop_waiting(share)
                share.since = None
                holder.go_on()


def no_room() -> Busy:
    return Busy(
        "The gateway has no memory for this body now: others are large too.",
        hint="Try again.",
        retry_after_s=5,
    )
