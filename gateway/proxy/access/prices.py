"""Prices of models, for budgets of money. A file has them:

    currency: EUR
    models:
      qwen: {prompt: 0.10, cached: 0.02, completion: 0.40}
      "*": {gpu_hour: 2.50}

Prices of tokens are for a million of them. `cached` are prompt tokens from a cache; without it
they cost as much as others. `*` is every other model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.proxy.access.ledger import GPU_UNITS, MONEY_UNITS

ANY_MODEL = "*"
_MILLION = 10**6
_HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class ModelPrice:
    """The price of one model. cached: None for that of `prompt`."""

    prompt: float = 0.0
    completion: float = 0.0
    cached: float | None = None
    gpu_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of all models, by name. currency: for people."""

    models: Mapping[str, ModelPrice] = field(default_factory=dict)
    currency: str = ""

    def find(self, model: str) -> ModelPrice | None:
        """The price of a model; None: it has none."""
        return self.models.get(model) or self.models.get(ANY_MODEL)


def money(
    price: ModelPrice, prompt: int, completion: int, cached_tokens: int, gpu_time: int
) -> int:
    """The cost of a request in billionths. gpu_time: microseconds of GPUs."""
    cached_tokens = min(cached_tokens, prompt)
    cached_price = price.prompt if price.cached is None else price.cached
    tokens = (
        (prompt - cached_tokens) * price.prompt
        + cached_tokens * cached_price
        + completion * price.completion
    ) / _MILLION
    return round((tokens + gpu_time / GPU_UNITS / _HOUR_S * price.gpu_hour) * MONEY_UNITS)
