"""Flags that load LoRA adapters into an engine. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from gateway.domain import Adapter, Engine, Scalar
from gateway.domain.value import served_name

# The flag that lists adapters -> the JSON keys of an item's name and folder. Source:
# LoRAParserAction (vllm/entrypoints/openai/cli_args.py of 0.18.0, common/cli_args.py of 0.33.0),
# LoRAPathAction (sglang srt/server_args.py of 0.5.10.post1, arg_groups/argparse_actions.py of
# 0.5.23).
LIST_FLAGS = {"lora-modules": ("name", "path"), "lora-paths": ("lora_name", "lora_path")}


def capacity_flags(engine: Engine, adapters: Sequence[Adapter]) -> dict[str, Scalar]:
    """Flags that reserve room for the adapters; `spell_flags` drops those that the engine lacks."""
    if not adapters:
        return {}
    return {
        "enable-lora": True,
        "max-lora-rank": supported_rank(engine, adapters) or 0,
        "max-loras": len(adapters),
        "max-loras-per-batch": len(adapters) + 1,  # SGLang needs one slot for the bare model
    }


def supported_rank(engine: Engine, adapters: Iterable[Adapter]) -> int | None:
    """The smallest rank of the engine that holds all adapters; None: every rank is too small."""
    highest = max(adapter.rank for adapter in adapters)
    flag = engine.flags.get("max-lora-rank")
    if flag is None:
        return None
    if not flag.choices:
        return highest
    return min((choice for choice in map(int, flag.choices) if choice >= highest), default=None)


def list_arguments(engine: Engine, folders: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Command-line items that list adapters. folders: name and folder of each, as the engine sees
    them."""
    flag = next((name for name in LIST_FLAGS if name in engine.flags), None)
    if flag is None or not folders:
        return ()
    name_key, path_key = LIST_FLAGS[flag]
    return (
        f"--{flag}",
        *(json.dumps({name_key: served_name(name), path_key: path}) for name, path in folders),
    )
