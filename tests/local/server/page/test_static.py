"""The page in a real chromium, in front of a gateway with scripted engines: every flow, at both
widths, in light and dark."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.support.browser import Visit, visit
from tests.support.dataplane import event
from tests.support.page_gateway import ENGINES, HOSTILE, gateway, llama
from tests.support.upstream import Call, Upstream

ADMIN = "page-secret-1"


def add_by_form(page: Visit, source: Path) -> None:
    """Type the folder of a model into the form, look at its plan, and add it as m."""
    tab = page.tab
    tab.get_by_role("link", name="Add a model").first.click()
    # Further typing gives up the earlier search.
    plans: list[str] = []
    tab.on(
        "requestfinished",
        lambda request: (
            plans.append(request.post_data or "")
            if request.url.endswith("/admin/models?dry_run=true")
            else None
        ),
    )
    tab.get_by_text("Engine and plan").click()
    tab.get_by_label("Engines").fill(ENGINES[0])
    tab.get_by_label("Model", exact=True).press_sequentially(str(source), delay=0)
    page.sees("This would be started:")
    assert [json.loads(plan)["source"] for plan in plans] == [str(source)]
    expect(tab.get_by_label("Name", exact=True)).to_have_value("my-llama")
    tab.locator("summary", has_text="Why").click()
    page.sees("the dtype of the weights")
    page.check("add")
    tab.get_by_label("Name", exact=True).fill("m")
    tab.get_by_role("button", name="Add").click()
    expect(tab.get_by_role("heading", name="m", exact=True)).to_be_visible()
    page.sees("0 of 256 concurrent requests")
    page.check("model")


def test_a_model_is_added_changed_stopped_started_and_deleted(
    tmp_path: Path, browser: Browser
) -> None:
    source = llama(tmp_path / "my-Llama")
    with gateway(tmp_path) as server, visit(browser, server.url) as page:
        tab = page.tab
        page.go()
        page.sees("No model yet.")
        page.sees("GeForce RTX 3090")
        page.check("empty")
        add_by_form(page, source)
        # A change is shown before it is made.
        tab.get_by_role("link", name="Edit").click()
        tab.get_by_text("Engine and plan").click()
        tab.get_by_label("Most context").fill("2048")
        page.sees("New engines are started")
        page.check("edit")
        tab.get_by_role("button", name="Change").click()
        dialog = tab.get_by_role("dialog")
        expect(dialog).to_contain_text("2048")
        page.check("edit-confirm")
        dialog.get_by_role("button", name="Change").click()
        server.until("m", "ready")
        page.sees("2k context")
        tab.get_by_role("link", name="Starts").click()
        page.sees("Start 2")
        # Escape says no.
        tab.get_by_role("button", name="Stop").click()
        tab.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        tab.get_by_role("button", name="Stop").click()
        dialog.get_by_role("button", name="Stop").click()
        # The log goes on with the next start by itself.
        tab.get_by_role("link", name="Log", exact=True).click()
        page.sees("The engine has ended.")
        tab.get_by_role("button", name="Start", exact=True).click()
        expect(tab.get_by_text("The engine has ended.").filter(visible=True)).to_have_count(0)
        tab.get_by_role("link", name="Starts").click()
        page.sees("Start 3")
        tab.get_by_role("button", name="Delete").click()
        page.check("delete-confirm")
        dialog.get_by_role("button", name="Delete").click()
        page.sees("No model yet.")
        page.expected = ("404",)  # it was gone while its view was open


def test_an_engine_that_runs_elsewhere_is_added_with_where_its_key_is(
    tmp_path: Path, browser: Browser
) -> None:
    with gateway(tmp_path) as server, visit(browser, server.url) as page:
        tab = page.tab
        page.go("#/add")
        tab.get_by_label("An engine that runs elsewhere").check()
        tab.get_by_label("Base URLs").fill("http://127.0.0.1:9/v1, http://127.0.0.1:19/v1")
        tab.get_by_label("Name", exact=True).fill("far")
        # A key itself is refused, and not shown again.
        tab.get_by_label("Its key").fill("sk-live-0123456789")
        page.expected = ("400",)
        tab.get_by_role("button", name="Add").click()
        page.sees("a key itself is not taken")
        page.check("add-elsewhere")
        tab.get_by_label("Its key").fill("file:far")
        tab.get_by_role("button", name="Add").click()
        expect(tab.get_by_role("heading", name="far", exact=True)).to_be_visible()
        wish = server.ask("GET", "/admin/models/far")["wish"]
        assert (wish["endpoints"], wish["endpoint_key"]) == (
            ["http://127.0.0.1:9/v1", "http://127.0.0.1:19/v1"],
            "file:far",
        )
        tab.get_by_role("link", name="Edit").click()
        expect(tab.get_by_label("Its key")).to_have_value("file:far")
        expect(tab.get_by_label("Context")).to_have_count(0)
        tab.get_by_label("Base URLs").fill("http://127.0.0.1:9/v1")
        tab.get_by_label("Its key").fill("")
        page.sees("No engine is restarted.")
        tab.get_by_role("button", name="Change").click()
        tab.get_by_role("dialog").get_by_role("button", name="Change").click()
        page.sees("far is being changed.")
        wish = server.ask("GET", "/admin/models/far")["wish"]
        assert (wish["endpoints"], wish["endpoint_key"]) == (["http://127.0.0.1:9/v1"], None)


def test_a_chat_template_is_given_and_taken_back(tmp_path: Path, browser: Browser) -> None:
    template = "{% for one in messages %}{{ one.content }}\n{% endfor %}"
    with gateway(tmp_path) as server, visit(browser, server.url) as page:
        server.add(
            "m", llama(tmp_path / "llama"), chat_template={"text": template, "name": "mine.jinja"}
        )
        server.until("m", "ready")
        tab = page.tab
        page.go("#/models/m/edit")
        tab.get_by_text("Engine and plan").click()
        expect(tab.get_by_label("Chat template")).to_have_value(template)
        page.check("edit-all")
        tab.get_by_label("Chat template").fill("{{ messages[0].content }}")
        page.sees("New engines are started")
        tab.get_by_role("button", name="Change").click()
        tab.get_by_role("dialog").get_by_role("button", name="Change").click()
        page.sees("m is being changed.")
        server.until("m", "ready")


def test_a_failed_start_shows_its_proof_and_output_of_engines_stays_text(
    tmp_path: Path, browser: Browser
) -> None:
    with gateway(tmp_path) as server, visit(browser, server.url) as page:
        server.add("bad-model", llama(tmp_path / "model"), policy={"max_attempts": 1})
        server.until("bad-model", "quarantined")
        page.go("#/models/bad-model/starts")
        page.sees("no kernel")
        page.sees("Failed to find a kernel that can implement the WNA16 linear layer")
        page.check("starts")
        page.tab.get_by_role("button", name="Log of start 1").click()
        page.sees(HOSTILE)
        page.tab.get_by_label("Filter lines").fill("alert(2)")
        expect(page.tab.locator(".log > div:visible")).to_have_count(1)
        assert page.tab.locator("main img, main script").count() == 0
        page.check("log")
        page.tab.get_by_role("link", name="History").click()
        page.tab.locator("summary", has_text="Evidence").first.click()
        page.sees("no_kernel")
        page.check("history")
        page.go()
        page.sees("given up")
        page.tab.get_by_role("link", name="bad-model").first.click()
        expect(page.tab.get_by_role("button", name="Try again now")).to_be_visible()


def test_a_key_is_asked_for_once_made_shown_once_and_removed(
    tmp_path: Path, browser: Browser
) -> None:
    with gateway(tmp_path, admin_key=ADMIN) as server, visit(browser, server.url) as page:
        page.expected = ("401",)
        tab, dialog = page.tab, page.tab.get_by_role("dialog")
        page.go("#/keys")
        expect(dialog).to_contain_text("This gateway needs a key")
        page.check("key-asked")
        tab.get_by_label("Key", exact=True).fill("wrong")
        tab.keyboard.press("Enter")
        expect(dialog).to_contain_text("is not valid at this gateway")
        tab.get_by_label("Key", exact=True).fill(ADMIN)
        tab.keyboard.press("Enter")
        page.sees("from the settings")
        expect(dialog).to_have_count(0)
        tab.get_by_label("Name").fill("app-1")
        tab.get_by_label("Requests per minute").fill("60")
        tab.get_by_role("button", name="Make key").click()
        key = dialog.get_by_label("Key", exact=True).input_value()
        assert key.startswith("fs-")
        page.check("key-made")
        dialog.get_by_role("button", name="Done").click()
        page.sees("60 requests per minute")
        page.check("keys")
        assert key not in tab.content()
        tab.reload()
        page.sees("app-1")
        assert tab.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [
            0,
            1,
            "",
        ]
        tab.get_by_role("button", name="Remove the key app-1").click()
        dialog.get_by_role("button", name="Remove").click()
        expect(tab.get_by_text("The key app-1 is removed.")).to_be_visible()
        expect(tab.get_by_role("button", name="Remove the key app-1")).to_have_count(0)


async def talks(call: Call) -> None:
    """Thinks, calls a tool, and repeats the tool's answer."""
    if call.head[0].startswith(b"GET"):
        await call.reply(b'{"object": "list", "data": [{"id": "m", "object": "model"}]}')
        return
    document = json.loads(call.body)
    await call.start()
    answers = [message["content"] for message in document["messages"] if message["role"] == "tool"]
    if document.get("tools") and not answers:
        function = {"name": "calculate", "arguments": '{"a": 6, "b": 7, '}
        await call.chunk(_delta({"reasoning_content": "It is a product."}))
        await call.chunk(
            _delta(
                {
                    "tool_calls": [
                        {"index": 0, "id": "call-1", "type": "function", "function": function}
                    ]
                }
            )
        )
        rest = {"arguments": '"operation": "multiply"}'}
        await call.chunk(_delta({"tool_calls": [{"index": 0, "function": rest}]}))
    elif document["messages"][-1]["content"] == "for ever":
        await call.chunk(event("It begins"))
        await call.closed.wait()
        return
    else:
        for word in ("The answer is ", *answers, HOSTILE):
            await call.chunk(event(word))
    await call.chunk(
        b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 12,'
        b' "total_tokens": 21}}\n\n'
    )
    await call.chunk(b"data: [DONE]\n\n")
    await call.end()


