"""The models of the grid: folders with config and tokenizer, for --load-format dummy.

The configs are those of tests/models. Quantized configs have the form of the usual tools. Only the
standard library: the measured machine has an engine, but no environment of fitserve.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parents[2] / "tests/models"

_LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
_TINY = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 64, "vocab_size": 32000}  # fmt: skip
_FP8 = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True,
            "dynamic": False},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token",
            "symmetric": True, "dynamic": True},
    }},
}  # fmt: skip
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
# An engine reads in a checkpoint's headers what GPTQ quantized; a folder without weights has to say
# so itself.
_GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False,
    "checkpoint_format": "gptq",
    "modules_in_block_to_quantize": [
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    ],
}  # fmt: skip
_MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False,
         "original_max_position_embeddings": 4096}  # fmt: skip

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.2-1b": ("llama-3.2-1b", {}),
    "llama-3.1-8b": ("llama-3.1-8b", {}),
    "llama-3.1-8b-fp8": ("llama-3.1-8b", {"quantization_config": _FP8}),
    "llama-3.1-8b-awq": ("llama-3.1-8b", {"quantization_config": _AWQ, "torch_dtype": "float16"}),
    "llama-3.1-8b-gptq": ("llama-3.1-8b", {"quantization_config": _GPTQ, "torch_dtype": "float16"}),
    "qwen3-30b-a3b": ("qwen3-30b-a3b", {}),
    "qwen3-30b-a3b-fp8-16": (
        "qwen3-30b-a3b",
        {
            "num_hidden_layers": 16,
            "quantization_config": {**_FP8, "ignore": ["lm_head", "re:.*mlp.gate$"]},
        },
    ),
    "gpt-oss-20b": (
        "gpt-oss-20b",
        {"quantization_config": _MXFP4, "rope_scaling": _YARN, "initial_context_length": 4096},
    ),
    "deepseek-v2-lite": ("deepseek-v2-lite", {}),
    "llama-3.3-70b": ("llama-3.1-8b", _LLAMA_70B),
    "llama-3.3-70b-fp8": ("llama-3.1-8b", {**_LLAMA_70B, "quantization_config": _FP8}),
    "tiny": ("llama-3.1-8b", _TINY),  # for rehearsals on a CPU
}


# GiB of weights, and KiB of KV cache for a token: for engines that start side by side on a GPU.
SIZES: dict[str, tuple[float, int]] = {
    "llama-3.2-1b": (2.4, 32), "llama-3.1-8b": (15, 128), "llama-3.1-8b-fp8": (8.5, 128),
    "llama-3.1-8b-awq": (5.4, 128),
    "llama-3.1-8b-gptq": (5.4, 128), "qwen3-30b-a3b": (57, 96), "gpt-oss-20b": (13, 48),
    "deepseek-v2-lite": (29.3, 32),
    "llama-3.3-70b-fp8": (68, 320), "tiny": (0.1, 2),
}  # fmt: skip
KERNEL_ROUTED = {"gpt-oss-20b"}  # its experts are chosen by the kernel that computes them
LOADED_TOKENS = 180_000  # 256 requests of 640 tokens, and some
BESIDE_GIB = 6  # activations, graphs, CUDA's own


def cache_bytes(name: str) -> int:
    """The KV cache of the loads."""
    return SIZES[name][1] * 1024 * LOADED_TOKENS


def gib(name: str) -> float:
    """The GPU memory of one engine."""
    return SIZES[name][0] + cache_bytes(name) / 2**30 + BESIDE_GIB if name in SIZES else math.inf


def config(name: str) -> dict[str, Any]:
    """The config.json of one of MODELS."""
    base, changes = MODELS[name]
    read: dict[str, Any] = json.loads((CONFIGS / f"{base}.json").read_text())
    return {**read, "bos_token_id": 1, "eos_token_id": 2, **changes}


def write(folder: Path, name: str) -> Path:
    """The model's folder, made where it is not there yet."""
    made = folder / name
    if (made / "tokenizer.json").is_file():
        return made
    made.mkdir(parents=True, exist_ok=True)
    stated = config(name)
    (made / "config.json").write_text(json.dumps(stated))
    vocabulary = {
        word: number
        for number, word in enumerate(
            ["<unk>", "<s>", "</s>", *(f"t{n}" for n in range(3, stated["vocab_size"]))]
        )
    }
    special = [
        {
            "id": number,
            "content": word,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, word in enumerate(["<unk>", "<s>", "</s>"])
    ]
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }  # fmt: skip
    words = {
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (made / "tokenizer_config.json").write_text(json.dumps(words))
    (made / "tokenizer.json").write_text(json.dumps(tokenizer))
    return made
