"""One rank of an engine: how many share the model, and in what it computes. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Rank(NamedTuple):
    """tp, pp: ranks of tensor parallelism, stages of pipeline parallelism. ep: ranks over which
        experts are dealt whole; 1: experts
    are cut like other layers. dtype: of activations. capability: of the GPU ("8.6"); "" on a CPU,
        or where it is not known.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dtype: str = "bfloat16"
    kv_dtype: str = "auto"
    capability: str = ""

    @property
    def computing(self) -> Rank:
        """The same rank as far as weights and their kernels go: whatever stage it is in, and
        however it keeps its cache."""
        return Rank(self.tp, 1, self.ep, self.dtype, "auto", self.capability)
