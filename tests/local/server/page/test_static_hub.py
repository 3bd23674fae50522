"""The page in a real chromium, with a model of a Hub whose branch moves."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.e2e.conftest import wait_for
from tests.support.browser import visit
from tests.support.fake_hub import COMMIT, FakeHub, FakeRepo
from tests.support.model_files import model
from tests.support.page_gateway import ENGINES, gateway


def test_a_model_of_the_hub_goes_to_its_newer_commit_when_that_is_wanted(
    tmp_path: Path, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    moved = "f" * 40
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(FakeHub({"org/name": FakeRepo(model(), older=(COMMIT, moved))}))
        hub.variants["org/name"] = []
        resource = stack.enter_context(
            gateway(tmp_path, hf_endpoint=hub.url(), models_dir=tmp_path / "cache")
        )
        page = stack.enter_context(visit(browser, resource.url))
        tab, dialog = page.tab, page.tab.get_by_role("dialog")
        fields = {
            "name": "name",
            "source": "org/name",
            "engines": ENGINES,
            "gpus": 1,
            "check": False,
        }
        resource.ask("POST", "/admin/models", fields)
        resource.until("name", "ready")
        page.go("#/models/name")
        tab.get_by_role("button", name="Update").click()
        page.sees("name: nothing newer.")
        hub.repos["org/name"].commit = moved
        # An answer "no" changes nothing.
        for answer in ("Cancel", "Update"):
            tab.get_by_role("button", name="Update").click()
            expect(dialog).to_contain_text(f"{COMMIT[:12]} → {moved[:12]}")
            if answer == "Update":
                page.check("update")
            assert resource.ask("GET", "/admin/models/name")["wish"]["commits"] == {
                "org/name": COMMIT
            }
            dialog.get_by_role("button", name=answer).click()
        page.sees("name is being updated.")
        tab.get_by_role("link", name="Starts").click()
        page.sees("Start 2")
        # The serving model goes on until the other one serves.
        wait_for(
            "the newer commit",
            lambda: (
                resource.ask("GET", "/admin/models/name")["wish"]["commits"] == {"org/name": moved}
            ),
        )
        resource.until("name", "ready")
