"""A backup that is downloaded: its file is closed however the download ends."""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

import pytest

from gateway.server.admin.backup_routes import Download

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_client_that_leaves_leaves_no_open_file(has_begun: bool) -> None:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the answer closes it
    file.write(b"x" * 1_000_000)
    messages: list[Any] = []
    leaves = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if has_begun:
            await leaves.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        messages.append(message)
        if message["type"] == "http.response.body":
            leaves.set()
        if message["type"] == "http.response.body" or not has_begun:
            await asyncio.Event().wait()

    await Download(file)({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
    assert file.closed
    assert [message["type"] for message in messages][1:] == (
        ["http.response.body"] if has_begun else []
    )
