"""A decision as HTML: its tables, its refusal, and no tag of a model's texts."""

from __future__ import annotations

from html.parser import HTMLParser

from gateway.domain import Decision
from gateway.domain.decision_html import decision_html
from tests.support.makers import make_decision

TAGS = {"p", "b", "table", "thead", "tbody", "tr", "th", "td", "details", "summary"}


class Reader(HTMLParser):
    """The tags and the texts of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_notebook_shows_the_plans_and_the_reasons_of_the_first() -> None:
    decision = make_decision("2x3090")
    page = Reader(decision_html(decision))
    assert page.open == []
    assert page.tags <= TAGS
    best = decision.plans[0]
    assert {str(best.engine), f"{best.max_model_len.value:,}", "Reasons of the first plan"} <= {
        *page.texts
    }
    assert f"{best.dtype.reason} ({best.dtype.source})" in page.texts
    assert decision._repr_html_() == decision_html(decision)


def test_the_refusal_is_shown_without_a_plan() -> None:
    decision = make_decision("2x3090", tensor_parallel=64)
    assert not decision.plans
    page = Reader(decision_html(decision.evolve(refusal=("Too few GPUs.",))))
    assert "Too few GPUs." in page.texts
    assert decision.rejected[0].reasons[0] in page.texts
    assert "No plan." in Reader(decision_html(Decision(model="m", hardware="h"))).texts


def test_rows_that_are_left_out_are_counted_and_layouts_are_whole() -> None:
    decision = make_decision("2x3090", tensor_parallel=64)
    refusal = decision.rejected[0].evolve(tensor_parallel=2, pipeline_parallel=3, data_parallel=4)
    texts = Reader(decision_html(decision.evolve(rejected=(refusal,) * 9))).texts
    assert "9 rejected, of which 8 are shown" in texts
    assert texts.count("TP=2 PP=3 DP=4") == 8
    plan = make_decision("2x3090").plans[0]
    texts = Reader(decision_html(decision.evolve(plans=(plan,) * 13, rejected=()))).texts
    assert "13 plans, of which 12 are shown." in texts


def test_texts_of_a_model_are_no_tags() -> None:
    page = decision_html(Decision(model="<script>alert(1)</script>", hardware='"><img>'))
    assert Reader(page).tags <= TAGS
    assert "&lt;script&gt;" in page


def test_print_shows_the_plans_and_the_flags_of_the_first() -> None:
    decision = make_decision("2x3090")
    best, lines = decision.plans[0], str(decision).splitlines()
    assert lines[0] == f"{decision.model} on {decision.hardware}"
    row = next(line for line in lines if str(best.engine) in line)
    assert row.split()[:2] == ["1", str(best.engine)]
    assert f"{best.max_model_len.value:,}" in row
    assert " ".join(best.argv) in lines
    head = next(line for line in lines if line.startswith("rank"))
    assert head.index("engine") == row.index(str(best.engine))


def test_print_shows_the_refusal_without_a_plan() -> None:
    decision = make_decision("2x3090", tensor_parallel=64)
    assert not decision.plans
    first_line, *other_lines = str(decision).splitlines()
    assert first_line == f"{decision.model} on {decision.hardware}"
    assert other_lines == list(decision.refusal or ("No plan.",))
