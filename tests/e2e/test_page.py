"""The page with the real CPU engine, as for a user with nothing else: a model is added, watched,
asked and deleted in the browser alone."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from gateway.cli.demo.checkpoint import SENTENCE
from tests.e2e.conftest import ENGINE, START_S, Gateway
from tests.e2e.scripted import engines as running_engines
from tests.support.browser import chromium, visit

pytestmark = pytest.mark.engine


def test_a_model_is_added_watched_asked_and_deleted_on_the_page_alone(
    gateway: Gateway, demo_model: object
) -> None:
    with chromium() as browser, visit(browser, gateway.url) as page:
        tab, dialog = page.tab, page.tab.get_by_role("dialog")
        page.go()
        page.sees("No model yet.")
        tab.get_by_role("link", name="Add a model").first.click()
        tab.get_by_text("Engine and plan").click()
        tab.get_by_label("Engines").fill(ENGINE)
        tab.get_by_label("Model", exact=True).press_sequentially(str(demo_model), delay=0)
        # Its engine's own code is asked first.
        expect(tab.get_by_text("This would be started:")).to_be_visible(timeout=START_S * 1000)
        tab.get_by_label("Name", exact=True).fill("tiny")
        tab.get_by_role("button", name="Add").click()
        expect(tab.get_by_role("heading", name="tiny", exact=True)).to_be_visible()
        # The log grows while the engine starts.
        tab.get_by_role("link", name="Log").click()
        expect(tab.get_by_text("Application startup complete").first).to_be_visible(
            timeout=START_S * 1000
        )
        expect(tab.locator(".title .state")).to_have_text("ready", timeout=START_S * 1000)
        navigation = tab.get_by_role("navigation", name="Of this model")
        navigation.get_by_role("link", name="Plan").click()
        page.sees("verified")
        page.check("real-engine-page")
        navigation.get_by_role("link", name="Chat").click()
        tab.get_by_label("Message").fill("What do you say?")
        tab.keyboard.press("Enter")
        page.sees(SENTENCE)
        # It says its sentence for ever: the request is seen in another tab's list, and ended there.
        second = tab.context.new_page()
        second.goto(f"{gateway.url}/#/")
        list_item = second.get_by_role("list", name="Requests in flight").get_by_role("listitem")
        expect(list_item).to_contain_text("tiny")
        list_item.get_by_role("button").click()
        second.get_by_role("dialog").get_by_role("button", name="End").click()
        page.sees("ended this request")
        expect(list_item).to_have_count(0)
        second.close()
        tab.get_by_role("button", name="Delete").click()
        expect(dialog).to_contain_text("Delete tiny?")
        dialog.get_by_role("button", name="Delete").click()
        page.sees("No model yet.")
        page.expected = ("404",)  # it was gone while its view was open
    assert gateway.client.get("/admin/models").json()["data"] == []
    assert running_engines(gateway) == {}
