"""Traits of the memory of vLLM versions, read in their own code.

A version without rules is forecast by the traits of the nearest one. memory_traits.json keeps the
traits of each version's code; `scripts/engine-profile` writes both.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from gateway.domain import Engine
from gateway.domain.profile_diff import ProfileDiff

KEPT = Path(__file__).parent / "memory_traits.json"
_BATCHES = "vllm/engine/arg_utils.py", "get_batch_defaults"
_CONFIG = "vllm/config/vllm.py"
_RUNNER = "vllm/v1/worker/gpu/model_runner.py"
_DEFAULT_MODELS = "_is_default_v2_model_runner_model"


_Code = Callable[[str, str], str]


def _default_models(code: _Code) -> str:
    """The trait for the models that the second runner serves by default; "": none, or all."""
    models, is_listed = code(_CONFIG, _DEFAULT_MODELS), '"LlamaForCausalLM"' in code(_CONFIG, "")
    if "is_quantized" in models:
        return "llama_second_runner" if is_listed else "qwen3_second_runner"
    if "is_moe" in models:
        return "dense_second_runner"
    return "listed_second_runner" if models else ""


# Each with the code that shows it: of a file, and of a function in it or of the whole file ("").
_SIGNS: Mapping[str, Callable[[_Code], bool]] = {
    "counted_second_graphs": lambda code: (
        "_profile_cudagraph_memory(" in code(_RUNNER, "profile_cudagraph_memory")
    ),
    "graphs_in_budget": lambda code: (
        'VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", "1"' in code("vllm/envs.py", "")
    ),
    "large_batches": lambda code: "160 * GiB_bytes" in code(*_BATCHES),
    "profiled_encoders": lambda code: "profile_encoder_cache" in code(_RUNNER, "profile_run"),
    "second_runner": lambda code: (
        bool(text := code(_CONFIG, "use_v2_model_runner")) and _DEFAULT_MODELS not in text
    ),
    "small_gb10_batches": lambda code: "gb10" in code(*_BATCHES).lower(),
}
_RUNNERS = frozenset(
    {
        "dense_second_runner",
        "listed_second_runner",
        "llama_second_runner",
        "qwen3_second_runner",
    }
)
MEMORY_TRAITS = _RUNNERS | _SIGNS.keys()


def memory_traits(sources: Path) -> list[str]:
    """The traits of an unpacked wheel's code."""

    def code(file: str, function: str) -> str:
        path = sources / file
        text = path.read_text() if path.is_file() else ""
        return text if not function else _function(text, function)

    traits = {name for name, is_shown in _SIGNS.items() if is_shown(code)}
    return sorted(traits | {_default_models(code)} - {""})


def _function(text: str, name: str) -> str:
    """The source of the functions of this name, in any class."""
    return "\n".join(
        ast.get_source_segment(text, node) or ""
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name == name
    )


def read_traits() -> dict[str, list[str]]:
    """The kept traits, by version."""
    traits: dict[str, list[str]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    return traits


def keep_traits(version: str, traits: list[str]) -> None:
    """Write the traits of a version beside those of the others."""
    traits_by_version = read_traits() | {version: traits}
    KEPT.write_text(json.dumps(dict(sorted(traits_by_version.items())), indent=1) + "\n")


def with_memory_traits(diff: ProfileDiff, near: Engine) -> ProfileDiff:
    """The difference, with the traits of the version's memory, if its code was read."""
    if diff.kind != "vllm" or diff.version not in read_traits():
        return diff
    traits, remaining_traits = {*read_traits()[diff.version]}, {*near.traits}
    other_traits = {*diff.traits} - MEMORY_TRAITS
    dropped_traits = {*diff.without.get("traits", ())} - MEMORY_TRAITS
    dropped_traits |= (MEMORY_TRAITS - traits) & remaining_traits
    without = {field: names for field, names in diff.without.items() if field != "traits"}
    return diff.evolve(
        traits=tuple(sorted(other_traits | (traits - remaining_traits))),
        without=without | ({"traits": tuple(sorted(dropped_traits))} if dropped_traits else {}),
    )
