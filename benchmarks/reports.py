"""What `fitserve diagnose` says of logs that users reported: python -m benchmarks.reports [FOLDER
...] [--split fifth] [--list] [--rules COMMIT] [--without-words] [--form FORM]

FOLDER holds logs and an index.json: `file`, `engine`, the `kinds` that are right, `gap` (a kind
that was made for it), `old` (not counted). Right: an accepted kind. Unknown: named a failure, but
not which. Not told: a failure taken for none. Without a folder that of tests/logs. To be reached:
nine of ten right, and no healthy log taken for a failure.

--rules COMMIT asks the rows of profiles/failures.yaml as they were then, before the reports of
later sets had been looked at; --without-words leaves out profiles/failure_words.yaml: how much is
named by what was not made by these reports.
"""

from __future__ import annotations

import argparse
import subprocess
from collections import Counter
from pathlib import Path

import yaml

from gateway.diagnosis.signature import Signature
from gateway.diagnosis.signatures import Signatures
from gateway.profiles.profiles import Profiles
from tests.support.reports import COLUMNS, FORMS, OWN, score


def rules_of(commit: str) -> tuple[Signature, ...]:
    """The rows of profiles/failures.yaml as a commit has them. Raises CalledProcessError where
    there is none."""
    told = subprocess.run(
        ["git", "show", f"{commit}:profiles/failures.yaml"], check=True, capture_output=True
    ).stdout
    return tuple(Signature.model_validate(row) for row in yaml.safe_load(told))


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("folders", nargs="*", type=Path, default=[OWN])
    asked.add_argument(
        "--split",
        help=(
            "reports of this split, or of those whose names begin with it (fifth: fifth-tuned and"
            " fifth-held); several with commas"
        ),
    )
    asked.add_argument("--list", action="store_true", help="each report that is not right")
    asked.add_argument(
        "--form",
        choices=FORMS,
        help="pasted in another form: html, behind a prefix, the last message alone, in a sentence",
    )
    asked.add_argument(
        "--rules",
        metavar="COMMIT",
        help="with the rows of this commit, before it had seen later reports",
    )
    asked.add_argument("--without-words", action="store_true", help="without failure_words.yaml")
    given = asked.parse_args()
    shipped = Profiles().signatures
    # What tells that an engine is over names no failure, and is read as today.
    over = tuple(row for row in shipped.rows if row.over)
    rows_then = shipped.rows if given.rules is None else rules_of(given.rules) + over
    signatures = Signatures(rows_then, () if given.without_words else shipped.kinds)
    for folder in given.folders:
        rows = score(folder, signatures, given.split, given.form)
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
        if given.list:
            for case, found, column in rows:
                if column != "right":
                    print(
                        f"  {column:<9}{found:<24}{case['file']}: {', '.join(case['kinds'])}"
                        f" {case.get('gap') or ''}"
                    )


if __name__ == "__main__":
    main()
