"""An engine's Python, asked outside of a gateway: for benchmarks that put questions of many models
into one document."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Mapping
from pathlib import Path

from gateway.engines.inquiry import script
from gateway.errors import HostError
from gateway.hosts.process import child


def asked_in(
    python: str, document: bytes, env: Mapping[str, str], limit_s: float | None = None
) -> tuple[list[bytes], str]:
    """The lines of an engine's Python, and the reason of an early end; empty: no early end."""

    async def run() -> tuple[list[bytes], str]:
        chunks: list[bytes] = []
        lines = child.stream_child_lines(
            script.command(python),
            script.input_bytes(document),
            cwd=Path(tempfile.gettempdir()),
            env=env,
        )
        try:
            async with asyncio.timeout(limit_s), contextlib.aclosing(lines):
                async for line in lines:
                    chunks.append(line)  # noqa: PERF401 - lines until the end are kept
        except HostError as error:
            return chunks, error.message
        except TimeoutError:
            return chunks, f"{limit_s} s were over"
        return chunks, ""

    return asyncio.run(run())
