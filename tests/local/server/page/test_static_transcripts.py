"""Transcripts on the page, in a real chromium: recorded models, search, times, and a replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, expect

from tests.support.browser import visit
from tests.support.page_gateway import HOSTILE, gateway, llama
from tests.support.transcripts import write_keys

CHAT = "/v1/chat/completions"


def test_recorded_requests_are_found_read_and_replayed(tmp_path: Path, browser: Browser) -> None:
    keys = write_keys(tmp_path / "keys")
    folder = tmp_path / "gateway"
    folder.mkdir()
    settings: dict[str, Any] = {"transcript_key_file": keys, "transcript_models": "m"}
    with gateway(folder, **settings) as server, visit(browser, server.url) as page:
        tab = page.tab
        server.add("m", llama(folder))
        server.until("m", "ready")
        for text in ("a first question", HOSTILE):
            body = {"model": "m", "messages": [{"role": "user", "content": text}]}
            server.ask("POST", CHAT, body)
        while len(server.ask("GET", "/admin/transcripts")["data"]) < 2:
            pass
        page.go()
        tab.get_by_role("link", name="Recording model m").click()
        rows = tab.get_by_role("list", name="Transcripts").get_by_role("listitem")
        expect(rows).to_have_count(2)
        expect(rows.first).to_contain_text(HOSTILE)
        page.check("transcripts")
        tab.get_by_label("Text").fill("first question")
        tab.get_by_role("button", name="Search").click()
        expect(rows).to_have_count(1)
        tab.get_by_label("Text").fill("nothing like it")
        tab.keyboard.press("Enter")
        page.sees("No transcript fits.")
        tab.get_by_label("Text").fill("")
        tab.keyboard.press("Enter")
        expect(rows).to_have_count(2)

        rows.first.get_by_role("link").click()
        page.sees("queued")
        tab.get_by_text("Request", exact=True).first.click()
        tab.get_by_label("Send it to").select_option("m")
        tab.get_by_role("button", name="Replay").click()
        expect(tab.get_by_role("heading", name="m, now")).to_be_visible()
        expect(tab.get_by_label("Answer", exact=True)).to_have_count(2)
        page.check("transcript")


def test_a_gateway_without_the_recorder_shows_no_sign_of_it(
    tmp_path: Path, browser: Browser
) -> None:
    with gateway(tmp_path) as server, visit(browser, server.url) as page:
        page.go()
        page.sees("Live")
        expect(page.tab.locator("#recorder")).to_be_empty()
