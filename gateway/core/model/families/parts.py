"""Parts that model families share: sizes uncut, names as the engine has them. Pure.

Sources: vllm/model_executor/models/ of 0.19.1 and 0.33.0.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.core.model.blueprint import Built
from gateway.core.model.config import Fields
from gateway.core.model.families.softmax import LAYERS, heads_of
from gateway.domain import Shard, TensorGroup

# More layers than any model has: what says so is broken, or made to break us.
_MOST_LAYERS = 2000


def layer_numbers(fields: Fields) -> range:
    layers = fields.integer(*LAYERS)
    if layers > _MOST_LAYERS:
        raise fields.wrong(next(name for name in LAYERS if name in fields.config), f"at most {_MOST_LAYERS}")
    return range(layers)


def tensor(name: str, count: int, *shape: int, shard: Shard = "replicated", dtype: str = "") -> TensorGroup:
    """A parameter that is not a linear layer's, in `count` layers; `dtype` is empty for the model's."""
    return TensorGroup(name=name, count=count, shape=shape, dtype=dtype, shard=shard)


def ends(fields: Fields, path: str, *, tied: bool = False, embedding: str = "embed_tokens") -> list[TensorGroup]:
    """Embedding, last norm and output head; `tied` is what a config means that does not say (transformers' default)."""
    vocab, hidden = fields.integer("vocab_size"), fields.integer("hidden_size")
    found = [
        tensor(f"{path}.{embedding}.weight", 1, vocab, hidden, shard="vocab"),
        tensor(f"{path}.norm.weight", 1, hidden),
    ]
    if fields.config.get("tie_word_embeddings", tied) is not True:
        found.append(tensor(f"{path.removesuffix('model')}lm_head.weight", 1, vocab, hidden, shard="vocab"))
    return found


def norms(path: str, count: int, size: int, *names: str) -> list[TensorGroup]:
    """Norms without bias under `path`, of `size` elements each."""
    return [tensor(f"{path}.{name}.weight", count, size) for name in names] if count else []


def attention(
    fields: Fields,
    family: str,
    path: str,
    numbers: Sequence[int],
    *,
    fused: bool = False,
    gated: bool = False,
    bias: bool = False,
    out_bias: bool = False,
) -> list[Built]:
    """The projections around softmax attention. `fused`: the checkpoint holds one of them; `gated`: a gate beside each query."""
    heads, kv_heads, head = heads_of(fields, family)
    hidden = fields.integer("hidden_size")
    parts = (heads * head * (2 if gated else 1), kv_heads * head, kv_heads * head)
    modules = ("qkv_proj",) if fused else ("q_proj", "k_proj", "v_proj")
    return [
        Built(f"{path}.qkv_proj", numbers, hidden, parts, "qkv", modules, heads=heads, kv_heads=kv_heads, bias=bias),
        Built(f"{path}.o_proj", numbers, heads * head, (hidden,), "row", bias=out_bias),
    ]


def mlp(path: str, numbers: Sequence[int], hidden: int, width: int, *, fused: bool = False, bias: bool = False) -> list[Built]:
    """A gated MLP; nothing where there are no layers of it."""
    if not numbers:
        return []
    modules = ("gate_up_proj",) if fused else ("gate_proj", "up_proj")
    return [
        Built(f"{path}.gate_up_proj", numbers, hidden, (width, width), "merged", modules, bias=bias),
        Built(f"{path}.down_proj", numbers, width, (hidden,), "row", bias=bias),
    ]


def experts(path: str, numbers: Sequence[int], hidden: int, width: int, count: int, *, bias: bool = False) -> list[Built]:
    """`count` gated MLPs of which a router picks, as the two products that engines compute for all of them at once."""
    return [
        Built(f"{path}.experts.w13", numbers, hidden, (width, width), "expert_column", experts=count, bias=bias),
        Built(f"{path}.experts.w2", numbers, width, (hidden,), "expert_row", experts=count, bias=bias),
    ]


def router(name: str, numbers: Sequence[int], hidden: int, count: int, *, bias: bool = False) -> Built:
    """Routers are whole on every rank and not quantized."""
    return Built(name, numbers, hidden, (count,), "replicated", quantizable=False, bias=bias)
