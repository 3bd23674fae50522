"""What one stage of pipeline parallelism has of a model. Pure."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from gateway.core.layers.layers import Body


@lru_cache(maxsize=64)
def stage(body: Body, stages: int) -> Body:
    """The fullest of `stages` stages: its share of the layers rounded up, and one of embedding and output head.

    Source: get_pp_indices in vllm/distributed/utils.py deals the layers out evenly; the embedding is on the first rank, the
    head on the last.
    """
    if stages == 1:
        return body

    def share(count: int) -> int:
        return -(-count // stages)

    heads = [tensor for tensor in body.others if tensor.shard == "vocab"]
    kept = sorted(heads, key=lambda tensor: tensor.shape)[-1:]
    return replace(
        body,
        linears=tuple(replace(layer, count=share(layer.count)) for layer in body.linears),
        others=tuple(t.evolve(count=share(t.count)) for t in body.others if t.shard != "vocab") + tuple(kept),
        attention=tuple(group.evolve(layers=share(group.layers)) for group in body.attention),
    )
