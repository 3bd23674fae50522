"""The quantization block, wherever a checkpoint keeps it."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain import ModelSpec
from gateway.errors import BadModel
from gateway.models.quantization_block import FILE
from gateway.models.spec import add_quant_files
from tests.conformance.quant_place_cases import CASES, files
from tests.support.published import config, model_from_config, tensors

AWQ = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
GPTQ = {"bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": False, "sym": True}


def case(name: str) -> ModelSpec:
    fields, file = files(CASES[name])
    return read(fields, {} if file is None else {FILE: file})


def read(
    fields: dict[str, Any], files: dict[str, dict[str, Any]], dtype: str | None = None
) -> ModelSpec:
    headers = None if dtype is None else tensors({"model.layers.0.mlp.up_proj.x": (64, 64)}, dtype)
    return add_quant_files(model_from_config(fields, tensors=headers), files)


@pytest.mark.parametrize(
    ("name", "method", "place"),
    [
        ("file FP8, KV FP8", "modelopt", FILE),
        ("file FP8 without producer", "modelopt", FILE),
        ("flat NVFP4 beside its file", "modelopt", "quantization_config"),
        ("gptq beside a file", "gptq", "quantization_config"),
        ("compression_config", "compressed-tensors", "compression_config"),
        ("compression_config beside a file", "modelopt", FILE),
        ("text_config of qwen3-vl-8b", "compressed-tensors", "text_config.quantization_config"),
        ("text_config beside a file", "modelopt", FILE),
    ],
)
def test_the_first_place_with_a_block_counts(name: str, method: str, place: str) -> None:
    quant = case(name).quant
    assert quant is not None
    assert (quant.method, quant.place) == (method, place)


def test_a_file_that_quantizes_the_cache_alone_leaves_weights_as_they_are() -> None:
    assert case("file KV alone").quant is None


def test_layers_that_config_json_leaves_out_stand_in_the_file() -> None:
    quant = case("flat MIXED, layers in the file").quant
    assert quant is not None
    assert len(quant.config["quantized_layers"]) == 14
    assert quant.place == "quantization_config and hf_quant_config.json"


def test_another_program_that_writes_the_file_is_no_producer() -> None:
    file = {"producer": {"name": "converter"}, "quantization": {"quant_algo": "NVFP4"}}
    quant = read(config("llama-3.1-8b"), {FILE: file}).quant
    assert quant is not None
    assert (quant.method, "producer" in quant.config) == ("modelopt", False)


@pytest.mark.parametrize(
    ("name", "content", "method"),
    [("quant_config.json", AWQ, "awq"), ("quantize_config.json", GPTQ, "gptq")],
)
def test_files_of_old_programs_count_beside_packed_weights(
    name: str, content: dict[str, Any], method: str
) -> None:
    fields = config("llama-3.1-8b")
    for dtype in ("I32", None):
        quant = read(fields, {name: content}, dtype).quant
        assert quant is not None
        assert (quant.method, quant.place, quant.is_unread) == (method, name, True)
    assert read(fields, {name: content}, "BF16").quant is None
    assert read(fields, {name: {"note": "of another program"}}, "I32").quant is None


@pytest.mark.parametrize(
    "file", [{"quant_method": 7}, {"quant_method": "a b"}, {"quant_method": "x", "y": "\ud800"}]
)
def test_a_damaged_file_is_refused_by_its_name(file: dict[str, Any]) -> None:
    with pytest.raises(BadModel, match=r"hf_quant_config.json of m has quant_method="):
        read(config("llama-3.1-8b"), {FILE: file})


@pytest.mark.parametrize("place", ["quantization_config", FILE, "quantize_config.json"])
def test_a_block_with_more_levels_than_parsers_take_is_refused(place: str) -> None:
    block: dict[str, Any] = {**GPTQ, "quant_method": "gptq"}
    deep: list[Any] = []
    for _ in range(150):
        deep = [deep]
    fields, file_blocks = config("qwen3-8b"), {place: {**block, "x": deep}}
    if place == "quantization_config":
        fields, file_blocks = {**fields, **file_blocks}, {}
    with pytest.raises(BadModel, match="plain JSON"):
        read(fields, file_blocks)
    shallow = {name: {**block, "x": [[[]]]} for name in file_blocks}
    assert read(
        {**fields, "quantization_config": block} if not file_blocks else fields, shallow
    ).quant
