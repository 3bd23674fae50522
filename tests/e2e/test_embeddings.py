"""A real sentence embedding model on the real CPU engine: read, planned without a KV cache, verified and asked; removed, it leaves no process."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from tests.e2e.conftest import Gateway, wait_for
from tests.e2e.scripted import engines as running_engines
from tests.e2e.test_sdk_differential import engine_of
from tests.support.sdk_calls import OPENAI_VECTORS, told_openai

pytestmark = pytest.mark.engine


def test_sentences_become_embeddings(gateway: Gateway, minilm: Path) -> None:
    added = gateway.cli("add", "minilm", str(minilm), "--wait")
    assert added.returncode == 0, added.stderr
    view = gateway.show("minilm")
    assert view["plan"]["memory"]["kv_bytes_per_token"] == 0
    assert view["attempts"][0]["grade"] == "verified"
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        sentences = ["A cat sits on the mat.", "A kitten is sitting on a rug.", "The central bank raised interest rates."]
        answer = client.embeddings.create(model="minilm", input=sentences, encoding_format="float")
        cat, kitten, bank = [item.embedding for item in answer.data]
        assert len(cat) == 384
        near, far = (sum(a * b for a, b in zip(cat, other, strict=True)) for other in (kitten, bank))
        assert near > 0.5 > far
        with pytest.raises(openai.BadRequestError, match="makes embeddings"):
            client.completions.create(model="minilm", prompt="Hello")
    engine, key = engine_of(gateway, "minilm")
    for call in OPENAI_VECTORS.values():
        straight, through = (told_openai(call, url, "minilm", key) for url in (engine, gateway.url))
        assert straight.status == 200
        assert through == straight
    removed = gateway.cli("rm", "minilm", "--wait")
    assert removed.returncode == 0, removed.stderr
    wait_for("no engine processes", lambda: not running_engines(gateway))
