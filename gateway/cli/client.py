"""The CLI's side of the admin API: FITSERVE_URL says where, FITSERVE_KEY (or FITSERVE_ADMIN_KEY) is
the key."""

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
    in_brief,
)

if TYPE_CHECKING:
    import ssl

    import httpx


# As FITSERVE_PORT has it by default: another machine's settings are not known here.
_PORT = 8080
# Planning a large repository reads its headers over the network first.
_PATIENCE_S = 120.0
_NO_TEXT = "What was given is not valid UTF-8."


def call(method: str, path: str, body: Any = None, *, timeout_s: float | None = _PATIENCE_S) -> Any:
    """The JSON answer; timeout_s None: however long it takes. Raises the gateway's own error with
    its words, or NotReady when nothing answers."""
    import httpx

    with _client(timeout_s) as client:
        try:
            response = client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise _unreachable(client, error) from None
        except UnicodeEncodeError:
            raise BadRequest(_NO_TEXT, hint="Type it again.") from None
        if response.is_error:
            raise _reported_error(response.status_code, response.content)
        return response.json()


def text(path: str) -> str:
    """The answer as it is."""
    return b"".join(stream(path, {})).decode(errors="replace")


def stream(
    path: str, query: dict[str, Any], *, method: str = "GET", body: Any = None
) -> Iterator[bytes]:
    """The answer's bytes as they come."""
    import httpx

    # Of what is asked for by POST nobody knows how long it is silent: a request that waits for a
    # model.
    with _client(_PATIENCE_S if method == "GET" else None) as client:
        try:
            with client.stream(method, path, params=query, json=body) as response:
                if response.is_error:
                    raise _reported_error(response.status_code, response.read())
                yield from response.iter_raw()
        except httpx.HTTPError as error:
            raise _unreachable(client, error) from None


def lines(path: str, body: Any) -> Iterator[str]:
    """The lines of an answer that comes line by line, to a POST."""
    import codecs

    decoder, rest = codecs.getincrementaldecoder("utf-8")("replace"), ""
    for piece in stream(path, {}, method="POST", body=body):
        *whole, rest = (rest + decoder.decode(piece)).split("\n")
        yield from whole
    if rest:
        yield rest


def reported(said: Any) -> FitserveError:
    """The error that an answer's body tells of."""
    return _reported_error(500, json.dumps(said).encode())


def in_path(name: str) -> str:
    """A name as a part of a path, whatever was typed: `m?` is not `m`, and `a/../m` neither. Raises
    BadRequest."""
    try:
        return "/".join(
            one.replace(".", "%2E") if one in (".", "..") else quote(one, safe=":")
            for one in name.split("/")
        )
    except UnicodeEncodeError:
        raise BadRequest(_NO_TEXT, hint="Type it again.") from None


def of_model(name: str, below: str = "") -> str:
    """The path of a model in the admin API, or of what is below it: `/retry`, `?weights=true`.
    Raises BadRequest."""
    return f"/admin/models/{in_path(name)}{below}"


def address() -> tuple[str, str | None]:
    """Where the gateway is, and the key. Without FITSERVE_URL it is where the settings of this
    shell would have it listen. Raises SettingsError."""
    url = os.environ.get("FITSERVE_URL") or _here()
    key = os.environ.get("FITSERVE_KEY") or os.environ.get("FITSERVE_ADMIN_KEY")
    if not url.startswith(("http://", "https://")):
        raise BadRequest(
            f"FITSERVE_URL is {url!r}, which is not a URL.",
            hint="Give one like http://127.0.0.1:8080.",
        )
    return url, key


def url_of(host: str | None, port: int | None) -> str:
    """The URL of a gateway whose address was typed: HOST, HOST:PORT or a URL. Raises BadRequest."""
    scheme, mark, rest = (host or "127.0.0.1").rstrip("/").rpartition("://")
    try:
        # An IPv6 address has brackets where a port stands behind it.
        given = urlsplit(f"//[{rest}]" if rest.count(":") > 1 and "[" not in rest else f"//{rest}")
        name, known = given.hostname, given.port
    except ValueError:
        name, known = None, None
    if not name or given.path or (port is not None and known not in (None, port)):
        raise BadRequest(
            f"{host!r} is no address of a gateway.",
            hint="Give HOST, HOST:PORT or http://HOST:PORT, and the port once.",
        )
    number = port or known or (None if mark else _PORT)
    return f"{scheme if mark else 'http'}://{f'[{name}]' if ':' in name else name}" + (
        f":{number}" if number else ""
    )


def _here() -> str:
    from gateway.settings import load_settings

    return load_settings().own_url


def _certificate() -> str:
    from gateway.settings import load_settings

    return str(load_settings().tls_cert)


def _client(timeout_s: float | None = _PATIENCE_S) -> httpx.Client:
    import httpx

    url, key = address()
    verify: ssl.SSLContext | bool = True
    if url.startswith("https://") and not os.environ.get("FITSERVE_URL"):
        import ssl

        # The gateway of this machine: its certificate itself is what is trusted, whatever name it
        # is for.
        verify = ssl.create_default_context()
        try:
            verify.load_verify_locations(_certificate())
        except OSError as error:
            raise SettingsError(
                f"The certificate {_certificate()}, by which the gateway of this machine is known,"
                f" cannot be used: {in_brief(error)}.",
                hint="Put a good one at FITSERVE_TLS_CERT.",
            ) from None
        verify.check_hostname = False
        verify.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    headers = {b"authorization": f"Bearer {key}".encode(errors="surrogateescape")} if key else {}
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
            f"FITSERVE_URL is {url!r}, which is not a URL ({error}).",
            hint="Give one like http://127.0.0.1:8080.",
        ) from None


def _unreachable(client: httpx.Client, error: Exception) -> NotReady:
    import httpx

    if isinstance(error, httpx.ReadTimeout):
        return NotReady(
            f"The gateway at {client.base_url} has not answered for {client.timeout.read:.0f} s.",
            hint="It may still do what was asked: see `fitserve list` before you try again.",
        )
    return NotReady(
        f"No gateway answers at {client.base_url} ({in_brief(error)}).",
        hint="Start one with `fitserve serve`, or set FITSERVE_URL.",
    )


def _reported_error(status: int, body: bytes) -> FitserveError:
    try:
        said = json.loads(body)["error"]
        message, code = str(said["message"]), str(said.get("code"))
    except (ValueError, KeyError, TypeError, AttributeError):
        message, code = f"The gateway answered with status {status}.", FitserveError.code
    if status == Unauthorized.status:
        message += " Here it comes from FITSERVE_KEY, or from --key before the command."
    error = FitserveError(message)
    error.code = code
    error.status = status
    error.exit_code = _exit_codes().get(code) or {400: 2, 422: 3, 503: 3}.get(status, 1)
    return error


def _exit_codes() -> dict[str, int]:
    """By the code of the error: a command ends as it would have, had the error happened here."""
    kinds: list[type[FitserveError]] = [FitserveError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return {kind.code: kind.exit_code for kind in kinds}
