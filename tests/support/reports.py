"""Logs written from the facts of public reports, and how well `fitserve diagnose` names them.

benchmarks/reports.py prints it.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gateway.diagnosis.diagnose import diagnose
from gateway.diagnosis.signatures import Signatures
from tests.support.paths import LOGS

OWN = LOGS / "reports"
COLUMNS = ("right", "wrong", "unknown", "not told")


def judge(kind: str, case: dict[str, Any]) -> str:
    """The column of COLUMNS that a report comes to."""
    # Reports were judged before the engine's own faults had a kind of their own.
    kinds = {*case["kinds"], *(["engine_bug"] if "unknown" in case["kinds"] else [])}
    if kind in kinds or kind == case.get("gap"):
        return "right"
    return {"none": "not told", "unknown": "unknown"}.get(kind, "wrong")


def _html(text: str) -> str:
    return "\n".join(f"<p>{html.escape(line, quote=False)}</p>" for line in text.split("\n"))


def _prefix(text: str) -> str:
    return "\n".join(f"my-vllm-7d9f4-abcde vllm-server {line}" for line in text.split("\n"))


def _bare(text: str) -> str:
    """The message of the last exception, without its name."""
    lines = [line for line in text.split("\n") if line.strip()]
    error_lines = [line for line in lines if _RAISED.search(line)] or lines[-1:]
    return _RAISED.sub("", error_lines[-1]) if error_lines else ""


def _sentence(text: str) -> str:
    return f"When I start it I get `{_bare(text)}` and nothing else, any idea?"


# Other forms of the same reports.
FORMS: dict[str, Callable[[str], str]] = {
    "html": _html,
    "prefixed": _prefix,
    "bare": _bare,
    "sentence": _sentence,
}
_RAISED = re.compile(r"^.*?(?:\w+\.)*\w*(?:Error|Exception): ")


def score(
    folder: Path, signatures: Signatures, split: str | None = None, form: str | None = None
) -> list[tuple[dict[str, Any], str, str]]:
    """Each report of a folder that counts: its row of the index, its diagnosis, and its column.
    form: a member of FORMS."""
    rows = []
    for case in json.loads((folder / "index.json").read_text())["logs"]:
        if case.get("old") or (
            split and not str(case.get("split")).startswith(tuple(split.split(",")))
        ):
            continue
        log = folder / case["file"]
        data = (log if log.exists() else folder / "logs" / case["file"]).read_bytes()
        if form is not None:
            data = FORMS[form](data.decode(errors="replace")).encode()
        kind = diagnose([data], signatures, case["engine"])[0].kind
        rows.append((case, kind, judge(kind, case)))
    return rows
