"""How an engine is told of adapters, and what it calls them. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from gateway.domain import Adapter, Engine, Scalar
from gateway.domain.value import served_name

# The flag that names them, and the fields of its values, by kind of engine: LoRAParserAction
# (vllm/entrypoints/openai/cli_args.py of 0.18.0, common/cli_args.py of 0.33.0), LoRAPathAction
# (sglang srt/server_args.py of 0.5.10.post1, arg_groups/argparse_actions.py of 0.5.23).
FLAGS = {"lora-modules": ("name", "path"), "lora-paths": ("lora_name", "lora_path")}


def flags(engine: Engine, adapters: Sequence[Adapter]) -> dict[str, Scalar]:
    """What the engine is told but for the adapters themselves; what an engine version does not have
    is left out by `spelled`."""
    if not adapters:
        return {}
    told: dict[str, Scalar] = {"enable-lora": True, "max-lora-rank": rank(engine, adapters) or 0}
    # Of SGLang's places one is the model's own.
    return told | {"max-loras": len(adapters), "max-loras-per-batch": len(adapters) + 1}


def rank(engine: Engine, adapters: Iterable[Adapter]) -> int | None:
    """The smallest rank that the engine takes for all of them; None: it takes none so high."""
    most = max(adapter.rank for adapter in adapters)
    flag = engine.flags.get("max-lora-rank")
    if flag is None:
        return None
    if not flag.choices:
        return most
    return min((choice for choice in map(int, flag.choices) if choice >= most), default=None)


def arguments(engine: Engine, placed: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """The items of a command line that name adapters and their folders, as the engine sees them."""
    flag = next((name for name in FLAGS if name in engine.flags), None)
    if flag is None or not placed:
        return ()
    name, path = FLAGS[flag]
    return (
        f"--{flag}",
        *(json.dumps({name: served_name(one), path: folder}) for one, folder in placed),
    )


def name_at(kind: str, model: str, adapter: str) -> str:
    """What the engine of a model calls an adapter in requests. SGLang: _parse_model_parameter
    (srt/entrypoints/openai/serving_base.py)."""
    own = served_name(adapter)
    return f"{served_name(model)}:{own}" if kind == "sglang" else own
