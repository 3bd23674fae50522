"""Methods of drafting in one engine version: profiles/engines/KIND/VERSION/speculative.yaml.
Pure."""

from __future__ import annotations

from typing import Any

from gateway.domain import AttentionGroup, Choice, LayerAttention, Refusal, Value
from gateway.domain.base import Field


class Targets(Value):
    """Models that may have such layers, by model_type or architecture, and the field of config.json
    that counts them."""

    types: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    field: str
    default: int | None = Field(
        None, description="layers where the config has no such field; None: then there are none"
    )


class Mtp(Value):
    source: str = ""
    targets: tuple[Targets, ...]
    staged: dict[str, str] = Field(
        {},
        description="model_type or architecture -> class of its drafting layers, which has to be"
        " able to run in stages of a pipeline; empty: none has to",
    )


class HiddenStateTargets(Value):
    """Targets that hand out the hidden states of their layers, which EAGLE3, DFlash and DSpark
    read."""

    source: str = ""
    types: tuple[str, ...] = Field(
        (), description="a model_type has to contain one of these; empty: any"
    )
    architectures: tuple[str, ...]


class SpeculativeRules(Value):
    methods: dict[str, str] = Field(description="method -> where the version names it")
    parallel: tuple[str, ...] = Field(
        (), description="methods for which a batch reserves all drafted tokens but one per sequence"
    )
    speculators: dict[str, dict[str, str]] = Field(
        description=(
            "speculators_model_type -> model_type of its layers ('*': any) -> the class that"
            " loads it"
        )
    )
    architectures: tuple[str, ...] = Field(description="classes that load drafters")
    hidden_states: HiddenStateTargets
    mtp: Mtp
    copies_vocabulary: bool = Field(
        False,
        description="layers that draft have an embedding and a head of their own, in 16 bits, while"
        " the engine sizes its cache",
    )
    default_tokens: int | None = Field(
        None, description="tokens of a draft by the engine's own choice; None: one for each layer"
    )
    default_requests: int | None = Field(
        None, description="concurrent requests of an engine that drafts; None: as without"
    )


class Speculation(Value):
    """The drafting of a plan.

    `config` is the value of vLLM's --speculative-config; its `model` is where the drafter was read,
    not where an engine finds it.
    """

    method: Choice[str]
    tokens: Choice[int] | None = None
    config: dict[str, Any] = Field({}, description="empty: nothing is drafted")
    weights_bytes: int = Field(0, description="per rank, in addition to the target's")
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

    @property
    def draft_tokens(self) -> int:
        """Tokens that a step drafts for each sequence."""
        return self.tokens.value if self.config and self.tokens else 0
