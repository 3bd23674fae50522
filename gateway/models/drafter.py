"""A drafter: a small model whose tokens a larger one checks. Pure."""

from __future__ import annotations

from typing import Literal

from gateway.domain import AttentionGroup, ModelSpec, TensorGroup, Value
from gateway.domain.base import Field

DraftMethod = Literal["eagle", "eagle3", "dflash", "dspark", "mtp", "draft_model"]


class Drafter(Value):
    """A drafter as a plan needs it.

    `tensors` are as stored; an engine casts floats to the target's dtype.
    """

    source: str
    revision: str | None = None
    method: DraftMethod
    kind: str = Field(
        "", description="speculators_model_type; empty: not in the speculators format"
    )
    architecture: str
    model_type: str
    tokens: int | None = Field(None, description="tokens per draft, as the drafter's files say")
    tokens_source: str = ""
    is_parallel: bool = Field(
        False, description="P-EAGLE: EAGLE3 with all tokens drafted in one pass", alias="parallel"
    )
    hidden: int
    vocab: int = Field(description="input vocabulary: the target's")
    draft_vocab: int = Field(description="vocabulary of drafts")
    target_hidden: int | None = Field(
        None, description="hidden size of the drafter's target; None: not named"
    )
    target_layers: tuple[int, ...] = Field(
        (), description="layers of the target whose outputs the drafter reads"
    )
    attention: tuple[AttentionGroup, ...]
    tensors: tuple[TensorGroup, ...] = ()
    plain: ModelSpec | None = Field(
        None, description="method draft_model: the drafter as an ordinary model"
    )
    tensors_from: Literal["headers", "config"]

    @property
    def heads(self) -> tuple[int, ...]:
        return tuple(group.heads for group in self.attention)
