"""`fitserve usage` against a whole gateway."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.support.commands import fitserve
from tests.support.run_scripts import script
from tests.support.running import model_folder, running

pytestmark = pytest.mark.anyio


async def test_usage_is_a_table_json_or_csv(tmp_path: Path) -> None:
    async with running(tmp_path, script) as gateway:
        await gateway.add("m", model_folder(tmp_path / "model"))
        await gateway.until("m", "ready")
        ask = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        usage_of_answer = (await gateway.client.post("/v1/chat/completions", json=ask)).json()[
            "usage"
        ]

        async def usage(*arguments: str) -> str:
            outcome = await asyncio.to_thread(
                fitserve, "usage", *arguments, FITSERVE_URL=gateway.url
            )
            assert outcome.returncode == 0, outcome.stderr
            return str(outcome.stdout)

        head, row = (await usage()).splitlines()
        assert head.split() == [
            "KEY",
            "MODEL",
            "REQUESTS",
            "PROMPT",
            "COMPLETION",
            "CACHED",
            "UNCOUNTED",
            "ESTIMATED",
        ]
        assert row.split() == [
            "-",
            "m",
            "1",
            str(usage_of_answer["prompt_tokens"]),
            str(usage_of_answer["completion_tokens"]),
            "0",
            "0",
            "0",
        ]
        assert json.loads(await usage("--json", "--by", "model"))["data"][0]["requests"] == 1
        assert (await usage("--csv", "--by", "model")).splitlines()[1].startswith("m,1,")
        result = await asyncio.to_thread(
            fitserve, "usage", "--by", "hour", FITSERVE_URL=gateway.url
        )
        assert (result.returncode, "not counted by 'hour'" in result.stderr) == (2, True)
