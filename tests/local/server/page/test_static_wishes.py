"""The history of a model's wishes on the page, in a real chromium."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.support.browser import visit
from tests.support.page_gateway import gateway, llama


def test_former_wishes_are_shown_and_restored(tmp_path: Path, browser: Browser) -> None:
    with gateway(tmp_path) as server, visit(browser, server.url) as page:
        server.add("m", llama(tmp_path / "llama"))
        server.until("m", "ready")
        server.ask("PATCH", "/admin/models/m", {"aliases": ["other"]})
        page.go("#/models/m")
        page.tab.get_by_role("link", name="Wishes").click()
        rows = page.tab.get_by_role("region", name="Wishes").get_by_role("listitem")
        page.sees("Wish 2")
        page.sees("in force")
        page.check("wishes")
        page.tab.get_by_role("button", name="Restore wish 1").click()
        dialog = page.tab.get_by_role("dialog")
        expect(dialog).to_contain_text("No engine is restarted.")
        expect(dialog).to_contain_text("aliases")
        dialog.get_by_role("button", name="Restore").click()
        page.sees("It is wish 1 again.")
        page.sees("Wish 3")
        expect(rows.first).to_contain_text("page")
        assert server.ask("GET", "/admin/models/m")["wish"]["aliases"] == []
