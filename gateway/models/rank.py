"""One rank of an engine: its share of the model, and the dtypes of its computation. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Rank(NamedTuple):
    """One rank of an engine.

    tp, pp: ranks of tensor parallelism, stages of pipeline parallelism.
    ep: ranks that share the experts, each expert whole; 1: experts are cut like other layers.
    dtype: dtype of activations.
    capability: compute capability of the GPU ("8.6"); "": a CPU, or unknown.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dtype: str = "bfloat16"
    kv_dtype: str = "auto"
    capability: str = ""

    @property
    def computing(self) -> Rank:
        """The rank reduced to the fields that decide weights and kernels."""
        return Rank(self.tp, 1, self.ep, self.dtype, "auto", self.capability)
