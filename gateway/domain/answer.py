"""Answers of an engine's own code about a model (engines/inquiry). domain/plan.py: the question."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gateway.domain.base import Field
from gateway.domain.plan import Question, StartSettings
from gateway.domain.value import Value


class AskedKernel(Value):
    """The kernel of `count` linear layers of one kind.

    k, n: width of the model and of one expert on this rank, for a layer of experts.
    """

    layer: str
    kernel: str
    k: int
    n: int
    experts: int = 0
    count: int


class AskedAttention(Value):
    """The backend of `layers` attention layers of one kind. version: of FlashAttention, or 0."""

    kind: str
    head_dim: int
    backend: str
    version: int = 0
    layers: int


class AskedCache(Value):
    """The memory of one rank for sequences.

    block_bytes: one block of the pool.
    reserved_blocks: blocks that must be free in addition to those of the longest request.
    fixed: bytes outside the pool, for all requests.
    needed: (tokens, bytes) of one request.
    state_bytes: bytes of the cache for one state of recurrent layers; 0: no layer has a state.
    """

    block_bytes: int = Field(gt=0)
    reserved_blocks: int = Field(0, alias="aside")
    fixed: int = Field(0, ge=0)
    needed: tuple[tuple[int, int], ...]
    state_bytes: int = Field(0, ge=0)
    states_per_request: int = Field(1, ge=1)


class ResolvedSettings(Value):
    """Settings that the engine resolved by itself.

    static_fraction: the share of a GPU for weights and pools; None: the engine has no such share.
    """

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


class RehearsedStart(Value):
    """A start without weights and cache, by the engine's own code.

    settings: the settings of the start.
    run_stages, skipped_steps: stages, the latter with the reason.
    refused: the engine's words, in this stage, at this place of its source.
    has_crashed: an error of its code ends the start, and no statement of it.
    blocks, tokens: the size of the cache.
    """

    settings: StartSettings | None = Field(None, alias="asked")
    run_stages: tuple[str, ...] = Field((), alias="ran")
    skipped_steps: tuple[str, ...] = Field((), alias="left_out")
    refused: str = ""
    stage: str = ""
    location: str = Field("", alias="place")
    has_crashed: bool = Field(False, alias="crashed")
    blocks: int | None = None
    tokens: int | None = None
    graph_sizes: tuple[int, ...] = ()


class EngineAnswer(Value):
    """The engine's answer: how it runs the model, or its own words why it refuses.

    weights: bytes of all parameters of one rank.
    kv: None without a cache.
    source: the image's digest, or the environment.
    """

    kernels: tuple[AskedKernel, ...] = ()
    attention: tuple[AskedAttention, ...] = ()
    weights: int = 0
    kv: AskedCache | None = None
    resolved_settings: ResolvedSettings | None = Field(None, alias="settled")
    start: RehearsedStart | None = None
    refusal_text: str = Field("", alias="refused")
    source: str


class InquiryResult(NamedTuple):
    """The answers of engines. problems: by engine, why it could not be asked.

    pins: the digest that answered, by name of its image.
    """

    answers: Mapping[Question, EngineAnswer]
    problems: Mapping[str, str]
    pins: Mapping[str, str]
