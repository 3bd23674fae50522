"""Small LoRA adapters in the format of peft, which change the answers of the demo model."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

from tests.support.model_files import entries


def adapter_config(**changes: Any) -> dict[str, Any]:
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["down_proj"],
        "bias": "none",
    }
    return {**fields, "base_model_name_or_path": "org/demo", **changes}


def shapes(hidden: int, inner: int, rank: int = 8, layers: int = 2) -> dict[str, tuple[int, ...]]:
    """Of an adapter of all down projections."""
    shapes_by_name: dict[str, tuple[int, ...]] = {}
    for number in range(layers):
        module = f"base_model.model.model.layers.{number}.mlp.down_proj"
        shapes_by_name |= {
            f"{module}.lora_A.weight": (rank, inner),
            f"{module}.lora_B.weight": (hidden, rank),
        }
    return shapes_by_name


def adapter_files(model: Path, rank: int = 8, seed: int = 1, **changes: Any) -> dict[str, bytes]:
    """File name -> content of an adapter for the model in the folder. Each seed changes its answers
    otherwise."""
    config = json.loads((model / "config.json").read_text())
    sizes = shapes(
        config["hidden_size"], config["intermediate_size"], rank, config["num_hidden_layers"]
    )
    header, dice = entries(sizes, "F32"), random.Random(seed)
    end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    text = json.dumps(header).encode()
    data = b"".join(struct.pack("<f", dice.uniform(-30, 30)) for _ in range(end // 4))
    config_fields = adapter_config(r=rank, **changes)
    return {
        "adapter_config.json": json.dumps(config_fields).encode(),
        "adapter_model.safetensors": struct.pack("<Q", len(text)) + text + data,
    }


def make_adapter(path: Path, model: Path, **fields: Any) -> Path:
    path.mkdir(parents=True)
    for name, content in adapter_files(model, **fields).items():
        (path / name).write_bytes(content)
    return path
