"""A drafter: a small model whose tokens a larger one checks. Pure."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gateway.domain import AttentionGroup, ModelSpec, TensorGroup, Value

DraftMethod = Literal["eagle", "eagle3", "dflash", "dspark", "mtp", "draft_model"]


class Drafter(Value):
    """What a plan needs to know of a drafter. `tensors` are as stored; an engine casts floats to
    the target's dtype."""

    source: str
    revision: str | None = None
    method: DraftMethod
    kind: str = Field(
        "", description="speculators_model_type; empty: not in the speculators format"
    )
    architecture: str
    model_type: str
    tokens: int | None = Field(None, description="drafted at once, as the drafter's files name it")
    tokens_source: str = ""
    parallel: bool = Field(
        False, description="P-EAGLE: an EAGLE3 that drafts all tokens in one pass"
    )
    hidden: int
    vocab: int = Field(description="tokens it reads: the target's vocabulary")
    draft_vocab: int = Field(description="tokens it can draft")
    target_hidden: int | None = Field(
        None, description="hidden size of the target that it was made for; None: not named"
    )
    target_layers: tuple[int, ...] = Field(
        (), description="layers of the target whose outputs it reads"
    )
    attention: tuple[AttentionGroup, ...]
    tensors: tuple[TensorGroup, ...] = ()
    plain: ModelSpec | None = Field(
        None, description="method draft_model: it is a model of its own"
    )
    tensors_from: Literal["headers", "config"]

    @property
    def heads(self) -> tuple[int, ...]:
        return tuple(group.heads for group in self.attention)
