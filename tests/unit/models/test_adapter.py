"""An adapter is read from its config and its headers; an adapter that no engine serves, or of
another model, is refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.domain import Adapter
from gateway.errors import BadModel
from gateway.models.adapter import check_base, read_adapter
from gateway.models.tensor import Tensor
from tests.support.adapters import adapter_config, shapes
from tests.support.model_files import CONFIG
from tests.support.published import model_from_config


def adapter(sizes: dict[str, tuple[int, ...]] | None = None, **config: Any) -> Adapter:
    tensors = {name: Tensor("F32", shape) for name, shape in (sizes or shapes(64, 128)).items()}
    return read_adapter("sql", "org/sql", None, adapter_config(**config), tensors)


def base(**config: Any) -> Any:
    layers = {
        f"model.layers.{number}.mlp.{name}.weight": Tensor("BF16", shape)
        for number in (0, 1)
        for name, shape in (("up_proj", (128, 64)), ("down_proj", (64, 128)))
    }
    return model_from_config({**CONFIG, **config}, source="org/demo", tensors=layers)


def test_layers_of_one_name_are_one() -> None:
    lora = adapter(shapes(64, 128, rank=4), r=4)
    (layer,) = lora.layers
    assert (layer.module, layer.inputs, layer.outputs, layer.rank) == (
        "model.layers.*.mlp.down_proj",
        128,
        64,
        4,
    )
    assert (lora.rank, lora.deepest, lora.base) == (4, 1, "org/demo")
    check_base(lora, base())


def test_the_rank_is_the_highest_of_all_layers() -> None:
    assert adapter(rank_pattern={"down_proj": 24}).rank == 24


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"peft_type": "IA3"}, "is IA3"),
        ({"use_dora": True}, "has DoRA"),
        ({"modules_to_save": ["lm_head"]}, "whole layers of its own"),
        ({"bias": "all"}, "trained biases"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights pissa"),
        ({"r": "8"}, "r='8'; it must be a whole number"),
        ({"r": 0}, "r=0"),
    ],
)
def test_an_adapter_that_engines_do_not_compute_is_refused(
    config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BadModel, match=reason):
        adapter(**config)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"base_model.model.x.lora_A.weight": (8, 4)}, "no pair of matrices of one rank for x"),
        (
            {
                "base_model.model.x.lora_A.weight": (8, 4),
                "base_model.model.x.lora_B.weight": (4, 9),
            },
            "no pair of matrices",
        ),
        ({"model.x.weight": (8, 4)}, "no LoRA tensors"),
    ],
)
def test_half_an_adapter_is_refused(sizes: dict[str, tuple[int, ...]], reason: str) -> None:
    with pytest.raises(BadModel, match=reason):
        adapter(sizes)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        (shapes(32, 128), r"down_proj of 32 x 128, and the layer of org/demo is 64 x 128"),
        (shapes(64, 128, layers=3), "changes layer 2, and org/demo has 2 layers"),
        (
            {
                "base_model.model.h.0.c.lora_A.weight": (8, 4),
                "base_model.model.h.0.c.lora_B.weight": (4, 8),
            },
            "has none of the layers",
        ),
    ],
)
def test_an_adapter_of_another_model_is_refused_and_its_own_is_named(
    sizes: dict[str, tuple[int, ...]], reason: str
) -> None:
    with pytest.raises(BadModel, match=reason) as error:
        check_base(adapter(sizes), base())
    assert "trained for org/demo" in error.value.hint
