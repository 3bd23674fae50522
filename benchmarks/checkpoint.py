"""What a checkpoint holds, and why an engine's parameters are not the same bytes: for
benchmarks/family_bytes.py. Pure.

    quantized(config, made) -> tensors as the checkpoint of this config stores them, by the
    definition of its format; None: another format reasons(engine, stored) -> {what: bytes} by which
    the engine's parameters on one GPU differ from those tensors, each part computed

Each reason follows from names and shapes on both sides, none from the difference: where all reasons
are known, the bytes of the checkpoint and those of the reasons are together the engine's bytes.
"""

from __future__ import annotations

import collections
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gateway.engines.common.layers.weights import other_bytes
from gateway.models.spec import Tensor, group_tensors

BYTES = {
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "U8": 1,
    "I8": 1,
    "I32": 4,
    "I64": 8,
}
_DTYPES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
}
_DTYPES |= {"uint8": "U8", "int8": "I8", "int32": "I32", "int64": "I64"}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
# The stack of layers, its number, and the place within: model.layers.3.mlp.gate
_LAYER = re.compile(r"(?:^|\.)(\w+\.\w+)\.(\d+)\.(.+)$")
_TOWERS = re.compile(r"vision|visual|audio|encoder|decoder")


class Made(NamedTuple):
    """Tensors that transformers' own class of the model would save. linear: those that a format
    quantizes."""

    tensors: dict[str, Tensor]
    linear: frozenset[str]


class Held(NamedTuple):
    """Parameters of the engine. rows: of vocabularies, without their padding; buffers: names of
    what is held beside parameters."""

    tensors: dict[str, Tensor]
    rows: dict[str, int]
    buffers: frozenset[str]


def tensors_of(listed: Iterable[Sequence[Any]]) -> dict[str, Tensor]:
    return {name: Tensor(_DTYPES[dtype], tuple(shape)) for name, dtype, shape in listed}


