"""The chosen method of speculative decoding, or the reasons against each. Pure."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gateway.domain import AttentionGroup, Choice, LayerAttention, Refusal, Value


class Speculation(Value):
    """`config` is the value of --speculative-config; its `model` is where the drafter was read, not
    where an engine finds it."""

    method: Choice[str]
    tokens: Choice[int] | None = None
    config: dict[str, Any] = Field({}, description="empty: nothing is drafted")
    weights_bytes: int = Field(0, description="per rank, beside the target's")
    weights_from: Literal["headers", "config"] = "headers"
    groups: tuple[AttentionGroup, ...] = Field(
        (), description="attention of the drafter, which keeps a KV cache too"
    )
    attention: tuple[LayerAttention, ...] = ()
    slots: int = Field(
        0,
        description=(
            "tokens of each sequence that a batch (max_num_batched_tokens) reserves for drafting"
        ),
    )
    refused: tuple[Refusal, ...] = ()
    warnings: tuple[str, ...] = ()
