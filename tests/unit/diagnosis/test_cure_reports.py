"""The first two steps help in failures of public reports."""

from typing import Any

import pytest

from gateway.diagnosis.reasons import reasons
from gateway.profiles.profiles import Profiles
from tests.support.cure_reports import REPORTS, measure

SIGNATURES = Profiles().signatures


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report["source"])
def test_the_first_steps_of_a_report_help(report: dict[str, Any]) -> None:
    failure, helpful = measure(report, SIGNATURES)
    # Where the kind is not right today, `kind` has the one that is told.
    assert failure.kind in (report["kinds"] if "kind" not in report else [report["kind"]])
    assert helpful >= report.get("least", 2), failure.steps


def test_a_setting_that_is_the_only_reason_is_the_change() -> None:
    told = reasons(
        "Reasons: {FROB_MLA: [compute capability not supported, kv_cache_dtype not supported],"
        " TRITON_MLA: [kv_cache_dtype not supported]}"
    )
    assert told["backend"] == "TRITON_MLA"
    assert "--kv-cache-dtype auto" in str(told["change"])
    assert "change" not in reasons("Reasons: {TRITON_MLA: [sparse not supported]}")
