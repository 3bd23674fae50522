"""KV cache dtype that an engine version gives a model of its own accord. Pure."""

from __future__ import annotations

from gateway.domain import CacheDefault, Engine, ModelSpec
from gateway.engines.common.rules.subject import is_of_family


def find_cache_default(
    spec: ModelSpec, engine: Engine, capability: str | None
) -> CacheDefault | None:
    """The row for this model on GPUs of this compute capability; None: it has no such dtype."""
    return next(
        (
            row
            for row in engine.cache_defaults
            if spec.architecture in row.architectures
            and capability is not None
            and is_of_family(capability, row.capabilities)
        ),
        None,
    )
