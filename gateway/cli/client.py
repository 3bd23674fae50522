"""Client of the admin API, by FITSERVE_URL and FITSERVE_KEY or FITSERVE_ADMIN_KEY."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from gateway.errors import (
    BadRequest,
    FitserveError,
    NotReady,
    SettingsError,
    Unauthorized,
    short_reason,
)
from gateway.secret import Secret, shown_address
from gateway.version import __version__

if TYPE_CHECKING:
    import ssl

    import httpx


# The default of FITSERVE_PORT: the settings of another machine are not known here.
_PORT = 8080
# Planning a large repository reads its headers over the network first.
_PATIENCE_S = 120.0


Answer = dict[str, Any]
"""A JSON object with the fields of the route's class."""


def call(
    method: str,
    path: str,
    body: Any = None,
    *,
    timeout_s: float | None = _PATIENCE_S,
    idempotency_key: str = "",
    content: bytes | None = None,
) -> Answer:
    """The JSON answer. timeout_s None: no time limit. Raises the gateway's own error, or NotReady
    when nothing answers.

    idempotency_key: a request with one is sent again when its answer is lost.
    content: the bytes of a body that is not JSON.
    """
    import httpx

    with _http_client(timeout_s) as client:
        headers = {"idempotency-key": idempotency_key} if idempotency_key else None
        try:
            try:
                response = client.request(method, path, json=body, headers=headers, content=content)
            except (httpx.ReadError, httpx.RemoteProtocolError):
                if headers is None:
                    raise
                response = client.request(method, path, json=body, headers=headers)
        except httpx.HTTPError as error:
            raise _unreachable_error(client, error) from None
        except UnicodeEncodeError:
            raise not_text_error() from None
        if response.is_error:
            raise _response_error(client, response)
        try:
            answer: Answer = response.json()
        except ValueError:
            raise _foreign_program_error(client, response.status_code) from None
        return answer


def get_text(path: str) -> str:
    """The text of an answer."""
    return b"".join(stream(path, {})).decode(errors="replace")


def stream(
    path: str, query: dict[str, Any], *, method: str = "GET", body: Any = None
) -> Iterator[bytes]:
    """The bytes of an answer as they arrive."""
    import httpx

    # A POST may wait for a model to load, so it has no time limit.
    with _http_client(_PATIENCE_S if method == "GET" else None) as client:
        try:
            with client.stream(method, path, params=query, json=body) as response:
                if response.is_error:
                    response.read()
                    raise _response_error(client, response)
                yield from response.iter_raw()
        except httpx.HTTPError as error:
            raise _unreachable_error(client, error) from None


def stream_lines(path: str, body: Any) -> Iterator[str]:
    """The lines of the answer to a POST as they arrive."""
    import codecs

    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    tail = ""
    for piece in stream(path, {}, method="POST", body=body):
        *lines, tail = (tail + decoder.decode(piece)).split("\n")
        yield from lines
    if tail:
        yield tail


def answer_error(answer: Any) -> FitserveError:
    """The error in the body of an answer."""
    return _reported_error(500, json.dumps(answer).encode())


def not_text_error() -> BadRequest:
    """The error for an argument with bytes that are not text."""
    return BadRequest("An argument is not valid UTF-8.", hint="Type it again.")


def path_segment(name: str) -> str:
    """A name, quoted for a path: neither `m?` nor `a/../m` becomes `m`. Raises BadRequest."""
    try:
        return "/".join(
            part.replace(".", "%2E") if part in (".", "..") else quote(part, safe=":")
            for part in name.split("/")
        )
    except UnicodeEncodeError:
        raise not_text_error() from None


def model_path(name: str, suffix: str = "") -> str:
    """The path of a model in the admin API. suffix: `/retry`, `?weights=true`. Raises
    BadRequest."""
    return f"/admin/models/{path_segment(name)}{suffix}"


def address() -> tuple[str, Secret | None]:
    """The URL and the key of the gateway. Without FITSERVE_URL, the settings of this shell give
    the URL. Raises SettingsError."""
    url = os.environ.get("FITSERVE_URL") or _local_url()
    key = os.environ.get("FITSERVE_KEY") or os.environ.get("FITSERVE_ADMIN_KEY")
    if not url.startswith(("http://", "https://")):
        raise BadRequest(
            f"FITSERVE_URL is {shown_address(url)!r}, which is not a URL.",
            hint="Set it to a URL such as http://127.0.0.1:8080.",
        )
    return url, Secret(key) if key else None


