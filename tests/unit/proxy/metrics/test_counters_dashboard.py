"""The dashboard and the alert rules ask for metrics that there are, by labels that they have."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gateway.proxy.metrics.counters import METRICS, render
from tests.support.dashboard import ALERTS, DASHBOARD, NAME, OTHERS, expressions, rules
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "monitoring.md"


def series() -> dict[str, set[str]]:
    """The labels of every name that a page of metrics may have."""
    labels_by_name = dict(OTHERS)
    for metric in METRICS:
        endings = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}.get(
            metric.kind, ("",)
        )
        for ending in endings:
            more = {"le"} if ending == "_bucket" else set()
            labels_by_name[metric.name + ending] = {*metric.labels, *more, "job", "instance"}
    return labels_by_name


@pytest.mark.parametrize("expression", expressions())
def test_the_series_of_each_panel_exist(expression: str) -> None:
    known_series = series()
    matches = NAME.findall(expression)
    assert matches or "up{" in expression
    for name, matchers in matches:
        assert name in known_series, f"no metric is called {name}"
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers):
            assert label in known_series[name], f"{name} has no label {label}"


def test_the_labels_of_a_legend_are_in_the_series() -> None:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            labels = {label for name, _ in NAME.findall(target["expr"]) for label in series()[name]}
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels


def test_the_page_has_every_alert() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| .* \| .* \|$", PAGE.read_text().partition("## Alerts")[2], re.MULTILINE
    )
    assert rows == [rule["alert"] for rule in rules()]


def test_a_summary_has_a_sum_and_a_count_and_no_more() -> None:
    name = "fitserve_engine_queue_seconds"
    text = render([(f"{name}_sum", ("m", "0"), 1.5), (f"{name}_count", ("m", "0"), 3)])
    assert f"# TYPE {name} summary" in text
    assert f'{name}_sum{{model="m",replica="0"}} 1.5' in text
    with pytest.raises(AssertionError, match="not in the table"):
        render([(f"{name}_bucket", ("m", "0", "+Inf"), 3)])


promtool = pytest.mark.skipif(
    shutil.which("promtool") is None and not os.environ.get("REQUIRE_PROMTOOL"),
    reason="promtool is not here; scripts/docker-up brings it",
)


@promtool
def test_the_expressions_are_promql(tmp_path: Path) -> None:
    queries = [
        expression.replace("$__rate_interval", "1m").replace("$model", ".*")
        for expression in expressions()
    ]
    groups = [
        {
            "name": "all",
            "rules": [
                {"record": f"r{number}", "expr": query} for number, query in enumerate(queries)
            ],
        }
    ]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": groups}))
    for path in (file, ALERTS):
        result = subprocess.run(
            ["promtool", "check", "rules", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr


# Minutes from the start, by alert: the series that there are then (a value for each minute), and
# the labels with which it fires.
WHEN: dict[str, list[tuple[dict[str, str], int, list[dict[str, str]]]]] = {
    "EngineKeepsFailing": [
        # Minutes apart, as failures are: the addition of `increase` beyond the samples is then less
        # than one.
        ({'fitserve_failures_total{model="m",kind="oom"}': "_ _ 1x5 2x5 3x5"}, 18,
            [{"model": "m", "kind": "oom"}]),
        ({'fitserve_failures_total{model="m",kind="oom"}': "_ _ 1 2 2"}, 4, []),
        ({'fitserve_failures_total{model="m",kind="oom"}': "7x60"}, 60, []),
        # The gateway was started anew.
        ({'fitserve_failures_total{model="m",kind="oom"}': "7x40 1 2 3x10"}, 45,
            [{"model": "m", "kind": "oom"}]),
        ({'fitserve_failures_total{model="m",kind="oom"}': "_ 1 2 3x40"}, 43, []),
    ],
    "GpuErrors": [
        ({'fitserve_gpu_errors_total{gpu="g",xid="31"}': "_ 6"}, 1, [{"gpu": "g", "xid": "31"}]),
        ({'fitserve_gpu_errors_total{gpu="g",xid="31"}': "_ 5"}, 1, []),
    ],
    "ModelNotServed": [
        ({'fitserve_replicas{model="m",state="quarantined"}': "1x9"}, 4, []),
        ({'fitserve_replicas{model="m",state="quarantined"}': "1x9"}, 6, [{"model": "m"}]),
        ({f'fitserve_replicas{{model="m",state="{state}"}}': "1x9" for state in ("quarantined",
            "ready")}, 6, []),
    ],
    "RequestsFail": [
        ({'fitserve_upstream_errors_total{model="m"}': "0+1x20",
            'fitserve_requests_total{model="m"}': "0+10x20"}, 12, [{"model": "m"}]),
        ({'fitserve_upstream_errors_total{model="m"}': "0+1x20",
            'fitserve_requests_total{model="m"}': "0+30x20"}, 12, []),
    ],
}  # fmt: skip


@promtool
@pytest.mark.parametrize("alert", WHEN)
def test_an_alert_fires_when_the_page_says_so(alert: str, tmp_path: Path) -> None:
    rules_by_alert = {rule["alert"]: rule for rule in rules()}
    cases = []
    for series_of, minute, fires in WHEN[alert]:
        alerts = [{"exp_labels": {**labels, **rules_by_alert[alert]["labels"]}} for labels in fires]
        cases.append(
            {
                "interval": "1m",
                "input_series": [
                    {"series": name, "values": values} for name, values in series_of.items()
                ],
                "alert_rule_test": [
                    {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": alerts}
                ],
            }
        )
    # The condition of the alert, without its texts.
    without_words = [
        {name: value for name, value in rules_by_alert[alert].items() if name != "annotations"}
    ]
    (tmp_path / "rules.yml").write_text(
        json.dumps({"groups": [{"name": "all", "rules": without_words}]})
    )
    (tmp_path / "cases.yml").write_text(
        json.dumps({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": cases})
    )
    result = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "cases.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
