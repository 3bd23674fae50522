"""Names, labels and bounds of the metrics."""

from __future__ import annotations

import re

import pytest

from gateway.proxy.metrics.counters import MAX_SERIES, METRICS, Metrics, _Series, render
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "metrics.md"


def test_the_page_lists_every_metric() -> None:
    section = PAGE.read_text().partition("\n## List\n")[2].partition("\n## ")[0]
    items = [" ".join(item.split()) for item in f"\n{section.strip()}".split("\n* ")[1:]]
    kinds = [", ".join((m.kind, *(f"`{label}`" for label in m.labels))) for m in METRICS]
    assert items == [
        f"`{m.name}` ({kind}): {m.help}" for m, kind in zip(METRICS, kinds, strict=True)
    ]


def test_names_follow_the_conventions() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"(fitserve|process)_[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.kind != "histogram" or metric.name.endswith("_seconds")
        assert "\n" not in metric.help
        assert "le" not in metric.labels


def test_labels_are_escaped_and_unknown_names_refused() -> None:
    text = render([("fitserve_facts", ('a"b\\c\nd',), 1)])
    assert 'fitserve_facts{kind="a\\"b\\\\c\\nd"} 1' in text.splitlines()
    with pytest.raises(AssertionError, match="not in the table"):
        render([("fitserve_other", (), 1)])
    with pytest.raises(ValueError, match="zip"):
        render([("fitserve_facts", (), 1)])


class _Ended:
    """As much of an exchange as the metrics of an admitted one look at."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.endpoint = type("Endpoint", (), {"name": "chat"})


def test_the_number_of_series_is_bounded() -> None:
    metrics = Metrics()
    metrics._series = {(f"m{number}", "chat"): _Series() for number in range(MAX_SERIES)}
    for number in range(3):
        metrics.count_start(_Ended(f"new{number}"))  # type: ignore[arg-type]
    assert len(metrics._series) == MAX_SERIES + 1
    assert metrics._series["other", "chat"].in_flight == 3
