"""What one rank of an engine computes at once. Pure."""

from __future__ import annotations

from typing import NamedTuple

from gateway.models.rank import Rank


class Workload(NamedTuple):
    """`runner`: the 1st or 2nd model runner of vLLM. query: tokens of a request in one step of
    decoding, with those that are drafted."""

    device: str
    rank: Rank
    batched_tokens: int
    seqs: int
    graphs: bool
    runner: int = 1
    query: int = 1
