"""Logs that users reported, and how well `fitserve diagnose` names what failed in them (benchmarks/reports.py prints it)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gateway.core.failures.diagnose import diagnose
from gateway.core.failures.signatures import Signatures
from tests.support.paths import LOGS

OWN = LOGS / "reports"
COLUMNS = ("right", "wrong", "unknown", "not told")


def judged(found: str, case: dict[str, Any]) -> str:
    """The column of COLUMNS that a report comes to."""
    if found in case["kinds"] or found == case.get("gap"):
        return "right"
    return {"none": "not told", "unknown": "unknown"}.get(found, "wrong")


def score(folder: Path, signatures: Signatures, split: str | None = None) -> list[tuple[dict[str, Any], str, str]]:
    """Each report of a folder that counts: its row of the index, what it was taken for, and its column."""
    rows = []
    for case in json.loads((folder / "index.json").read_text())["logs"]:
        if case.get("old") or (split and not str(case.get("split")).startswith(tuple(split.split(",")))):
            continue
        log = folder / case["file"]
        data = (log if log.exists() else folder / "logs" / case["file"]).read_bytes()
        found = diagnose([data], signatures, case["engine"])[0].kind
        rows.append((case, found, judged(found, case)))
    return rows
