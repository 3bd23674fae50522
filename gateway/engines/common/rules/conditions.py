"""Conditions of rules by name: the type of the value, and a test with a reason. Pure.

CONDITIONS[name].test(subject, expected) -> the reason that it does not hold, with numbers; "": it
holds

A profile writes conditions by name: {schemes: [wna16], min_capability: "8.0", n_multiple: 64}.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Any, Literal

from gateway.domain.base import ConfigDict, Field, TypeAdapter
from gateway.domain.record import FrozenRecord
from gateway.engines.common.rules.subject import (
    AttentionQuery,
    LayerKind,
    Subject,
    is_of_family,
    numbers,
)
from gateway.models.scheme import Kind, LinearShape, MoeShape

Test = Callable[[Any, Subject], str]
Read = Callable[[Subject], Any]  # None: not known


class UnknownSubject(str):
    """No refusal: the subject lacks a value that the condition tests."""


class Condition(FrozenRecord, frozen=True):
    operand: TypeAdapter[Any]  # the type of its value in a profile
    test: Test


def _type_adapter(kind: Any) -> TypeAdapter[Any]:
    """Built when it is first asked: a plan by shipped rules asks none."""
    return TypeAdapter(kind, config=ConfigDict(defer_build=True))


_NAMES = _type_adapter(tuple[str, ...])
_NUMBERS = _type_adapter(tuple[int, ...])
_NAME = _type_adapter(str)
_NUMBER = _type_adapter(int)
_YES_NO = _type_adapter(bool)
_YES = _type_adapter(Literal[True])
_SIZE = _type_adapter(Annotated[int, Field(ge=1)])

# --- parts of most conditions: the part of the subject that is read, and the comparison of its
# value ---


def _layer_reader(read: Callable[[LinearShape], Any]) -> Read:
    return lambda subject: None if subject.layer is None else read(subject.layer)


def _experts_reader(read: Callable[[MoeShape], Any]) -> Read:
    return lambda subject: None if subject.experts is None else read(subject.experts)


def _attention_reader(read: Callable[[AttentionQuery], Any]) -> Read:
    return lambda subject: None if subject.attention is None else read(subject.attention)


def _comparison_test(text: str, read: Read, reason: Callable[[Any, Any], str]) -> Test:
    """A test of one value. `reason` gets this value and the rule's."""

    def test(requirement: Any, subject: Subject) -> str:
        value = read(subject)
        return (
            UnknownSubject(f"{text} is not known") if value is None else reason(value, requirement)
        )

    return test


def _membership_condition(text: str, read: Read, operand: TypeAdapter[Any] = _NAMES) -> Condition:
    def reason(value: Any, requirement: tuple[Any, ...]) -> str:
        return (
            ""
            if value in requirement
            else f"takes {text} {_alternatives_text(requirement) or 'of its own'}, not {value}"
        )

    return Condition(operand, _comparison_test(text, read, reason))


def _switch_condition(text: str, read: Read) -> Condition:
    def reason(value: bool, requirement: bool) -> str:
        return "" if value == requirement else f"is {'' if requirement else 'not '}for {text}"

    return Condition(_YES_NO, _comparison_test(text, read, reason))


def _divisibility_condition(
    text: str, read: Read, message: str = "{} {} is not a multiple of {}"
) -> Condition:
    def reason(value: int, requirement: int) -> str:
        return (
            message.format(text, value, requirement, value % requirement)
            if value % requirement
            else ""
        )

    return Condition(_SIZE, _comparison_test(text, read, reason))


def _minimum_condition(text: str, read: Read, message: str = "{} {} is below {}") -> Condition:
    return Condition(
        _NUMBER,
        _comparison_test(
            text,
            read,
            lambda value, requirement: (
                message.format(text, value, requirement) if value < requirement else ""
            ),
        ),
    )


def _maximum_condition(text: str, read: Read, message: str = "{} {} is above {}") -> Condition:
    return Condition(
        _NUMBER,
        _comparison_test(
            text,
            read,
            lambda value, requirement: (
                message.format(text, value, requirement) if value > requirement else ""
            ),
        ),
    )


@lru_cache(maxsize=1024)
def _alternatives_text(requirement: tuple[Any, ...]) -> str:
    return " or ".join(map(str, requirement))


