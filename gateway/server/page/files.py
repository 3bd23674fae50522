"""GET /: the page. Its files are read once, and served as they are: no build step, and nothing of
another server.

Their addresses have a hash of all of them: a browser keeps them for ever, and asks for others when
one of them is another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response

from gateway.errors import NotFound

router = APIRouter(include_in_schema=False)

FOLDER = Path(__file__).parent / "static"
_INDEX = "index.html"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Names of models and lines of logs are hostile text: the browser runs and shows nothing but the
# page's own files, and no text becomes markup.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src"
        " 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_FOR_EVER = {"cache-control": "public, max-age=31536000, immutable"}


@dataclass(frozen=True)
class PageFiles:
    """index: the HTML, with the addresses of the others. kept: by path below the folder."""

    version: str
    index: bytes
    kept: Mapping[str, bytes]


@cache
def page_files() -> PageFiles:
    found = {
        str(path.relative_to(FOLDER)): path.read_bytes()
        for path in sorted(FOLDER.rglob("*"))
        if path.suffix in _TYPES
    }
    version = hashlib.sha256(
        b"".join(name.encode() + data for name, data in found.items())
    ).hexdigest()[:12]
    # All modules at once, not each when the one before it names it.
    modules = "\n".join(
        f'<link rel="modulepreload" href="PAGE/{name}">' for name in found if name.endswith(".js")
    )
    index = (
        found.pop(_INDEX)
        .decode()
        .replace("<!-- modules -->", modules)
        .replace("PAGE/", f"/page/{version}/")
    )
    return PageFiles(version, index.encode(), found)


@router.head("/")
@router.get("/")
async def index(request: Request) -> Response:
    files = page_files()
    tag = f'"{files.version}"'
    headers = {**HEADERS, "cache-control": "no-cache", "etag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(files.index, media_type=_TYPES[".html"], headers=headers)


@router.head("/page/{version}/{name:path}")
@router.get("/page/{version}/{name:path}")
async def file(version: str, name: str) -> Response:
    files = page_files()
    data = files.kept.get(name)
    if data is None or version != files.version:
        raise NotFound(
            "The page has no such file.",
            hint="Load the page again: another version of the gateway runs now.",
        )
    return Response(data, media_type=_TYPES[Path(name).suffix], headers={**HEADERS, **_FOR_EVER})
