"""A batch by the openai SDK, answered by the real engine."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
import pytest

from tests.e2e.conftest import Gateway
from tests.support.batch_calls import CHAT, ENDS, batch_line
from tests.support.patience import Patience, hang_s
from tests.support.sdk_calls import openai_client

pytestmark = pytest.mark.engine


def test_the_sdk_runs_a_batch_at_the_real_engine(serving_demo: Gateway) -> None:
    with openai_client(serving_demo.url, timeout=hang_s()) as client:
        lines = [
            batch_line(f"line-{number}", model="demo", max_tokens=4, temperature=0)
            for number in range(6)
        ]
        lines.append(batch_line("wrong", model="demo", max_tokens="many"))
        file = client.files.create(file=("input.jsonl", b"".join(lines)), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        patience = Patience(3 * hang_s())
        while batch.status not in ENDS:
            assert not patience.is_over(), batch
            time.sleep(patience.pause_s(0.1))
            batch = client.batches.retrieve(batch.id)
        assert batch.status == "completed", batch
        rows = _rows(client, batch.output_file_id)
        assert {row["custom_id"] for row in rows} == {f"line-{number}" for number in range(6)}
        texts = {row["response"]["body"]["choices"][0]["message"]["content"] for row in rows}
        assert len(texts) == 1  # equal questions without chance
        assert all(row["response"]["body"]["usage"]["completion_tokens"] for row in rows)
        (failure,) = _rows(client, batch.error_file_id)
        assert (failure["custom_id"], failure["response"]["status_code"]) == ("wrong", 400)


def _rows(client: openai.OpenAI, file_id: str | None) -> list[Any]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).content.splitlines()]
