"""Check the gateway against its API description.

    python -m benchmarks.description [--cases 5000] [--seed 1]

A gateway in front of scripted engines gets requests made from GET /admin/openapi.json: valid
values, invalid values, and bodies that are no JSON (tests/support/description_cases.py). Printed:
cases, statuses and kinds of violations for each route and method. Exit code 1 for any 5xx, for an
undescribed status, content type or body, and for a broken connection.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.support.description_cases import asked, asked_gateway


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        asked_gateway(Path(folder)) as gateway,
    ):
        rows = asked(gateway, args.cases, args.seed)
        tracebacks = gateway.log.read_text(errors="replace").count("Traceback")
    for label, row in rows.items():
        statuses = ", ".join(f"{status}: {count}" for status, count in sorted(row.statuses.items()))
        print(f"{label:46} {row.cases:5}  breaches {len(row.breaches):2}  {statuses}")
    breaches = [
        (label, kind, first) for label, row in rows.items() for kind, first in row.breaches.items()
    ]
    for label, kind, first in breaches:
        print(f"\nBREACH {label}: {kind}\n{first}")
    total = sum(row.cases for row in rows.values())
    print(
        f"\n{total} cases of {len(rows)} routes in {time.monotonic() - began:.0f} s, seed"
        f" {args.seed}: {len(breaches)} kinds of breaches, {tracebacks} tracebacks in the"
        " gateway's log"
    )
    return int(bool(breaches or tracebacks or total < args.cases))


if __name__ == "__main__":
    sys.exit(main())
