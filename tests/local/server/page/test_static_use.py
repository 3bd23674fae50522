"""The page in a real chromium: calls and settings that it offers to copy are run as they stand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.support.browser import visit
from tests.support.page_gateway import gateway, llama
from tests.support.page_states import busy_state, model, replica, telling
from tests.support.paths import ROOT
from tests.support.patience import hang_s

ADMIN = "page-secret-1"
APP = re.compile(r"^\| \[([^\]]+)\]", re.MULTILINE)
# A program sees the values that `console.log` of the snippet gets.
RUN = "async () => {{ const said = []; const console = {{ log: (one) => said.push(one) }};\n{}\n"
RUN += "return said; }}"


def block(tab: Page, label: str) -> Locator:
    """The code below a label that begins so."""
    return tab.locator("figure.code").filter(
        has=tab.locator("figcaption", has_text=re.compile(f"^{label}"))
    )


def code(tab: Page, label: str) -> str:
    return block(tab, label).first.locator("code").text_content() or ""


def run(*command: str) -> str:
    answer = subprocess.run(command, capture_output=True, text=True, timeout=hang_s(), check=False)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_calls_of_a_model_run_as_they_are_copied(tmp_path: Path, browser: Browser) -> None:
    permissions = ["clipboard-read", "clipboard-write"]
    with gateway(tmp_path) as server, visit(browser, server.url, permissions=permissions) as page:
        server.add("m", llama(tmp_path / "llama"))
        server.until("m", "ready")
        tab = page.tab
        page.go("#/models/m")
        tab.get_by_role("link", name="Use it").click()
        page.sees("No key is needed")
        page.check("use")
        tab.get_by_role("button", name="Copy Base URL").click()
        expect(tab.get_by_role("button", name="Copy Base URL")).to_have_text("Copied")
        assert tab.evaluate("navigator.clipboard.readText()") == f"{server.url}/v1"
        assert code(tab, "Model") == "m"
        assert '"role":"assistant"' in run("sh", "-c", code(tab, "curl")).replace(" ", "")
        output = run(sys.executable, "-c", code(tab, "Python")).strip()
        assert output
        [answer] = tab.evaluate(RUN.format(code(tab, "JavaScript")))
        assert answer.strip() == output
        # Settings of apps have the same address and name.
        for name in ("Continue", "LiteLLM in front"):
            tab.locator("summary", has_text=name).click()
        page.check("use-apps")
        settings = yaml.safe_load(code(tab, "~/.continue"))
        assert settings["models"][0]["apiBase"] == f"{server.url}/v1"
        assert settings["models"][0]["model"] == "m"
        routes = yaml.safe_load(code(tab, "config.yaml"))["model_list"]
        assert routes[0]["litellm_params"]["model"] == "hosted_vllm/m"
        assert tab.locator("details > summary").all_text_contents() == APP.findall(
            (ROOT / "docs/apps.md").read_text()
        )


def test_a_browser_without_a_clipboard_copies_and_a_key_is_named(
    tmp_path: Path, browser: Browser
) -> None:
    with gateway(tmp_path, admin_key=ADMIN) as server, visit(browser, server.url) as page:
        server.add("m", llama(tmp_path / "llama"))
        server.until("m", "ready")
        tab = page.tab
        page.expected = ("401",)
        tab.add_init_script("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
        page.go("#/models/m/use")
        tab.get_by_label("Key", exact=True).fill(ADMIN)
        tab.keyboard.press("Enter")
        page.sees("A key is needed in the place of KEY")
        button = tab.get_by_role("button", name="Copy curl")
        button.click()
        expect(button).to_have_text("Copied")
        expect(button).to_be_focused()
        tab.get_by_role("link", name="Chat").last.click()
        tab.get_by_label("Message").focus()
        tab.keyboard.press("Control+V")
        expect(tab.get_by_label("Message")).to_have_value(
            re.compile(r"^curl http.*Bearer KEY", re.S)
        )


@pytest.mark.parametrize(
    ("task", "path", "method"),
    [
        ("embed", "/v1/embeddings", "embeddings.create"),
        ("rerank", "/v1/rerank", "httpx.post"),
        ("classify", "/v1/classify", "httpx.post"),
        ("transcribe", "/v1/audio/transcriptions", "audio.transcriptions.create"),
    ],
)
def test_the_call_is_that_of_the_task(
    tmp_path: Path, browser: Browser, task: str, path: str, method: str
) -> None:
    state = busy_state() | {"models": [model("m", "ready", "", replicas=[replica(state="ready")])]}
    view: dict[str, Any] = {"name": "m", "wish": {}, "plan": {"model": {"task": task}}}
    with (
        gateway(tmp_path) as server,
        server.enter(telling(state)) as tells,
        visit(browser, server.url) as page,
    ):
        page.tab.route("**/admin/live", tells)
        page.tab.route("**/admin/models/m", lambda route: route.fulfill(json=view))
        page.go("#/models/m/use")
        assert f"{server.url}{path}" in code(page.tab, "curl")
        assert method in code(page.tab, "Python")
        assert f"{server.url}{path}" in code(page.tab, "JavaScript")
        compile(code(page.tab, "Python"), task, "exec")
        expect(page.tab.locator("details > summary")).to_have_count(0)


def test_the_call_is_that_of_a_plan_that_comes_later(tmp_path: Path, browser: Browser) -> None:
    readings = 0

    def tell(route: Route) -> None:
        nonlocal readings
        readings += 1
        row = model("m", "starting" if readings == 1 else "ready", "", replicas=[replica()])
        state = busy_state() | {"models": [row]}
        route.fulfill(body=f"data: {json.dumps(state)}\n\n", content_type="text/event-stream")

    def view(route: Route) -> None:
        plan = None if readings == 1 else {"model": {"task": "embed"}}
        route.fulfill(json={"name": "m", "wish": {}, "plan": plan})

    with gateway(tmp_path) as server, visit(browser, server.url) as page:
        page.tab.route("**/admin/live", tell)
        page.tab.route("**/admin/models/m", view)
        page.go("#/models/m/use")
        expect(block(page.tab, "curl").locator("code")).to_contain_text(
            f"{server.url}/v1/embeddings"
        )
        expect(page.tab.get_by_text("No key is needed")).to_be_visible()
