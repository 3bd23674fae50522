"""A rate of the gateway's own answers by key and address, for all callers without an admin key.

Health, the page, metrics and the admin API are rendered in the loop that serves inference. So a
caller gets BURST answers without a wait, and then PER_S a second. Further requests wait, or are
refused where the wait is too long.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable

from gateway.errors import RateLimited
from gateway.proxy.access.client_network import client_network

# A tenth of a core at some 0.3 ms of an answer.
PER_S = 200.0
BURST = 1000
# A client waits for so long without a sign; probes of health wait no longer.
MAX_DELAY_S = 5.0
# Callers that are counted. The caller that asked least recently is dropped.
MAX_ADDRESSES = 16_384


class AnswerRate:
    """The rates of all callers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # The time at which all requests of a caller so far would be over at PER_S, by caller.
        self._over_at: OrderedDict[tuple[str, str], float] = OrderedDict()

    def wait_s(self, key: str, address: str) -> float:
        """Seconds until the answer to one more request. Raises RateLimited, which costs the caller
        nothing of its rate.

        key: the name of the key; empty: none.
        """
        now = self._clock()
        caller = (key, client_network(address))
        over_at = max(now, self._over_at.pop(caller, now)) + 1 / PER_S
        wait_s = max(0.0, over_at - now - BURST / PER_S)
        if wait_s > MAX_DELAY_S:
            over_at -= 1 / PER_S
        self._over_at[caller] = over_at
        if len(self._over_at) > MAX_ADDRESSES:
            self._over_at.popitem(last=False)
        if wait_s > MAX_DELAY_S:
            raise RateLimited(
                f"More than {PER_S:g} requests a second came to the gateway itself from this"
                " address.",
                hint="Ask less often, or use an admin key.",
                retry_after_s=math.ceil(wait_s),
            )
        return wait_s