# "K=64 is ...": of the sides of a product, with how much is over.
# KiB of shared memory that a block of threads may take: CUDA C++ Programming Guide, technical
# specifications per compute capability. All others have at least the last.
_SHARED_KIB = {
    "7.0": 96,
    "7.5": 64,
    "8.0": 163,
    "8.7": 163,
    "9.0": 227,
    "10.0": 227,
    "10.3": 227,
    "11.0": 227,
}
_MIN_SHARED_KIB = 99
_OVER = "{}={} is not a multiple of {} ({} over)"
_BELOW = "{}={} is below {}"


# --- conditions that need more than one comparison ---


def _layer_condition(
    reason: Callable[[LinearShape, Any], str], operand: TypeAdapter[Any]
) -> Condition:
    return Condition(operand, _comparison_test("the layer", lambda subject: subject.layer, reason))


def _expert_condition(
    reason: Callable[[MoeShape, Any], str], operand: TypeAdapter[Any]
) -> Condition:
    return Condition(
        operand, _comparison_test("the layer of experts", lambda subject: subject.experts, reason)
    )


def _capability_refusal(requirement: tuple[str, ...], subject: Subject) -> str:
    matching = is_of_family(subject.capability, requirement)
    return (
        ""
        if matching
        else f"runs on compute capability {_alternatives_text(requirement)}, this GPU has"
        f" {subject.capability}"
    )


def _has_min_capability(requirement: str, subject: Subject) -> bool:
    return (numbers(subject.capability) or (0, 0)) >= (numbers(requirement) or (0, 0))


def _min_capability(requirement: str, subject: Subject) -> str:
    is_enough = _has_min_capability(requirement, subject)
    return (
        ""
        if is_enough
        else f"needs compute capability {requirement} or higher, this GPU has {subject.capability}"
    )


def _below_capability(requirement: str, subject: Subject) -> str:
    is_above = _has_min_capability(requirement, subject)
    return (
        f"is for GPUs below compute capability {requirement}, this one has {subject.capability}"
        if is_above
        else ""
    )


def _min_gib(requirement: float, subject: Subject) -> str:
    return "" if subject.gpu_gib >= requirement else f"the GPU has less than {requirement:g} GiB"


def _package_refusal(requirement: str, subject: Subject) -> str:
    return "" if requirement in subject.packages else f"the package {requirement} is not installed"


def _variable_refusal(requirement: str, subject: Subject) -> str:
    return "" if requirement in subject.variables else f"{requirement}=1 is not set"


def _kernel_refusal(requirement: str, subject: Subject) -> str:
    return (
        f"the engine also wants {requirement}, which VLLM_DISABLED_KERNELS disables"
        if requirement in subject.disabled
        else ""
    )


_DTYPE = _membership_condition("dtype", _attention_reader(lambda a: a.dtype))
_ACTIVATION_DTYPE = _membership_condition("activations in", _layer_reader(lambda s: s.dtype))


def _dtype_refusal(requirement: tuple[str, ...], subject: Subject) -> str:
    return (_ACTIVATION_DTYPE if subject.attention is None else _DTYPE).test(requirement, subject)


def _full_k(layer: LinearShape) -> int:
    return layer.full_k or layer.k


def _act_order(layer: LinearShape, requirement: str) -> str:
    act_order = layer.scheme.act_order
    full_k = _full_k(layer)
    if requirement == "yes":
        return "" if act_order else "is for layers with act-order"
    if not act_order or (requirement == "unsharded" and layer.k == full_k):
        return ""
    return "cannot do act-order" + (
        f" on K={layer.k} of {full_k}" if requirement == "unsharded" else ""
    )


def _group_is_full_k(layer: LinearShape, _: bool) -> str:
    group_size = layer.scheme.group
    full_k = _full_k(layer)
    return "" if group_size == full_k else f"group size {group_size} is not the whole K={full_k}"


def _whole_groups(layer: LinearShape, requirement: str) -> str:
    group_size = layer.scheme.group
    full_k = _full_k(layer)
    if group_size <= 0 or (requirement == "rank unless one group" and group_size >= full_k):
        return ""
    value = full_k if requirement == "layer" else layer.k
    return (
        f"K={value} is not a multiple of the group size {group_size}" if value % group_size else ""
    )


