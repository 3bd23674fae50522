"""The CLI's side of the admin API: FITSERVE_URL says where, FITSERVE_KEY (or FITSERVE_ADMIN_KEY) is the key."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gateway.errors import BadRequest, FitserveError, NotReady

if TYPE_CHECKING:
    import httpx


# Planning a large repository reads its headers over the network first.
_PATIENCE_S = 120.0


def call(method: str, path: str, body: Any = None, *, timeout_s: float | None = _PATIENCE_S) -> Any:
    """The JSON answer; timeout_s None: however long it takes. Raises the gateway's own error with its words, or NotReady when nothing answers."""
    import httpx

    with _client(timeout_s) as client:
        try:
            response = client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise _unreachable(client, error) from None
        except UnicodeEncodeError:
            raise BadRequest("What was given is not valid UTF-8.", hint="Type it again.") from None
        if response.is_error:
            raise _reported_error(response.status_code, response.content)
        return response.json()


def text(path: str) -> str:
    """The answer as it is."""
    return b"".join(stream(path, {})).decode(errors="replace")


def stream(path: str, query: dict[str, Any]) -> Iterator[bytes]:
    """The answer's bytes as they come."""
    import httpx

    with _client() as client:
        try:
            with client.stream("GET", path, params=query) as response:
                if response.is_error:
                    raise _reported_error(response.status_code, response.read())
                yield from response.iter_raw()
        except httpx.HTTPError as error:
            raise _unreachable(client, error) from None


def address() -> tuple[str, str | None]:
    """Where the gateway is, and the key. Without FITSERVE_URL it is where the settings of this shell would have it listen. Raises SettingsError."""
    url = os.environ.get("FITSERVE_URL") or _here()
    key = os.environ.get("FITSERVE_KEY") or os.environ.get("FITSERVE_ADMIN_KEY")
    if not url.startswith(("http://", "https://")):
        raise BadRequest(f"FITSERVE_URL is {url!r}, which is not a URL.", hint="Give one like http://127.0.0.1:8080.")
    return url, key


def _here() -> str:
    from gateway.settings import load_settings

    settings = load_settings()
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::", "localhost") else settings.host
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"


def _client(timeout_s: float | None = _PATIENCE_S) -> httpx.Client:
    import httpx

    url, key = address()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(timeout_s, connect=5), trust_env=False)


def _unreachable(client: httpx.Client, error: Exception) -> NotReady:
    return NotReady(
        f"No gateway answers at {client.base_url} ({type(error).__name__}).",
        hint="Start one with `fitserve serve`, or set FITSERVE_URL.",
    )


def _reported_error(status: int, body: bytes) -> FitserveError:
    import json

    try:
        said = json.loads(body)["error"]
        message, code = str(said["message"]), str(said.get("code"))
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code = f"The gateway answered with status {status}.", FitserveError.code
    error = FitserveError(message)
    error.code = code
    error.status = status
    error.exit_code = {400: 2, 422: 3, 503: 3}.get(status, 1)
    return error
