"""Providers of OpenID Connect: a real one as a process, and one whose tokens a test writes.

with real_provider() as url: ...            oidc-provider-mock, which signs in whom a browser names
with ScriptedProvider() as provider: ...    provider.token is the next ID token
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import httpx
from joserfc import jwt
from joserfc.jwk import ECKey, RSAKey

from tests.contract.process_harness import free_port
from tests.support.patience import Patience, hang_s


@contextlib.contextmanager
def real_provider(users: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The issuer of a running provider with these claims of users, by their subject."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [sys.executable, "-m", "oidc_provider_mock", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        patience = Patience()
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/jwks", trust_env=False, timeout=hang_s()).status_code == 200:
                    break
            assert process.poll() is None, "the provider did not start"
            assert not patience.is_over()
            time.sleep(patience.pause_s(0.05))
        for subject, claims in users.items():
            answer = httpx.put(
                f"{url}/users/{subject}", json=claims, trust_env=False, timeout=hang_s()
            )
            assert answer.status_code == 204, answer.text
        yield url
    finally:
        process.terminate()
        process.wait()


class ScriptedProvider:
    """A provider on a socket. Tests change its fields between requests.

    key: signs tokens.
    published: the keys that it publishes.
    token: the next ID token.
    user_info: its answer at the UserInfo endpoint; None: it has no such endpoint.
    info_headers: the header Authorization of each request there.
    requests: path and body of each request so far.
    """

    def __init__(self) -> None:
        self.key: RSAKey | ECKey = RSAKey.generate_key(2048, {"kid": "one"})
        self.published: list[RSAKey | ECKey] = [self.key]
        self.token = ""
        self.extra: dict[str, Any] = {}
        self.user_info: dict[str, Any] | None = None
        self.info_headers: list[str | None] = []
        self.requests: list[tuple[str, str]] = []
        self.is_away = False

    def __enter__(self) -> Self:
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider._answer(self, "")

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                provider._answer(self, self.rfile.read(length).decode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def claims(self, **changes: Any) -> dict[str, Any]:
        """Claims of a good token, with changes; None removes a claim."""
        now = int(time.time())
        claims = {
            "iss": self.url,
            "aud": "fitserve",
            "sub": "1",
            "iat": now,
            "exp": now + 300,
            "email": "ann@example.org",
            "email_verified": True,
            **changes,
        }
        return {name: value for name, value in claims.items() if value is not None}

    def sign(self, claims: dict[str, Any], key: Any = None, **header: Any) -> str:
        key = key or self.key
        algorithm = header.pop("alg", "ES256" if isinstance(key, ECKey) else "RS256")
        head = {"alg": algorithm, "kid": key.kid or "one", **header}
        return jwt.encode(head, claims, key, algorithms=[algorithm])

    def count(self, path: str) -> int:
        return len([1 for request_path, _ in self.requests if request_path == path])

    def _answer(self, handler: BaseHTTPRequestHandler, body: str) -> None:
        path = handler.path.partition("?")[0]
        self.requests.append((path, body))
        documents: dict[str, Any] = {
            "/.well-known/openid-configuration": {
                "issuer": self.url,
                "authorization_endpoint": f"{self.url}/authorize",
                "token_endpoint": f"{self.url}/token",
                "jwks_uri": f"{self.url}/jwks",
                "end_session_endpoint": f"{self.url}/logout",
                **({"userinfo_endpoint": f"{self.url}/userinfo"} if self.user_info else {}),
                **self.extra,
            },
            "/userinfo": self.user_info,
            "/jwks": {"keys": [key.as_dict(private=False) for key in self.published]},
            "/token": {"access_token": "a", "token_type": "Bearer", "id_token": self.token},
        }
        document = documents.get(path)
        if path == "/userinfo":
            self.info_headers.append(handler.headers["authorization"])
        data = json.dumps(document).encode()
        handler.send_response(503 if self.is_away else 200 if document is not None else 404)
        handler.send_header("content-type", "application/json")
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)


def encode_part(part: bytes) -> str:
    return base64.urlsafe_b64encode(part).rstrip(b"=").decode()


def shared_secret_token(claims: dict[str, Any], secret: bytes) -> str:
    """A token that is signed by a secret in the place of a key pair."""
    head = {"alg": "HS256", "kid": "one", "typ": "JWT"}
    text = ".".join(encode_part(json.dumps(part).encode()) for part in (head, claims))
    signature = hmac.digest(secret, text.encode(), "sha256")
    return f"{text}.{encode_part(signature)}"


def unsigned_token(claims: dict[str, Any]) -> str:
    """A token without a signature."""
    head = {"alg": "none", "typ": "JWT"}
    return ".".join(encode_part(json.dumps(part).encode()) for part in (head, claims)) + "."
