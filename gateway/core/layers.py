"""Every linear layer that an engine builds for a model, with its size, its cut and its quantization scheme. Pure.

    layers_from_config(config.json) -> (Linear, ...)      per_rank(layer, tp) -> (k, n)

Layers that differ only in their number are one Linear with the number as `*`; where a scheme holds for some numbers only,
there are several. The output head is not one of them. Sources: vllm/model_executor/models/ of 0.18.0 to 0.33.0, held to
what those build by tests/conformance/golden/layers-*.json.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.core.blueprint import Built, Shard
from gateway.core.families.text import FAMILIES, NESTED, RENAMES, qwen_vision
from gateway.core.fields import Fields
from gateway.core.quantization import UNQUANTIZED, Known, Quantization
from gateway.core.reading import quant_of
from gateway.core.schemes import parse
from gateway.domain import ModelSpec
from gateway.errors import BadModel

# A trait is what some engine versions build differently; a caller names those of its version.
# vLLM 0.26.0 and 0.33.0: GPTQ, AWQ and AutoRound keep a Qwen3.5 in_proj_ba whole (maybe_disable_tp in
# layers/mamba/gdn/qwen_gdn_linear_attn.py:853 of 0.33.0).
WHOLE_GATES = "whole_gates"

_FLOATS = {"F16", "BF16", "F32"}


@dataclass(frozen=True)
class Linear:
    """`k` inputs and `n` outputs of the uncut layer; `parts` are the outputs of each module merged into it.

    Names are the engine's, with `.w13` (gate and up) and `.w2` (down) for the two products of experts, of which there are
    `experts`. A cut never splits one of `heads`; `kv_heads` are repeated where ranks outnumber them. Both are 0 elsewhere.
    """

    name: str
    count: int
    k: int
    n: int
    shard: Shard
    parts: tuple[int, ...]
    scheme: Known
    heads: int = 0
    kv_heads: int = 0
    experts: int = 0


def per_rank(layer: Linear, tp: int) -> tuple[int, int] | None:
    """(k, n) on one of `tp` ranks, or None where the engine refuses the cut.

    Source: ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear in
    vllm/model_executor/layers/linear.py: KV heads are repeated where there are fewer of them than ranks.
    """
    if layer.shard == "replicated":
        return layer.k, layer.n
    if layer.shard in ("row", "expert_row"):
        return (layer.k // tp, layer.n) if layer.k % tp == 0 else None
    if layer.heads % tp:
        return None
    if layer.shard == "qkv":
        query, key, value = layer.parts
        heads = layer.kv_heads
        if heads % tp if heads >= tp else tp % heads:
            return None
        repeated = max(1, tp // heads)
        return layer.k, (query + (key + value) * repeated) // tp
    return (layer.k, layer.n // tp) if all(part % tp == 0 for part in layer.parts) else None


def layers_from_config(
    config: Mapping[str, Any],
    source: str = "config.json",
    traits: Collection[str] = (),
    packed: frozenset[str] = frozenset(),
) -> tuple[Linear, ...]:
    """`packed` are the modules (layer numbers may be `*`) that headers show to hold other than plain floats.

    Raises BadModel naming the field that is missing or cannot be, and for families that these rules do not know.
    """
    top = Fields(config, source)
    fields = Fields(top.mapping("text_config", config), source)
    family = fields.word("model_type")
    build = FAMILIES.get(family)
    nested = "text_config" in config
    if build is None or (nested and top.word("model_type") not in NESTED):
        raise BadModel(
            f"Which layers the family {top.word('model_type')} of {source} has is not known here.",
            hint="Serve it by an engine started elsewhere and add that as an endpoint.",
        )
    quantization = parse(quant_of(top, fields), RENAMES.get(top.word("model_type"), ()), packed)
    stem = "language_model.model.layers" if nested else "model.layers"
    built = build(fields, family, f"{stem}.*")
    if nested:
        built += qwen_vision(Fields(top.mapping("vision_config", {}), source))
    found = [linear for item in built for linear in _schemed(item, quantization, traits)]
    return tuple(sorted(found, key=lambda linear: (linear.name, -linear.count)))


def linear_layers(spec: ModelSpec, traits: Collection[str] = ()) -> tuple[Linear, ...]:
    """The same from a spec, whose headers tell what a GPTQ or AWQ checkpoint has quantized where its block does not.

    Source: maybe_update_config in gptq_marlin.py and awq_marlin.py, which read the headers for that too.
    """
    packed: frozenset[str] = frozenset()
    if spec.tensors_from == "headers":
        packed = frozenset(group.name.rpartition(".")[0] for group in spec.tensors if group.dtype not in _FLOATS)
    return layers_from_config(spec.config, spec.source, traits, packed)


def _schemed(item: Built, quantization: Quantization, traits: Collection[str]) -> list[Linear]:
    """One Linear for each scheme that the numbers of a layer have."""
    counts: dict[Known, int] = {}
    for number in item.numbers:
        scheme: Known = UNQUANTIZED
        if item.quantizable:
            name = item.name.replace("*", str(number), 1).removesuffix(".w13").removesuffix(".w2")
            scheme = quantization.scheme_of(name, item.modules, experts=item.experts > 0)
        counts[scheme] = counts.get(scheme, 0) + 1
    whole = WHOLE_GATES in traits and item.modules == ("in_proj_b", "in_proj_a") and quantization.integer_checkpoint
    shard: Shard = "replicated" if whole else item.shard
    return [
        Linear(item.name, count, item.k, sum(item.parts), shard, item.parts, scheme, item.heads, item.kv_heads, item.experts)
        for scheme, count in counts.items()
    ]