def gateway_url(host: str | None, port: int | None) -> str:
    """The URL for an address from the command line: HOST, HOST:PORT or a URL. Raises
    BadRequest."""
    scheme, mark, address = (host or "127.0.0.1").rstrip("/").rpartition("://")
    try:
        # Only an IPv6 address with a port has brackets.
        url_parts = urlsplit(
            f"//[{address}]" if address.count(":") > 1 and "[" not in address else f"//{address}"
        )
        name = url_parts.hostname
        typed_port = url_parts.port
    except ValueError:
        name = None
        typed_port = None
    if not name or url_parts.path or (port is not None and typed_port not in (None, port)):
        raise BadRequest(
            f"{shown_address(host or '')!r} is not the address of a gateway.",
            hint="Use HOST, HOST:PORT or http://HOST:PORT, with one port number.",
        )
    number = port or typed_port or (None if mark else _PORT)
    return f"{scheme if mark else 'http'}://{f'[{name}]' if ':' in name else name}" + (
        f":{number}" if number else ""
    )


def _local_url() -> str:
    from gateway.settings import load_settings

    return load_settings().own_url


def _certificate_path() -> str:
    from gateway.settings import load_settings

    return str(load_settings().tls_cert)


def _http_client(timeout_s: float | None = _PATIENCE_S) -> httpx.Client:
    """A client of the gateway, with its key. Raises SettingsError, BadRequest."""
    import ssl

    import httpx

    url, key = address()
    verify: ssl.SSLContext | bool = True
    if url.startswith("http://"):
        # No authority is trusted, and no file of authorities is read: 20 ms of a command.
        verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    elif url.startswith("https://") and not os.environ.get("FITSERVE_URL"):
        # The gateway of this machine: only its own certificate is trusted, for any host name.
        verify = ssl.create_default_context()
        try:
            verify.load_verify_locations(_certificate_path())
        except OSError as error:
            raise SettingsError(
                f"The certificate of this machine's gateway, {_certificate_path()}, cannot be used:"
                f" {short_reason(error)}.",
                hint="Set FITSERVE_TLS_CERT to a valid certificate.",
            ) from None
        verify.check_hostname = False
        verify.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    headers = {b"user-agent": f"fitserve/{__version__}".encode()}
    if key is not None:
        headers[b"authorization"] = b"Bearer " + key.reveal_bytes()
    try:
        return httpx.Client(
            base_url=url,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=5),
            trust_env=False,
            verify=verify,
        )
    except httpx.InvalidURL as error:
        raise BadRequest(
            f"FITSERVE_URL is {shown_address(url)!r}, which is not a URL"
            f" ({Secret(url).hidden_in(str(error))}).",
            hint="Set it to a URL such as http://127.0.0.1:8080.",
        ) from None


def _unreachable_error(client: httpx.Client, error: Exception) -> NotReady:
    import httpx

    if isinstance(error, httpx.ReadTimeout):
        return NotReady(
            f"The gateway at {client.base_url} has not answered for {client.timeout.read:.0f} s.",
            hint="It may still be working on the request. Check `fitserve list` before you retry.",
        )
    return NotReady(
        f"No gateway answers at {client.base_url} ({short_reason(error)}).",
        hint="Start one with `fitserve serve`, or set FITSERVE_URL.",
    )


def _response_error(client: httpx.Client, response: httpx.Response) -> FitserveError:
    """The error of an answer that was read."""
    if _SOURCE not in response.headers:
        return _foreign_program_error(client, response.status_code)
    return _reported_error(response.status_code, response.content)


# Every error that passes the gateway has this header.
_SOURCE = "x-gateway-source"


def _foreign_program_error(client: httpx.Client, status: int) -> NotReady:
    return NotReady(
        f"The server at {client.base_url} is not fitserve (status {status}): another program has"
        " this port, or a proxy stands before the gateway.",
        hint="Start the gateway on a free port with FITSERVE_PORT, or set FITSERVE_URL to it.",
    )


def _reported_error(status: int, body: bytes) -> FitserveError:
    try:
        content = json.loads(body)["error"]
        message = str(content["message"])
        code = str(content.get("code"))
        param = content.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        message = f"The gateway answered with status {status}."
        code = FitserveError.code
        param = None
    if status == Unauthorized.status:
        message += " Set FITSERVE_KEY, or give --key before the command."
    error = FitserveError(message, param=param)
    error.code = code
    error.status = status
    error.exit_code = _exit_codes().get(code) or {400: 2, 422: 3, 503: 3}.get(status, 1)
    return error


def _exit_codes() -> dict[str, int]:
    """Exit codes by error code: an error of the gateway ends a command like a local one."""
    kinds: list[type[FitserveError]] = [FitserveError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return {kind.code: kind.exit_code for kind in kinds}
