"""A model is changed under load behind several workers: its clients, which are those of the openai
SDK, see nothing of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Gateway, wait_for
from tests.e2e.scripted import engines
from tests.e2e.test_workers import start_gateway
from tests.support.patience import HANG_S
from tests.support.steady_client import PER_SECOND, keep_asking

pytestmark = pytest.mark.anyio


async def wait_for_change(gateway: Gateway, new_context: int) -> dict[str, Any]:
    """The model, once its context is another one and the engine from before is gone."""
    answer = await asyncio.to_thread(
        gateway.client.patch, "/admin/models/m", json={"max_context": new_context}
    )
    assert answer.status_code == 202, answer.text

    def wait_for_end() -> Any:
        view = gateway.show("m")
        serves = (
            view["state"] == "ready"
            and view["change"] is None
            and view["plan"]["max_model_len"]["value"] == new_context
        )
        return serves and len(engines(gateway)) == 1 and view

    view: dict[str, Any] = await asyncio.to_thread(wait_for, "the change", wait_for_end, 4 * HANG_S)
    return view


async def test_no_answer_fails_and_no_stream_breaks_while_a_model_is_changed(
    tmp_path: Path,
) -> None:
    with start_gateway(tmp_path, "--tokens-per-second", str(PER_SECOND)) as gateway:
        async with keep_asking(gateway) as counts:
            for context in (2048, 1024):
                view = await wait_for_change(gateway, context)
                assert view["attempts"][-1]["max_model_len"] == context
            counter = Counter(counts)
            # The one that came last answers too.
            await asyncio.to_thread(
                wait_for, "answers of the last one", lambda: len(counts - counter) == 2
            )
        assert set(counts) == {"streams", "answers"}
        assert [attempt["failure"] for attempt in view["attempts"]] == [None, None, None]
