"""A Hub on loopback with the facts of public models, as they were on 2026-05-12.

Source of names, downloads, dates, shapes and parameters: hf_models.json of github.com/AlexsJones/
llmfit at 5bdc9df and before. `~` marks estimated downloads of repositories that it leaves out.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from functools import cache
from typing import Any

from tests.support.fake_hub import FakeHub, FakeRepo
from tests.support.paths import HUB, MODELS, ROOT

CATALOG_DATE = date(2026, 5, 12)
_TEMPLATE = json.dumps({"chat_template": "{{ messages[0]['content'] }}"}).encode()
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
_UNQUANTIZED = ["lm_head", "re:.*visual.*", "re:.*vision.*", "re:.*mlp.gate$", "re:.*router.*"]


def _compressed_block(weights: dict[str, Any], layout: str, inputs: Any = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": [*_UNQUANTIZED, "re:.*linear_attn.*"],
    }


# A block of config.json for each form.
_FP8_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
_FP8_INPUTS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
_INT8_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_INT8_INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
_NOT_CONVERTED = ["visual", "vision", "lm_head", "mlp.gate", "router"]
_GPTQ = {"quant_method": "gptq", "group_size": 128, "desc_act": False, "sym": True}
_BLOCKS: dict[str, dict[str, Any]] = {
    "fp8": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": _NOT_CONVERTED,
    },
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": _NOT_CONVERTED,
    },
    "gptq4": _GPTQ | {"bits": 4},
    "gptq8": _GPTQ | {"bits": 8},
    "autoround": {
        "quant_method": "auto-round",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "data_type": "int",
        "packing_format": "auto_round:auto_gptq",
        "block_name_to_quantize": "model.language_model.layers",
    },
    "nvfp4": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "ignore": ["lm_head", "model.visual*", "*router*", "*mlp.gate"],
    },
    "mxfp4": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["lm_head", "self_attn", "router"],
    },
    "bnb": {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "llm_int8_skip_modules": ["lm_head", "visual"],
    },
    "ct4": _compressed_block(_INT4, "pack-quantized"),
    "ct8": _compressed_block(_INT8_WEIGHTS, "int-quantized", _INT8_INPUTS),
    "ctfp8": _compressed_block(_FP8_WEIGHTS, "float-quantized", _FP8_INPUTS),
}
_BITS = {"": 16, "fp8": 8, "gptq8": 8, "ct8": 8, "ctfp8": 8}
# Fields of config.json by the columns of the catalog; of several spellings the present ones change.
_FIELDS = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "vocab": ("vocab_size",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "active": ("num_experts_per_tok",),
    "context": ("max_position_embeddings", "n_positions"),
}
# Heads of linear attention in Qwen3.5 by hidden size, and hidden size up to which heads are tied.
_VALUE_HEADS = {1024: 16, 3072: 64, 5120: 48}
_TIED_UP_TO = 2560
_GLM_V: dict[str, Any] = {
    "architectures": ["Glm4vMoeForConditionalGeneration"],
    "model_type": "glm4v_moe",
    "torch_dtype": "bfloat16",
    "vision_config": {
        "depth": 24,
        "hidden_size": 1536,
        "intermediate_size": 10944,
        "num_heads": 12,
        "out_hidden_size": 4096,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
_NEMOTRON_SUPER = {
    "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*"
    "EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
    "mamba_num_heads": 128,
    "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
}


@cache
def catalog() -> tuple[dict[str, str], ...]:
    """The rows of the catalog, the most downloaded first."""
    with (HUB / "catalog.csv").open(newline="") as file:
        return tuple(csv.DictReader(file))


@cache
def _published_config(name: str) -> dict[str, Any]:
    kind, _, family = name.partition(" ")
    if family:
        families = json.loads((ROOT / "tests/conformance/family_configs.json").read_bytes())
        return dict(families[family])
    if name == "glm-4.5v":
        return _GLM_V | {"text_config": dict(_published_config("glm-4.5-air"))}
    return dict(json.loads((MODELS / f"{kind}.json").read_bytes()))


def bits(row: Mapping[str, str]) -> int:
    """The bits of most weights."""
    return _BITS.get(row["form"], 4)


def config_of(row: Mapping[str, str]) -> dict[str, Any]:
    """The config.json of a model: that of its architecture with the shapes of the catalog."""
    if not row["like"]:
        return {"architectures": [f"{row['name'].split('/')[1]}Model"], "model_type": "other"}
    config: dict[str, Any] = json.loads(json.dumps(_published_config(row["like"])))
    text = config.get("text_config", config)
    for column, fields in _FIELDS.items():
        for field in fields:
            if row[column] and (field in text or (column == "head_dim" and "gemma" not in field)):
                text[field] = int(row[column])
    _set_inner_size(text, row)
    _set_layers(text)
    if "linear_num_value_heads" in text and row["like"].startswith("qwen3."):
        text["linear_num_value_heads"] = _VALUE_HEADS.get(text["hidden_size"], 32)
    if row["like"].startswith(("qwen", "llama")) and text["hidden_size"] <= _TIED_UP_TO:
        config["tie_word_embeddings"] = text["tie_word_embeddings"] = True
    if "Nemotron-3-Super" in (row["base"] or row["name"]):
        text |= _NEMOTRON_SUPER
    if row["form"] in _BLOCKS:
        config["quantization_config"] = dict(_BLOCKS[row["form"]])
        if not row["experts"] and "modules_to_not_convert" in config["quantization_config"]:
            config["quantization_config"]["modules_to_not_convert"] = _NOT_CONVERTED[:3]
    else:
        config.pop("quantization_config", None)
    return config


def _set_inner_size(text: dict[str, Any], row: Mapping[str, str]) -> None:
    """Of a mixture the catalog has the inner size of an expert, else that of a layer."""
    if not row["inner"]:
        return
    names = [name for name in ("moe_intermediate_size", "intermediate_size") if name in text]
    for name in names[:1]:
        text[name] = int(row["inner"])
    if "shared_expert_intermediate_size" in text and row["experts"]:
        text["shared_expert_intermediate_size"] = int(row["inner"])


def _set_layers(text: dict[str, Any]) -> None:
    """The list of kinds of layers, repeated or cut to their number."""
    for name in ("layer_types", "attn_type_list"):
        if kinds := text.get(name):
            layer_kinds = kinds * (int(text["num_hidden_layers"]) // len(kinds) + 1)
            text[name] = layer_kinds[: int(text["num_hidden_layers"])]


def _repo(row: Mapping[str, str]) -> FakeRepo:
    if row["form"] in ("gguf", "mlx"):
        return FakeRepo({"README.md": b"weights of another engine"})
    files = {"config.json": json.dumps(config_of(row)).encode()}
    if row["chat"] == "1":
        files["tokenizer_config.json"] = _TEMPLATE
    if row["task"] in ("feature-extraction", "sentence-similarity"):
        files["modules.json"] = b"[]"
    is_gated = row["name"].startswith(("meta-llama/", "google/gemma-2", "google/gemma-3"))
    return FakeRepo(files, gated=is_gated)


def _row(row: Mapping[str, str]) -> dict[str, Any]:
    """The row of a listing, as the Hub sends it. The score of trends is not published: here it is
    downloads by the square of the age."""
    downloads = int(row["downloads"].removeprefix("~"))
    age_days = max(1, (CATALOG_DATE - date.fromisoformat(row["created"])).days)
    foreign = row["form"] if row["form"] in ("gguf", "mlx") else "safetensors"
    tags = ["transformers", foreign, *(["conversational"] if row["chat"] == "1" else [])]
    if row["name"].startswith(("Qwen/Qwen2.5-Coder", "bigcode/", "codellama/")):
        tags.append("code")
    if row["base"]:
        tags.append(f"base_model:quantized:{row['base']}")
    return {
        "id": row["name"],
        "tags": tags,
        "pipeline_tag": row["task"],
        "downloads": downloads,
        "trendingScore": downloads / age_days**2,
        "createdAt": (datetime.now(UTC) - timedelta(days=age_days)).isoformat(),
        "safetensors": {"total": int(row["parameters"])},
    }


def public_hub() -> FakeHub:
    """A Hub with every model of the catalog, and the quantized variants of each."""
    rows = catalog()
    hub = FakeHub({row["name"]: _repo(row) for row in rows})
    hub.listed = [_row(row) for row in rows]
    hub.variants = {row["name"]: [] for row in rows}
    for row, row_of_hub in zip(rows, hub.listed, strict=True):
        if row["base"]:
            hub.variants.setdefault(row["base"], []).append(row_of_hub)
    return hub
