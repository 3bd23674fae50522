"""The weights of a small Llama as a file that is whole by its header and takes no room: its numbers
are a hole, and nobody reads them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.model_files import entries


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """All tensors of a LlamaForCausalLM of this config.json."""
    hidden_size = config["hidden_size"]
    inner = config["intermediate_size"]
    vocab = config["vocab_size"]
    head = config.get("head_dim") or hidden_size // config["num_attention_heads"]
    q, kv = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    shapes_by_name: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden_size)}
    for number in range(config["num_hidden_layers"]):
        of_layer = {
            "self_attn.q_proj": (q, hidden_size),
            "self_attn.k_proj": (kv, hidden_size),
            "self_attn.v_proj": (kv, hidden_size),
            "self_attn.o_proj": (hidden_size, q),
            "mlp.gate_proj": (inner, hidden_size),
            "mlp.up_proj": (inner, hidden_size),
            "mlp.down_proj": (hidden_size, inner),
            "input_layernorm": (hidden_size,),
            "post_attention_layernorm": (hidden_size,),
        }
        shapes_by_name |= {
            f"model.layers.{number}.{name}.weight": shape for name, shape in of_layer.items()
        }
    shapes_by_name["model.norm.weight"] = (hidden_size,)
    if not config.get("tie_word_embeddings"):
        shapes_by_name["lm_head.weight"] = (vocab, hidden_size)
    return shapes_by_name


def write_weights(folder: Path, config: Mapping[str, Any]) -> None:
    header = entries(shapes(config))
    text = json.dumps(header).encode()
    end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