def size(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * BYTES[tensor.dtype]


def total(tensors: Mapping[str, Tensor]) -> int:
    return sum(map(size, tensors.values()))


def header(tensors: Mapping[str, Tensor]) -> tuple[bytes, int]:
    """A safetensors file's header, and how long the file is that it describes."""
    described: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        described[name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (at, at + size(tensor)),
        }
        at += size(tensor)
    text = json.dumps(described).encode()
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + at


# --- what quantizes a checkpoint ---


def quantized(config: Mapping[str, Any], made: Made) -> dict[str, Tensor] | None:
    block = _block(config)
    if block is None:
        return made.tensors
    if config.get("expert_dtype"):  # DeepSeek V4: experts in another format than its block says
        return None
    found: dict[str, Tensor] = {}
    left_out = _LeftOut(block)
    for name, tensor in made.tensors.items():
        stored = (
            {name: tensor}
            if name not in made.linear or name in left_out
            else _packed(block, name, tensor)
        )
        if stored is None:
            return None
        found |= stored
    return found


def _block(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for part in (config, config.get("text_config") or {}):
        block = part.get("quantization_config") or part.get("compression_config")
        if block:
            return dict(block)
    return None


class _LeftOut:
    """The layers that a block keeps as they were: by a name within the path, by a pattern, or as
    the head."""

    def __init__(self, block: Mapping[str, Any]) -> None:
        given = (
            block.get("modules_to_not_convert")
            or block.get("ignore")
            or block.get("exclude_modules")
            or block.get("ignored_layers")
            or []
        )
        self._names = {one for one in given if "*" not in one and not one.startswith("re:")} | {
            "lm_head"
        }
        self._patterns = [re.compile(one[3:]) for one in given if one.startswith("re:")]
        self._patterns += [
            re.compile(f"(.*\\.)?{re.escape(one).replace(re.escape('*'), '.*')}(\\.|$)")
            for one in given
            if "*" in one
        ]

    def __contains__(self, name: str) -> bool:
        path = name.removesuffix(".weight")
        parts = path.split(".")
        ends = range(1, len(parts) + 1)
        within = any(
            ".".join(parts[first:last]) in self._names for last in ends for first in range(last)
        )
        return within or any(pattern.match(path) for pattern in self._patterns)


def _packed(block: Mapping[str, Any], name: str, tensor: Tensor) -> dict[str, Tensor] | None:
    """This layer's weight in its format; None: a format that is not written here."""
    method, path = block.get("quant_method"), name.removesuffix(".weight")
    if method == "mxfp4":  # gpt-oss: experts alone, blocks of 32 with a shared exponent
        if ".experts." not in name or name.endswith("bias"):
            return {name: tensor}
        experts, k, n = tensor.shape
        return {
            f"{name}_blocks": Tensor("U8", (experts, n, k // 32, 16)),
            f"{name}_scales": Tensor("U8", (experts, n, k // 32)),
        }
    if len(tensor.shape) != 2:
        return None
    n, k = tensor.shape
    if method == "fp8" and block.get("weight_block_size"):
        rows, columns = block["weight_block_size"]
        return {
            name: Tensor("F8_E4M3", (n, k)),
            f"{path}.weight_scale_inv": Tensor("F32", (-(-n // rows), -(-k // columns))),
        }
    if method == "compressed-tensors":
        return _compressed(block, path, n, k)
    if method == "awq":
        bits, group = block["bits"], block["group_size"]
        zeros = Tensor("I32", (k // group, n * bits // 32))
        return {
            f"{path}.qweight": Tensor("I32", (k, n * bits // 32)),
            f"{path}.qzeros": zeros,
            f"{path}.scales": Tensor("F16", (k // group, n)),
        }
    if method == "gptq":
        bits, group = block["bits"], block["group_size"]
        return {
            f"{path}.qweight": Tensor("I32", (k * bits // 32, n)),
            f"{path}.qzeros": Tensor("I32", (k // group, n * bits // 32)),
            f"{path}.scales": Tensor("F16", (k // group, n)),
            f"{path}.g_idx": Tensor("I32", (k,)),
        }
    producer = (block.get("producer") or {}).get("name", "")
    if (method == "modelopt" or producer == "modelopt") and "NVFP4" in str(
        block.get("quant_algo") or block
    ):
        return {
            name: Tensor("U8", (n, k // 2)),
            f"{path}.weight_scale": Tensor("F8_E4M3", (n, k // 16)),
            f"{path}.weight_scale_2": Tensor("F32", ()),
            f"{path}.input_scale": Tensor("F32", ()),
        }
    return None


def _compressed(block: Mapping[str, Any], path: str, n: int, k: int) -> dict[str, Tensor] | None:
    form, weights = block.get("format"), next(iter(block["config_groups"].values()))["weights"]
    bits, group = weights["num_bits"], weights.get("group_size") or k
    if form == "pack-quantized":
        return {
            f"{path}.weight_packed": Tensor("I32", (n, k * bits // 32)),
            f"{path}.weight_scale": Tensor("BF16", (n, k // group)),
            f"{path}.weight_shape": Tensor("I64", (2,)),
        }
    if form in ("float-quantized", "int-quantized") and weights["strategy"] == "channel":
        kind = "F8_E4M3" if form.startswith("float") else "I8"
        return {
            f"{path}.weight": Tensor(kind, (n, k)),
            f"{path}.weight_scale": Tensor("BF16", (n, 1)),
        }
    if form == "nvfp4-pack-quantized":
        return {
            f"{path}.weight_packed": Tensor("U8", (n, k // 2)),
            f"{path}.weight_scale": Tensor("F8_E4M3", (n, k // 16)),
            f"{path}.weight_global_scale": Tensor("F32", (1,)),
            f"{path}.input_global_scale": Tensor("F32", (1,)),
        }
    return None


# --- why an engine holds other bytes ---


def reasons(engine: Held, stored: Mapping[str, Tensor]) -> dict[str, int]:
    found: collections.Counter[str] = collections.Counter()
    wide = {
        end
        for name, tensor in stored.items()
        if tensor.dtype == "F32"
        for end in (_end(name), name.rpartition(".")[2])
    }
    wide -= {"weight", "bias"}
    if "expert_bias" in wide:
        wide.add("e_score_correction_bias")  # the name that vLLM's models give it
    narrow = {
        name.rpartition(".")[2]
        for name, tensor in stored.items()
        if tensor.dtype in ("BF16", "F16")
    }
    for name, tensor in engine.tensors.items():
        module, _, last = name.rpartition(".")
        if module in engine.rows:
            found["padding of a vocabulary"] += (
                (tensor.shape[0] - engine.rows[module]) * size(tensor) // tensor.shape[0]
            )
        if (
            tensor.dtype == "F32"
            and ("scale" not in last or last in narrow)
            and not {_end(name), last} & wide
        ):
            found["held in float32"] += size(tensor) // 2
        if tensor.dtype == "BF16" and "scale" not in last and _end(name) in wide:
            found["float32 held in bfloat16"] -= size(tensor)
        if last.endswith("weight_shape"):
            found["shapes of packed weights"] += size(tensor)
        if last == "input_scale" and tensor.dtype == "BF16":
            found["scales of inputs in bfloat16"] -= size(tensor)
    found["scales of attention"] = scales(engine)
    found["shapes of packed weights"] -= sum(
        size(tensor) for name, tensor in stored.items() if name.endswith("weight_shape")
    )
    for name in dropped(engine, stored):
        found[f"not held: {_NUMBER.sub('*', name)}"] -= size(stored[name])
    plain = _unpacked(engine, stored)
    for what, count in (
        ("a bias of zeros", _filled(engine, stored)),
        ("K in place of V", _repeated(engine, stored)),
        ("held unquantized", plain),
    ):
        found[what] += count
    return {what: count for what, count in found.items() if count}


def scales(engine: Held) -> int:
    """Bytes of the numbers that attention layers keep for a quantized KV cache, which no forecast
    counts."""
    return sum(
        size(tensor)
        for name, tensor in engine.tensors.items()
        if re.search(r"\.attn\.\w+_(scale|zero_point)$", name)
    )


def dropped(engine: Held, stored: Mapping[str, Tensor]) -> list[str]:
    """Tensors that the engine has no parameter for: of layers that it does not build, of its
    buffers, of what nothing there is named as."""
    stacks: dict[str, set[int]] = collections.defaultdict(set)
    ends = set()
    for name in engine.tensors:
        if layer := _LAYER.search(name):
            stacks[layer[1]].add(int(layer[2]))
        ends.add(_end(name))
    buffers = {_end(name) for name in engine.buffers} - ends
    formats = {"g_idx", "input_scale"} - {name.rpartition(".")[2] for name in engine.tensors}
    found = []
    for name in stored:
        layer = _LAYER.search(name)
        if layer and layer[1] in stacks:
            lost = int(layer[2]) not in stacks[layer[1]] or _end(name) in buffers
        elif layer:
            lost = _end(name) in buffers
        else:
            named = re.search(
                r"(^|\.)(post_layernorm|std_bias|std_scale)(\.|$)|lm_head\.bias$", name
            )
            lost = bool(re.search(r"\.head\.", name)) or (bool(named) and _end(name) not in ends)
        one = re.match(r"(.*\.experts\.\d+\.)(gate|up)_proj\.weight$", name)
        lost = lost or (
            one is not None and f"{one[1]}down_proj.weight" not in stored
        )  # LongCat's experts that compute nothing
        if lost or name.rpartition(".")[2] in formats:
            found.append(name)
    return found


def _end(name: str) -> str:
    return ".".join(_NUMBER.sub("*", name).split(".")[-2:])


def _place(name: str) -> tuple[str, int, str] | None:
    """Tower, number of the layer, and the path of the module within."""
    layer = _LAYER.search(name)
    if layer is None:
        return None
    tower = _TOWERS.findall(name[: layer.start(2)])
    return tower[-1] if tower else "", int(layer[2]), layer[3].rpartition(".")[0]


def _filled(engine: Held, stored: Mapping[str, Tensor]) -> int:
    """Of a fused bias the parts that the checkpoint has no bias for."""
    places = {
        (_place(name), name.rpartition(".")[2]): tensor
        for name, tensor in stored.items()
        if _place(name)
    }
    count = 0
    for name, tensor in engine.tensors.items():
        place = _place(name)
        if place is None or not re.search(r"\.(q?kv_proj)\.bias$", name):
            continue
        tower, number, module = place
        for part in ("q_proj", "k_proj", "v_proj"):
            own = (tower, number, f"{module.rpartition('.')[0]}.{part}")
            if (
                part[0] in module.rpartition(".")[2]
                and (own, "weight") in places
                and (own, "bias") not in places
            ):
                count += places[own, "weight"].shape[0] * BYTES[tensor.dtype]
    return count


def _repeated(engine: Held, stored: Mapping[str, Tensor]) -> int:
    """Of layers without a projection of V, that of K once more."""
    places = {_place(name): tensor for name, tensor in stored.items() if name.endswith(".weight")}
    count = 0
    for name in engine.tensors:
        place = _place(name)
        if place is None or not name.endswith(".qkv_proj.weight"):
            continue
        tower, number, module = place
        key, value = (
            (tower, number, module.replace("qkv_proj", part)) for part in ("k_proj", "v_proj")
        )
        if key in places and value not in places:
            count += size(places[key])
    return count


def _unpacked(engine: Held, stored: Mapping[str, Tensor]) -> int:
    """Of two layers that the engine joins without quantizing them, though the checkpoint has one or
    both quantized: DeepSeek's indexer."""
    joined = {
        name
        for name, tensor in engine.tensors.items()
        if name.endswith(".indexer.wk_weights_proj.weight") and size(tensor)
    }
    joined = {name for name in joined if engine.tensors[name].dtype == "BF16"}
    if not joined:
        return 0
    packed = {
        name: tensor
        for name, tensor in stored.items()
        if re.search(r"\.indexer\.(wk|weights_proj)\.weight(_scale_inv)?$", name)
    }
    return sum(size(engine.tensors[name]) for name in joined) - total(packed)


def on_rank(engine: Held, stored: Mapping[str, Tensor], tp: int, kv_heads: int) -> int:
    """Bytes that one rank should hold of an unquantized checkpoint: each tensor cut as its name
    says (models/sharding.py), and for the
    parameters that the engine holds in float32 the rest. `engine`: on that rank."""
    lost = {*dropped(engine, stored)}
    groups = group_tensors({name: tensor for name, tensor in stored.items() if name not in lost})
    extra = sum(
        size(tensor) // 2
        for name, tensor in engine.tensors.items()
        if tensor.dtype == "F32" and not re.search(r"\.(mamba|mixer)\.A$", name)
    )
    return (
        sum(other_bytes(group, tp, "bfloat16", kv_heads) for group in groups)
        + extra
        + _filled(engine, stored) // tp
    )
