"""`fitserve knowledge`: signed bundles of profiles for a running gateway."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.cli.client import call
from gateway.cli.options import Json
from gateway.cli.terminal import say
from gateway.cli.text_tables import print_paragraph
from gateway.errors import BadRequest, NotReady, short_reason

app = typer.Typer(
    no_args_is_help=True,
    help="Signed bundles of profiles: engines, failures and cards without a release.",
    rich_markup_mode=None,
)
_BUNDLE_BYTES = 32 * 1024 * 1024
_PATIENCE_S = 60.0


@app.command("update")
def update(
    source: Annotated[str, typer.Argument(help="File of the bundle, or its http(s) address.")],
    as_json: Json = False,
) -> None:
    """Take a bundle into the running gateway. The one in use is kept for a rollback."""
    is_address = source.startswith(("http://", "https://"))
    content = _download(source) if is_address else _read(Path(source))
    _print(call("POST", "/admin/knowledge", content=content), as_json=as_json)


@app.command("status")
def status(as_json: Json = False) -> None:
    """Show the bundle in use, the one before it, and the trusted keys."""
    _print(call("GET", "/admin/knowledge"), as_json=as_json)


@app.command("rollback")
def rollback(as_json: Json = False) -> None:
    """Return to the bundle before, or to the shipped profiles."""
    _print(call("POST", "/admin/knowledge/rollback"), as_json=as_json)


def _print(view: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        say(json.dumps(view, indent=2))
        return
    say(f"in use    {_bundle_text(view['bundle'])}")
    if view["bundle"] is not None:
        say(f"rollback  {_bundle_text(view['previous'])}")
    say(f"keys      {', '.join(view['keys']) or 'none is trusted'}")
    if view["problem"]:
        print_paragraph(view["problem"])


def _bundle_text(bundle: dict[str, Any] | None) -> str:
    if bundle is None:
        return "the profiles shipped with fitserve"
    note = f": {bundle['note']}" if bundle["note"] else ""
    return f"bundle {bundle['number']} of {bundle['date']}{note}"


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_BUNDLE_BYTES + 1)
    except OSError as error:
        raise BadRequest(
            f"{path} cannot be read: {error.strerror}.", hint="Name the file of a bundle."
        ) from None
    return _check_size(content, str(path))


def _download(address: str) -> bytes:
    """The content at an address, with the proxies of this shell. Raises NotReady, BadRequest."""
    import httpx

    content = bytearray()
    try:
        with httpx.stream("GET", address, timeout=_PATIENCE_S, follow_redirects=True) as response:
            response.raise_for_status()
            for piece in response.iter_bytes():
                content += piece
                if len(content) > _BUNDLE_BYTES:
                    break
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NotReady(
            f"The bundle cannot be downloaded: {short_reason(error)}.",
            hint="Check the address, or download it with another program and name the file.",
        ) from None
    return _check_size(bytes(content), "The download")


def _check_size(content: bytes, name: str) -> bytes:
    """The content, unless it is larger than a bundle may be. Raises BadRequest."""
    if len(content) > _BUNDLE_BYTES:
        raise BadRequest(
            f"{name} has more than {_BUNDLE_BYTES // 1024**2} MiB, so it is not a bundle.",
            hint="Name the file that `scripts/knowledge pack` wrote.",
        )
    return content