def _delta(delta: dict[str, Any]) -> bytes:
    return (
        b"data: "
        + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}).encode()
        + b"\n\n"
    )


def test_a_chat_streams_thinks_calls_tools_and_can_be_stopped(
    tmp_path: Path, browser: Browser
) -> None:
    with (
        gateway(tmp_path) as server,
        server.enter(Upstream(talks)) as upstream,
        visit(browser, server.url) as page,
    ):
        server.ask("POST", "/admin/models", {"name": "m", "endpoints": [f"{upstream.url}/v1"]})
        server.until("m", "ready")
        tab = page.tab
        page.go("#/chat")
        tab.get_by_text("Options").click()
        tab.get_by_label("Offer two tools").check()
        tab.get_by_label("Message").fill("What is 6 times 7?")
        tab.keyboard.press("Enter")
        page.sees(f"The answer is 42{HOSTILE}")
        page.sees('calculate({"a": 6, "b": 7, "operation": "multiply"})')
        page.sees("12 tokens")
        tab.get_by_text("Thoughts").filter(visible=True).click()
        page.sees("It is a product.")
        page.check("chat")
        page.tab.get_by_role("link", name="Usage").click()
        page.sees("no key")
        page.check("usage")
        page.go("#/chat")
        tab.get_by_label("Message").fill("for ever")
        tab.get_by_role("button", name="Send").click()
        page.sees("It begins")
        tab.get_by_role("button", name="Stop").click()
        page.sees("Stopped.")
        page.go("#/models/m")
        page.sees(upstream.url)
        page.check("endpoint")


