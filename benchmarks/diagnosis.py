"""Speed and memory of `fitserve diagnose` on a long log: python benchmarks/diagnosis.py

A log of 200 MB repeats the lines of a serving engine and ends with a fatal error. CPU time of this
process, so other work hardly matters. Target: 50 MB/s.
"""

from __future__ import annotations

import resource
import sys
import time

from gateway.diagnosis.diagnose import diagnose
from gateway.profiles.profiles import Profiles
from tests.support.long_log import long_log

MEGABYTES = 200


def main() -> None:
    signatures = Profiles().signatures
    print(f"{'log':<10}{'MB':>6}{'seconds':>9}{'MB/s':>7}  found")
    for kind in ("quiet", "noisy", "starting"):
        size = sum(len(piece) for piece in long_log(kind, MEGABYTES)) / 1e6
        before = time.process_time()
        failure, _ = diagnose(long_log(kind, MEGABYTES), signatures)
        seconds = time.process_time() - before
        print(
            f"{kind:<10}{size:>6.0f}{seconds:>9.2f}{size / seconds:>7.0f}  {failure.kind} at line"
            f" {failure.line_number}"
        )
    print(
        f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB, of the"
        " interpreter and all modules",
        file=sys.stdout,
    )


if __name__ == "__main__":
    main()
