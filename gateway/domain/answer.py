"""What an engine's own code says of a model. See gateway/inquiry; domain/plan.py has the
question."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pydantic import Field

from gateway.domain.plan import Question
from gateway.domain.value import Value


class AskedKernel(Value):
    """What computes `count` linear layers of one kind; of experts `k` is the model's width and `n`
    one expert's, on this rank."""

    layer: str
    kernel: str
    k: int
    n: int
    experts: int = 0
    count: int


class AskedAttention(Value):
    """What computes `layers` attention layers of one kind. version: of FlashAttention; 0: not of
    it."""

    kind: str
    head_dim: int
    backend: str
    version: int = 0
    layers: int


class AskedCache(Value):
    """What one rank keeps of sequences. block_bytes: one block of the pool; aside: blocks that must
    be free beside those of the longest
    request; fixed: bytes beside the pool, for no request; needed: (tokens, bytes of one request of
    this length).
    """

    block_bytes: int = Field(gt=0)
    aside: int = 0
    fixed: int = Field(0, ge=0)
    needed: tuple[tuple[int, int], ...]


class Settled(Value):
    """What the engine resolved by itself. static_fraction: the share of a GPU for weights and
    pools; None: it has no such share."""

    architecture: str
    dtype: str
    quantization: str
    kv_cache_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enforce_eager: bool
    runner: str
    static_fraction: float | None = None


class EngineAnswer(Value):
    """The engine's answer: what it makes of the model, or (`refused`) its own words why it does
    not.

    weights: bytes of all parameters of one rank. kv: None where nothing is kept. source: the
    image's digest, or the environment.
    """

    kernels: tuple[AskedKernel, ...] = ()
    attention: tuple[AskedAttention, ...] = ()
    weights: int = 0
    kv: AskedCache | None = None
    settled: Settled | None = None
    refused: str = ""
    source: str


class Asked(NamedTuple):
    """What came of asking: the answers; by engine, in words, why it could not be asked; and by the
    name of an image the digest of what was asked."""

    answers: Mapping[Question, EngineAnswer]
    problems: Mapping[str, str]
    pins: Mapping[str, str]
