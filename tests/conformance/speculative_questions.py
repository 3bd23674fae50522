"""Which drafters does each version take? A question is a target, a drafter's config.json (or none)
and --speculative-config.

An answer is [method, tokens, architecture, [bytes of layers, of the embedding, of the head]]: the
engine's reading, the class that it loads the drafter with, and the weights of that class on one of
`tp` ranks; null where nothing is loaded. ["error", class, message] where it refuses; ["unanswered",
class, message] where it could not be asked.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

from gateway.engines.vllm.inside.model import build_from_config
from tests.support.paths import MODELS

CAPABILITIES = ("9.0",)
NO_HIDDEN_STATES = "the target does not hand out its hidden states"


class Question(NamedTuple):
    target: str  # tests/models/NAME.json
    drafter: str  # a key of DRAFTERS; "": none
    method: str
    tokens: int | None
    tp: int = 1
    parallel: bool = False
    layers: int | None = (
        None  # num_nextn_predict_layers of the target, where it is not that of its config
    )


def _layer(model_type: str, **more: Any) -> dict[str, Any]:
    return {
        "model_type": model_type, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 1,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False, "attention_bias": False, "dtype": "bfloat16", **more,
    }  # fmt: skip


def _speculators(kind: str, tokens: int, layer: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["Speculator"], "speculators_model_type": kind,
        "model_type": "speculators", "dtype": "bfloat16",
        "speculators_version": "0.4.0", "draft_vocab_size": 32000,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": kind, "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens,
                "verifier_accept_k": 1}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
        },
        **more,
    }  # fmt: skip


_GEMMA = _layer(
    "qwen3", hidden_size=5376, intermediate_size=21504, num_hidden_layers=5, num_key_value_heads=16,
    head_dim=256,
    vocab_size=262144, layer_types=["full_attention"] * 5,
)  # fmt: skip
_DFLASH = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}

DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle3 speculators llama": _speculators("eagle3", 3, _layer("llama"),
        norm_before_residual=False),
    "eagle3 speculators qwen3": _speculators("eagle3", 5, _layer("qwen3")),
    "eagle3 speculators mistral": _speculators("eagle3", 3, _layer("mistral")),
    "eagle3 llama": _layer("llama", architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=32000),
    "eagle3 bare llama": _layer("llama", architectures=["LlamaForCausalLM"],
        draft_vocab_size=32000),
    "eagle llama": _layer("llama", architectures=["LlamaForCausalLM"], vocab_size=151936),
    "peagle speculators": _speculators("peagle", 4, _layer("llama", num_hidden_layers=4),
        mask_token_id=128),
    "dflash speculators": _speculators(
        "dflash", 8, _layer("qwen3", num_hidden_layers=5), mask_token_id=4,
        aux_hidden_state_layer_ids=[2, 10, 18, 26, 34],
        block_size=9,
    ),
    "dflash gemma-4-31b": _speculators(
        "dflash", 8, _GEMMA, mask_token_id=4, aux_hidden_state_layer_ids=[2, 13, 24, 36, 47, 58],
        block_size=9,
    ),
    "dflash qwen3": _layer(
        "qwen3", architectures=["DFlashDraftModel"], num_hidden_layers=5, block_size=16,
        dflash_config=_DFLASH,
        num_target_layers=36,
    ),
    "dspark qwen3": _layer(
        "qwen3", architectures=["Qwen3DSparkModel"], num_hidden_layers=5, block_size=7,
        markov_rank=256,
        markov_head_type="vanilla", mask_token_id=151669, target_layer_ids=[1, 9, 17, 25, 33],
    ),
    "draft qwen3": _layer(
        "qwen3", architectures=["Qwen3ForCausalLM"], hidden_size=1024, intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16, tie_word_embeddings=True,
    ),
    "draft llama": _layer("llama", architectures=["LlamaForCausalLM"], hidden_size=1024,
        num_attention_heads=8, vocab_size=32000),
}  # fmt: skip


# Asked of the version as a whole: a question whose target is "". The answer is a list of names.
LISTS = ("methods", "classes of drafters", "targets with hidden states")


def questions(version: str) -> Iterator[Question]:
    """The same of every version."""
    for name in LISTS:
        yield Question("", "", name, None)
    for name, method, tokens in (
        ("eagle3 speculators llama", "eagle3", 3),
        ("eagle3 speculators qwen3", "eagle3", 5),
        ("eagle3 speculators mistral", "eagle3", 3),
        ("eagle3 llama", "eagle3", 3),
        ("eagle3 bare llama", "eagle3", 3),
        ("eagle llama", "eagle", 3),
        ("dflash speculators", "dflash", 8),
        ("dflash qwen3", "dflash", 15),
        ("dspark qwen3", "dspark", 7),
        ("draft qwen3", "draft_model", 3),
    ):
        for tp in (1, 2):
            yield Question("qwen3-8b", name, method, tokens, tp)
    yield Question("qwen3-8b", "eagle3 llama", "eagle3", None)
    yield Question("qwen3-8b", "dflash speculators", "dflash", None)
    yield Question("qwen3-8b", "draft llama", "draft_model", 3)
    yield Question("qwen3-8b", "draft qwen3", "draft_model", 3, 32)
    yield Question("qwen3-8b", "peagle speculators", "eagle3", 4, parallel=True)
    yield Question("qwen3-8b", "", "ngram", 5)
    yield Question("qwen3-8b", "", "ngram", None)
    yield Question("qwen3-8b", "", "mtp", 1)
    yield Question("gemma-4-31b", "dflash gemma-4-31b", "dflash", 8, 2)
    yield Question("gemma-4-31b", "dflash gemma-4-31b", "dflash", None, 2)
    yield Question("gemma-4-31b", "eagle3 llama", "eagle3", 3)
    for target in (
        "llama-3.1-8b",
        "gpt-oss-20b",
        "mixtral-8x7b",
        "gemma-3-4b",
        "phi-4",
        "minimax-m2",
        "qwen3-30b-a3b",
        "qwen2.5-7b",
    ):
        yield Question(target, "eagle3 llama", "eagle3", 3)
    for target in (
        "deepseek-v3", "deepseek-v3.2", "glm-4.5-air", "qwen3-next-80b-a3b", "qwen3.6-35b-a3b",
        "ernie-4.5-21b-a3b",
        "nemotron-3-nano-30b-a3b", "minimax-m2", "gpt-oss-20b",
    ):  # fmt: skip
        for number in (None, 1, 3):
            yield Question(target, "", "mtp", number)
    for number in (1, 2, 3, 4):
        yield Question("glm-4.5-air", "", "mtp", number, layers=2)
    yield Question("ernie-4.5-21b-a3b", "", "mtp", 1, layers=1)
    yield Question("nemotron-3-nano-30b-a3b", "", "mtp", 1, layers=1)
    for tp in (2, 4):
        yield Question("qwen3-next-80b-a3b", "", "mtp", 1, tp)
        yield Question("glm-4.5-air", "", "mtp", 1, tp)


def answers(version: str) -> list[list[Any]]:
    """Ask the engine that this process has booted."""
    return [_answer(question) for question in questions(version)]


def config_of(question: Question, drafter: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {"method": question.method}
    if question.tokens is not None:
        options["num_speculative_tokens"] = question.tokens
    if drafter:
        options["model"] = drafter
    if question.parallel:
        options["parallel_drafting"] = True
    return options


def _answer(question: Question) -> list[Any]:
    if not question.target:
        return _list(question.method)
    target = json.loads((MODELS / f"{question.target}.json").read_text())
    if question.layers is not None:
        target["num_nextn_predict_layers"] = question.layers
    with tempfile.TemporaryDirectory() as folder:
        if question.drafter:
            Path(folder, "config.json").write_text(json.dumps(DRAFTERS[question.drafter]))
        config = config_of(question, folder if question.drafter else None)
        try:
            with build_from_config(target, question.tp, speculative_config=config) as (
                configuration,
                model,
            ):
                return _taken_layers(configuration, model)
        except Exception as error:
            message = re.sub(r"/\S+|0x[0-9a-f]+", "...", str(error))[:160]
            is_refused = (
                type(error).__name__ in ("ValidationError", "NotImplementedError")
                or str(error) == NO_HIDDEN_STATES
            )
            # Anything else comes of asking without a GPU, or with another transformers than the
            # version was made for.
            return ["error" if is_refused else "unanswered", type(error).__name__, message]


def _taken_layers(configuration: Any, model: Any) -> list[Any]:
    spec = configuration.speculative_config
    draft = spec.draft_model_config
    if draft is None or draft is configuration.model_config:
        return [spec.method, spec.num_speculative_tokens, None, None]
    supports: Any = importlib.import_module("vllm.model_executor.models.interfaces").supports_eagle3
    if spec.method in ("eagle3", "dflash", "dspark") and not supports(model):
        raise RuntimeError(NO_HIDDEN_STATES)  # as GPUModelRunner does when it loads
    if spec.method == "draft_model":
        return [spec.method, spec.num_speculative_tokens, draft.architectures[0], None]
    loading: Any = importlib.import_module("vllm.model_executor.model_loader.utils")
    drafting = loading.initialize_model(configuration, prefix="drafter", model_config=draft)
    sizes = {"": 0, "embed_tokens": 0, "lm_head": 0}
    for name, weight in drafting.named_parameters():
        part = next((part for part in sizes if part and part in name), "")
        sizes[part] += weight.numel() * weight.itemsize
    return [spec.method, spec.num_speculative_tokens, draft.architectures[0], list(sizes.values())]


def _list(name: str) -> list[str]:
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    drafters = registry._SPECULATIVE_DECODING_MODELS
    if name == "classes of drafters":
        return sorted(drafters)
    if name == "methods":
        methods = get_args(importlib.import_module("vllm.config.speculative").SpeculativeMethod)
        # Names that end so are other names of mtp.
        return sorted(method for method in methods if not method.endswith("_mtp"))
    supports: Any = importlib.import_module("vllm.model_executor.models.interfaces").supports_eagle3
    names = []
    for group in [
        group
        for label, group in vars(registry).items()
        if label.endswith("_MODELS") and isinstance(group, dict)
    ]:
        for architecture, place in group.items():
            if isinstance(place, tuple) and architecture not in drafters:
                module = (
                    place[0]
                    if place[0].startswith("vllm.")
                    else f"vllm.model_executor.models.{place[0]}"
                )
                with contextlib.suppress(ImportError, ValueError):  # of missing packages
                    if supports(getattr(importlib.import_module(module), place[1])):
                        names.append(architecture)
    return sorted(set(names))
