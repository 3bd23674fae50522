"""The parser that a plan names reads back what the model's own chat template writes, in every engine version that has it.

The golden answers are made anew by scripts/engine-answers (tests/conformance/parser_questions.py).
"""

from __future__ import annotations

import pytest

from gateway.core.chat.parsers import NONE
from gateway.domain import ModelSpec
from gateway.profiles import Profiles
from tests.conformance import parser_questions
from tests.conformance.dialects import Dialect, kept
from tests.conformance.golden import pairs
from tests.support.published import published
from tests.support.versions import VLLM

PROFILES = Profiles()
# model_type, where a row asks for it, by how the name of the template begins.
TYPES = {"ibm-granite": "granite", "Qwen": "qwen3", "meta-llama": "llama", "StepFun": "step3p5", "tencent": "hunyuan_v3"}
# Parsers that a stand-in for a tokenizer cannot try, and why.
UNTRIED = {
    "mistral": "it asks the tokenizer of mistral-common how to read",
    "openai": "it reads tokens, not text",
    "gigachat3": "special tokens around the call are gone before it reads",
    "hy_v3": "the suffix of its tokens is the tokenizer's",
}
# What a version's own parser does not read of what the template writes.
UNREAD = {("0.18.0", "deepseek-ai-DeepSeek-V3.2"), ("0.19.1", "deepseek-ai-DeepSeek-V3.2"), ("0.26.0", "MiniMax-M3")}
# Kinds of models that must not fall out of the table.
FAMILIES = (
    "Apertus", "ByteDance-Seed", "GLM-4.6", "GLM-4.7", "GigaChat3", "Kimi-K2", "LFM2.5-8B", "MiniMax-M2", "Mistral-Small", "NVIDIA-Nemotron-3",
    "NousResearch-Hermes-3", "Qwen-Qwen2.5", "Qwen-Qwen3", "Qwen-QwQ", "Qwen3-Coder", "Qwen3.5", "StepFun", "deepseek-ai-DeepSeek-R1",
    "deepseek-ai-DeepSeek-V3.1", "deepseek-ai-DeepSeek-V3.2", "google-gemma-4", "granite-4.0", "Llama-3.1", "Llama-3.3", "Ministral-3", "gpt-oss",
    "Devstral", "Bielik", "Reka", "MiMo",
)  # fmt: skip


def spec(dialect: Dialect) -> ModelSpec:
    model_type = next((kind for begins, kind in TYPES.items() if dialect.name.startswith(begins)), "other")
    made: ModelSpec = published("llama-3.1-8b").evolve(chat_template=dialect.template(), model_type=model_type)
    return made


@pytest.mark.parametrize("version", VLLM)
def test_the_parser_reads_what_the_template_writes(version: str) -> None:
    engine, read = PROFILES.engine(f"vllm=={version}"), dict(pairs(parser_questions, version, "9.0"))
    wrong = []
    for dialect in kept():
        if dialect.calls is None:
            continue
        mine, theirs = PROFILES.parsers.of(spec(dialect)).tool_parser(engine).value, read[dialect.name, dialect.calls]
        if mine not in (NONE, *UNTRIED, *theirs) and (version, dialect.name) not in UNREAD:
            wrong.append(f"{dialect.name}: {mine}, and {theirs or 'none'} read it")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ref", ["vllm==0.33.0", "sglang==0.5.23"])
def test_a_family_that_calls_tools_has_a_parser(family: str, ref: str) -> None:
    found = [one for one in kept() if family in one.name]
    assert found
    if ref.startswith("sglang") and family == "ByteDance-Seed":
        pytest.skip("SGLang 0.5.23 has no parser for Seed-OSS")
    assert NONE not in {PROFILES.parsers.of(spec(one)).tool_parser(PROFILES.engine(ref)).value for one in found}