def test_requests_in_flight_are_listed_and_one_is_ended(tmp_path: Path, browser: Browser) -> None:
    with (
        gateway(tmp_path) as server,
        server.enter(Upstream(talks)) as upstream,
        visit(browser, server.url) as page,
    ):
        server.ask("POST", "/admin/models", {"name": "m", "endpoints": [f"{upstream.url}/v1"]})
        server.until("m", "ready")
        tab, dialog = page.tab, page.tab.get_by_role("dialog")
        page.go()
        page.sees("Nobody is waiting for an answer.")
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "for ever"}]}
        with server.asks("/v1/chat/completions", body) as answer:
            listed = tab.get_by_role("list", name="Requests in flight").get_by_role("listitem")
            expect(listed).to_have_count(1)
            expect(listed).to_contain_text("chat · no key · 127.0.0.1")
            expect(listed).to_contain_text("B so far, first byte after")
            page.check("request")
            tab.get_by_role("link", name="m", exact=True).first.click()
            expect(listed).to_have_count(1)
            tab.get_by_role("button", name="End the request").click()
            expect(dialog).to_contain_text("Its client gets an error")
            page.check("request-end")
            dialog.get_by_role("button", name="End").click()
            expect(listed).to_have_count(0)
            assert "ended this request" in answer.result()


