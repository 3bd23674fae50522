"""The parsers of each family of models, by engine version: tests/conformance/parser_families.txt,
held to the table of parsers by test_parsers.py.

python -m tests.conformance.parser_families > tests/conformance/parser_families.txt
"""

from __future__ import annotations

import sys
from pathlib import Path

from gateway.domain import ModelSpec
from gateway.profiles.profiles import Profiles
from tests.conformance.dialects import PROMPT, kept_dialects
from tests.support.published import published_model

KEPT = Path(__file__).with_suffix(".txt")
VERSIONS = (
    *(f"vllm=={version}" for version in ("0.18.0", "0.19.1", "0.26.0", "0.30.0", "0.33.0")),
    *(f"sglang=={version}" for version in ("0.5.10.post1", "0.5.15.post1", "0.5.23")),
)
# Family: its model_type, and the name of its template in dialects.json, or the marks of a template
# that is not there.
FAMILIES = {
    "Qwen2.5": ("qwen2", "Qwen-Qwen2.5-7B-Instruct"),
    "Qwen3": ("qwen3", "Qwen-Qwen3-0.6B"),
    "Qwen3-Coder": ("qwen3_moe", "Qwen3-Coder"),
    "Qwen3.5 and 3.6": ("qwen3_5", "Qwen3.5-4B"),
    "Llama 3.1": ("llama", "meta-llama-Llama-3.1-8B-Instruct"),
    "Llama 3.2": ("llama", "meta-llama-Llama-3.2-3B-Instruct"),
    "Llama 3.3": ("llama", "meta-llama-Llama-3.3-70B-Instruct"),
    "Llama 4": ("llama4", "ipython <|header_start|>"),
    "Mistral Nemo": ("mistral", "mistralai-Mistral-Nemo-Instruct-2407"),
    "Mistral Small": ("mistral3", "Mistral-Small-3.2-24B-Instruct-2506"),
    "Magistral": ("mistral", "[TOOL_CALLS] [THINK]"),
    "Devstral": ("mistral", "unsloth-mistral-Devstral-Small-2507"),
    "Ministral": ("mistral3", "mistralai-Ministral-3-14B-Reasoning-2512"),
    "gpt-oss": ("gpt_oss", "openai-gpt-oss-120b"),
    "DeepSeek R1": ("deepseek_v3", "llama-cpp-deepseek-r1"),
    "DeepSeek V3.1": ("deepseek_v3", "deepseek-ai-DeepSeek-V3.1"),
    "DeepSeek V3.2": ("deepseek_v32", "deepseek-ai-DeepSeek-V3.2"),
    "DeepSeek V4": ("deepseek_v4", "deepseek-ai-DeepSeek-V4"),
    "GLM-4.5 and 4.6": ("glm4_moe", "GLM-4.6"),
    "GLM-4.7 and 5": ("glm4_moe_lite", "GLM-4.7-Flash"),
    "Kimi K2": ("kimi_k2", "moonshotai-Kimi-K2"),
    "Kimi K2 Thinking": ("kimi_k2", "Kimi-K2-Thinking"),
    "Kimi K3": ("kimi_k3", "Kimi-K3"),
    "Granite 3.3": ("granite", "ibm-granite-granite-3.3-2B-Instruct"),
    "Granite 4": ("granitemoehybrid", "ibm-granite-granite-4.0"),
    "Gemma 3": ("gemma3", "<start_of_turn>"),
    "FunctionGemma": ("gemma3_text", "<start_function_call>"),
    "Gemma 4": ("gemma4", "google-gemma-4-31B-it"),
    "Phi-4-mini": ("phi3", "<|tool|>"),
    "Hermes 3": ("llama", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use"),
    "MiniMax M2": ("minimax_m2", "MiniMax-M2"),
    "MiniMax M3": ("minimax_m3", "MiniMax-M3"),
    "Nemotron 3": ("nemotron_h", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    "Seed-OSS": ("seed_oss", "ByteDance-Seed-OSS"),
    "ERNIE 4.5": ("ernie4_5_moe", "<tool_call> </think>"),
    "Hunyuan A13B": ("hunyuan_v1_moe", "<tool_calls> <think>"),
    "Hy3": ("hy_v3", "tencent-Hy3"),
    "InternLM": ("internlm2", "<|action_start|>"),
    "Jamba": ("jamba", "<tool_calls>"),
    "Olmo 3": ("olmo3", "<function_calls> </think>"),
    "Step 3.5": ("step3p5", "StepFun3.5-Flash"),
    "LFM2.5": ("lfm2", "LFM2.5-8B-A1B"),
    "LongCat": ("longcat_flash", "<longcat_tool_call>"),
    "MiniCPM5": ("minicpm", "openbmb-MiniCPM5-1B"),
    "Apertus": ("apertus", "Apertus-8B-Instruct"),
    "GigaChat 3": ("deepseek_v3", "GigaChat3.1-10B-A1.8B"),
    "Ling 3": ("bailing_moe", "inclusionai-ling-3.0-flash"),
    "Laguna": ("laguna", "poolside-Laguna-XS-2.1"),
    "Muse Glimmer": ("muse", "muse-glimmer"),
    "Command A": ("cohere2", "<|START_ACTION|>"),
}


def spec(family: str) -> ModelSpec:
    model_type, template = FAMILIES[family]
    templates = {dialect.name: dialect.template() for dialect in kept_dialects()}
    text = templates.get(template, f"{template} {PROMPT}")
    return published_model("llama-3.1-8b").evolve(
        chat_template=text, model_type=model_type, added_tokens=("<think>", "</think>")
    )


def parsers_by_version(profiles: Profiles, family: str) -> list[str]:
    """Tools and thoughts, by engine version; - for none."""
    writing = profiles.parsers.writing(spec(family))
    parsers = []
    for ref in VERSIONS:
        engine = profiles.engine(ref)
        pair = (writing.tool_parser(engine).value, writing.reasoning_parser(engine).value)
        parsers.append("/".join("-" if name == "none" else name for name in pair))
    return parsers


def text(profiles: Profiles) -> str:
    """One line for each family: its name, then the parsers of each version of VERSIONS."""
    rows = [
        ("family", *VERSIONS),
        *((family, *parsers_by_version(profiles, family)) for family in FAMILIES),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        + "\n"
        for row in rows
    )


if __name__ == "__main__":
    sys.stdout.write(text(Profiles()))
