"""Values that describe the work of one rank for a token; count.py makes them. Pure."""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

from gateway.domain.record import FrozenRecord


class Product(NamedTuple):
    """All linear layers of one kind on one rank.

    layers: their number.
    bytes: bytes of their weights.
    flops, passed_bytes: FLOP, and bytes of inputs and outputs, of one token.
    experts: each token uses `per_token` of them; 0: all weights.
    expert_ranks: number of ranks over which whole experts are spread; 1: each is split.
    number_format: the format.
    kernel: the name of a kernel in KernelNames.
    """

    layers: int
    bytes: float
    flops: float
    passed_bytes: float
    number_format: str
    kernel: str
    experts: int = 0
    per_token: int = 0
    expert_ranks: int = 1

    def busiest(self, tokens: float) -> float:
        """Work of the busiest rank relative to the mean of all ranks, for this many random choices
        of experts."""
        drawn = tokens * self.per_token / self.expert_ranks
        return (
            1 + math.sqrt(2 * math.log(self.expert_ranks) / drawn)
            if self.expert_ranks > 1 and drawn
            else 1.0
        )

    def bytes_of_step(self, tokens: float) -> float:
        """Bytes of weights that a batch of this many tokens reads: those of experts that no token
        takes are not read."""
        if not self.experts:
            return self.bytes
        untouched: float = (1 - self.per_token / self.experts) ** tokens
        return self.bytes * min(1.0, (1 - untouched) * self.busiest(tokens))


class AttentionWork(NamedTuple):
    """Attention layers of one kind on one rank.

    token_bytes: bytes of the KV cache for each token of context; at most `window` tokens count.
    state_bytes: read and written for each request of any length.
    has_8_bit_cache: the cache has 8 bits.
    is_narrow: heads have 64 elements or fewer.
    flops: operations of one token with one token of its context.
    prompt_flops: operations of a prompt, if they differ.
    """

    token_bytes: float
    flops: float
    window: int | None = None
    state_bytes: float = 0
    has_8_bit_cache: bool = False
    is_narrow: bool = False
    prompt_flops: float = 0

    def visible_tokens(self, context: float) -> float:
        return context if self.window is None else min(context, float(self.window))

    def pairs(self, prompt: float) -> float:
        """The pairs of a whole prompt's tokens, each with every token that it attends to."""
        window = self.visible_tokens(prompt)
        return window * window / 2 + (prompt - window) * window


# Compared by identity, as plans share one.
class RankWork(FrozenRecord, frozen=True, eq=False, dict=True):
    """Work of one rank of the fullest stage.

    head: the product for logits, only for the last token of a request.
    all_reduce_count: number of all-reduces of `hidden_bytes` for each token, by `tp` ranks.
    dp: groups of ranks whose tokens all meet in the layers with experts.
    """

    products: tuple[Product, ...]
    head: Product
    readings: tuple[AttentionWork, ...]
    layers: int
    all_reduce_count: int
    hidden_bytes: int
    tp: int
    pp: int
    dp: int = 1

    @cached_property
    def expert_layers(self) -> int:
        """How many of the layers have experts."""
        return min(
            self.layers,
            max((product.layers for product in self.products if product.experts), default=0),
        )
