"""gateway.hosts.process.child: whoever leaves is not kept."""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from gateway.hosts.process.child import stream_child_lines
from tests.support.patience import hang_s

pytestmark = pytest.mark.anyio


async def test_a_child_that_floods_has_left_once_its_reader_leaves(tmp_path: Path) -> None:
    async with asyncio.timeout(hang_s()):
        flood: Any = stream_child_lines(("yes",), b"", cwd=tmp_path, env=os.environ)
        async with aclosing(flood) as lines:
            assert await anext(lines) == b"y"
            child = lines.ag_frame.f_locals["child"]
            # asyncio reads no more until somebody has taken its bytes.
            while not child.stdout._paused:
                await asyncio.sleep(0)
        assert child.returncode is not None
