"""An image registry with one image, `NAME:latest`, of one layer; a real Docker Engine pulls from
it.

The layer comes slowly until `hurry` is set.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


def digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


class Registry:
    def __init__(self, name: str) -> None:
        self.hurry = threading.Event()
        content = os.urandom(1024 * 1024)
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            entry = tarfile.TarInfo("data")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        self.layer = gzip.compress(archive.getvalue(), compresslevel=0)
        config = {
            "architecture": ARCHITECTURES[platform.machine()],
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [digest(archive.getvalue())]},
        }
        self.config = json.dumps(config).encode()
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": _descriptor("application/vnd.docker.container.image.v1+json", self.config),
            "layers": [
                _descriptor("application/vnd.docker.image.rootfs.diff.tar.gzip", self.layer)
            ],
        }
        self.manifest = json.dumps(manifest).encode()
        registry = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                answers = {
                    "/v2/": b"{}",
                    f"/v2/{name}/manifests/latest": registry.manifest,
                    f"/v2/{name}/manifests/{digest(registry.manifest)}": registry.manifest,
                    f"/v2/{name}/blobs/{digest(registry.config)}": registry.config,
                    f"/v2/{name}/blobs/{digest(registry.layer)}": registry.layer,
                }
                body = answers.get(self.path)
                self.send_response(404 if body is None else 200)
                body = (
                    body or b'{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}'
                )
                self.send_header(
                    "Content-Type", MANIFEST if body is registry.manifest else "application/json"
                )
                self.send_header("Docker-Content-Digest", digest(body))
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self._send(body)

            def _send(self, body: bytes) -> None:
                byte_count = 0
                if body is registry.layer:
                    while not registry.hurry.wait(0.05) and byte_count < len(body) // 2:
                        self.wfile.write(body[byte_count : byte_count + 4096])
                        byte_count += 4096
                self.wfile.write(body[byte_count:])

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Silent."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        # Docker trusts loopback without TLS.
        self.image = f"127.0.0.1:{self._server.server_port}/{name}"

    def __enter__(self) -> Registry:
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}
        )
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.hurry.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _descriptor(kind: str, blob: bytes) -> dict[str, object]:
    return {"mediaType": kind, "size": len(blob), "digest": digest(blob)}
