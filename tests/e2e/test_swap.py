"""Two real models on the real CPU engine in RAM that holds one of them: each is loaded when it is
asked, and the other one leaves for it. One of them
embeds: read, planned without a KV cache, verified and asked; removed, they leave no process."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

import openai
import pytest

from gateway.cli.demo.checkpoint import SENTENCE
from gateway.domain.units import GIB
from tests.e2e.conftest import ENGINE, START_S, Gateway, wait_for, with_real_engines
from tests.e2e.scripted import engines as running_engines
from tests.e2e.test_sdk_differential import engine_of
from tests.support.sdk_calls import OPENAI_VECTORS, told_openai

pytestmark = pytest.mark.engine

# The gateway leaves 2 GiB of it free, and each of the two engines takes more than 2.
RAM = 6 * GIB
ROUNDS = 1


@contextmanager
def looked_at(gateway: Gateway) -> Iterator[list[tuple[float, frozenset[str]]]]:
    """Which models had a process, each time that it changed."""
    looks: list[tuple[float, frozenset[str]]] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            running_names = frozenset(name.partition("-")[0] for name in running_engines(gateway))
            if not looks or looks[-1][1] != running_names:
                looks.append((time.time(), running_names))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield looks
    finally:
        over.set()
        thread.join()


def embeds(gateway: Gateway, client: openai.OpenAI, name: str) -> None:
    """The model is loaded, and answers as a model for embeddings."""
    sentences = [
        "A cat sits on the mat.",
        "A kitten is sitting on a rug.",
        "The central bank raised interest rates.",
    ]
    answer = client.embeddings.create(model=name, input=sentences, encoding_format="float")
    cat, kitten, bank = [item.embedding for item in answer.data]
    assert len(cat) == 384
    near, far = (sum(a * b for a, b in zip(cat, vector, strict=True)) for vector in (kitten, bank))
    assert near > 0.5 > far
    with pytest.raises(openai.BadRequestError, match="makes embeddings"):
        client.completions.create(model=name, prompt="Hello")
    engine, key = engine_of(gateway, name)
    for call in OPENAI_VECTORS.values():
        straight, through = (told_openai(call, url, name, key) for url in (engine, gateway.url))
        assert straight.status == 200
        assert through == straight
    view = gateway.show(name)
    assert view["plan"]["memory"]["kv_bytes_per_token"] == 0
    assert view["attempts"][0]["grade"] == "verified"


def test_two_models_take_turns_in_ram_that_holds_one_of_them(
    tmp_path: Path, engines: Path, demo_model: Path, minilm: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    with closing(with_real_engines(data, engines, FITSERVE_RAM_BYTES=str(RAM))) as gateway:
        gateway.start()
        with (
            looked_at(gateway) as looks,
            openai.OpenAI(
                base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=START_S
            ) as client,
        ):
            result = gateway.cli("add", "writer", str(demo_model), "--engine", ENGINE, "--wait")
            assert result.returncode == 0, result.stderr
            assert gateway.cli("add", "reader", str(minilm), "--engine", ENGINE).returncode == 0
            # Nobody leaves for a model that nobody asks for.
            assert "writer holds" in gateway.until("reader", "stopped")["detail"]
            for _ in range(ROUNDS):
                embeds(gateway, client, "reader")
                text = (
                    client.completions.create(
                        model="writer", prompt="Hello", max_tokens=12, temperature=0
                    )
                    .choices[0]
                    .text
                )
                assert text
                assert SENTENCE.startswith(text)
        loaded_models = [models for _, models in looks if models]
        assert all(len(models) == 1 for models in loaded_models), looks
        assert [min(models) for models in loaded_models] == [
            "writer",
            *["reader", "writer"] * ROUNDS,
        ]
        views = {name: gateway.show(name) for name in ("writer", "reader")}
        attempts = sorted(
            (attempt for view in views.values() for attempt in view["attempts"]),
            key=lambda attempt: attempt["started_at"],
        )
        assert not [attempt["failure"] for attempt in attempts if attempt["failure"]]
        for before, after in pairwise(attempts):
            load_s = after["ready_at"] - after["started_at"]
            left_s = after["started_at"] - before["ended_at"]
            assert left_s >= 0, "never both at once"
            sys.stdout.write(
                f"{after['instance']}: {load_s:.1f} s from start to proof, {left_s:.1f} s after the"
                " other one ended\n"
            )
        for name in ("writer", "reader"):
            outcome = gateway.cli("rm", name, "--wait")
            assert outcome.returncode == 0, outcome.stderr
        wait_for("no engine processes", lambda: not running_engines(gateway))
