from __future__ import annotations

import hashlib
import re
from itertools import takewhile
from pathlib import Path

import pytest

from gateway.domain import LaunchSpec
from gateway.server.page.files import FOLDER
from tests.support.running import running
from tests.support.scripted_engine import EngineScript

pytestmark = pytest.mark.anyio

# Compressed, as browsers get them.
MAX_BYTES = 112_000
COMMENT = re.compile(r" *(?://|/\*|\* |\*/)")
VENDOR = FOLDER / "vendor"
# Bytes that were added at the end of a library.
CHANGES = {"uplot.js": b"\nexport default uPlot;\n"}


def unused_script(_: LaunchSpec) -> EngineScript:
    raise AssertionError("no engine is started")


async def test_the_page_is_served_from_here_in_few_bytes(tmp_path: Path) -> None:
    async with running(tmp_path, unused_script, admin_key="page-secret-1") as gateway:
        index = await gateway.client.get("/")
        assert index.headers["content-type"] == "text/html; charset=utf-8"
        named = re.findall(r'(?:href|src)="(/[^"#]+)"', index.text)
        assert {Path(name).suffix for name in named} == {".js", ".css", ".svg"}
        files = {name: await gateway.client.get(name) for name in named}
        assert {answer.status_code for answer in files.values()} == {200}
        # Nothing is there that is not named, and nothing is fetched later. Two files are the HTML.
        parts = [path for path in FOLDER.rglob("*") if path.suffix in {".js", ".css", ".svg"}]
        assert len(files) == len(parts) - 1
        sizes = [answer.num_bytes_downloaded for answer in (index, *files.values())]
        assert 0 < sum(sizes) <= MAX_BYTES
        for answer in (index, *files.values()):
            assert answer.headers["content-encoding"] == "gzip"
            assert answer.headers["vary"] == "accept-encoding"
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
        second_answer = await gateway.client.get(
            "/", headers={"if-none-match": index.headers["etag"]}
        )
        assert (second_answer.status_code, second_answer.content) == (304, b"")


def test_no_text_of_a_script_spans_lines() -> None:
    """Indents within a text would be lost."""
    for path in sorted(FOLDER.rglob("*.js")):
        if path.parent != VENDOR:
            lines = re.sub(r'"(?:[^"\\\n]|\\.)*"', "", path.read_text()).splitlines()
            assert not [line for line in lines if line.count("`") % 2], path.name


async def test_comments_and_indents_stay_in_the_source(tmp_path: Path) -> None:
    async with running(tmp_path, unused_script) as gateway:
        index = (await gateway.client.get("/")).text
        names = re.findall(r'(?:href|src)="(/page/\w+/([^"#]+\.(?:js|css)))"', index)
        for address, name in names:
            served = (await gateway.client.get(address)).text.splitlines()
            source = (FOLDER / name).read_text().splitlines()
            if name.startswith("vendor/"):
                assert served == source
                continue
            # Nothing but comments is left out.
            rest = (line.lstrip(" ") for line in source)
            skipped = [line for row in served for line in takewhile(row.__ne__, rest)]
            assert not [line for line in (*skipped, *rest) if not COMMENT.match(line)], name
            assert not [line for line in served if re.match(r" |//|/\*", line)], name


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


async def test_a_client_that_accepts_no_compression_gets_the_same_bytes(tmp_path: Path) -> None:
    async with running(tmp_path, unused_script) as gateway:
        index = await gateway.client.get("/")
        [main] = re.findall(r'src="(/page/\w+/main.js)"', index.text)
        compressed = await gateway.client.get(main)
        for accepted in ("identity", "br", "gzip;q=0"):
            plain = await gateway.client.get(main, headers={"accept-encoding": accepted})
            assert "content-encoding" not in plain.headers, accepted
            assert plain.content == compressed.content
        head = await gateway.client.head(main)
        assert head.headers["content-encoding"] == "gzip"


def test_libraries_of_others_are_those_of_their_packages_with_their_licence() -> None:
    readme = (VENDOR / "README.md").read_text()
    for path in sorted((*VENDOR.glob("*.js"), *VENDOR.glob("*.css"))):
        published = path.read_bytes().removesuffix(CHANGES.get(path.name, b""))
        assert hashlib.sha256(published).hexdigest() in readme, path.name
        assert "Permission is hereby granted" in path.with_suffix(".LICENSE").read_text()


@pytest.mark.parametrize(
    "path",
    sorted(path for path in FOLDER.rglob("*.*") if path.suffix in {".js", ".css", ".html", ".svg"}),
    ids=lambda path: path.name,
)
def test_the_files_name_no_other_host_and_no_markup_in_text(path: Path) -> None:
    text = path.read_text()
    # Comments of libraries name their homes.
    if path.parent != VENDOR:
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg|gpu-2:8000/v1)", text)
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new"
        r" Function|\son\w+=\"|style=\"",
        text,
    )
