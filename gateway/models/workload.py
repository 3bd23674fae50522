"""The workload of one rank of an engine. Pure."""

from __future__ import annotations

from typing import NamedTuple

from gateway.models.rank import Rank


class Workload(NamedTuple):
    """The largest computation of one step.

    runner: the 1st or 2nd model runner of vLLM.
    query: tokens of a request in one decoding step, drafted tokens included.
    has_drafter: whether layers draft from the model's hidden states.
    context: the longest context in tokens that may be planned; 0 where nothing depends on it.
    """

    device: str
    rank: Rank
    batched_tokens: int
    seqs: int
    graphs: bool
    runner: int = 1
    query: int = 1
    has_drafter: bool = False
    context: int = 0
