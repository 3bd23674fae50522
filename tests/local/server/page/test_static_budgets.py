"""Budgets of keys and groups on the page, in a real chromium."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Browser, expect

from tests.support.browser import visit
from tests.support.page_gateway import gateway

ADMIN = "an-admin-key-of-this-page"


def test_budgets_of_keys_and_groups_are_set_and_shown(tmp_path: Path, browser: Browser) -> None:
    with gateway(tmp_path, admin_key=ADMIN) as server, visit(browser, server.url) as page:
        page.expected = ("401", "400")
        tab, dialog = page.tab, page.tab.get_by_role("dialog")
        server.ask("POST", "/admin/keys", {"name": "app", "group": "team"})
        page.go("#/keys")
        tab.get_by_label("Key", exact=True).fill(ADMIN)
        tab.keyboard.press("Enter")

        tab.get_by_role("button", name="Budget of the key app").click()
        dialog.get_by_label("Requests per day").fill("50")
        dialog.get_by_label("Money per month").fill("9")
        page.check("budget-form")
        dialog.get_by_role("button", name="Set budget").click()
        expect(dialog.get_by_role("alert")).to_contain_text("needs prices")
        dialog.get_by_label("Money per month").fill("")
        dialog.get_by_label("Tokens per month").fill("1000000")
        dialog.get_by_role("button", name="Set budget").click()
        page.sees("The budget of the key app is set.")
        expect(tab.get_by_label("0 of 50 requests of this day")).to_have_js_property("value", 0)
        page.sees("50 left, starts over in")
        page.sees("0 of 1,000,000 tokens of this month")

        tab.get_by_role("button", name="Budget of the group team").click()
        dialog.get_by_label("GPU seconds per day").fill("9.5")
        dialog.get_by_label("Only warn").check()
        dialog.get_by_role("button", name="Set budget").click()
        page.sees("0 of 9.5 GPU seconds of this day")
        page.sees("warns only")
        tab.get_by_role("textbox", name="New group").fill("others")
        tab.get_by_role("button", name="Set budget").click()
        dialog.get_by_label("Tokens per day").fill("10")
        dialog.get_by_role("button", name="Set budget").click()
        page.sees("0 of 10 tokens of this day")
        page.check("budgets")

        (view,) = [key for key in server.ask("GET", "/admin/keys")["data"] if key["name"] == "app"]
        assert view["budget"]["requests_per_day"] == 50
        assert view["budget"]["money_per_month"] is None
        tab.get_by_role("button", name="Budget of the key app").click()
        expect(dialog.get_by_label("Requests per day")).to_have_value("50")
        dialog.get_by_role("button", name="Cancel").click()
        tab.get_by_role("button", name="Remove the group others").click()
        dialog.get_by_role("button", name="Remove").click()
        page.sees("The group others is removed.")
