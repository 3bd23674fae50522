"""A Hugging Face Hub on loopback: enough of its HTTP API for huggingface_hub, with faults on
request.

Weights are served by a second server, as the real Hub sends them from a CDN: requests to `cdn` must
bear no token.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.patience import hang_s

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Request:
    server: str
    method: str
    path: str
    range: str | None
    token: str | None
    sent: int = 0
    """Bytes of the body that were handed to the socket."""


@dataclass
class FakeRepo:
    files: dict[str, bytes]
    served: dict[str, bytes | None] = field(default_factory=dict)
    """Contents that replace the listed ones; None: no content."""
    commit: str = COMMIT
    refs: tuple[str, ...] = ("main",)
    older: tuple[str, ...] = ()
    """Commits that are served too, with the same files."""
    gated: bool = False
    private: bool = False
    sizes: dict[str, int] = field(default_factory=dict)
    """Listed sizes that are not those of the files."""
    listed_commit: str | None = None
    """The commit that the listing names, whichever was asked for."""


@dataclass
class FakeHub:
    """Use as a context manager. `requests` are those that came so far, in order."""

    repos: dict[str, FakeRepo] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    ignores_range: bool = False
    answers: int | None = None
    """A status that every request gets, 200 being a page that is not the Hub's."""
    break_off: dict[str, list[int]] = field(default_factory=dict)
    """File -> for each of the next downloads of it, after how many bytes (in steps of 64 KiB) the
    connection breaks."""
    stalls: dict[str, int] = field(default_factory=dict)
    """File -> after how many bytes its download stands still, until `close` or `resume`."""
    endless: set[str] = field(default_factory=set)
    """Files with endless bodies and without a length."""
    redirects: dict[str, str] = field(default_factory=dict)
    """File -> target of the redirection."""
    variants: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By repository, the list of its quantized variants. The answer for a missing repository stands
    still until `close`."""
    listed: list[dict[str, Any]] = field(default_factory=list)
    """The rows that a search finds: id, tags, pipeline_tag, downloads, trendingScore."""
    search_answer: bytes | None = None
    """The answer to every search, instead of the rows."""
    listing: bytes | None = None
    """The answer to every listing; endless if "listing" is in `endless`."""
    stalled: threading.Event = field(default_factory=threading.Event)
    resume: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> FakeHub:
        self._servers = {name: _Server(self, name) for name in ("hub", "cdn")}
        return self

    def __exit__(self, *_: object) -> None:
        from huggingface_hub.utils import close_session  # type: ignore[attr-defined]

        close_session()
        self.resume.set()
        for server in self._servers.values():
            server.close()

    def url(self, server: str = "hub") -> str:
        return f"http://127.0.0.1:{self._servers[server].server_port}"

    def sent_bytes(self) -> int:
        return sum(request.sent for request in self.requests)

    def gets(self, name: str) -> list[Request]:
        """The GET requests for the content of the file `name`, on whichever server."""
        return [
            request
            for request in self.requests
            if request.method == "GET" and request.path.endswith(f"/{name}")
        ]


class _Server(ThreadingHTTPServer):
    daemon_threads = False

    def __init__(self, hub: FakeHub, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub
        self.name = name
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


def _sibling(name: str, size: int, data: bytes) -> dict[str, Any]:
    lfs = (
        {"lfs": {"sha256": hashlib.sha256(data).hexdigest(), "size": size, "pointerSize": 134}}
        if name.endswith(".safetensors")
        else {}
    )
    return {"rfilename": name, "size": size, "blobId": git_id(data), **lfs}


def _in_range(safetensors: dict[str, int] | None, span: str) -> bool:
    """Whether the parameters of a row are in `min:A,max:B`; unknown ones are."""
    bounds = re.fullmatch(r"min:(\d+),max:(\d+)", span)
    if bounds is None or safetensors is None:
        return True
    return int(bounds[1]) <= safetensors["total"] <= int(bounds[2])


def git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 20
    server: _Server

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        hub, path = self.server.hub, unquote(urlsplit(self.path).path)
        self._request = Request(
            self.server.name,
            self.command,
            path,
            self.headers.get("Range"),
            self.headers.get("Authorization"),
        )
        hub.requests.append(self._request)
        if hub.answers is not None:
            self._send(hub.answers, b"<html>" if hub.answers == 200 else b"", {})
        elif path == "/api/models":
            query = parse_qs(urlsplit(self.path).query)
            base = query.get("filter", [""])[0].partition("base_model:quantized:")[2]
            if base:
                self._variants(base)
            else:
                self._search(query)
        elif api := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            self._api(api[1], api[2], api[3] or "main")
        elif file := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(file[1], file[2], file[3])
        else:
            self._refuse(404, "NotFound")

    def _variants(self, repo_id: str) -> None:
        if repo_id not in self.server.hub.variants:
            self.server.hub.resume.wait(self.timeout)
        answer = json.dumps(self.server.hub.variants.get(repo_id, [])).encode()
        self._send(200, answer, {"Content-Type": "application/json"})

    def _search(self, query: dict[str, list[str]]) -> None:
        """The rows with all words and tags of the query, in its order."""
        words = query.get("search", [""])[0].lower().split()
        tags, pipeline = set(query.get("filter", ())), query.get("pipeline_tag")
        rows = [
            row
            for row in self.server.hub.listed
            if all(word in row["id"].lower() for word in words)
            and tags <= set(row["tags"])
            and (pipeline is None or row["pipeline_tag"] == pipeline[0])
            and _in_range(row.get("safetensors"), query.get("num_parameters", [""])[0])
        ]
        rows.sort(key=lambda row: -row[query["sort"][0]])
        answer = self.server.hub.search_answer
        if answer is None:
            answer = json.dumps(rows[: int(query["limit"][0])]).encode()
        self._send(200, answer, {"Content-Type": "application/json"})

    def _find(self, repo_id: str, revision: str) -> FakeRepo | None:
        repo = self.server.hub.repos.get(repo_id)
        if self.headers.get("Authorization") == "Bearer hf_wrong":
            self._send(401, b'{"error": "Invalid credentials in Authorization header"}', {})
        elif repo is None or (
            repo.private and self.server.name == "hub" and not self.headers.get("Authorization")
        ):
            self._refuse(401, "RepoNotFound")
        elif revision not in (repo.commit, *repo.refs, *repo.older):
            self._refuse(404, "RevisionNotFound")
        else:
            return repo
        return None

    def _api(self, repo_id: str, kind: str | None, revision: str) -> None:
        if (repo := self._find(repo_id, revision)) is None:
            return
        hub = self.server.hub
        if "listing" in hub.endless or hub.listing is not None:
            self._send(200, hub.listing or b"[", {"Content-Type": "application/json"}, "listing")
            return
        answer: Any
        if kind == "tree":
            answer = [
                {
                    "type": "file",
                    "path": name,
                    "size": repo.sizes.get(name, len(data)),
                    "oid": git_id(data),
                }
                for name, data in repo.files.items()
            ]
        else:
            siblings = [
                _sibling(name, repo.sizes.get(name, len(data)), data)
                for name, data in repo.files.items()
            ]
            answer = {
                "id": repo_id,
                "sha": repo.listed_commit or repo.commit,
                "gated": "auto" if repo.gated else False,
                "siblings": siblings,
            }
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _file(self, repo_id: str, revision: str, name: str) -> None:
        if (repo := self._find(repo_id, revision)) is None:
            return
        data = repo.served.get(name, repo.files.get(name))
        if repo.gated and self.server.name == "hub" and not self.headers.get("Authorization"):
            self._refuse(401, "GatedRepo")
        elif data is None:
            self._refuse(404, "EntryNotFound")
        else:
            self._entry(repo, name, data)

    def _entry(self, repo: FakeRepo, name: str, data: bytes) -> None:
        if name in self.server.hub.redirects:
            self._send(302, b"", {"Location": self.server.hub.redirects[name]})
            return
        digest = hashlib.sha256(data).hexdigest() if name.endswith(".safetensors") else git_id(data)
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": repo.commit, "Accept-Ranges": "bytes"}
        if name.endswith(".safetensors") and self.server.name == "hub":
            headers |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": headers["ETag"]}
            self._send(302, b"", headers | {"Location": self.server.hub.url("cdn") + self.path})
        else:
            self._content(name, data, headers)

    def _content(self, name: str, data: bytes, headers: dict[str, str]) -> None:
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if span is None or self.server.hub.ignores_range:
            self._send(200, data, headers, name)
            return
        first, last = int(span[1]), min(int(span[2] or len(data)), len(data) - 1)
        headers = headers | {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
        self._send(206, data[first : last + 1], headers, name)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, body: bytes, headers: dict[str, str], name: str = "") -> None:
        self.send_response(status)
        endless = name in self.server.hub.endless
        for key, value in (
            headers | ({"Connection": "close"} if endless else {"Content-Length": str(len(body))})
        ).items():
            self.send_header(key, value)
        self.end_headers()
        try:
            if self.command == "GET":
                self._write(body, name)
                while endless:
                    self._request.sent += self.wfile.write(b" " * 64 * 1024)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _write(self, body: bytes, name: str) -> None:
        hub = self.server.hub
        breaks = hub.break_off.get(name)
        cut = breaks.pop(0) if breaks else None
        for start in range(0, len(body), 64 * 1024):
            if name in hub.stalls and start >= hub.stalls[name] and not hub.resume.is_set():
                hub.stalled.set()
                hub.resume.wait(hang_s())
            piece = body[start : start + 64 * 1024]
            if cut is not None and start + len(piece) > cut:
                self.close_connection = True
                return
            self._request.sent += len(piece)
            self.wfile.write(piece)
