"""Schemes and shapes that kernel rules judge: quantization, linear layers, experts. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal[
    "wna16",
    "w8a16",
    "fp8_tensor",
    "fp8_token",
    "fp8_block",
    "int8",
    "nvfp4",
    "mxfp4",
    "mxfp8",
    "w4a8",
    "bnb",
    "unquantized",
]


class Scheme(NamedTuple):
    """The quantization of a layer.

    wna16 and w8a16 have integer weights. The names of FP8 and FP4 say how weights are scaled.
    """

    kind: Kind
    bits: int = 4
    group: int = -1  # input channels that share a scale; -1: all of them
    symmetric: bool = True  # False: zero points of the weights; with int8, of the activations
    act_order: bool = False  # GPTQ with desc_act
    static_activation: bool = False  # activations are scaled by the checkpoint, not per token
    weight_only: bool = False  # FP8 and FP4: activations stay 16-bit
    # The packing format where it decides the tensors other than the weights. Default: wna16 of
    # compressed-tensors, mxfp4 of gpt-oss.
    layout: Literal["", "gptq", "awq", "mxfp4"] = ""

    @property
    def weights(self) -> str:
        if self.kind == "w4a8":
            return f"int{self.bits}"
        return f"{self.bits}-bit {'symmetric' if self.symmetric else 'with zero points'}"


def describe(scheme: Scheme) -> str:
    """A scheme in a few terms: `wna16 4-bit g128 act-order`."""
    terms: list[str] = [scheme.kind]
    if scheme.kind in ("wna16", "w8a16", "w4a8"):
        terms += [f"{scheme.bits}-bit", "channel" if scheme.group < 0 else f"g{scheme.group}"]
        terms += ["act-order"] if scheme.act_order else []
        terms += [] if scheme.symmetric else ["zero points"]
    return " ".join(terms)


class LinearShape(NamedTuple):
    """The part of one layer on one rank: k inputs, n outputs."""

    k: int
    n: int
    scheme: Scheme
    dtype: str  # of activations: bfloat16, float16
    full_k: int | None = None  # inputs before sharding; None: equal to k
    full_n: int | None = None  # outputs before sharding; None: equal to n
    parts: tuple[int, ...] = ()  # outputs of each merged module on this rank; (): one module
    # quant_method of the checkpoint; "online": quantized by the engine; "": unquantized or unknown
    origin: str = ""
    family: str = ""  # model_type of the text model


class MoeShape(NamedTuple):
    """The part of one layer's experts on one rank.

    Products: w13 (k hidden, n twice intermediate), w2 (the reverse).
    """

    hidden: int
    intermediate: int  # after sharding
    experts: int  # in the whole model
    scheme: Scheme
    dtype: str  # of activations
    # quant_method of the checkpoint; "online": quantized by the engine; "": unquantized
    origin: str = ""
    # activation in the engine's terms: silu, gelu, swigluoai, relu2_no_mul
    function: str = "silu"
    bias: bool = False
    # renormalize, default (softmax alone), sigmoid, minimax (with a bias), deepseek (in groups);
    # "": unknown
    routing: str = ""
    family: str = ""  # model_type
    ep: bool = False  # a rank has whole experts
    dp: bool = False  # groups of ranks have requests of their own
    clamped: bool = False  # the activation has a limit

    @property
    def is_gated(self) -> bool:
        return not self.function.endswith("_no_mul")

    @property
    def w13(self) -> LinearShape:
        return LinearShape(
            k=self.hidden,
            n=self.intermediate * (2 if self.is_gated else 1),
            scheme=self.scheme,
            dtype=self.dtype,
        )

    @property
    def w2(self) -> LinearShape:
        return LinearShape(k=self.intermediate, n=self.hidden, scheme=self.scheme, dtype=self.dtype)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
