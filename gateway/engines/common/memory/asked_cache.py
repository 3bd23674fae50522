"""The KV cache as the engine's own code counts it, asked for some lengths of a request. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left

from gateway.domain import AskedCache
from gateway.domain.record import FrozenRecord
from gateway.engines.common.memory.kv_cache import longest
from gateway.models.scheme import round_up


class CountedCache(FrozenRecord, frozen=True):
    """A `KvCache` of the engine's own answer: exact for the lengths in it, linear between them, in
    whole blocks."""

    answer: AskedCache

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one more token of a long request."""
        # Long requests count, where windows are full and states are included. The last point is
        # left out: the longest request may not fill its last block.
        points = self.answer.needed[len(self.answer.needed) // 2 : -1] or self.answer.needed
        if len(points) < 2:
            return 0
        (short_length, short_bytes), (long_length, long_bytes) = points[0], points[-1]
        return -(-(long_bytes - short_bytes) // (long_length - short_length))

    @property
    def states_per_request(self) -> int:
        return self.answer.states_per_request if self.answer.state_bytes else 0

    def states(self, kv_bytes: int) -> int:
        remaining_bytes = max(0, kv_bytes - self.answer.fixed)
        return remaining_bytes // self.answer.state_bytes if self.answer.state_bytes else 0

    def bytes_for(self, length: int, _batched_tokens: int) -> int:
        """Bytes of a request of `length` tokens.

        Between two asked lengths the bytes grow linearly, to whole blocks. Beyond the longest one
        they grow as between the last two.
        """
        points = self.answer.needed
        if not points:
            return 0
        next_index = min(bisect_left(points, length, key=_point_tokens), len(points) - 1)
        if next_index == 0 or _point_tokens(points[next_index]) == length:
            return points[next_index][1]
        (short_length, short_bytes) = points[next_index - 1]
        (long_length, long_bytes) = points[next_index]
        # The longest request fills its last block in part: a whole one costs the same. The second
        # length is one block.
        block_tokens = _point_tokens(points[min(1, len(points) - 2)])
        long_length = round_up(long_length, block_tokens)
        added_bytes = math.ceil(
            (long_bytes - short_bytes) * (length - short_length) / (long_length - short_length)
        )
        return round_up(short_bytes + added_bytes, self.answer.block_bytes)

    def largest(self, kv_bytes: int, batched_tokens: int, limit: int) -> int:
        if not self.answer.needed:
            return limit
        capacity = (
            self._block_count(kv_bytes) - self.answer.reserved_blocks
        ) * self.answer.block_bytes
        return longest(limit, lambda length: self.bytes_for(length, batched_tokens) <= capacity)

    def requests(self, kv_bytes: int, length: int, batched_tokens: int) -> float:
        request_bytes = self.bytes_for(length, batched_tokens)
        return (
            self._block_count(kv_bytes) / (request_bytes / self.answer.block_bytes)
            if request_bytes
            else math.inf
        )

    def _block_count(self, kv_bytes: int) -> int:
        return max(0, kv_bytes - self.answer.fixed) // self.answer.block_bytes


def _point_tokens(point: tuple[int, int]) -> int:
    return point[0]
