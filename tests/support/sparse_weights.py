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
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for number in range(config["num_hidden_layers"]):
        of_layer = {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        found |= {f"model.layers.{number}.{name}.weight": shape for name, shape in of_layer.items()}
    found["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = (vocab, hidden)
    return found


def write_weights(folder: Path, config: Mapping[str, Any]) -> None:
    header = entries(shapes(config))
    text = json.dumps(header).encode()
    end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