def _block_groups(layer: LinearShape, allowed_sizes: tuple[int, ...]) -> str:
    """The groups in the K that one block of the kernel takes: 128, or the next smaller multiple of
    the group that divides K."""
    group_size = layer.scheme.group
    if group_size <= 0 or layer.k % group_size:
        return ""
    block = next(
        (
            size
            for size in range(max(128 // group_size, 1) * group_size, 0, -group_size)
            if layer.k % size == 0
        ),
        group_size,
    )
    if block // group_size in allowed_sizes:
        return ""
    return (
        f"a block of {block} of K={layer.k} has {block // group_size} groups of {group_size},"
        f" and the kernel takes {_alternatives_text(allowed_sizes)}"
    )


def _n_packs(layer: LinearShape, _: bool) -> str:
    # A number of bits that does not divide 32 needs several words: Fraction(32,
    # bits).numerator in gptq.py.
    packs = 32 // math.gcd(32, max(layer.scheme.bits, 1))
    remainder = layer.n % packs
    return _OVER.format("N", layer.n, packs, remainder) if remainder else ""


def _cut_multiple(layer: LinearShape, requirement: int) -> str:
    sizes = [("K", layer.k)] if layer.k < _full_k(layer) else []
    if len(layer.parts) > 1 or layer.n < (layer.full_n or layer.n):
        sizes += [("N", part) for part in layer.parts or (layer.n,)]
    odd = next(((name, size) for name, size in sizes if size % requirement), None)
    return _OVER.format(*odd, requirement, odd[1] % requirement) if odd else ""


def _origins(subject: Subject) -> str | None:
    product = subject.experts or subject.layer
    return None if product is None else product.origin


def _family(subject: Subject) -> str | None:
    """The family of the model, whose switches hold for dense layers and experts alike."""
    product = subject.experts or subject.layer
    return None if product is None else product.family


_NOT_FAMILIES = Condition(
    _NAMES,
    _comparison_test(
        "the model",
        _family,
        lambda family, requirement: (
            f"is not used for {family} models" if family in requirement else ""
        ),
    ),
)


def _whole_expert_groups(experts: MoeShape, _: bool) -> str:
    group_size = experts.scheme.group
    size = experts.intermediate
    return (
        f"intermediate size {size} is not a multiple of {group_size}"
        if group_size > 0 and size % group_size
        else ""
    )


def _halved_groups(experts: MoeShape, minimum: int) -> str:
    """Groups that do not divide both sizes are halved until they do, down to `minimum`."""
    halved = group_size = experts.scheme.group
    if halved <= 0:
        return f"takes groups of at least {minimum}, not one per channel"
    while experts.intermediate % halved or experts.hidden % halved:
        halved //= 2
        if halved < minimum:
            sizes = f"{experts.hidden} and {experts.intermediate}"
            return f"no half of the group size {group_size} down to {minimum} divides {sizes}"
    return ""


def _block_multiple(requirement: int, subject: Subject) -> str:
    size = subject.attention.block_size if subject.attention else None
    return (
        f"block size {size} is not a multiple of {requirement}"
        if size is not None and size % requirement
        else ""
    )


def _tile_rows(rows: int, subject: Subject) -> str:
    """Rows of one block of threads: a tile of queries, and those of keys and values."""
    attention = subject.attention
    if attention is None or not attention.head_dim:
        return UnknownSubject("head size is not known")
    # Triton's tiles have powers of two.
    row_bytes = (1 << (attention.head_dim - 1).bit_length()) * (
        4 if attention.dtype == "float32" else 2
    )
    available_bytes = _SHARED_KIB.get(subject.capability, _MIN_SHARED_KIB)
    needed_bytes = rows * row_bytes // 1024
    if needed_bytes <= available_bytes:
        return ""
    return (
        f"heads of size {attention.head_dim} in {attention.dtype} take {needed_bytes} KiB of shared"
        f" memory, and a block of compute capability {subject.capability} has {available_bytes}"
    )


# --- the table ---

CONDITIONS: dict[str, Condition] = {
    # The GPU and the installed packages.
    "capabilities": Condition(_NAMES, _capability_refusal),  # "9.0", or "12.*" for a family
    "min_capability": Condition(_NAME, _min_capability),
    "below_capability": Condition(_NAME, _below_capability),
    "min_gib": Condition(_type_adapter(float), _min_gib),  # memory of the smallest GPU
    "package": Condition(_NAME, _package_refusal),
    "variable": Condition(_NAME, _variable_refusal),  # an environment variable that is on
    # The engine insists on another kernel in addition to the chosen one.
    "enabled": Condition(_NAME, _kernel_refusal),
    # The dtype of the computation.
    "dtypes": Condition(_NAMES, _dtype_refusal),
    # How the weights of a layer are quantized: dense ones and experts.
    "schemes": _membership_condition(
        "schemes", _layer_reader(lambda s: s.scheme.kind), _type_adapter(tuple[Kind, ...])
    ),
    "bits": _membership_condition(
        "weights of bits", _layer_reader(lambda s: s.scheme.bits), _NUMBERS
    ),
    # Values are texts such as "4-bit symmetric" and "8-bit with zero points".
    "weights": _membership_condition("weights", _layer_reader(lambda s: s.scheme.weights)),
    "symmetric": _switch_condition(
        "symmetric quantization", _layer_reader(lambda s: s.scheme.symmetric)
    ),
    "weight_only": _switch_condition(
        "only weights quantized", _layer_reader(lambda s: s.scheme.weight_only)
    ),
    "static_activation": _switch_condition(
        "static activation scales", _layer_reader(lambda s: s.scheme.static_activation)
    ),
    # The code path quantizes activations in this way.
    "activations": _membership_condition("activations", lambda subject: subject.activation),
    # The quantizing program is a quant_method, or "online".
    "origins": _membership_condition("checkpoints of", _origins),
    "layouts": _membership_condition("weights packed as", _layer_reader(lambda s: s.scheme.layout)),
    "act_order": _layer_condition(_act_order, _type_adapter(Literal["no", "yes", "unsharded"])),
    # The size -1 means one group for all inputs.
    "groups": _membership_condition(
        "group size", _layer_reader(lambda s: s.scheme.group), _NUMBERS
    ),
    "min_group": _minimum_condition("group size", _layer_reader(lambda s: s.scheme.group), _BELOW),
    "group_is_full_k": _layer_condition(_group_is_full_k, _YES),
    "whole_groups": _layer_condition(
        _whole_groups, _type_adapter(Literal["layer", "rank", "rank unless one group"])
    ),
    # A kernel takes this many groups in one block of K.
    "block_groups": _layer_condition(_block_groups, _NUMBERS),
    # The sides of a product: K inputs, N outputs, on one rank; "full": before ranks cut the layer.
    "k_multiple": _divisibility_condition("K", _layer_reader(lambda s: s.k), _OVER),
    "n_multiple": _divisibility_condition("N", _layer_reader(lambda s: s.n), _OVER),
    "full_k_multiple": _divisibility_condition(
        "K of the whole layer", _layer_reader(_full_k), _OVER
    ),
    "full_n_multiple": _divisibility_condition(
        "N of the whole layer", _layer_reader(lambda s: s.full_n or s.n), _OVER
    ),
    "cut_multiple": _layer_condition(_cut_multiple, _SIZE),
    "n_packs": _layer_condition(_n_packs, _YES),
    "min_k": _minimum_condition("K", _layer_reader(lambda s: s.k), _BELOW),
    "min_n": _minimum_condition("N", _layer_reader(lambda s: s.n), _BELOW),
    # Experts. Sizes are those of one rank.
    "families": _membership_condition("models of", _family),  # model_type of the text model
    "not_families": _NOT_FAMILIES,
    # The activation function stands between the two products.
    "functions": _membership_condition(
        "the activation function", _experts_reader(lambda e: e.function)
    ),
    "routings": _membership_condition("routing", _experts_reader(lambda e: e.routing)),
    "gated": _switch_condition("gated experts", _experts_reader(lambda e: e.is_gated)),
    "bias": _switch_condition("experts with bias", _experts_reader(lambda e: e.bias)),
    # Ranks hold whole experts.
    "ep": _switch_condition("expert parallelism", _experts_reader(lambda e: e.ep)),
    "clamped": _switch_condition(
        "an activation with a limit", _experts_reader(lambda e: e.clamped)
    ),
    # Ranks have requests of their own.
    "dp": _switch_condition("data parallelism", _experts_reader(lambda e: e.dp)),
    "max_experts": _maximum_condition(
        "experts", _experts_reader(lambda e: e.experts), "takes at most {2} {0}, not {1}"
    ),
    "hidden_multiple": _divisibility_condition("hidden size", _experts_reader(lambda e: e.hidden)),
    "intermediate_multiple": _divisibility_condition(
        "intermediate size", _experts_reader(lambda e: e.intermediate)
    ),
    "whole_expert_groups": _expert_condition(_whole_expert_groups, _YES),
    "halved_groups": _expert_condition(_halved_groups, _SIZE),
    # Attention.
    "layers": _membership_condition(
        "layers of kind", _attention_reader(lambda a: a.kind), _type_adapter(tuple[LayerKind, ...])
    ),
    "mla": _switch_condition("MLA", _attention_reader(lambda a: a.kind == "mla")),
    "sparse": _switch_condition("sparse attention", _attention_reader(lambda a: a.sparse)),
    "causal": _switch_condition("causal layers", _attention_reader(lambda a: a.causal)),
    "sinks": _switch_condition(
        "layers with attention sinks", _attention_reader(lambda a: a.has_sinks)
    ),
    "alibi": _switch_condition("layers with ALiBi", _attention_reader(lambda a: a.alibi)),
    "multimodal_prefix": _switch_condition(
        "image tokens that see one another", _attention_reader(lambda a: a.multimodal_prefix)
    ),
    "softcap": _switch_condition("logits with a soft cap", _attention_reader(lambda a: a.softcap)),
    "flash_attention_4": _switch_condition(
        "a forced FlashAttention 4", _attention_reader(lambda a: a.flash_attention == 4)
    ),
    "kv_dtypes": _membership_condition("KV cache dtype", _attention_reader(lambda a: a.kv_dtype)),
    "block_multiple": Condition(_SIZE, _block_multiple),  # where --block-size names a block
    "heads": _membership_condition(
        "heads per rank", _attention_reader(lambda a: a.heads), _NUMBERS
    ),
    "max_heads": _maximum_condition("heads per rank", _attention_reader(lambda a: a.heads)),
    # The head size of MLA is that of latent and rope together.
    "head_dims": _membership_condition(
        "head size", _attention_reader(lambda a: a.head_dim), _NUMBERS
    ),
    "head_multiple": _divisibility_condition("head size", _attention_reader(lambda a: a.head_dim)),
    "min_head": _minimum_condition("head size", _attention_reader(lambda a: a.head_dim)),
    "max_head": _maximum_condition("head size", _attention_reader(lambda a: a.head_dim)),
    "tile_rows": Condition(_SIZE, _tile_rows),
    "nope_dims": _membership_condition(
        "qk_nope_head_dim", _attention_reader(lambda a: a.nope_dim), _NUMBERS
    ),
    "rope_dims": _membership_condition(
        "qk_rope_head_dim", _attention_reader(lambda a: a.rope_dim), _NUMBERS
    ),
    "value_dims": _membership_condition(
        "v_head_dim", _attention_reader(lambda a: a.value_dim), _NUMBERS
    ),
    "latent_dims": _membership_condition(
        "kv_lora_rank", _attention_reader(lambda a: a.latent_dim), _NUMBERS
    ),
    "index_topks": _membership_condition(
        "index_topk", _attention_reader(lambda a: a.index_topk), _NUMBERS
    ),
    "index_topk_multiple": _divisibility_condition(
        "index_topk", _attention_reader(lambda a: a.index_topk)
    ),
    # Attention of an engine that decides once for the whole model.
    "architectures": _membership_condition(
        "models of", _attention_reader(lambda a: a.architecture)
    ),
    "recurrent": _membership_condition(
        "recurrent layers of kind", _attention_reader(lambda a: a.recurrent or "none")
    ),
    "state_dtypes": _membership_condition("states in", _attention_reader(lambda a: a.state_dtype)),
    "state_sizes": _membership_condition(
        "states of",
        _attention_reader(lambda a: a.state_size),
        _type_adapter(tuple[tuple[int, int], ...]),
    ),
    "max_chunk": _maximum_condition("a prefill batch of", _attention_reader(lambda a: a.chunk)),
}
