"""Subjects of conditions: a layer or a model, its GPU, and the installation. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, NamedTuple

from gateway.models.scheme import LinearShape, MoeShape

LayerKind = Literal["full", "sliding", "mla", "recurrent", "encoder", "vision"]
AttentionRole = Literal["decoder", "encoder", "encoder_only", "encoder_decoder"]


class AttentionQuery(NamedTuple):
    """Attention of one layer on one rank (vLLM), or of a whole model (SGLang). None: not known.

    kind: the kind of layer. With `mla`, `head_dim` is latent_dim + rope_dim; `nope_dim` and
    `value_dim` are of the uncompressed heads. Encoders differ by `role`.
    causal: False for a decoder layer that sees ahead, as in a DFlash drafter.
    """

    kind: LayerKind
    head_dim: int = 0  # 0: of a whole model, whose layers may differ
    heads: int = 1
    dtype: str = "bfloat16"
    kv_dtype: str = "auto"
    block_size: int | None = None  # only where --block-size names one
    has_sinks: bool = False
    causal: bool = True
    sparse: bool = False  # with an indexer (DeepSeek V3.2)
    multimodal_prefix: bool = False  # the tokens of an image see one another, as in Gemma 3
    softcap: bool = False
    alibi: bool = False
    role: AttentionRole = "decoder"
    nope_dim: int | None = None
    rope_dim: int | None = None
    value_dim: int | None = None
    latent_dim: int | None = None
    index_topk: int | None = None
    flash_attention: int | None = None  # the version that is asked for, --attention-config
    recurrent: Literal["", "gdn", "kda", "mamba1", "mamba2", "short_conv"] = (
        ""  # "": not recurrent; of a model: it has no such layers
    )
    # only for a whole model
    architecture: str = ""
    state_dtype: str = (
        "float32"  # of recurrent layers; the engine's own where config.json names none
    )
    state_size: tuple[int, int] = (0, 0)  # rows and columns of a head's state
    chunk: int = 0  # tokens of one prefill batch, where the user sets them


class Subject(NamedTuple):
    """A GPU and the parts of its work that the rules test; other parts are None."""

    capability: str
    packages: frozenset[str] = frozenset()
    layer: LinearShape | None = None  # a dense layer, or one of the two products of experts
    experts: MoeShape | None = None
    attention: AttentionQuery | None = None
    activation: str = ""  # how the code path of `layer` quantizes activations
    disabled: frozenset[str] = frozenset()  # kernels, by the user
    variables: frozenset[str] = frozenset()  # environment variables: NAME=VALUE, and NAME if on
    gpu_gib: float = 0  # memory of the smallest GPU


@lru_cache(maxsize=64)
def numbers(capability: str) -> tuple[int, int] | None:
    """Major and minor number; None: the text is not a compute capability."""
    major, _, minor = capability.partition(".")
    return (
        (int(major), int(minor))
        if (major + minor).isascii() and major.isdigit() and minor.isdigit()
        else None
    )


def is_of_family(capability: str, families: Iterable[str]) -> bool:
    return any(
        capability == family or family == f"{capability.partition('.')[0]}.*" for family in families
    )
