"""The author of a request that changes a wish."""

from __future__ import annotations

import time

from starlette.requests import Request

from gateway.domain.wish import Way, WishOrigin

# Value of the header User-Agent of this program's commands.
_COMMAND_AGENT = "fitserve/"


def wish_origin(request: Request, restored: int | None = None) -> WishOrigin:
    """The author of `request`.

    restored: number of the former wish that a rollback restores.
    """
    caller = request.scope.get("caller")
    return WishOrigin(
        at=time.time(),
        key="" if caller is None else caller.name,
        way="models file" if caller is None else _way(request),
        restored=restored,
    )


def _way(request: Request) -> Way:
    """The program of the caller, by its own word. A browser always sends `Sec-Fetch-Site`."""
    if "sec-fetch-site" in request.headers:
        return "page"
    is_command = request.headers.get("user-agent", "").startswith(_COMMAND_AGENT)
    return "command line" if is_command else "API"