def test_the_page_works_by_keyboard_and_reports_a_lost_connection(
    tmp_path: Path, browser: Browser
) -> None:
    with contextlib.ExitStack() as stack:
        resource = stack.enter_context(gateway(tmp_path))
        page = stack.enter_context(visit(browser, resource.url))
        page.go()
        page.sees("No model yet.")
        page.sees("Live")
        tab = page.tab
        focused = "document.activeElement.textContent.trim()"
        tab.keyboard.press("Tab")
        assert tab.evaluate(focused) == "Skip to content"
        while tab.evaluate(focused) != "Keys":
            tab.keyboard.press("Tab")
        tab.keyboard.press("Enter")
        page.sees("There is no key")
        assert tab.evaluate("document.activeElement.id") == "main"
        # A tab that nobody sees costs nothing: its stream is closed, and comes back.
        page.expected = ("ERR_", "404")
        tab.route("**/admin/live", lambda route: route.abort())
        tab.go_back()
        tab.reload()
        page.sees("Connecting")
        tab.unroute("**/admin/live")
        page.sees("Live")


def test_a_failed_visit_is_reported(browser: Browser, tmp_path: Path) -> None:
    """State that the other tests count on."""
    with gateway(tmp_path) as server:
        for wrong, words in (
            ("console.error('broken')", "broken"),
            ("setTimeout(() => { throw new Error('thrown') })", "thrown"),
            (
                (
                    "document.body.append(Object.assign(new Image(), {src:"
                    " 'http://localhost:9/x.png'}))"
                ),
                "Content Security Policy",
            ),
            ("document.body.setAttribute('style', 'color: red')", "Content Security Policy"),
        ):
            with pytest.raises(AssertionError, match=words), visit(browser, server.url) as page:
                page.go()
                page.sees("Live")
                page.tab.evaluate(wrong)
                while not page.errors:
                    page.tab.wait_for_timeout(10)
        with visit(browser, server.url) as page:
            page.go()
            page.sees("Live")
            page.tab.evaluate(
                "document.querySelector('#main').append(document.createElement('input'))"
            )
            with pytest.raises(AssertionError, match="label"):
                page.check("wrong")
