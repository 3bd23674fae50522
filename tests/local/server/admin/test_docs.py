"""The page that describes the admin API."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gateway.server.admin.docs import page
from tests.support.running import running
from tests.unit.test_security import routes

pytestmark = pytest.mark.anyio


class Parts(HTMLParser):
    """The elements of a page, and the targets that they name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.targets: set[str] = set()
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            assert not name.startswith("on"), name
            if name in ("src", "href", "action", "data"):
                self.targets.add(value or "")
            if name == "id":
                self.ids.add(value or "")


async def test_the_page_names_every_route_and_asks_no_other_server(tmp_path: Path) -> None:
    async with running(tmp_path, lambda spec: pytest.fail(spec.model)) as gateway:
        answer = await gateway.client.get("/admin/docs")
    assert answer.status_code == 200
    parts = Parts(answer.text)
    assert not parts.tags & {"script", "iframe", "link", "img", "object", "form"}
    assert "/admin/openapi.json" in parts.targets
    assert {target for target in parts.targets if not target.startswith("#")} == {
        "/admin/openapi.json"
    }
    assert {
        target.removeprefix("#") for target in parts.targets if target.startswith("#")
    } <= parts.ids
    for method, path in routes():
        if path.startswith(("/admin/models", "/admin/keys", "/admin/facts")) and method != "HEAD":
            assert f"{method} {path.replace('{name:path}', '{name}')}" in answer.text
    # The browser runs nothing and loads nothing, whatever stands in the page; but for the one style
    # in it.
    policy = answer.headers["content-security-policy"]
    style = re.search(r"<style>(.*)</style>", answer.text)
    assert style is not None
    text = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert policy.split("; ")[:2] == ["default-src 'none'", f"style-src 'sha256-{text}'"]


def test_words_of_the_description_stay_words() -> None:
    evil = "<script>alert(1)</script>\"'"
    fields = {"type": evil, "description": evil}
    operation = {
        "description": evil,
        "parameters": [{"name": evil, "in": evil, "schema": {"enum": [evil]}, "description": evil}],
        "responses": {"200": {"content": {"application/json": {"schema": {"$ref": f"#/{evil}"}}}}},
    }
    shown_page = page(
        {
            "info": {"title": evil, "version": evil},
            "paths": {f"/{evil}": {"get": operation}},
            "components": {"schemas": {evil: {"properties": {evil: fields}, "description": evil}}},
        }
    )
    assert "script" not in Parts(shown_page).tags
    assert "<script" not in shown_page
