from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.domain import LaunchSpec
from gateway.server.page.files import FOLDER
from tests.support.running import running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio

MOST_BYTES = 150_000


def unused_script(_: LaunchSpec) -> EngineScript:
    raise AssertionError("no engine is started")


async def test_the_page_and_all_that_it_names_come_from_here_in_few_bytes(tmp_path: Path) -> None:
    async with running(tmp_path, unused_script, admin_key="page-secret-1") as gateway:
        index = await gateway.client.get("/")
        assert index.headers["content-type"] == "text/html; charset=utf-8"
        named = re.findall(r'(?:href|src)="(/[^"#]+)"', index.text)
        assert {Path(name).suffix for name in named} == {".js", ".css", ".svg"}
        files = {name: await gateway.client.get(name) for name in named}
        assert {answer.status_code for answer in files.values()} == {200}
        # Nothing is there that is not named, and nothing is fetched later. Two files are the HTML.
        assert len(files) == len([path for path in FOLDER.rglob("*") if path.is_file()]) - 2
        assert (
            len(index.content) + sum(len(answer.content) for answer in files.values()) <= MOST_BYTES
        )
        for answer in (index, *files.values()):
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none';")
            assert "unsafe" not in policy
            assert "http" not in policy
            assert "frame-ancestors 'none'" in policy
            assert (
                answer.headers["x-content-type-options"],
                answer.headers["referrer-policy"],
            ) == ("nosniff", "no-referrer")
        # Browsers ask for the page each time, and for a file once.
        assert all("immutable" in answer.headers["cache-control"] for answer in files.values())
        again = await gateway.client.get("/", headers={"if-none-match": index.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


async def test_no_other_file_is_served(tmp_path: Path) -> None:
    async with running(tmp_path, unused_script) as gateway:
        version = re.findall(r"/page/(\w+)/main.js", (await gateway.client.get("/")).text)[0]
        for path in (
            "index.html",
            "../files.py",
            "%2e%2e/files.py",
            "/etc/passwd",
            "",
            "main.js/",
            "views",
        ):
            assert (await gateway.client.get(f"/page/{version}/{path}")).status_code == 404, path
        assert (await gateway.client.get("/page/0/main.js")).status_code == 404


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.*")), ids=lambda path: path.name)
def test_the_files_name_no_other_host_and_no_markup_in_text(path: Path) -> None:
    text = path.read_text()
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg|gpu-2:8000/v1)", text)
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new"
        r" Function|\son\w+=\"|style=\"",
        text,
    )
