"""The accuracy of `fitserve diagnose` on logs with a known cause.

    python -m benchmarks.reports [FOLDER ...] [--split fifth] [--list] [--without-words]
                                [--form FORM]

FOLDER holds logs and an index.json: `file`, `engine`, the right `kinds`, `gap` (a kind made for
it), `old` (not counted). Default: tests/logs/reports. Right: an accepted kind. Unknown: a failure
without a name. Not told: a failure taken for none. Target: nine of ten right, and no healthy log
taken for a failure.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from gateway.diagnosis.signatures import Signatures
from gateway.profiles.profiles import Profiles
from tests.support.reports import COLUMNS, FORMS, OWN, score


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs="*", type=Path, default=[OWN])
    parser.add_argument(
        "--split",
        help=(
            "reports of this split, or of those whose names begin with it (fifth: fifth-tuned and"
            " fifth-held); several with commas"
        ),
    )
    parser.add_argument("--list", action="store_true", help="each report that is not right")
    parser.add_argument(
        "--form",
        choices=FORMS,
        help="pasted in another form: html, behind a prefix, the last message alone, in a sentence",
    )
    parser.add_argument("--without-words", action="store_true", help="without words.yaml")
    args = parser.parse_args()
    shipped = Profiles().signatures
    signatures = Signatures(shipped.rows._replace(words=())) if args.without_words else shipped
    for folder in args.folders:
        rows = score(folder, signatures, args.split, args.form)
        table = {
            kind: Counter[str]()
            for kind in sorted(
                {case["kinds"][0] if case["kinds"] else case["gap"] for case, _, _ in rows}
            )
        }
        for case, _, column in rows:
            table[case["kinds"][0] if case["kinds"] else case["gap"]][column] += 1
        print(f"{folder}\n{'kind':<26}" + "".join(f"{name:>10}" for name in COLUMNS))
        for kind, row in table.items():
            print(f"{kind:<26}" + "".join(f"{row[name]:>10}" for name in COLUMNS))
        total = Counter(column for _, _, column in rows)
        print(f"{'all':<26}" + "".join(f"{total[name]:>10}" for name in COLUMNS))
        alarms = sum(column != "right" for case, _, column in rows if case["kinds"] == ["none"])
        print(
            f"right: {total['right'] / len(rows):.0%} of {len(rows)}; healthy logs taken for"
            f" failures: {alarms}\n"
        )
        if args.list:
            for case, found, column in rows:
                if column != "right":
                    print(
                        f"  {column:<9}{found:<24}{case['file']}: {', '.join(case['kinds'])}"
                        f" {case.get('gap') or ''}"
                    )


if __name__ == "__main__":
    main()
