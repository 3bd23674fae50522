"""Models whose KV cache is compared."""

from __future__ import annotations

from typing import Any

from gateway.domain import AttentionGroup, Recurrent


def full(layers: int, kv_heads: int, head_dim: int, **fields: Any) -> AttentionGroup:
    return AttentionGroup(
        kind="full",
        layers=layers,
        heads=2 * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        **fields,
    )


def sliding(
    layers: int, kv_heads: int, head_dim: int, window: int, **fields: Any
) -> AttentionGroup:
    return full(layers, kv_heads, head_dim, window=window, **fields).evolve(kind="sliding")


def latent(layers: int, index_dim: int | None = None) -> AttentionGroup:
    return AttentionGroup(
        kind="mla", layers=layers, heads=128, kv_heads=1, head_dim=576, value_dim=512,
        index_dim=index_dim
    )  # fmt: skip


def recurrent(
    layers: int, kind: str, heads: int, rows: int, columns: int, groups: int, **fields: Any
) -> AttentionGroup:
    keys = 2 * groups * columns
    state = Recurrent.model_validate(
        {
            "kind": kind,
            "heads": heads,
            "rows": rows,
            "columns": columns,
            "groups": groups,
            "conv_kernel": 4,
        }
        | {"conv_channels": heads * rows + keys}
        | fields
    )
    return AttentionGroup(
        kind="recurrent",
        layers=layers,
        heads=heads,
        kv_heads=groups,
        head_dim=columns,
        recurrent=state,
    )


MODELS: dict[str, tuple[AttentionGroup, ...]] = {
    "llama-3.2-1b": (full(16, 8, 64),),
    "qwen2.5-7b": (full(28, 4, 128),),
    "qwen3-30b-a3b": (full(48, 4, 128),),
    "mistral-7b-v0.1": (sliding(32, 8, 128, 4096),),
    "gemma-2-9b": (full(21, 8, 256), sliding(21, 8, 256, 4096)),
    "gemma-3-1b": (full(4, 1, 256), sliding(22, 1, 256, 512)),
    "gemma-3-27b": (full(10, 16, 128), sliding(52, 16, 128, 1024)),
    "gpt-oss-20b": (full(12, 8, 64, has_sinks=True), sliding(12, 8, 64, 128, has_sinks=True)),
    "olmo-3-7b": (full(8, 32, 128), sliding(24, 32, 128, 4096)),
    "command-r7b": (full(8, 8, 128), sliding(24, 8, 128, 4096)),
    "gemma-4-e4b": (full(4, 2, 512), sliding(20, 2, 256, 512)),
    "gemma-4-26b-a4b": (full(5, 2, 512), sliding(25, 8, 256, 1024)),
    "gemma-4-31b": (full(10, 4, 512), sliding(50, 16, 256, 1024)),
    "deepseek-v2-lite": (latent(27),),
    "deepseek-v3": (latent(61),),
    "deepseek-v3.2": (latent(61, 128),),
    "qwen3-next-80b-a3b": (full(12, 2, 256), recurrent(36, "gdn", 32, 128, 128, 16)),
    "qwen3.6-35b-a3b": (full(10, 2, 256), recurrent(30, "gdn", 32, 128, 128, 16)),
    "qwen3.6-35b-a3b, mamba_ssm_dtype float32": (
        full(10, 2, 256),
        recurrent(30, "gdn", 32, 128, 128, 16, dtype="float32"),
    ),
    "granite-4.0-h-micro": (full(4, 8, 64), recurrent(36, "mamba2", 64, 64, 128, 1, chunk=256)),
    "granite-4.0-h-small": (full(4, 8, 128), recurrent(36, "mamba2", 128, 64, 128, 1, chunk=256)),
    "nemotron-nano-9b-v2": (
        full(4, 8, 128),
        recurrent(27, "mamba2", 128, 80, 128, 8, chunk=128, dtype="float32"),
    ),
    "nemotron-3-nano-30b-a3b": (
        full(6, 2, 128),
        recurrent(23, "mamba2", 64, 64, 128, 8, chunk=128, dtype="float32"),
    ),
}
