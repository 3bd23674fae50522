"""Settings of uvicorn, equal for a single gateway process, a worker and the control process."""

from __future__ import annotations

import asyncio
from typing import Literal

import uvicorn
from starlette.types import ASGIApp


def uvicorn_config(
    app: ASGIApp,
    http: type[asyncio.Protocol] | Literal["httptools"],
    *,
    lifespan: Literal["on", "off"],
    grace_s: float,
) -> uvicorn.Config:
    """http: the protocol of client connections.
    grace_s: how long requests may continue when the server stops.
    """
    config = uvicorn.Config(
        app,
        http=http,
        ws="none",
        lifespan=lifespan,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=round(grace_s),
    )
    config.load()
    return config
