"""LoRA adapters: adapter_config.json and tensor headers read, and checked against a model. Pure.

    read_adapter(name, source, revision, config, tensors) -> Adapter
    check_base(adapter, spec): raises BadModel

Format: peft, tuners/lora/config.py; names of tensors: base_model.model.<module>.lora_A.weight (rank
x inputs) and lora_B.weight (outputs x rank).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gateway.domain import Adapter, AdapterLayer, ModelSpec
from gateway.errors import BadModel
from gateway.models.families.config import Fields
from gateway.models.tensor import Tensor

_PART = re.compile(
    r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.\w+)?\.weight"
    r"|(?:base_model\.model\.)?(.+)\.lora_(embedding_A|embedding_B)"
)
_NUMBER = re.compile(r"\.\d+(?=\.)")
_FLOAT_DTYPES = ("BF16", "F16", "F32")
_MAX_RANK = 2**16
# Features that peft trains and engines do not compute. Source: PEFTHelper._validate_features and
# validate_legal (vllm/lora/peft_helper.py of 0.18.0 to 0.33.0). Older versions load some of them
# and give wrong answers.
_UNSUPPORTED_FEATURES = {
    "use_dora": "DoRA",
    "modules_to_save": "whole layers of its own (modules_to_save)",
    "lora_bias": "a bias of its own (lora_bias)",
    "alora_invocation_tokens": "activated LoRA (aLoRA)",
    "layer_replication": "layer replication",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
}
# Every other value of init_lora_weights changes the model's own weights when peft loads it.
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga", "true", "false")


def read_adapter(
    name: str,
    source: str,
    revision: str | None,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> Adapter:
    """The adapter of a config and its tensor headers.

    Raises BadModel for a feature that no engine serves.
    """
    _check_features(config, source)
    ranks = _ranks(Fields(config, source))
    parts: dict[str, dict[str, tuple[int, ...]]] = {}
    for tensor, shape in tensors.items():
        if (match := _PART.fullmatch(tensor)) is not None:
            parts.setdefault(match[1] or match[3], {})[(match[2] or match[4])[-1]] = shape.shape
    layers = [_adapter_layer(source, module, shapes) for module, shapes in sorted(parts.items())]
    if not layers:
        raise BadModel(
            f"The adapter {source} has no LoRA tensors in adapter_model.safetensors.",
            hint="Save it with peft.",
        )
    base = config.get("base_model_name_or_path")
    return Adapter(
        name=name,
        source=source,
        revision=revision,
        base=base[:300] if isinstance(base, str) and base.isprintable() else None,
        rank=max(*ranks, *(layer.rank for layer in layers)),
        layers=tuple(
            dict.fromkeys(layer.evolve(module=_NUMBER.sub(".*", layer.module)) for layer in layers)
        ),
        deepest=max(
            (int(number) for module in parts for number in re.findall(r"(?<=layers\.)\d+", module)),
            default=0,
        ),
    )


def _check_features(config: Mapping[str, Any], source: str) -> None:
    kind = str(config.get("peft_type", "LORA"))
    if kind != "LORA":
        raise BadModel(
            f"The adapter {source} is {kind[:40]}, and engines serve LoRA.",
            hint="Choose a LoRA adapter.",
        )
    features = [name for field, name in _UNSUPPORTED_FEATURES.items() if config.get(field)]
    if str(config.get("bias") or "none") != "none":
        features.append("trained biases")
    if str(config.get("init_lora_weights", True)).lower() not in _PLAIN_INITS:
        features.append(
            f"init_lora_weights {str(config['init_lora_weights'])[:40]}, which changes the model's"
            " own weights"
        )
    if features:
        raise BadModel(
            f"The adapter {source} has {', '.join(features)}, which engines do not compute.",
            hint="Merge it into its model (peft's merge_and_unload), or train it as plain LoRA.",
        )


def _ranks(fields: Fields) -> list[int]:
    """The rank of the adapter and those of single layers. Raises BadModel."""
    patterns = fields.config.get("rank_pattern") or {}
    values = patterns.values() if isinstance(patterns, Mapping) else ()
    ranks = [fields.integer("r"), *(rank for rank in values if isinstance(rank, int))]
    if max(ranks) > _MAX_RANK:
        raise fields.field_error("r", f"at most {_MAX_RANK}")
    return ranks


def _adapter_layer(source: str, module: str, shapes: Mapping[str, tuple[int, ...]]) -> AdapterLayer:
    first = shapes.get("A", ())
    second = shapes.get("B", ())
    if len(first) != 2 or len(second) != 2 or first[0] != second[1]:
        raise BadModel(
            f"The adapter {source} has no pair of matrices of one rank for {module[:200]}.",
            hint="Save it with peft.",
        )
    return AdapterLayer(module=module, inputs=first[1], outputs=second[0], rank=first[0])


def check_base(adapter: Adapter, spec: ModelSpec) -> None:
    """Check that the adapter changes layers of the model, in their sizes. Raises BadModel.

    The check compares shapes, because quantized and copied repositories of one model have many
    names.
    """
    sizes = {group.name: group for group in spec.tensors}
    names = {name.rpartition(".")[0] for name in sizes}
    trained = f" It was trained for {adapter.base}." if adapter.base else ""
    hint = f"Serve the adapter with the model that it was trained for.{trained}"
    for layer in adapter.layers:
        whole_group = sizes.get(f"{layer.module}.weight")
        if (
            whole_group is not None
            and whole_group.dtype in _FLOAT_DTYPES
            and whole_group.shape != (layer.outputs, layer.inputs)
        ):
            shape = " x ".join(map(str, whole_group.shape))
            raise BadModel(
                f"The adapter {adapter.source} changes {layer.module} of {layer.outputs} x"
                f" {layer.inputs}, and the layer of {spec.source} is {shape}.",
                hint=hint,
            )
    # The names of layers are known only from headers: engines rename and merge layers.
    if spec.tensors_from == "headers" and not any(
        layer.module in names for layer in adapter.layers
    ):
        raise BadModel(
            f"{spec.source} has none of the layers that the adapter {adapter.source} changes.",
            hint=hint,
        )
    layers = sum(group.layers for group in spec.attention if group.kind != "vision")
    if layers and adapter.deepest >= layers:
        raise BadModel(
            f"The adapter {adapter.source} changes layer {adapter.deepest}, and {spec.source} has"
            f" {layers} layers.",
            hint=hint,
        )
