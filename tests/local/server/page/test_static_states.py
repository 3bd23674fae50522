"""The page in a real chromium, with states of the gateway that are made up: large machines, models
in every state, long names and texts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Route, expect

from tests.support.browser import visit
from tests.support.page_gateway import HOSTILE, gateway, llama
from tests.support.page_states import busy_state, model, telling


def test_a_large_machine_in_trouble_is_legible(tmp_path: Path, browser: Browser) -> None:
    with (
        gateway(tmp_path) as server,
        server.enter(telling(busy_state())) as tells,
        visit(browser, server.url) as page,
    ):
        page.tab.clock.install(time=1_000_000)
        page.tab.route("**/admin/live", tells)
        page.go()
        page.sees("2 problems")
        page.sees("1,238")
        page.sees("No space left on device")
        page.sees("12 requests, 3 waiting")
        page.sees("21 GiB of 63 GiB, 300 MiB/s, 2 min 23 s left")
        page.sees("loading weights 12 s of 30 s, 1 min of 1 min 20 s to 1 min 35 s in all")
        page.sees("compiling 12 s, a first start, so its time is unknown")
        page.sees("the start takes 1 min 20 s to 1 min 35 s in all, an estimate")
        page.sees("Prepared: vllm 0.26.0, 1.1 GiB, up 2 h 0 min")
        page.sees("no node service · engines: 0")
        page.sees("Network of one and two")
        page.sees("Waiting: 190 of batch to serves, the oldest for 40 s.")
        page.sees("Xid 79 (GPU has fallen off the bus).")
        page.sees("used by python (4242, 34 GiB)")
        page.sees(HOSTILE)
        assert page.tab.get_by_role("img", name="Tokens written: new").count() == 1
        page.sees("It is being changed.")
        page.sees("Another plan should be better.")
        page.sees("These are the oldest 4; 1,234 more are in flight.")
        page.sees("key a-key-of-a-team-with-a-long-name · 2001:db8:85a3::8a2e:370:7334")
        page.check("busy")


def test_a_start_is_shown_as_steps_without_repeated_words(tmp_path: Path, browser: Browser) -> None:
    with (
        gateway(tmp_path) as server,
        server.enter(telling(busy_state())) as tells,
        visit(browser, server.url) as page,
    ):
        tab = page.tab
        tab.clock.install(time=1_000_000)
        tab.route("**/admin/live", tells)
        view: dict[str, Any] = {
            "wish": {"endpoints": []},
            "plan": None,
            "decision": None,
            "attempts": [],
        }
        tab.route("**/admin/models/*", lambda route: route.fulfill(json=view))
        page.go()
        rows = tab.locator(".model")
        for name, words in (
            ("loads", ("loading weights", "starting")),
            ("compiles", ("compiling",)),
            ("new", ("Downloading", "21 GiB")),
        ):
            row = rows.filter(has=tab.get_by_role("link", name=name, exact=True))
            expect(row).to_contain_text(words[0])
            assert [row.inner_text().count(word) for word in words] == [1] * len(words)
        page.go("#/models/loads")
        steps = tab.get_by_role("list", name="Phases of the start").get_by_role("listitem")
        expect(steps).to_have_text(
            [
                "importing the engine 48 s",
                re.compile(r"loading weights \d+ s of 30 s"),
                "compiling 20 s",
            ]
        )
        expect(tab.locator("[aria-current=step]")).to_contain_text("loading weights")
        assert tab.locator("main").inner_text().count("loading weights") == 1
        page.check("start-steps")
        tab.clock.fast_forward(25_000)
        expect(steps.nth(1)).to_contain_text(re.compile(r"[3-9]\d s of 30 s"))
        page.go("#/models/new")
        page.sees("21 GiB of 63 GiB, 300 MiB/s, 2 min 23 s left")
        page.check("start-download")


def test_a_chat_with_a_loading_model_names_the_reason_of_its_wait(
    tmp_path: Path, browser: Browser
) -> None:
    with (
        gateway(tmp_path) as server,
        server.enter(telling(busy_state())) as tells,
        visit(browser, server.url) as page,
    ):
        tab = page.tab
        routes: list[Route] = []

        def hold(route: Route) -> None:
            routes.append(route)

        tab.clock.install(time=1_000_000)
        tab.route("**/admin/live", tells)
        tab.route("**/v1/chat/completions", hold)
        for name, words in (
            ("loads", r"waiting: loads is starting \(loading weights \d+ s of 30 s\), \d s"),
            ("new", r"waiting: new is starting \(Downloading org/new: 21 GiB of 63 GiB\), \d s"),
            ("resting", r"waiting: resting is waking up, \d s"),
            ("serves", r"waiting for the first token, \d s"),
        ):
            page.go("#/chat")
            page.tab.reload()
            tab.get_by_role("combobox", name="Model").select_option(name)
            tab.get_by_label("Message").fill("Hello")
            tab.keyboard.press("Enter")
            expect(tab.locator(".waiting").last).to_have_text(re.compile(words))
            if name == "loads":
                page.check("chat-waits")
        tab.clock.fast_forward(25_000)
        expect(tab.locator(".waiting").last).to_have_text(re.compile(r"first token, [2-9]\d s"))
        chunk = {"choices": [{"index": 0, "delta": {"content": "It is here."}}]}
        while len(routes) < 2:
            tab.wait_for_timeout(10)
        # A model that starts is asked when it is ready, and not before.
        names = [json.loads(route.request.post_data or "")["model"] for route in routes]
        assert names == ["resting", "serves"]
        routes[-1].fulfill(body=f"data: {json.dumps(chunk)}\n\n", content_type="text/event-stream")
        page.sees("It is here.")
        expect(tab.locator(".waiting").filter(visible=True)).to_have_count(0)


def test_a_message_to_a_model_that_starts_is_answered_when_it_is_ready(
    tmp_path: Path, browser: Browser
) -> None:
    shown_state = busy_state()
    chunk = {"choices": [{"index": 0, "delta": {"content": "It is here."}}]}
    answer = f"data: {json.dumps(chunk)}\n\n"
    questions: list[str] = []

    def tell(route: Route) -> None:
        # The stream ends, and the page asks for the next state by itself.
        body = f"data: {json.dumps(shown_state)}\n\n"
        route.fulfill(body=body, content_type="text/event-stream")

    def reply(route: Route) -> None:
        questions.append(route.request.post_data or "")
        route.fulfill(body=answer, content_type="text/event-stream")

    with gateway(tmp_path) as server, visit(browser, server.url) as page:
        tab = page.tab
        tab.route("**/admin/live", tell)
        tab.route("**/v1/chat/completions", reply)
        page.go("#/chat")
        tab.get_by_role("combobox", name="Model").select_option("loads")
        tab.get_by_label("Message").fill("Hello")
        tab.keyboard.press("Enter")
        expect(tab.locator(".waiting").last).to_contain_text("waiting: loads is starting")
        assert questions == []
        model = next(model for model in shown_state["models"] if model["name"] == "loads")
        model["state"] = "ready"
        page.sees("It is here.")
        assert len(questions) == 1


# Words of the gateway's own tables, which are not text of users and engines.
OWN_WORDS = {"state", "phase", "grade", "kind", "task", "object", "uuid", "gpus", "change", "id"}
MARKUP = (
    "\"'><img src=x onerror=hit()><svg onload=hit()><iframe srcdoc='<script>parent.hit()</script>'>"
    "<a href=javascript:hit()>a</a><style>*{display:none}</style>${hit()}{{hit()}}"
)
ADDRESS = "javascript:hit()//"
TRAP = """window.hits = []; window.hit = () => window.hits.push("called");
document.addEventListener("securitypolicyviolation", (violation) =>
  window.hits.push(`${violation.violatedDirective} ${violation.blockedURI}`));"""
# Elements that the page's own code never makes, and links that leave it.
STRANGE = """() => [...document.querySelectorAll(
  "iframe, body script:not([src]), style, object, embed, [onload], [onerror], img[src=x]")]
  .map((one) => one.outerHTML).concat([...document.querySelectorAll("a[href], img, form, [src]")]
  .map((one) => one.href || one.src || one.action || "")
  .filter((url) => url && new URL(url).origin !== location.origin))"""


def mark_texts(value: Any, mark: str, key: str = "") -> Any:
    """The value with the mark in each text that users, engines or machines can choose."""
    if isinstance(value, dict):
        return {name: mark_texts(item, mark, name) for name, item in value.items()}
    if isinstance(value, list):
        return [mark_texts(item, mark, key) for item in value]
    return f"{mark}{value}" if isinstance(value, str) and key not in OWN_WORDS else value


@pytest.mark.parametrize("mark", [MARKUP, ADDRESS], ids=["markup", "address"])
def test_no_text_of_any_answer_becomes_markup(tmp_path: Path, browser: Browser, mark: str) -> None:
    def spoil(route: Route) -> None:
        if "/admin/events" in route.request.url:
            if "follow=false" in route.request.url:
                listed = {"data": [mark_texts(EVENT, mark)], "oldest": 1, "newest": 6}
                route.fulfill(json=listed)
                return
            event = json.dumps(mark_texts(EVENT, mark))
            body = f"id: 7\nevent: engine.failed\ndata: {event}\n\n"
            route.fulfill(status=200, body=body, content_type="text/event-stream")
            return
        if "log" in route.request.url:
            route.fulfill(status=200, body=f"{mark}\n" * 3, content_type="text/plain")
            return
        answer = route.fetch()
        if "json" not in answer.headers.get("content-type", ""):
            route.fulfill(status=answer.status, body=mark, content_type="text/plain")
            return
        route.fulfill(response=answer, json=mark_texts(answer.json(), mark))

    state = mark_texts(busy_state(), mark)
    # Their own answers are marked too.
    state["models"] += [model("m", "ready", mark), model("bad", "quarantined", mark)]
    with (
        gateway(tmp_path) as server,
        server.enter(telling(state)) as tells,
        visit(browser, server.url) as page,
    ):
        server.add("m", llama(tmp_path / "model"))
        server.until("m", "ready")
        server.add("bad", llama(tmp_path / "bad"))
        page.expected = ("404", "JSON")
        page.tab.add_init_script(TRAP)
        page.tab.route("**/admin/**", spoil)
        page.tab.route("**/v1/**", spoil)
        page.tab.route("**/admin/live", tells)
        name = quote(f"{mark}serves", safe="")
        views = [
            "chat",
            "history",
            "usage",
            "keys",
            "add",
            "models/m",
            f"models/{quote(mark, safe='')}",
        ]
        views += [f"models/{one_name}/{view}" for one_name in ("m", "bad", name) for view in PARTS]
        for place in ("", *views):
            page.go(f"#/{place}")
            expect(page.tab.locator("main")).not_to_be_empty()
            page.tab.wait_for_timeout(200)
            assert page.tab.evaluate("window.hits") == [], place
            assert page.tab.evaluate(STRANGE) == [], place
        page.go()
        page.sees(f"{mark}Docker does not answer")


EVENT = {
    "id": 7,
    "at": 999_000.0,
    "kind": "engine.failed",
    "model": "m",
    "replica": 0,
    "attempt": 1,
    "words": "It failed.",
    "data": {"reason": "words", "line": "words"},
}
PARTS = ("log", "plan", "starts", "chat", "use", "edit")
