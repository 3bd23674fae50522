"""The page in a real chromium: addresses that lead nowhere, the view before the first data, errors
of fields beside them, and the filters of the history."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Route, expect

from tests.support.browser import visit
from tests.support.page_gateway import ENGINES, gateway, llama

ADMIN = "page-secret-1"
DAY_S = 86400


@pytest.mark.parametrize("place", ["nosuch", "constructor", "__proto__", "%E0%A4%A", "models2/m"])
def test_an_unknown_address_shows_an_explanation(
    tmp_path: Path, browser: Browser, place: str
) -> None:
    with gateway(tmp_path) as server, visit(browser, server.url) as page:
        page.go(f"#/{place}")
        page.sees("No such page")
        expect(page.tab.get_by_role("heading", name="Models")).to_have_count(0)
        expect(page.tab).to_have_title(re.compile(r"^No such page"))
        page.check("no-such-page")
        page.tab.locator("main").get_by_role("link", name="Overview").click()
        page.sees("No model yet.")


def test_a_model_that_never_was_is_not_called_removed(tmp_path: Path, browser: Browser) -> None:
    with gateway(tmp_path) as server, visit(browser, server.url) as page:
        server.add("m", llama(tmp_path / "llama"), aliases=["gpt-4o"])
        server.until("m", "ready")
        tab = page.tab
        page.go("#/models/nosuch")
        page.sees("This gateway has no model nosuch.")
        expect(tab.get_by_role("navigation", name="Of this model")).to_be_hidden()
        expect(tab.locator(".title .state")).to_be_hidden()
        expect(tab.get_by_role("button", name="Delete")).to_be_hidden()
        page.check("no-such-model")
        tab.goto(f"{server.url}/#/models/gpt-4o/plan")
        page.sees("gpt-4o is another name of m.")
        tab.locator("main").get_by_role("link", name="m", exact=True).click()
        page.sees("Command line")
        # One that goes while its view is open was removed, and may come back.
        server.ask("DELETE", "/admin/models/m")
        page.sees("m was removed.")
        server.add("m", llama(tmp_path / "llama"))
        expect(tab.get_by_role("navigation", name="Of this model")).to_be_visible()
        page.sees("Command line")
        page.expected = ("404",)  # it was gone while its view was open


def test_nothing_is_said_to_be_empty_before_a_key_is_given(
    tmp_path: Path, browser: Browser
) -> None:
    with gateway(tmp_path, admin_key=ADMIN) as server, visit(browser, server.url) as page:
        page.expected = ("401",)
        tab = page.tab
        for place in ("", "#/history", "#/usage", "#/keys"):
            page.go(place)
            tab.reload()
            expect(tab.get_by_role("dialog")).to_contain_text("This gateway needs a key")
            words = tab.locator("main").inner_text()
            for claim in ("No model", "Nothing", "No request", "There is no key", "Nobody"):
                assert claim not in words, place
        page.go()
        tab.reload()
        tab.get_by_label("Key", exact=True).fill(ADMIN)
        tab.keyboard.press("Enter")
        page.sees("No model yet.")
        page.sees("Nobody is waiting for an answer.")
        page.sees("No request was answered in the last 10 minutes.")


def test_an_error_stands_at_its_field(tmp_path: Path, browser: Browser) -> None:
    with gateway(tmp_path) as server, visit(browser, server.url) as page:
        page.expected = ("400",)
        tab = page.tab
        page.go("#/add")
        tab.get_by_label("Model", exact=True).fill(str(llama(tmp_path / "llama")))
        tab.get_by_label("Context", exact=True).fill("many")
        page.sees("A field has to be changed first.")
        field = tab.get_by_label("Context", exact=True)
        expect(field).to_have_attribute("aria-invalid", "true")
        problem = tab.locator(".field").filter(has=field).get_by_role("alert")
        expect(problem).to_be_visible()
        expect(problem).not_to_contain_text("openapi")
        assert (problem.get_attribute("id") or "no id") in (
            field.get_attribute("aria-describedby") or ""
        )
        page.check("add-field-error")
        tab.get_by_role("button", name="Add").click()
        expect(field).to_be_focused()
        field.fill("4096")
        expect(tab.get_by_role("alert").filter(visible=True)).to_have_count(0)
        expect(field).not_to_have_attribute("aria-invalid", "true")
        # A field of a closed part is opened.
        tab.get_by_text("When it is loaded").click()
        tab.get_by_label("Priority").fill("high")
        tab.get_by_text("When it is loaded").click()
        expect(tab.get_by_label("Priority")).to_be_visible()
        tab.get_by_role("button", name="Add").click()
        expect(tab.get_by_label("Priority")).to_be_focused()
        tab.get_by_label("Priority").fill("")
        tab.get_by_label("Name", exact=True).fill("no name")
        tab.get_by_role("button", name="Add").click()
        expect(tab.get_by_label("Name", exact=True)).to_have_attribute("aria-invalid", "true")
        page.go("#/keys")
        page.sees("programs of this machine may do everything")
        tab.get_by_label("Name").fill("no name")
        # The first key has to be the administrator's.
        expect(tab.get_by_label("admin")).to_be_checked()
        expect(tab.get_by_label("inference")).not_to_be_checked()
        tab.get_by_role("button", name="Make key").click()
        expect(tab.get_by_label("Name")).to_have_attribute("aria-invalid", "true")
        page.check("key-field-error")


def test_a_form_shows_present_values(tmp_path: Path, browser: Browser) -> None:
    with gateway(tmp_path) as server, visit(browser, server.url) as page:
        server.add("m", llama(tmp_path / "llama"))
        server.until("m", "ready")
        tab = page.tab
        plan = server.ask("GET", "/admin/models/m")["plan"]
        page.go("#/models/m/edit")
        expect(tab.get_by_label("Context", exact=True)).to_have_attribute(
            "placeholder", f"{plan['max_model_len']['value']} now"
        )
        expect(tab.get_by_label("Concurrent requests")).to_have_attribute(
            "placeholder", f"{plan['max_num_seqs']['value']} now"
        )
        tab.get_by_text("Engine and plan").click()
        expect(tab.get_by_label("Engines")).to_have_value(ENGINES[0])
        page.sees(f"now {plan['dtype']['value']}")
        tab.get_by_text("When it is loaded").click()
        expect(tab.get_by_label("Keep loaded")).to_have_attribute("placeholder", "for ever now")
        page.check("edit-present")
        page.sees("Nothing is changed yet.")


def event(number: int, day: int, model: str) -> dict[str, Any]:
    return {
        "id": number,
        "at": 1_000_000.0 + day * DAY_S,
        "kind": "engine.phase_seen",
        "model": model,
        "replica": 0,
        "attempt": 1,
        "words": f"Event {number} of {model}.",
        "data": {"number": number},
    }


# Counts the days that a page writes.
COUNTED_DAYS = """window.days = 0;
const write = Date.prototype.toLocaleDateString;
Date.prototype.toLocaleDateString = function (...how) { days += 1; return write.apply(this, how); };
const place = Object.getOwnPropertyDescriptor(Intl.DateTimeFormat.prototype, "format");
Object.defineProperty(Intl.DateTimeFormat.prototype, "format",
  { ...place, get() { days += 1; return place.get.call(this); } });"""


def test_a_long_history_is_read_once_for_each_event(tmp_path: Path, browser: Browser) -> None:
    events = [event(number, number // 10, "a") for number in range(300)]

    def answer(route: Route) -> None:
        if "follow=false" in route.request.url:
            route.fulfill(json={"data": events, "oldest": 0, "newest": 299})
        else:
            route.fulfill(body=": \n\n", content_type="text/event-stream")

    with gateway(tmp_path) as server, visit(browser, server.url) as page:
        page.tab.add_init_script(COUNTED_DAYS)
        page.tab.route("**/admin/events*", answer)
        page.go("#/history")
        page.sees("Event 0 of a.")
        assert 300 <= page.tab.evaluate("days") < 600


def test_the_history_is_filtered_by_model_and_day(tmp_path: Path, browser: Browser) -> None:
    events = [event(5, 0, "a"), event(6, 0, "b"), event(7, 1, "a"), event(8, 2, "c")]

    def answer(route: Route) -> None:
        if "follow=false" in route.request.url:
            route.fulfill(json={"data": events, "oldest": 2, "newest": 8})
        else:
            after = int(route.request.url.split("after=")[1])
            late = event(9, 2, "a")
            body = f"id: 9\ndata: {json.dumps(late)}\n\n" if after < 9 else ": \n\n"
            route.fulfill(body=body, content_type="text/event-stream")

    with (
        gateway(tmp_path) as server,
        visit(browser, server.url, timezone_id="UTC", locale="en-GB") as page,
    ):
        tab = page.tab
        tab.route("**/admin/events*", answer)
        page.go("#/history")
        page.sees("Event 9 of a.")
        rows = tab.locator(".history > li")
        expect(rows).to_have_count(5)
        expect(rows.first).to_contain_text("Event 9 of a.")
        expect(rows.first).to_contain_text("engine phase seen")
        page.sees("Older ones: fitserve events.")
        page.check("history-days")
        tab.get_by_label("Model").select_option("a")
        expect(rows).to_have_count(3)
        tab.get_by_label("Day").select_option(index=2)
        expect(rows).to_have_count(1)
        expect(rows).to_contain_text("Event 7 of a.")
        tab.get_by_label("Model").select_option("c")
        page.sees("Nothing happened to this model on this day.")
        tab.get_by_label("Day").select_option(index=0)
        expect(rows).to_have_count(1)
