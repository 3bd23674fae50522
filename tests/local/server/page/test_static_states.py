"""The page in a real chromium, with states of the gateway that are made up: large machines, models
in every state, long names and texts."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser

from tests.support.browser import visit
from tests.support.page_gateway import HOSTILE, gateway
from tests.support.page_states import busy_state, telling


def test_a_large_machine_in_trouble_is_legible(tmp_path: Path, browser: Browser) -> None:
    with (
        gateway(tmp_path) as one,
        one.enter(telling(busy_state())) as tells,
        visit(browser, one.url) as page,
    ):
        page.tab.clock.install(time=1_000_000)
        page.tab.route("**/admin/live", tells)
        page.go()
        page.sees("2 problems")
        page.sees("1,238")
        page.sees("No space left on device")
        page.sees("12 requests, 3 waiting")
        page.sees("21 GiB of 63 GiB, 300 MiB/s, 2 min 23 s left")
        page.sees("load 12 s of 30 s, 1 min of 1 min 20 s to 1 min 35 s in all")
        page.sees("compile 12 s, nothing is compiled yet")
        page.sees("the start takes 1 min 20 s to 1 min 35 s in all, an estimate")
        page.sees("Prepared: vllm 0.26.0, 1.1 GiB, up 2 h 0 min")
        page.sees("Xid 79 (GPU has fallen off the bus).")
        page.sees("used by python (4242, 34 GiB)")
        page.sees(HOSTILE)
        assert page.tab.get_by_role("img", name="Tokens written: new").count() == 1
        page.sees("It is being changed.")
        page.sees("Another plan should be better.")
        page.sees("These are the oldest 4; 1,234 more are in flight.")
        page.sees("key a-key-of-a-team-with-a-long-name · 2001:db8:85a3::8a2e:370:7334")
        page.check("busy")
