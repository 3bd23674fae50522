"""Small models, written by hand: config.json and safetensors."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}
WIDTH = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "U8": 1}


def entries(shapes: Mapping[str, tuple[int, ...]], dtype: str = "BF16") -> dict[str, Any]:
    """The header of a file that holds tensors of these shapes, one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * WIDTH[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    return header


def pack(header: Any, data_bytes: int) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data_bytes)


def safetensors(shapes: Mapping[str, tuple[int, ...]], dtype: str = "BF16") -> bytes:
    return pack(
        entries(shapes, dtype), sum(math.prod(shape) * WIDTH[dtype] for shape in shapes.values())
    )


def layer(number: int) -> dict[str, tuple[int, ...]]:
    return {
        f"model.layers.{number}.mlp.up_proj.weight": (128, 64),
        f"model.layers.{number}.mlp.down_proj.weight": (64, 128),
    }


def model(**config: Any) -> dict[str, bytes]:
    """File name -> content of a model in one file."""
    shapes = {"model.embed_tokens.weight": (256, 64), **layer(0), **layer(1)}
    return {
        "config.json": json.dumps(CONFIG | config).encode(),
        "model.safetensors": safetensors(shapes),
    }


def sharded_model() -> dict[str, bytes]:
    """The same in two shards with an index, and a copy of the weights that the index does not
    name."""
    shards = {f"model-{n + 1:05d}-of-00002.safetensors": layer(n) for n in (0, 1)}
    weight_map = {name: shard for shard, shapes in shards.items() for name in shapes}
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "model.safetensors.index.json": (
            json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
        ),
        "consolidated.safetensors": safetensors(layer(0)),
        **{shard: safetensors(shapes) for shard, shapes in shards.items()},
    }


def experts(shards: int) -> dict[str, bytes]:
    """A model of so many shards, with the experts of one layer in each: a thousand tensors."""
    files = {"config.json": json.dumps(CONFIG).encode()}
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard:05d}.safetensors"
        shapes = {
            f"model.layers.{shard}.mlp.experts.{n}.up_proj.weight": (1, 1) for n in range(1000)
        }
        weight_map |= dict.fromkeys(shapes, name)
        files[name] = safetensors(shapes)
    return files | {"model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode()}


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder
