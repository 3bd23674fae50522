"""Signing in on the page, in a real chromium, at a real provider and behind a proxy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.contract.process_harness import free_port
from tests.support.browser import visit
from tests.support.page_gateway import gateway

ADMIN = "an-admin-key-of-this-page"


def test_a_person_signs_in_and_out(tmp_path: Path, browser: Browser) -> None:
    pytest.importorskip("authlib", reason="needs the extra packages oidc")
    from tests.support.oidc_servers import real_provider

    port = free_port()
    users = {"ann": {"email": "ann@example.org", "email_verified": True}}
    with real_provider(users) as issuer:
        settings: dict[str, Any] = {
            "port": port,
            "admin_key": ADMIN,
            "oidc_issuer": issuer,
            "oidc_client_id": "fitserve",
            "oidc_client_secret": "a-secret-of-the-client",
            "oidc_url": f"http://127.0.0.1:{port}",
            "roles": "admin=ann@example.org",
        }
        with gateway(tmp_path, **settings) as server, visit(browser, server.url) as page:
            # The provider has no icon, and a style sheet of another host.
            page.expected = ("401", "404", "ERR_NAME_NOT_RESOLVED")
            tab = page.tab
            page.go("#/keys")
            page.check("sign-in")
            tab.get_by_role("dialog").get_by_role("button", name="Sign in").click()
            tab.locator("input[name=sub]").fill("ann")
            tab.get_by_role("button", name="Authorize").first.click()
            page.sees("Keys in use")
            page.sees("from the settings")
            assert tab.url.endswith("#/keys")
            assert tab.evaluate("document.cookie") == ""
            page.check("signed-in")
            tab.get_by_role("button", name="Sign out ann@example.org").click()
            tab.wait_for_url(f"{issuer}/**")
            page.go("#/keys")
            expect(tab.get_by_role("dialog")).to_contain_text("This gateway needs a key")
            # The provider's own page and its files.
            page.requests[:] = [
                url for url in page.requests if not url.startswith((issuer, "https://"))
            ]


def test_a_page_behind_a_proxy_asks_for_no_key(tmp_path: Path, browser: Browser) -> None:
    settings: dict[str, Any] = {
        "proxy_user_header": "Remote-User",
        "proxy_addresses": "127.0.0.1",
        "roles": "admin=ann",
    }
    with (
        gateway(tmp_path, **settings) as server,
        visit(browser, server.url, extra_http_headers={"Remote-User": "ann"}) as page,
    ):
        page.go("#/keys")
        page.sees("There is no key.")
        expect(page.tab.get_by_label("admin")).not_to_be_checked()
        page.tab.get_by_label("Name").fill("app-1")
        page.tab.get_by_role("button", name="Make key").click()
        page.tab.get_by_role("dialog").get_by_role("button", name="Done").click()
        page.sees("app-1")
        expect(page.tab.get_by_role("dialog")).to_have_count(0)
