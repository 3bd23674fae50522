"""The parser that a plan names reads back texts of the model's own chat template, in every engine
version that has it.

The golden answers are made anew by scripts/engine-answers (parser_questions.py, and
sglang_parser_questions.py for SGLang, which is asked about thoughts too). parser_families.txt has
the parsers of each family of models in each version.
"""

from __future__ import annotations

import pytest

from gateway.domain import ModelSpec
from gateway.engines.common.chat.parsers import NO_PARSER
from gateway.profiles.profiles import Profiles
from tests.conformance import parser_families, parser_questions, sglang_parser_questions
from tests.conformance.dialects import Dialect, kept_dialects
from tests.conformance.golden import pairs
from tests.support.published import published_model
from tests.support.versions import NEWEST_SGLANG, SGLANG, SGLANG_REF, VLLM, VLLM_REF

PROFILES = Profiles()
# model_type, where a row asks for it, by how the name of the template begins.
TYPES = {
    "ibm-granite": "granite",
    "Qwen": "qwen3",
    "meta-llama": "llama",
    "StepFun": "step3p5",
    "tencent": "hunyuan_v3",
}
# Parsers that a stand-in for a tokenizer cannot try, and why.
UNTRIED = {
    "mistral": "it asks the tokenizer of mistral-common how to read",
    "openai": "it reads tokens, not text",
    "gigachat3": "special tokens around the call are gone before it reads",
    "hy_v3": "the suffix of its tokens is the tokenizer's",
}
# The parts of the template's text that a version's own parser does not read.
UNREAD = {
    ("0.18.0", "deepseek-ai-DeepSeek-V3.2"),
    ("0.19.1", "deepseek-ai-DeepSeek-V3.2"),
    ("0.26.0", "MiniMax-M3"),
}
# Before 0.33 the parser of Granite wants nothing behind the list: the end of the turn, which the
# template writes, engines take off the text.
UNREAD |= {
    (version, "ibm-granite-granite-3.3-2B-Instruct repaired")
    for version in ("0.18.0", "0.19.1", "0.26.0")
}
# The same of SGLang: "" for all its versions.
SGLANG_UNREAD = {
    (
        "",
        "GigaChat3",
        (
            "the parser wants the special tokens around the call, which the template has and a text"
            " loses"
        ),
    ),
    (
        "",
        "Mistral-Small-3.2",
        "the template writes the id of a call too, which the parser does not take",
    ),
    (
        "",
        "Mistral-Nemo",
        "the parser wants a space that the model's tokenizer puts, and the template does not",
    ),
    ("", "gpt-oss", "it reads the channels of a whole conversation"),
    ("0.5.10.post1", "Laguna-XS", "glm47 reads the calls of Laguna S, and of XS only glm45"),
    (
        "0.5.23",
        "GLM-4.6",
        "the template writes a line break before the thought, which no parser of it takes",
    ),
    ("0.5.23", "tencent-Hy3", "the suffix of its tokens is the tokenizer's"),
}
# Kinds of models that must not fall out of the table.
FAMILIES = (
    "Apertus", "ByteDance-Seed", "GLM-4.6", "GLM-4.7", "GigaChat3", "Kimi-K2", "LFM2.5-8B",
    "MiniMax-M2", "Mistral-Small", "NVIDIA-Nemotron-3",
    "NousResearch-Hermes-3", "Qwen-Qwen2.5", "Qwen-Qwen3", "Qwen-QwQ", "Qwen3-Coder", "Qwen3.5",
    "StepFun", "deepseek-ai-DeepSeek-R1",
    "deepseek-ai-DeepSeek-V3.1", "deepseek-ai-DeepSeek-V3.2", "google-gemma-4", "granite-4.0",
    "Llama-3.1", "Llama-3.3", "Ministral-3", "gpt-oss",
    "Devstral", "Bielik", "Reka", "MiMo",
)  # fmt: skip


def spec(dialect: Dialect) -> ModelSpec:
    model_type = next(
        (kind for begins, kind in TYPES.items() if dialect.name.startswith(begins)), "other"
    )
    return published_model("llama-3.1-8b").evolve(
        chat_template=dialect.template(), model_type=model_type
    )


@pytest.mark.parametrize("version", VLLM)
def test_the_parser_reads_calls_of_the_template(version: str) -> None:
    engine = PROFILES.engine(f"vllm=={version}")
    read = dict(pairs(parser_questions, version, "9.0"))
    wrong = []
    for dialect in kept_dialects():
        if dialect.calls is None:
            continue
        planner_parser = PROFILES.parsers.writing(spec(dialect)).tool_parser(engine).value
        template_parsers = read[dialect.name, dialect.calls]
        if (
            planner_parser not in (NO_PARSER, *UNTRIED, *template_parsers)
            and (version, dialect.name) not in UNREAD
        ):
            wrong.append(
                f"{dialect.name}: {planner_parser}, and {template_parsers or 'none'} read it"
            )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ref", [VLLM_REF, SGLANG_REF])
def test_a_family_that_calls_tools_has_a_parser(family: str, ref: str) -> None:
    dialects = [dialect for dialect in kept_dialects() if family in dialect.name]
    assert dialects
    if ref.startswith("sglang") and family == "ByteDance-Seed":
        pytest.skip(f"SGLang {NEWEST_SGLANG} has no parser for Seed-OSS")
    assert NO_PARSER not in {
        PROFILES.parsers.writing(spec(dialect)).tool_parser(PROFILES.engine(ref)).value
        for dialect in dialects
    }


@pytest.mark.parametrize("version", SGLANG)
def test_sglangs_parser_reads_calls_of_the_template(version: str) -> None:
    engine = PROFILES.engine(f"sglang=={version}")
    templates = {dialect.name: dialect for dialect in kept_dialects()}
    wrong = set()
    for question, read in pairs(sglang_parser_questions, version, "9.0"):
        model = spec(templates[question.model]).evolve(added_tokens=("<think>", "</think>"))
        writing = PROFILES.parsers.writing(model)
        planner_parser = (
            writing.tool_parser(engine)
            if question.about == "calls"
            else writing.reasoning_parser(engine)
        ).value
        if planner_parser not in (NO_PARSER, *read):
            wrong.add(question.model)
    unread_names = {name for since, name, _ in SGLANG_UNREAD if since in ("", version)}
    assert {
        name for name in wrong if not any(name_part in name for name_part in unread_names)
    } == set()
    assert all(any(name_part in name for name in wrong) for name_part in unread_names), (
        "an exception that is none any more"
    )


def test_every_family_has_the_parser_of_the_table() -> None:
    """By the registry of each version: no version is given a parser that it does not list."""
    assert len(parser_families.FAMILIES) >= 25
    assert parser_families.text(PROFILES) == parser_families.KEPT.read_text()
    for ref in parser_families.VERSIONS:
        flags, at = PROFILES.engine(ref).flags, parser_families.VERSIONS.index(ref)
        for family in parser_families.FAMILIES:
            tools, thoughts = parser_families.parsers_by_version(PROFILES, family)[at].split("/")
            assert tools == "-" or tools in (flags["tool-call-parser"].choices or ()), (ref, family)
            assert thoughts == "-" or thoughts in (flags["reasoning-parser"].choices or ()), (
                ref,
                family,
            )
