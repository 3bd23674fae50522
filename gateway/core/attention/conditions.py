"""What an attention rule may ask of a layer and a GPU, as data, and the answer in words. Pure.

Check (from a profile) + AttentionQuery (one layer on one rank) + Gpu -> why it does not hold; None: it does
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from gateway.core.kernels.conditions import numbers, of_family
from gateway.domain import Value

Kind = Literal["full", "sliding", "mla", "recurrent", "encoder", "vision"]
Role = Literal["decoder", "encoder", "encoder_only", "encoder_decoder"]


@dataclass(frozen=True, kw_only=True)
class AttentionQuery:
    """One layer as one rank holds it. None: not known (and then a backend that asks for it makes the answer unknown).

    mla: `head_dim` is latent_dim + rope_dim; `nope_dim`, `value_dim` are of the uncompressed heads. encoder: `role` says
    which. causal False: a decoder layer that sees ahead, as the layers of a DFlash drafter do.
    """

    kind: Kind
    head_dim: int
    heads: int = 1
    kv_heads: int = 1
    dtype: str = "bfloat16"
    kv_dtype: str = "auto"
    block_size: int | None = None  # only where --block-size names one
    sinks: bool = False
    causal: bool = True
    sparse: bool = False  # with an indexer (DeepSeek V3.2)
    multimodal_prefix: bool = False  # the tokens of an image see one another, as in Gemma 3
    softcap: bool = False
    role: Role = "decoder"
    nope_dim: int | None = None
    rope_dim: int | None = None
    value_dim: int | None = None
    latent_dim: int | None = None
    index_topk: int | None = None
    flash_attention: int | None = None  # the version that is asked for, --attention-config
    recurrent: Literal["gdn", "kda", "mamba1", "mamba2"] | None = None


@dataclass(frozen=True)
class Gpu:
    capability: str
    packages: frozenset[str]


class Unknown(str):
    """Not a reason: what the rule asks for is not known."""


class Check(Value):
    """Conditions, all of which must hold. Capabilities are "9.0" or, for a family, "12.*"."""

    when: Check | None = None  # the others apply only where this holds
    any_of: tuple[Check, ...] | None = None
    kinds: tuple[Kind, ...] | None = None
    capabilities: tuple[str, ...] | None = None
    min_capability: str | None = None
    max_capability: str | None = None
    package: str | None = None
    head_dims: tuple[int, ...] | None = None
    head_multiple: int | None = None
    min_head: int | None = None
    max_head: int | None = None
    dtypes: tuple[str, ...] | None = None
    kv_dtypes: tuple[str, ...] | None = None
    block_multiple: int | None = None
    heads: tuple[int, ...] | None = None
    max_heads: int | None = None
    sinks: bool | None = None
    causal: bool | None = None
    sparse: bool | None = None
    multimodal_prefix: bool | None = None
    softcap: bool | None = None
    flash_attention_4: bool | None = None  # FlashAttention 4 is asked for
    nope_dims: tuple[int, ...] | None = None
    rope_dims: tuple[int, ...] | None = None
    value_dims: tuple[int, ...] | None = None
    latent_dims: tuple[int, ...] | None = None
    index_topks: tuple[int, ...] | None = None
    index_topk_multiple: int | None = None

    @cached_property
    def tests(self) -> tuple[tuple[Callable[[Any, AttentionQuery, Gpu], str], Any], ...]:
        """What is asked for: the function that tests it, and the value."""
        return tuple((test, wanted) for name, test in _TESTS if (wanted := getattr(self, name)) is not None)


def refusal(check: Check, query: AttentionQuery, gpu: Gpu) -> str | None:
    """Why the check does not hold; None: it does."""
    if check.when is not None and (outside := refusal(check.when, query, gpu)) is not None:
        return outside if isinstance(outside, Unknown) else None
    for test, wanted in check.tests:
        reason = test(wanted, query, gpu)
        if reason:
            return reason
    return None


# --- one function a condition: what is wanted, the layer, the GPU -> why not, in words with the numbers; "": it holds ---


def _any_of(wanted: tuple[Check, ...], query: AttentionQuery, gpu: Gpu) -> str:
    reasons = [refusal(check, query, gpu) for check in wanted]
    if None in reasons:
        return ""
    unknown = next((reason for reason in reasons if isinstance(reason, Unknown)), None)
    return unknown or " and ".join(dict.fromkeys(reason for reason in reasons if reason))


def _capabilities(wanted: tuple[str, ...], _: AttentionQuery, gpu: Gpu) -> str:
    here = of_family(gpu.capability, wanted)
    return "" if here else f"runs on compute capability {_or(wanted)}, this GPU has {gpu.capability}"


def _min_capability(wanted: str, _: AttentionQuery, gpu: Gpu) -> str:
    enough = (numbers(gpu.capability) or (0, 0)) >= (numbers(wanted) or (0, 0))
    return "" if enough else f"needs compute capability {wanted} or higher, this GPU has {gpu.capability}"


def _max_capability(wanted: str, _: AttentionQuery, gpu: Gpu) -> str:
    within = (numbers(gpu.capability) or (0, 0)) <= (numbers(wanted) or (0, 0))
    return "" if within else f"is for compute capability up to {wanted}, this GPU has {gpu.capability}"


def _package(wanted: str, _: AttentionQuery, gpu: Gpu) -> str:
    return "" if wanted in gpu.packages else f"the package {wanted} is not installed"


def _one_of(name: str, read: Callable[[AttentionQuery], Any]) -> Callable[[Any, AttentionQuery, Gpu], str]:
    def test(wanted: Any, query: AttentionQuery, _: Gpu) -> str:
        value = read(query)
        if value is None:
            return Unknown(f"{name} is not known")
        return "" if value in wanted else f"takes {name} {_or(wanted) or 'of its own'}, not {value}"

    return test


def _multiple(name: str, read: Callable[[AttentionQuery], int | None]) -> Callable[[int, AttentionQuery, Gpu], str]:
    def test(wanted: int, query: AttentionQuery, _: Gpu) -> str:
        value = read(query)
        if value is None:
            return Unknown(f"{name} is not known")
        return f"{name} {value} is not a multiple of {wanted}" if value % wanted else ""

    return test


def _block_multiple(wanted: int, query: AttentionQuery, _: Gpu) -> str:
    size = query.block_size
    return f"block size {size} is not a multiple of {wanted}" if size is not None and size % wanted else ""


def _at_most(name: str, read: Callable[[AttentionQuery], int]) -> Callable[[int, AttentionQuery, Gpu], str]:
    return lambda wanted, query, _: "" if read(query) <= wanted else f"{name} {read(query)} is above {wanted}"


def _min_head(wanted: int, query: AttentionQuery, _: Gpu) -> str:
    return "" if query.head_dim >= wanted else f"head size {query.head_dim} is below {wanted}"


def _is(name: str, read: Callable[[AttentionQuery], bool]) -> Callable[[bool, AttentionQuery, Gpu], str]:
    return lambda wanted, query, _: "" if read(query) == wanted else f"is {'' if wanted else 'not '}for {name}"


@lru_cache(maxsize=1024)
def _or(wanted: tuple[Any, ...]) -> str:
    return " or ".join(map(str, wanted))


_TESTS: tuple[tuple[str, Callable[[Any, AttentionQuery, Gpu], str]], ...] = (
    ("kinds", _one_of("layers of kind", lambda q: q.kind)),
    ("capabilities", _capabilities),
    ("min_capability", _min_capability),
    ("max_capability", _max_capability),
    ("package", _package),
    ("head_dims", _one_of("head size", lambda q: q.head_dim)),
    ("head_multiple", _multiple("head size", lambda q: q.head_dim)),
    ("min_head", _min_head),
    ("max_head", _at_most("head size", lambda q: q.head_dim)),
    ("dtypes", _one_of("dtype", lambda q: q.dtype)),
    ("kv_dtypes", _one_of("KV cache dtype", lambda q: q.kv_dtype)),
    ("block_multiple", _block_multiple),
    ("heads", _one_of("heads per rank", lambda q: q.heads)),
    ("max_heads", _at_most("heads per rank", lambda q: q.heads)),
    ("sinks", _is("layers with attention sinks", lambda q: q.sinks)),
    ("causal", _is("causal layers", lambda q: q.causal)),
    ("sparse", _is("sparse attention", lambda q: q.sparse)),
    ("multimodal_prefix", _is("image tokens that see one another", lambda q: q.multimodal_prefix)),
    ("softcap", _is("logits with a soft cap", lambda q: q.softcap)),
    ("flash_attention_4", _is("a forced FlashAttention 4", lambda q: q.flash_attention == 4)),
    ("nope_dims", _one_of("qk_nope_head_dim", lambda q: q.nope_dim)),
    ("rope_dims", _one_of("qk_rope_head_dim", lambda q: q.rope_dim)),
    ("value_dims", _one_of("v_head_dim", lambda q: q.value_dim)),
    ("latent_dims", _one_of("kv_lora_rank", lambda q: q.latent_dim)),
    ("index_topks", _one_of("index_topk", lambda q: q.index_topk)),
    ("index_topk_multiple", _multiple("index_topk", lambda q: q.index_topk)),
    ("any_of", _any_of),
)
