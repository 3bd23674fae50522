"""Engines with abilities, and models that they serve."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gateway.domain import LaunchSpec
from tests.support.running import Running, model_folder
from tests.support.scripted_engine import EngineScript
from tests.support.versions import VLLM_REF

ALL = frozenset({"tools", "required_tools", "reasoning", "json_schema"})


# Qwen3's marks; the engine is scripted, so that nothing else of a template counts.
TEMPLATE = (
    "<tool_call></think>{% if enable_thinking %}{% endif %}{% if add_generation_prompt %}{%"
    " endif %}"
)


ENGINE = VLLM_REF


def chat_model(folder: Path, template: str = TEMPLATE) -> Path:
    model_folder(folder, model_type="qwen3")
    tokens = {
        str(number): {"content": token} for number, token in enumerate(("<think>", "</think>"))
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "added_tokens_decoder": tokens})
    )
    return folder


def doing(
    does: frozenset[str], record: Path | None = None, **script: Any
) -> Callable[[LaunchSpec], EngineScript]:
    return lambda spec: EngineScript(model=spec.model, does=does, record=record, **script)


async def add_model(
    gateway: Running, folder: Path, template: str = TEMPLATE, state: str = "ready", **fields: Any
) -> Any:
    await gateway.add("m", chat_model(folder, template), engines=[ENGINE], **fields)
    return await gateway.until("m", state)
