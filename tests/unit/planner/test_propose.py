"""Answers that the model's own generation_config.json ends early, where the engine applies it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import ModelSpec
from gateway.models.catalog.catalog import load
from gateway.models.catalog.hub import Hub
from gateway.profiles.profiles import Profiles
from tests.support.makers import spec, wish
from tests.support.planning import decide
from tests.support.published import config
from tests.support.versions import SGLANG_REF, VLLM_REF

PROFILES = Profiles()


def warnings(limit: int | None, engine: str = VLLM_REF, **args: Any) -> list[str]:
    """The warnings about short answers in the first plan for a model with this limit."""
    engines = [PROFILES.engine(engine)]
    decision = decide(
        spec().evolve(answer_limit=limit),
        PROFILES.hardware("h200"),
        engines,
        wish(args={name.replace("_", "-"): value for name, value in args.items()}),
        rules=PROFILES.rules(engines),
    )
    return [line for line in decision.plans[0].warnings if "max_new_tokens" in line]


def test_the_warning_has_the_figure_and_the_flag_that_lifts_it() -> None:
    (line,) = warnings(20)
    assert "end after 20 tokens" in line
    assert """--arg 'override-generation-config={"max_new_tokens": null}'""" in line


@pytest.mark.parametrize(
    ("limit", "engine", "args"),
    [
        (None, VLLM_REF, {}),
        (10**7, VLLM_REF, {}),  # longer than the context
        (20, SGLANG_REF, {}),  # ignores the key
        (20, VLLM_REF, {"generation_config": "vllm"}),
        (20, VLLM_REF, {"override_generation_config": '{"max_new_tokens": null}'}),
        (20, VLLM_REF, {"override_generation_config": '{"max_new_tokens": 4096}'}),
    ],
)
def test_no_warning_where_nothing_is_cut(
    limit: int | None, engine: str, args: dict[str, Any]
) -> None:
    assert warnings(limit, engine, **args) == []


def test_another_override_lifts_nothing() -> None:
    assert warnings(512, override_generation_config='{"temperature": 0.5}')


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ('{"max_new_tokens": 20, "temperature": 0.6}', 20),
        ('{"max_length": 20}', None),  # vLLM does not read it
        ('{"max_new_tokens": null}', None),
        ('{"max_new_tokens": true}', None),
        ('{"max_new_tokens": "20"}', None),
        ("[]", None),
        ("not JSON", None),
        (None, None),
    ],
)
def test_the_limit_is_read_and_a_file_that_no_engine_can_read_is_passed_over(
    tmp_path: Path, text: str | None, limit: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("qwen3-8b")))
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    model = load(str(tmp_path), hub=Hub("http://127.0.0.1:9", None, tmp_path))
    assert isinstance(model, ModelSpec)
    assert model.answer_limit == limit
