"""The page in a real chromium, with states of the gateway that are made up: large machines, models in every state, long names and texts."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser

from tests.support.browser import visit
from tests.support.page_gateway import HOSTILE, gateway
from tests.support.page_states import busy_state, told


def test_a_large_machine_in_trouble_is_legible(tmp_path: Path, browser: Browser) -> None:
    with gateway(tmp_path) as one, visit(browser, one.url) as page:
        page.tab.clock.install(time=1_000_000)
        page.tab.route("**/admin/live", told(busy_state()))
        page.go()
        page.sees("12 requests, 3 waiting")
        page.sees("21 GiB of 63 GiB, 300 MiB/s, 2 min 23 s left")
        page.sees("Xid 79 (GPU has fallen off the bus).")
        page.sees("used by python (4242, 34 GiB)")
        page.sees(HOSTILE)
        assert page.tab.get_by_role("img", name="Tokens written: new").count() == 1
        page.check("busy")
