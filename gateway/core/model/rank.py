"""One rank of an engine: how many share the model, and in what it computes. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rank:
    """tp, pp: ranks of tensor parallelism, stages of pipeline parallelism. ep: ranks over which experts are dealt whole; 1: experts
    are cut like other layers. dtype: of activations. capability: of the GPU ("8.6"); "" on a CPU, or where it is not known.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dtype: str = "bfloat16"
    kv_dtype: str = "auto"
    capability: str = ""
