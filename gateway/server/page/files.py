"""GET /: the page, served from files without a build step and without other servers.

Addresses contain a hash of all files: a browser caches them forever, and requests new ones after a
change. Files are compressed once.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
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
_VENDOR = "vendor/"
# Stands inside the HTML, so that it runs when no other file arrives.
_RELOAD = "reload.js"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Comments on lines of their own, a tenth of the bytes. No text of a file spans lines.
_COMMENTS = re.compile(rb"^ *(?://[^\n]*|/\*(?:(?!\*/).)*\*/)\n", re.MULTILINE | re.DOTALL)
_INDENTS = re.compile(rb"^ +", re.MULTILINE)
# Names of models and lines of logs are hostile text: the browser runs and shows only the page's own
# files, and no text becomes markup.
_POLICY = "content-security-policy"
HEADERS = {
    _POLICY: (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src"
        " 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_IMMUTABLE_HEADERS = {"cache-control": "public, max-age=31536000, immutable"}


@dataclass(frozen=True)
class PageFiles:
    """The files of the page, as they are sent.

    index: the HTML with the addresses of the other files.
    contents: bytes of each file, by its path below the folder.
    compressed: both, by gzip.
    index_headers: they permit the one script in the HTML.
    """

    version: str
    index: bytes
    index_headers: Mapping[str, str]
    contents: Mapping[str, bytes]
    compressed: Mapping[str, bytes]


@cache
def page_files() -> PageFiles:
    """The files of the page by address. The address of a module has a digest of all files."""
    contents = {
        str(path.relative_to(FOLDER)): _read(path)
        for path in sorted(FOLDER.rglob("*"))
        if path.suffix in _TYPES
    }
    version = hashlib.sha256(
        b"".join(name.encode() + data for name, data in contents.items())
    ).hexdigest()[:12]
    reload = contents.pop(_RELOAD)
    digest = base64.b64encode(hashlib.sha256(reload).digest()).decode()
    policy = HEADERS[_POLICY].replace("script-src", f"script-src 'sha256-{digest}'")
    # Loads all modules in parallel, not one after another.
    modules = "\n".join(
        f'<link rel="modulepreload" href="PAGE/{name}"{_priority(name)}>'
        for name in contents
        if name.endswith(".js")
    )
    index = (
        contents.pop(_INDEX)
        .decode()
        .replace("<!-- modules -->", modules)
        .replace("PAGE/", f"/page/{version}/")
        .replace("RELOAD", reload.decode())
    )
    return PageFiles(
        version,
        index.encode(),
        {**HEADERS, _POLICY: policy},
        contents,
        {
            name: gzip.compress(data, mtime=0)
            for name, data in {**contents, _INDEX: index.encode()}.items()
        },
    )


def _read(path: Path) -> bytes:
    """The file without its comments and indents, which are for readers of the source."""
    data = path.read_bytes()
    is_own = path.suffix in (".css", ".js") and path.parent.name != _VENDOR.rstrip("/")
    return _INDENTS.sub(b"", _COMMENTS.sub(b"", data)) if is_own else data


def _priority(name: str) -> str:
    """Libraries are used by some views only, so the first picture of the page does not await
    them."""
    return ' fetchpriority="low"' if name.startswith(_VENDOR) else ""


def _encode(request: Request, name: str, data: bytes) -> tuple[bytes, dict[str, str]]:
    """The body of a file and its headers, compressed for browsers that accept gzip."""
    vary = {"vary": "accept-encoding"}
    accepted = request.headers.get("accept-encoding", "").lower().replace(" ", "").split(",")
    if "gzip" not in accepted:
        return data, vary
    return page_files().compressed[name], {**vary, "content-encoding": "gzip"}


@router.head("/")
@router.get("/")
async def index(request: Request) -> Response:
    files = page_files()
    # Weak: the same page, compressed or not.
    tag = f'W/"{files.version}"'
    body, encoding = _encode(request, _INDEX, files.index)
    headers = {**files.index_headers, "cache-control": "no-cache", "etag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers={**headers, "vary": encoding["vary"]})
    return Response(body, media_type=_TYPES[".html"], headers={**headers, **encoding})


@router.head("/page/{version}/{name:path}")
@router.get("/page/{version}/{name:path}")
async def file(request: Request, version: str, name: str) -> Response:
    files = page_files()
    data = files.contents.get(name)
    if data is None or version != files.version:
        raise NotFound(
            "This file is not part of the page.",
            hint="Reload the page: another version of the gateway is running.",
        )
    body, encoding = _encode(request, name, data)
    return Response(
        body,
        media_type=_TYPES[Path(name).suffix],
        headers={**HEADERS, **_IMMUTABLE_HEADERS, **encoding},
    )
