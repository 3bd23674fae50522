"""The parser of a model's texts: by the marks of its chat template, and only one that the engine
version has."""

from __future__ import annotations

import pytest

from gateway.domain import ModelSpec
from gateway.engines.common.chat.parsers import NO_PARSER
from gateway.profiles.profiles import Profiles
from tests.support.makers import wish
from tests.support.planning import decide
from tests.support.published import published_model
from tests.support.versions import SGLANG_REF, VLLM_REF

PROFILES = Profiles()
TABLE = PROFILES.parsers
PROMPT = "{%- if add_generation_prompt %}"
HERMES = '<tool_call>\n{"name": {{ tool.name }}}\n</tool_call>'


def model_of_template(
    template: str | None,
    model_type: str = "llama",
    tokens: tuple[str, ...] = ("<think>", "</think>"),
) -> ModelSpec:
    return published_model("llama-3.1-8b").evolve(
        chat_template=template, model_type=model_type, added_tokens=tokens
    )


@pytest.mark.parametrize(
    ("template", "model_type", "vllm", "sglang"),
    [
        (HERMES, "qwen3", "hermes", "hermes"),
        (HERMES, "granitemoehybrid", "granite4", "hermes"),
        ("<tool_call>\n<function=f>\n<parameter=p>", "qwen3_next", "qwen3_coder", "qwen3_coder"),
        ("Environment: ipython", "llama", "llama3_json", "llama3"),
        ("[TOOL_CALLS]", "mistral", "mistral", "mistral"),
        ("<|channel|>commentary", "gpt_oss", "openai", "gpt-oss"),
        ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "deepseek_v3", "deepseek_v31", "deepseekv31"),
        ("<minimax:tool_call>", "minimax_m2", "minimax_m2", "minimax-m2"),
        (
            "<start_of_turn>user\nAnswer with a python list of the function calls.",
            "gemma3_text",
            "pythonic",
            "pythonic",
        ),
        ("{{ bos_token }}", "llama", NO_PARSER, NO_PARSER),
    ],
)
def test_the_template_decides_the_parser_of_tool_calls(
    template: str, model_type: str, vllm: str, sglang: str
) -> None:
    model = model_of_template(template, model_type)
    assert TABLE.writing(model).tool_parser(PROFILES.engine(VLLM_REF)).value == vllm
    assert TABLE.writing(model).tool_parser(PROFILES.engine(SGLANG_REF)).value == sglang


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("</think>{% if enable_thinking %}", "qwen3"),
        (f"{PROMPT}<|im_start|>assistant\n<think>\n", "deepseek_r1"),
        ("{{ '<think>' }} of the past " + PROMPT + "assistant", NO_PARSER),
        ("[gMASK]<sop></think>", "glm45"),
        ("<|channel|>analysis", "openai_gptoss"),
    ],
)
def test_the_template_decides_the_parser_of_thoughts(template: str, parser: str) -> None:
    assert (
        TABLE.writing(model_of_template(template)).reasoning_parser(PROFILES.engine(VLLM_REF)).value
        == parser
    )


def test_a_parser_that_the_version_does_not_have_is_not_taken() -> None:
    model = model_of_template("<|open|>tools<|close|>")
    assert TABLE.writing(model).tool_parser(PROFILES.engine(VLLM_REF)).value == "kimi_k3"
    old_tool_parser = TABLE.writing(model).tool_parser(PROFILES.engine("vllm==0.18.0"))
    assert (old_tool_parser.value, old_tool_parser.reason) == (
        NO_PARSER,
        "vllm==0.18.0 has no parser kimi_k3",
    )


def test_thoughts_are_left_in_the_answer_where_the_parser_would_break_it() -> None:
    reasoning_parser = TABLE.writing(
        model_of_template("</think>{% if enable_thinking %}", tokens=())
    ).reasoning_parser(PROFILES.engine(VLLM_REF))
    assert (reasoning_parser.value, "<think> as a token of its own" in reasoning_parser.reason) == (
        NO_PARSER,
        True,
    )
    assert (
        TABLE.writing(model_of_template("[THINK]", "mistral3"))
        .reasoning_parser(PROFILES.engine(VLLM_REF))
        .value
        == NO_PARSER
    )


def test_gemma_3_has_a_parser_only_with_a_template_that_tells_it_of_tools() -> None:
    tool_parser = TABLE.writing(
        model_of_template("{{ '<start_of_turn>' + role }}", "gemma3")
    ).tool_parser(PROFILES.engine(VLLM_REF))
    assert (tool_parser.value, "give it with --chat-template FILE" in tool_parser.reason) == (
        NO_PARSER,
        True,
    )


def test_a_model_without_template_or_words_has_none() -> None:
    assert (
        TABLE.writing(model_of_template(None)).tool_parser(PROFILES.engine(VLLM_REF)).reason
        == "the model has no chat template"
    )
    embeds = model_of_template(HERMES).evolve(task="embed")
    assert (
        TABLE.writing(embeds).tool_parser(PROFILES.engine(VLLM_REF)).reason
        == "the task of the model is embed"
    )


def test_every_parser_of_the_table_is_one_of_some_version() -> None:
    engines = PROFILES.engines(("vllm", "sglang"), device="cuda")
    for rows, flag in ((TABLE.tools, "tool-call-parser"), (TABLE.reasoning, "reasoning-parser")):
        known_engines = {name for engine in engines for name in engine.flags[flag].choices or ()}
        assert not {name for row in rows for name in row.parsers} - known_engines


def test_the_plan_starts_the_engine_with_both_parsers() -> None:
    engines = [PROFILES.engine(VLLM_REF)]
    model = model_of_template(HERMES + "</think>{% if enable_thinking %}", "qwen3")
    hardware, rules = PROFILES.hardware("2x3090"), PROFILES.rules(engines)
    best = decide(
        model,
        hardware,
        engines,
        wish(),
        rules=rules,
        speed_knowledge=PROFILES.speed_knowledge,
        parsers=TABLE,
    ).plans[0]
    assert (best.tool_parser.value, best.reasoning_parser.value) == ("hermes", "qwen3")
    assert {
        "--enable-auto-tool-choice",
        "--tool-call-parser=hermes",
        "--reasoning-parser=qwen3",
    } <= set(best.argv)
    assert best.question is None or not any("parser" in flag for flag in best.question.argv)


def test_a_user_has_the_last_word() -> None:
    engines = [PROFILES.engine(VLLM_REF)]
    request = wish(args={"tool-call-parser": "mistral"})
    hardware, rules = PROFILES.hardware("2x3090"), PROFILES.rules(engines)
    best = decide(
        model_of_template(HERMES),
        hardware,
        engines,
        request,
        rules=rules,
        speed_knowledge=PROFILES.speed_knowledge,
        parsers=TABLE,
    ).plans[0]
    assert (best.tool_parser.value, best.tool_parser.source) == ("mistral", "user")
    assert "--tool-call-parser=mistral" in best.argv
    assert "--enable-auto-tool-choice" in best.argv
