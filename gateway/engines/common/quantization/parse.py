"""Schemes of layers by the quantization block of a checkpoint. Pure.

`parse` never raises: a block that these rules do not cover gives "unknown" layers with the reason,
because a guessed scheme is a guessed kernel. Layer names are the engine's
(`model.layers.0.self_attn.qkv_proj`). A fused layer also has the last names of its checkpoint
modules, which blocks use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gateway.domain import Quant
from gateway.engines.common.quantization.block import (
    FORM_ERRORS,
    UNQUANTIZED_SCHEME,
    Block,
    Quantization,
    unknown_scheme,
)
from gateway.engines.common.quantization.floating import (
    compressed_tensors,
    fp8,
    modelopt,
    mxfp4,
    mxfp8,
)
from gateway.engines.common.quantization.integer import auto_round, awq, bitsandbytes, gptq
from gateway.engines.common.quantization.safe_regex import SlowPatternError


def parse(
    quant: Quant | None,
    renames: Sequence[tuple[str, str]] = (),
    packed_names: frozenset[str] = frozenset(),
    headers_read: bool = False,
    traits: frozenset[str] = frozenset(),
) -> Quantization:
    """The schemes that `quant` gives; Block explains the other arguments.

    Online quantization (`--quantization fp8` of an unquantized checkpoint) is Quant(method="fp8")
    without a block.
    """
    if quant is None:
        return Quantization(lambda _: UNQUANTIZED_SCHEME, is_numbered=False)
    method = quant.method.lower()
    reader = _METHODS.get(method)
    if reader is None:
        return Quantization(
            lambda _: unknown_scheme(f"no rules for the quantization method {method}")
        )
    try:
        result = reader(Block(quant.config, renames, packed_names, headers_read, traits))
        return result.evolve(
            is_numbered=bool(packed_names) or any(map(tells_numbers, _block_texts(quant.config)))
        )
    except SlowPatternError as error:
        untamed = str(error)
        return Quantization(lambda _: unknown_scheme(untamed))
    except FORM_ERRORS as error:
        reason = f"the {method} block of config.json is not understood ({type(error).__name__})"
        return Quantization(lambda _: unknown_scheme(reason))


# Entries that distinguish layers by number: a number between dots, or a pattern. Any other entry is
# compared with the text before or after the number, which all layers share.
_NUMBER_OR_PATTERN = re.compile(r"(^|\.)\d+(\.|$)|^re:|[\\\[\](){}*?+^$|]")
# A pattern of letters, dots and `.*`, as `re:.*mlp.gate$`, does not distinguish layers: the number
# can only be within `.*`. Most checkpoints have no other patterns, so their layers share one
# answer.
_ANY_NUMBER = re.compile(r"re:\^?(?:[A-Za-z_]|\\\.|\.\*|(?<=[A-Za-z_])\.(?=[A-Za-z_]))*\$?")


def tells_numbers(entry: str) -> bool:
    """Whether this text of a block may distinguish layers that differ only in their number."""
    return _NUMBER_OR_PATTERN.search(entry) is not None and _ANY_NUMBER.fullmatch(entry) is None


def _block_texts(value: Any) -> Iterator[str]:
    """Every text in a block, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _block_texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _block_texts(item)


_Reader = Callable[[Block], Quantization]
_METHODS: dict[str, _Reader] = {
    "gptq": gptq,
    "gptq_marlin": gptq,
    "awq": awq,
    "awq_marlin": awq,
    "auto-round": auto_round,
    "auto_round": auto_round,
    "intel/auto-round": auto_round,
    "inc": auto_round,
    "compressed-tensors": compressed_tensors,
    "mxfp4": mxfp4,
    "mxfp8": mxfp8,
    "modelopt": modelopt,
    "modelopt_fp4": modelopt,
    "modelopt_mixed": modelopt,
    "modelopt_mxfp8": modelopt,
    "bitsandbytes": bitsandbytes,
    "fp8": fp8,
}
