"""The wait for a client that leaves before its answer is whole."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any


async def wait_for_disconnect(receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> None:
    """Return once the client of an ASGI request has left. The rest of its body is dropped."""
    while (await receive())["type"] != "http.disconnect":
        pass
