"""From the quantization block of a checkpoint to the scheme of each layer. Pure.

`parse` never raises: a block that these rules do not understand gives layers of kind "unknown" with
the reason, because a guessed scheme is a guessed kernel. Layer names are those of the engine
(`model.layers.0.self_attn.qkv_proj`); a fused layer comes with the last names of the checkpoint's
modules it is made of, since blocks speak of those.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gateway.domain import Quant
from gateway.engines.common.quantization.block import UNQUANTIZED, Block, Quantization, unknown
from gateway.engines.common.quantization.floating import compressed, fp8, modelopt, mxfp4
from gateway.engines.common.quantization.integer import auto_round, awq, bitsandbytes, gptq
from gateway.engines.common.quantization.safe_regex import Untamed


def parse(
    quant: Quant | None,
    renames: Sequence[tuple[str, str]] = (),
    packed: frozenset[str] = frozenset(),
    read: bool = False,
    traits: frozenset[str] = frozenset(),
) -> Quantization:
    """The schemes that `quant` gives; Block says what the other arguments are.

    Online quantization (`--quantization fp8` of an unquantized checkpoint) is Quant(method="fp8")
    without a block.
    """
    if quant is None:
        return Quantization(lambda _: UNQUANTIZED, numbered=False)
    method = quant.method.lower()
    reader = _METHODS.get(method)
    if reader is None:
        return Quantization(lambda _: unknown(f"no rules for the quantization method {method}"))
    try:
        found = reader(Block(quant.config, renames, packed, read, traits))
        return replace(
            found, numbered=bool(packed) or any(map(tells_numbers, _texts(quant.config)))
        )
    except Untamed as error:
        untamed = str(error)
        return Quantization(lambda _: unknown(untamed))
    except (
        ArithmeticError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        RecursionError,
        Warning,
    ) as error:
        reason = f"the {method} block of config.json is not understood ({type(error).__name__})"
        return Quantization(lambda _: unknown(reason))


# What can tell layers by their number: a number between dots, as far as an entry goes, or a
# pattern. An entry without either is compared with the text before or after the number, which all
# layers share.
_NUMBERED = re.compile(r"(^|\.)\d+(\.|$)|^re:|[\\\[\](){}*?+^$|]")
# Nor can a pattern of letters, dots between them and `.*`, as `re:.*mlp.gate$`: it has a number,
# which stands between dots, only within `.*`, which takes any other too. Most checkpoints have no
# others, and their layers need not be asked for one by one.
_ANY_NUMBER = re.compile(r"re:\^?(?:[A-Za-z_]|\\\.|\.\*|(?<=[A-Za-z_])\.(?=[A-Za-z_]))*\$?")


def tells_numbers(entry: str) -> bool:
    """Whether this text of a block may tell layers apart that differ only in their number."""
    return _NUMBERED.search(entry) is not None and _ANY_NUMBER.fullmatch(entry) is None


def _texts(value: Any) -> Iterator[str]:
    """Every text in a block, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


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
    "compressed-tensors": compressed,
    "mxfp4": mxfp4,
    "modelopt": modelopt,
    "modelopt_fp4": modelopt,
    "modelopt_mixed": modelopt,
    "modelopt_mxfp8": modelopt,
    "bitsandbytes": bitsandbytes,
    "fp8": fp8,
}
