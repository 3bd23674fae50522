"""Does the time of a refusal depend on the right characters of a wrong key?

    python -m benchmarks.key_comparison [--comparisons 1000000]

Wrong keys of two kinds, right up to the last eight characters or wrong from the first, are checked
in random order by `Keys.check`. Printed for tables of one key and of 5,000: the mean times, their
difference, and Welch's t. Beyond +-4.5, the usual limit for side channels, the difference is not
chance. The slowest hundredth is left out, as the machine's own work.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import random
import statistics
import time

from gateway.domain.grant import Grant
from gateway.errors import FitserveError
from gateway.keys import digest_of, new_key
from gateway.proxy.access.auth import Keys, key_of
from gateway.proxy.access.failed_logins import FailedLogins

BATCH = 1000


class Patient(FailedLogins):
    """Does not count."""

    def wrong(self, address: str) -> None:
        del address


def welch(one: list[int], other: list[int]) -> float:
    spread = statistics.variance(one) / len(one) + statistics.variance(other) / len(other)
    return (statistics.fmean(one) - statistics.fmean(other)) / math.sqrt(spread)


def near(key: str) -> str:
    """Right up to its last eight characters."""
    return key[:-8] + "~" + new_key().reveal()[-7:]


def far(key: str) -> str:
    """Of the same length and the same characters."""
    wrong = new_key().reveal()
    return "~" + wrong[1 : len(key)]


def compare(count: int, made: int, chance: random.Random) -> str:
    known = [new_key().reveal() for _ in range(made)]
    keys = Keys(
        None,
        None,
        [
            key_of(Grant(name=f"k{index}"), digest_of(key.encode()))
            for index, key in enumerate(known)
        ],
        Patient(),
    )
    target = known[made // 2]
    spent: tuple[list[int], list[int]] = ([], [])
    gc.disable()
    for _ in range(max(1, count // BATCH)):
        # Each token is used once: one that comes again would show where its digest falls in the
        # table.
        tokens = [
            (kind, f"Bearer {make(target)}".encode())
            for kind, make in enumerate((near, far))
            for _ in range(BATCH // 2)
        ]
        chance.shuffle(tokens)
        for kind, token in tokens:
            began = time.perf_counter_ns()
            with contextlib.suppress(FitserveError):
                keys.check(token, "inference")
            spent[kind].append(time.perf_counter_ns() - began)
    gc.enable()
    cut = sorted(spent[0] + spent[1])[-max(1, sum(map(len, spent)) // 100)]
    kept = tuple([one for one in times if one < cut] for times in spent)
    means = [statistics.fmean(times) for times in kept]
    return (
        f"{made:>5} keys  {sum(map(len, spent)):>9} comparisons   nearly right {means[0]:8.1f} ns  "
        f" wrong {means[1]:8.1f} ns   difference {means[0] - means[1]:+6.2f} ns   t"
        f" {welch(*kept):+5.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--comparisons", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for made in (1, 5000):
        print(compare(options.comparisons, made, random.Random(options.seed)), flush=True)


if __name__ == "__main__":
    main()
