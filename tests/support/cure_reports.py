"""Failures of public reports with the steps that help, and how many of the first steps do.

benchmarks/cures.py prints it.
"""

from __future__ import annotations

import re
from typing import Any

from gateway.diagnosis.diagnose import diagnose
from gateway.diagnosis.signatures import Signatures
from gateway.domain import Failure
from gateway.profiles.profiles import Profiles
from tests.support.engine_logs import log_of_row
from tests.support.paths import LOGS
from tests.support.yaml_file import read_yaml

REPORTS: list[dict[str, Any]] = read_yaml(LOGS / "cure_reports.yaml")


def measure(report: dict[str, Any], signatures: Signatures) -> tuple[Failure, int]:
    """The diagnosis of a report, and the number of its first two steps that help."""
    failure, _ = diagnose([log_of_row(report)], signatures, report["engine"])
    return failure, sum(
        any(re.search(words, step) for words in report["helps"]) for step in failure.steps[:2]
    )


def steps_of(report: dict[str, Any]) -> tuple[str, ...]:
    """The steps for a report by the shipped rows."""
    return measure({"helps": (), **report}, Profiles().signatures)[0].steps
