"""The page when the browser loses requests: the network of its machine changes, as with each
container that starts, or the gateway is restarted while the page loads."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Route, expect

from tests.support.browser import visit
from tests.support.page_gateway import gateway, llama


def losing(count: int) -> Callable[[Route], None]:
    """A route that loses the first `count` requests."""
    losses_left = [count]

    def lose(route: Route) -> None:
        if losses_left[0]:
            losses_left[0] -= 1
            route.abort("connectionaborted")
        else:
            route.continue_()

    return lose


@pytest.mark.parametrize("file", ["main.js", "format.js", "style/base.css"])
def test_a_page_whose_file_was_lost_loads_again(
    tmp_path: Path, browser: Browser, file: str
) -> None:
    with gateway(tmp_path) as served, visit(browser, served.url) as page:
        page.expected = ("net::ERR_CONNECTION_ABORTED",)
        page.tab.route(f"**/page/*/{file}", losing(1))
        index = f"{served.url}/"
        with page.tab.expect_request(
            lambda request: request.url == index and page.requests.count(index) == 2
        ):
            page.go()
        page.sees("No model yet.")
        assert page.tab.evaluate("[reloads, sessionStorage.length]") == [False, 0]


def test_a_file_that_does_not_arrive_is_named_and_each_try_comes_later(
    tmp_path: Path, browser: Browser
) -> None:
    with gateway(tmp_path) as served, visit(browser, served.url) as page:
        page.expected = ("net::ERR_CONNECTION_ABORTED",)
        page.tab.route("**/page/*/main.js", losing(2))
        # Each text is shown until its try, so the test moves the clock.
        page.tab.clock.install()
        page.tab.clock.pause_at(datetime.now(UTC) + timedelta(days=1))
        page.go()
        page.sees("A file of this page did not arrive. Next try in 1 s.")
        page.tab.clock.run_for(1000)
        page.sees("Next try in 2 s.")
        page.tab.clock.run_for(1000)
        page.sees("Next try in 2 s.")
        page.tab.clock.run_for(1000)
        page.tab.clock.resume()
        page.sees("No model yet.")


def test_a_lost_reading_is_sent_again_and_a_lost_change_is_reported(
    tmp_path: Path, browser: Browser
) -> None:
    with gateway(tmp_path) as served, visit(browser, served.url) as page:
        served.add("m", llama(tmp_path / "llama"))
        served.until("m", "ready")
        page.expected = ("net::ERR_CONNECTION_ABORTED",)
        page.tab.route("**/admin/models/m", losing(1))
        page.tab.route("**/v1/chat/completions", losing(1))
        page.go("#/models/m/plan")
        page.sees("One request")
        page.go("#/models/m/chat")
        page.tab.get_by_label("Message").fill("Hello")
        page.tab.keyboard.press("Enter")
        page.sees("The connection to the gateway was lost: it ended, or the network changed.")
        expect(page.tab.get_by_text("Failed to fetch")).to_have_count(0)
