"""Plots of the page in a real chromium: axes with units and times, gaps, values under the
pointer."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, Route, expect

from tests.support.browser import visit
from tests.support.page_gateway import gateway
from tests.support.page_states import busy_state, telling
from tests.support.patience import Patience

# Words that are drawn on canvases, by the label of the plot.
WORDS = """window.drawn = {}; const write = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (words, ...place) {
  queueMicrotask(() => {
    const title = this.canvas.closest("[role=img]")?.ariaLabel.split(":")[0];
    (drawn[title] ??= []).push(words);
  });
  return write.call(this, words, ...place);
};"""
# Whether columns of pixels have the colour of a model, from the left of the plotting area.
COLUMNS = """([title, hue]) => {
  const place = [...document.querySelectorAll("[role=img]")].find(
    (one) => one.ariaLabel?.startsWith(title));
  const probe = document.createElement("i");
  probe.className = hue;
  document.body.append(probe);
  const wanted = getComputedStyle(probe).backgroundColor.match(/\\d+/g).map(Number);
  probe.remove();
  const canvas = place.querySelector("canvas"), area = place.querySelector(".u-over");
  const ratio = canvas.width / canvas.clientWidth, left = area.offsetLeft * ratio;
  const { data, width } = canvas.getContext("2d").getImageData(
    left, 0, area.offsetWidth * ratio, canvas.height);
  const columns = new Array(width).fill(false);
  for (let at = 0; at < data.length; at += 4)
    if (data[at + 3] > 200 && wanted.every((one, part) => Math.abs(one - data[at + part]) < 24))
      columns[(at / 4) % width] = true;
  return columns;
}"""


def flow(tokens: float, first_s: float | None = 0.25) -> dict[str, Any]:
    return {
        "requests": 2.0,
        "refused": 0.0,
        "prompt_tokens": 90.0,
        "completion_tokens": tokens,
        "first_p50_s": first_s,
        "first_p95_s": first_s,
    }


def words(tab: Page, title: str) -> list[str]:
    points: list[str] = tab.evaluate("(title) => drawn[title] ?? []", title)
    return points


def wait_for_words(tab: Page, title: str) -> None:
    """Until the axes of a plot are drawn."""
    patience = Patience()
    while len(words(tab, title)) < 4:
        assert not patience.is_over(), tab.evaluate("drawn")
        tab.wait_for_timeout(20)


def share(columns: list[bool], first: float, last: float) -> float:
    """The share of columns with colour between two shares of the width."""
    part = columns[round(first * len(columns)) : round(last * len(columns))]
    return sum(part) / len(part)


def find_hue(tab: Page, model: str) -> str:
    """The class of a model's colour."""
    names: str = tab.evaluate(
        "(model) => [...document.querySelectorAll('.plot .legend li')].find((one) =>"
        " one.textContent.startsWith(model)).querySelector('.swatch').className",
        model,
    )
    return names.rsplit(maxsplit=1)[-1]


def test_traffic_has_axes_and_gaps_and_tells_values(tmp_path: Path, browser: Browser) -> None:
    # Nothing was measured between seven and four minutes ago.
    times = [1_000_000.0 - 5 * step for step in range(119, -1, -1)]
    measured = [at for at in times if not 1_000_000 - 420 < at < 1_000_000 - 240]
    points: list[dict[str, Any]] = [
        {"at": at, "models": {"serves": flow(400.0), "new": flow(120.0)}} for at in measured
    ]
    points[-1]["models"]["serves"] = flow(500.0, None)
    # A point lacks models without traffic.
    for point in points[:30]:
        del point["models"]["new"]
    state = busy_state() | {"points": points}
    with (
        gateway(tmp_path) as server,
        server.enter(telling(state)) as tells,
        visit(browser, server.url, timezone_id="UTC", locale="en-GB") as page,
    ):
        tab = page.tab
        tab.add_init_script(WORDS)
        tab.clock.install(time=1_000_000)
        tab.route("**/admin/live", tells)
        page.go()
        chart = tab.get_by_role(
            "img", name="Tokens written: new 120/s, serves 500/s; highest 500/s"
        )
        expect(chart.locator("canvas")).to_be_visible()
        wait_for_words(tab, "Tokens written")
        # 1,000,000 s after 1970 is 13:46:40.
        assert {"13:40", "13:45", "0/s", "400/s"} <= set(words(tab, "Tokens written"))
        wait_for_words(tab, "First byte, 95th percentile")
        assert any(server.endswith(" ms") for server in words(tab, "First byte, 95th percentile"))
        columns = tab.evaluate(COLUMNS, ["Tokens written", find_hue(tab, "serves")])
        assert share(columns, 0.02, 0.28) > 0.9
        assert share(columns, 0.31, 0.59) == 0
        assert share(columns, 0.62, 0.98) > 0.9
        # No answer is not a latency of 0 s.
        columns = tab.evaluate(COLUMNS, ["First byte", find_hue(tab, "new")])
        assert share(columns, 0.02, 0.2) == 0
        page.check("plots")
        area = chart.locator(".u-over")
        area.scroll_into_view_if_needed()
        box = area.bounding_box()
        assert box is not None
        tab.mouse.move(box["x"] + box["width"] - 2, box["y"] + 40)
        tip = tab.locator(".tip").filter(visible=True)
        # A point is two pixels wide.
        expect(tip).to_contain_text(re.compile(r"13:46:(35|40).*serves [45]00/s"))
        tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + 40)
        tab.mouse.move(1, 1)
        expect(tip).to_have_count(0)


