"""One rank of an engine: its share of the model, and the dtypes of its computation. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Rank(NamedTuple):
    """One rank of an engine.

    tp, pp: ranks of tensor parallelism, stages of pipeline parallelism.
    ep: ranks that share the experts, each expert whole; 1: experts are cut like other layers.
    dp: groups of `tp` ranks that compute attention for requests of their own, and share the experts
    among all of them.
    dtype: dtype of activations.
    capability: compute capability of the GPU ("8.6"); "": a CPU, or unknown.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dtype: str = "bfloat16"
    kv_dtype: str = "auto"
    capability: str = ""
    dp: int = 1

    @property
    def expert_parts(self) -> int:
        """Parts into which each expert is cut."""
        return 1 if self.ep > 1 else self.tp * self.dp

    @property
    def computing(self) -> Rank:
        """The rank reduced to the fields that decide weights and kernels."""
        return Rank(
            tp=self.tp,
            pp=1,
            ep=self.ep,
            dtype=self.dtype,
            kv_dtype="auto",
            capability=self.capability,
            dp=self.dp,
        )
