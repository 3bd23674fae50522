"""Limits of keys where several workers serve: each counts what it admits, and hears soon after what the others did.

What is used is used of one and the same minute's worth: what the others took is taken here too, and what was admitted too much in
the moment before a worker heard of it is owed. So over a minute and more the limits hold; within the moment (SPENT_S) each worker may
admit as many as one could.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.serve.auth import Key, Limit
from gateway.serve.channel import Spent, Usage
from gateway.serve.limits import Account, Bucket, Limiter, Permit
from gateway.serve.surface import Shape


class _Bucket(Bucket):
    """`taken`: here, since it was last told."""

    __slots__ = ("taken",)

    def __init__(self, size: int, now: float) -> None:
        super().__init__(size, now)
        self.taken = 0

    def take(self, count: int, now: float) -> None:
        super().take(count, now)
        self.taken += count

    def take_elsewhere(self, count: int, now: float) -> None:
        super().take(count, now)

    def told(self) -> int:
        taken, self.taken = self.taken, 0
        return taken


class _Account(Account):
    """`elsewhere`: requests in flight by worker. `changed` is called when there is something to tell."""

    def __init__(self, limit: Limit, now: float, changed: Callable[[], None]) -> None:
        self._in_flight = 0
        self._changed = changed
        super().__init__(limit, now)
        self.requests = _Bucket(self.requests.size, now) if self.requests is not None else None
        self.tokens = _Bucket(self.tokens.size, now) if self.tokens is not None else None
        self.elsewhere: dict[int, int] = {}
        self._told_in_flight = 0

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @in_flight.setter
    def in_flight(self, count: int) -> None:
        self._in_flight = count
        self._changed()

    def admit(self, shape: Shape, now: float) -> None:
        others = sum(self.elsewhere.values())
        self._in_flight += others
        try:
            super().admit(shape, now)
        finally:
            self._in_flight -= others

    def told(self) -> Usage | None:
        """What is new since it was last asked."""
        requests, tokens = (bucket.told() if isinstance(bucket, _Bucket) else 0 for bucket in (self.requests, self.tokens))
        if not requests and not tokens and self._in_flight == self._told_in_flight:
            return None
        self._told_in_flight = self._in_flight
        return Usage(requests, tokens, self._in_flight)

    def heard(self, worker: int, usage: Usage, now: float) -> None:
        self.elsewhere[worker] = usage.in_flight
        for bucket, count in ((self.requests, usage.requests), (self.tokens, usage.tokens)):
            if isinstance(bucket, _Bucket) and count:
                bucket.take_elsewhere(count, now)


class SharedLimiter(Limiter):
    """`changed` is called when `spent` has something to tell."""

    def __init__(self, changed: Callable[[], None]) -> None:
        super().__init__()
        self._changed = changed

    def admit(self, key: Key, shape: Shape, now: float) -> Permit | None:
        self._account(key, now)
        return super().admit(key, shape, now)

    def spent(self) -> dict[bytes, Usage]:
        """What was used here since this was asked before, for the other workers."""
        told = ((digest, account.told()) for digest, account in self._accounts.items() if isinstance(account, _Account))
        return {digest: usage for digest, usage in told if usage is not None}

    def spent_elsewhere(self, spent: Spent, keys: Mapping[bytes, Key], now: float) -> None:
        for digest, usage in spent.keys.items():
            key = keys.get(digest)
            account = self._account(key, now) if key is not None else None
            if account is not None:
                account.heard(spent.worker, usage, now)

    def _account(self, key: Key, now: float) -> _Account | None:
        if key.limit is None:
            return None
        account = self._accounts.get(key.digest)
        if not isinstance(account, _Account):
            account = self._accounts[key.digest] = _Account(key.limit, now, self._changed)
        return account