def test_an_axis_of_few_requests_has_whole_numbers(tmp_path: Path, browser: Browser) -> None:
    counts = {"requests": 1, "prompt_tokens": 1, "completion_tokens": 2, "cached_tokens": 0}
    row = counts | {"day": "2026-11-29", "model": "m", "key": ""}
    answer = {"data": [row], "first": "2026-10-30", "last": "2026-11-29"}
    with gateway(tmp_path) as server, visit(browser, server.url, locale="en-US") as page:
        tab = page.tab
        tab.add_init_script(WORDS)
        tab.route("**/admin/usage*", lambda route: route.fulfill(json=answer))
        page.go("#/usage")
        wait_for_words(tab, "Requests")
        numbers = [word for word in words(tab, "Requests") if word.isdigit()]
        assert set(numbers) == {"0", "1"}
        assert all(number != following for number, following in pairwise(numbers))


def test_usage_of_each_day_is_a_plot_by_model_and_by_key(tmp_path: Path, browser: Browser) -> None:
    def usage_row(day: str, model: str, key: str, tokens: int) -> dict[str, Any]:
        counts = {"prompt_tokens": 3 * tokens, "completion_tokens": tokens, "cached_tokens": tokens}
        return counts | {"day": day, "model": model, "key": key, "requests": tokens // 100}

    rows = [
        usage_row("2026-11-02", "large", "", 4000),
        usage_row("2026-11-02", "small", "app", 1000),
        usage_row("2026-11-20", "large", "app", 9000),
        *(usage_row("2026-11-21", f"other-{number}", "app", 100) for number in range(9)),
    ]

    def answer(route: Route) -> None:
        assert route.request.url.endswith("?by=day,model,key")
        route.fulfill(json={"data": rows, "first": "2026-10-30", "last": "2026-11-29"})

    with (
        gateway(tmp_path) as server,
        visit(browser, server.url, timezone_id="America/Los_Angeles", locale="en-US") as page,
    ):
        tab = page.tab
        tab.add_init_script(WORDS)
        tab.route("**/admin/usage*", answer)
        page.go("#/usage")
        chart = tab.get_by_role("img", name="Tokens written: large 13,000, small 1,000")
        expect(chart.locator("canvas")).to_be_visible()
        wait_for_words(tab, "Tokens written")
        assert "Nov 29" in words(tab, "Tokens written")
        page.sees("all others")
        expect(tab.get_by_role("row", name="large app")).to_contain_text("9,000")
        page.check("usage-plots")
        tab.get_by_label("By").select_option("key")
        chart = tab.get_by_role(
            "img", name="Tokens written: app 10,900, no key 4,000; highest 9,000"
        )
        expect(chart.locator("canvas")).to_be_visible()
        area = chart.locator(".u-over")
        area.scroll_into_view_if_needed()
        box = area.bounding_box()
        assert box is not None
        # The fourth of 31 days.
        tab.mouse.move(box["x"] + box["width"] * 3.5 / 31, box["y"] + 60)
        tip = tab.locator(".tip").filter(visible=True)
        expect(tip).to_contain_text("Nov 2")
        expect(tip).to_contain_text("app 1,000")
        expect(tip).to_contain_text("no key 4,000")


def test_a_single_value_is_drawn_as_a_point(tmp_path: Path, browser: Browser) -> None:
    """Between values that are missing there is no line."""
    times = [1_000_000.0 - 5 * step for step in range(119, -1, -1)]
    points: list[dict[str, Any]] = [{"at": at, "models": {}} for at in times]
    points[60]["models"]["serves"] = flow(400.0)
    state = busy_state() | {"points": points}
    with (
        gateway(tmp_path) as server,
        server.enter(telling(state)) as tells,
        visit(browser, server.url) as page,
    ):
        tab = page.tab
        tab.add_init_script(WORDS)
        tab.clock.install(time=1_000_000)
        tab.route("**/admin/live", tells)
        page.go()
        title = "First byte, 95th percentile"
        wait_for_words(tab, title)
        columns = tab.evaluate(COLUMNS, [title, find_hue(tab, "serves")])
        assert share(columns, 0.45, 0.55) > 0
        assert share(columns, 0, 0.4) == share(columns, 0.6, 1) == 0
        page.check("plot-point")
