"""The quantization block of a checkpoint, in config.json or in a file next to it. Pure.

The places in the order of engines, of which the first with a block counts. Sources: get_config in
vllm/transformers_utils/config.py:953 and get_quantization_config in
model_arch_config_convertor.py:285 of 0.33.0; _parse_quant_hf_config in
sglang/srt/configs/model_config.py:1727 of 0.5.23.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gateway.domain import Quant, QuantPlace
from gateway.errors import BadModel
from gateway.models.families.config import WORD, Fields, quote

FILE: QuantPlace = "hf_quant_config.json"
"""The file of ModelOpt, up to 0.29 the only place of its block, later one of two."""

# Files of AutoAWQ and AutoGPTQ from before config.json had a block. Source: get_config_filenames of
# the classes in vllm/model_executor/layers/quantization.
_OLD_FILES: tuple[QuantPlace, ...] = ("quant_config.json", "quantize_config.json")
FILES = (FILE, *_OLD_FILES)
_MODELOPT = "modelopt"
# pydantic's parser takes 200 levels, others of engines take more. Published blocks have six.
_MAX_LEVELS = 100

Files = Mapping[str, Mapping[str, Any]]


def read_quantization(top: Fields, text: Fields, files: Files | None = None) -> Quant | None:
    """The checkpoint's quantization; None: its weights are not quantized.

    text: the text model of the config.
    files: contents of FILES, by name.

    Raises BadModel.
    """
    files = files or {}
    if top.config.get("quantization_config") is not None:
        return _config_quant("quantization_config", top, files)
    if FILE in files:
        return _file_quant(files[FILE], top.source)
    locations: tuple[tuple[QuantPlace, Fields], ...] = (
        ("compression_config", top),
        ("text_config.quantization_config", text),
        ("text_config.compression_config", text),
    )
    for location, fields in locations:
        if fields.config.get(location.rpartition(".")[2]) is not None:
            return _config_quant(location, fields, files)
    return next((_old_file_quant(name, files[name]) for name in _OLD_FILES if name in files), None)


def _config_quant(location: QuantPlace, fields: Fields, files: Files) -> Quant:
    """The quantization of a block in `config.json`. Raises BadModel."""
    name = location.rpartition(".")[2]
    block = fields.mapping(name, {})
    method = _method(block)
    if method is None:
        raise fields.field_error(name, "an object with a `quant_method`")
    if not _is_plain(block):
        raise fields.field_error(name, "plain JSON")
    # DeepSeek-V4 has the dtype of its experts next to the block. Source:
    # vllm/models/deepseek_v41/quant_config.py:75 of 0.33.0.
    experts = (
        {"expert_dtype": fields.config["expert_dtype"]}
        if isinstance(fields.config.get("expert_dtype"), str)
        else {}
    )
    if FILE in files and _lacks_layers(block):
        inner_block = _inner_block(files[FILE])
        location = "quantization_config and hf_quant_config.json"
        field_names = {"quantized_layers": "quantized_layers", "exclude_modules": "ignore"}
        block = {
            **block,
            **{
                new_name: inner_block[old_name]
                for old_name, new_name in field_names.items()
                if old_name in inner_block
            },
        }
    return Quant(method=method, config={**experts, **block}, place=location)


def _lacks_layers(block: Mapping[str, Any]) -> bool:
    """Whether engines read FILE too: layers have several algorithms, and the block lists none.

    Source: get_quant_config in vllm/model_executor/model_loader/weight_utils.py:275 of 0.33.0.
    """
    return block.get("quant_algo") == "MIXED_PRECISION" and "quantized_layers" not in block


def _file_quant(file: Mapping[str, Any], source: str) -> Quant | None:
    """The quantization that FILE describes; None: it names no algorithm for weights."""
    if _inner_block(file).get("quant_algo") is None and "quant_method" not in file:
        return None
    method = file.get("quant_method", _MODELOPT)
    if not _is_plain(file) or not isinstance(method, str) or not WORD.fullmatch(method):
        raise BadModel(
            f"{FILE} of {source} has quant_method={quote(method)}; it must be plain JSON and name a"
            " method.",
            hint="Repair the file, or download the model again from its publisher.",
        )
    producer = file.get("producer")
    is_signed = isinstance(producer, Mapping) and producer.get("name") == _MODELOPT
    # An engine knows no other program that writes the file.
    config = {name: value for name, value in file.items() if is_signed or name != "producer"}
    return Quant(method=method, config=config, place=FILE)


def _old_file_quant(name: QuantPlace, file: Mapping[str, Any]) -> Quant | None:
    """The quantization by the fields that only one of the two programs writes; None: neither."""
    if "w_bit" in file:
        method = "awq"
    elif "desc_act" in file:
        method = "gptq"
    else:
        return None
    if not _is_plain(file):
        raise BadModel(
            f"{name} is not plain JSON.",
            hint="Repair the file, or download the model again from its publisher.",
        )
    return Quant(method=method, config=dict(file), place=name)


def _inner_block(block: Mapping[str, Any]) -> Mapping[str, Any]:
    """ModelOpt's own file has its fields one level deeper than config.json."""
    inner_block = block.get("quantization", block)
    return inner_block if isinstance(inner_block, Mapping) else block


def _method(block: Mapping[str, Any]) -> str | None:
    """The method by its name; ModelOpt may name itself only in `producer`. None: no name."""
    method = block.get("quant_method")
    if method is None and isinstance(block.get("producer"), Mapping):
        method = block["producer"].get("name")
    return method if isinstance(method, str) and WORD.fullmatch(method) else None


def _is_plain(block: Mapping[str, Any]) -> bool:
    """Whether every parser of JSON reads the block."""
    try:
        json.dumps(block, ensure_ascii=False).encode()
    except (ValueError, TypeError, RecursionError):
        return False
    return not _nests(block, _MAX_LEVELS)


def _nests(value: object, levels: int) -> bool:
    """Whether a value has more levels of objects and lists."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list):
        return False
    return not levels or any(_nests(item, levels - 1) for item in value)
