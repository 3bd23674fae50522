"""From the quantization block of a checkpoint to the scheme of each layer. Pure.

`parse` never raises: a block that these rules do not understand gives layers of kind "unknown" with the reason, because
a guessed scheme is a guessed kernel. Layer names are those of the engine (`model.layers.0.self_attn.qkv_proj`); a fused
layer comes with the last names of the checkpoint's modules it is made of, since blocks speak of those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.core.float_schemes import compressed, fp8, modelopt, mxfp4
from gateway.core.integer_schemes import auto_round, awq, bitsandbytes, gptq
from gateway.core.patterns import Untamed
from gateway.core.quantization import UNQUANTIZED, Block, Quantization, unknown
from gateway.domain import Quant


def parse(
    quant: Quant | None,
    renames: Sequence[tuple[str, str]] = (),
    packed: frozenset[str] = frozenset(),
    read: bool = False,
    traits: frozenset[str] = frozenset(),
) -> Quantization:
    """The schemes that `quant` gives; Block says what the other arguments are.

    Online quantization (`--quantization fp8` of an unquantized checkpoint) is Quant(method="fp8") without a block.
    """
    if quant is None:
        return Quantization(lambda _: UNQUANTIZED)
    method = quant.method.lower()
    reader = _METHODS.get(method)
    if reader is None:
        return Quantization(lambda _: unknown(f"no rules for the quantization method {method}"))
    try:
        return reader(Block(quant.config, renames, packed, read, traits))
    except Untamed as error:
        untamed = str(error)
        return Quantization(lambda _: unknown(untamed))
    except (ArithmeticError, TypeError, ValueError, LookupError, AttributeError, RecursionError, Warning) as error:
        reason = f"the {method} block of config.json is not understood ({type(error).__name__})"
        return Quantization(lambda _: unknown(reason))


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
