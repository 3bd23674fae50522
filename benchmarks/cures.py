"""How often the first steps of `fitserve diagnose` help: python -m benchmarks.cures [--list]

Logs written from the facts of public failures (tests/logs/cure_reports.yaml), by round. Right: a
right kind. Both, one: the share of the first two steps that help. Target: 90 % right, 85 % both.
"""

from __future__ import annotations

import argparse
from collections import Counter

from gateway.profiles.profiles import Profiles
from tests.support.cure_reports import REPORTS, measure


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--round", type=int)
    parser.add_argument("--list", action="store_true", help="each report of which a step fails")
    args = parser.parse_args()
    signatures = Profiles().signatures
    rows = [
        (report, *measure(report, signatures))
        for report in REPORTS
        if args.round in (None, report["round"])
    ]
    print(f"{'round':<7}{'failures':>9}{'right':>7}{'both':>6}{'one':>5}{'none':>6}")
    for number in sorted({report["round"] for report, _, _ in rows}):
        several = [row for row in rows if row[0]["round"] == number]
        counts = Counter(helpful for _, _, helpful in several)
        right = sum(failure.kind in report["kinds"] for report, failure, _ in several)
        print(
            f"{number:<7}{len(several):>9}{right / len(several):>7.0%}"
            f"{counts[2] / len(several):>6.0%}{counts[1] / len(several):>5.0%}"
            f"{counts[0] / len(several):>6.0%}"
        )
    for report, failure, helpful in rows if args.list else ():
        if helpful < 2 or failure.kind not in report["kinds"]:
            print(f"\n{report['source']}: {failure.kind} in {failure.phase}, {helpful} help")
            print("\n".join(f"  - {step}" for step in failure.steps[:4]))


if __name__ == "__main__":
    main()
