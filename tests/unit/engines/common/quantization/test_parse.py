"""Every quantization block gives each layer a scheme, or says why it cannot; nothing in a block
raises."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import Quant
from gateway.engines.common.quantization.block import UNQUANTIZED_SCHEME, UnknownScheme
from gateway.engines.common.quantization.floating import EXPERTS_BY_SIBLINGS
from gateway.engines.common.quantization.parse import parse, tells_numbers
from gateway.models.scheme import Scheme
from tests.conformance.layer_cases import QUANTS
from tests.support.published import config, model_from_config

QKV = ("model.layers.3.self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj"))
DOWN = ("model.layers.3.mlp.down_proj", ())
WNA16 = Scheme(kind="wna16", bits=4, group=128)
PACKED = WNA16._replace(layout="gptq")
GPTQ = {"bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"bits": 4, "group_size": 128, "zero_point": True}
ROUND = {"bits": 4, "group_size": 128, "sym": True}


def scheme(
    method: str,
    block: dict[str, Any],
    layer: tuple[str, tuple[str, ...]] = DOWN,
    *,
    experts: bool = False,
) -> Any:
    return parse(Quant(method=method, config=block)).scheme_of(*layer, has_experts=experts)


def compressed_scheme(
    weights: dict[str, Any], inputs: dict[str, Any] | None = None, **block: Any
) -> Any:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return scheme("compressed-tensors", {"config_groups": {"group_0": group}} | block)


def test_a_model_without_a_block_is_unquantized() -> None:
    assert parse(None).scheme_of(*QKV) == UNQUANTIZED_SCHEME


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, PACKED),
        ({"bits": 8, "group_size": 32}, PACKED._replace(bits=8, group=32)),
        ({"sym": False}, PACKED._replace(symmetric=False)),
        ({"desc_act": True}, PACKED._replace(act_order=True)),
        ({"desc_act": True, "group_size": -1}, PACKED._replace(group=-1)),
        ({"modules_in_block_to_quantize": ["mlp.up_proj"]}, UNQUANTIZED_SCHEME),
        ({"modules_in_block_to_quantize": [["mlp.up_proj"], ["mlp.down_proj"]]}, PACKED),
        ({"dynamic": {r"-:.*\.3\..*": {}}}, UNQUANTIZED_SCHEME),
        ({"dynamic": {r"+:.*\.3\..*": {"bits": 8}}}, PACKED._replace(bits=8)),
        ({"dynamic": {r".*\.4\..*": {"bits": 8}}}, PACKED),
    ],
)
def test_a_gptq_block_has_its_scheme(changes: dict[str, Any], expected: Scheme) -> None:
    assert scheme("gptq", GPTQ | changes) == expected


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_headers_reveal_packed_layers_and_without_headers_the_plan_assumes(method: str) -> None:
    quant = Quant(method=method, config=GPTQ if method == "gptq" else AWQ)
    quantization = parse(
        quant, packed_names=frozenset(f"model.layers.3.self_attn.{name}_proj" for name in "qkv")
    )
    assert (
        isinstance(quantization.scheme_of(*QKV), Scheme),
        quantization.scheme_of(*DOWN),
        quantization.assumed,
    ) == (
        True,
        UNQUANTIZED_SCHEME,
        "",
    )
    assert quantization.scheme_of(*QKV) != UNQUANTIZED_SCHEME
    guessed_quantization = parse(quant)
    assert guessed_quantization.scheme_of(*DOWN) != UNQUANTIZED_SCHEME
    assert (
        guessed_quantization.scheme_of("model.layers.3.mlp.gate")
        == guessed_quantization.scheme_of("visual.blocks.0.attn.proj")
        == UNQUANTIZED_SCHEME
    )
    assert "assumed" in guessed_quantization.assumed


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_checkpoint_whose_headers_hold_nothing_packed_is_unknown(method: str) -> None:
    quant = Quant(method=method, config=GPTQ if method == "gptq" else AWQ)
    layer_scheme = parse(quant, headers_read=True).scheme_of(*DOWN)
    assert isinstance(layer_scheme, UnknownScheme)
    assert "hold no packed layer" in layer_scheme.reason
    block = {
        "modules_in_block_to_quantize": ["mlp.down_proj"],
        "modules_to_not_convert": ["visual"],
    }
    quant_with_names = Quant(method=method, config=quant.config | block)
    assert isinstance(parse(quant_with_names, headers_read=True).scheme_of(*DOWN), Scheme)


@pytest.mark.parametrize(
    ("block", "layer", "experts", "expected"),
    [
        ({"load_in_4bit": True}, DOWN, False, Scheme(kind="bnb", bits=4)),
        ({"load_in_8bit": True}, QKV, False, Scheme(kind="bnb", bits=8)),
        ({}, DOWN, True, Scheme(kind="bnb", bits=4)),
        ({}, ("lm_head", ()), False, UNQUANTIZED_SCHEME),
        ({"llm_int8_skip_modules": ["mlp"]}, DOWN, False, UNQUANTIZED_SCHEME),
        ({"llm_int8_skip_modules": ["model.layers.3"]}, DOWN, False, UNQUANTIZED_SCHEME),
        (
            {"llm_int8_skip_modules": ["model.layers.33", "down"]},
            DOWN,
            False,
            Scheme(kind="bnb", bits=4),
        ),
    ],
)
def test_a_bitsandbytes_block_has_its_scheme(
    block: dict[str, Any], layer: tuple[str, tuple[str, ...]], experts: bool, expected: Scheme
) -> None:
    assert scheme("bitsandbytes", block, layer, experts=experts) == expected


def test_bitsandbytes_has_no_experts_in_8_bits() -> None:
    assert isinstance(
        scheme("bitsandbytes", {"load_in_8bit": True}, DOWN, experts=True), UnknownScheme
    )


def test_online_fp8_is_fp8_without_a_block() -> None:
    assert scheme("fp8", {}) == Scheme(kind="fp8_tensor", bits=8)


def test_experts_may_have_fewer_bits_than_their_block_says() -> None:
    """DeepSeek-V4: FP8 in blocks, and `expert_dtype` beside them in config.json."""
    fields = {
        **config("deepseek-v3"),
        "quantization_config": QUANTS["fp8-block"],
        "expert_dtype": "fp4",
    }
    quantization = parse(model_from_config(fields).quant)
    assert quantization.scheme_of("model.layers.3.mlp.experts", has_experts=True) == scheme(
        "mxfp4", {}, experts=True
    )
    assert quantization.scheme_of(*DOWN) == scheme("fp8", QUANTS["fp8-block"])
    plain = parse(model_from_config({**fields, "expert_dtype": "fp8"}).quant)
    assert plain.scheme_of("model.layers.3.mlp.experts", has_experts=True) == scheme(
        "fp8", QUANTS["fp8-block"]
    )


def test_modelopt_has_one_fp8_method_for_experts() -> None:
    tensor = Scheme(kind="fp8_tensor", bits=8, static_activation=True)
    for algorithm in ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN"):
        assert scheme("modelopt", {"quant_algo": algorithm}, experts=True) == tensor


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_packed_head_is_announced(method: str) -> None:
    block = GPTQ | AWQ
    assert scheme(method, block, ("lm_head", ())) == UNQUANTIZED_SCHEME
    head_block = {
        "modules_in_block_to_quantize": ["lm_head"],
        "modules_to_not_convert": ["visual"],
        "lm_head": True,
    }
    assert scheme(method, block | head_block, ("lm_head", ())).kind == "wna16"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"modules_to_not_convert": ["visual"]}, WNA16._replace(layout="awq", symmetric=False)),
        ({"zero_point": False, "modules_to_not_convert": ["visual"]}, WNA16._replace(layout="awq")),
        ({"modules_to_not_convert": ["mlp"]}, UNQUANTIZED_SCHEME),
    ],
)
def test_an_awq_block_has_its_scheme(changes: dict[str, Any], expected: Scheme) -> None:
    assert scheme("awq", AWQ | changes) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, PACKED),
        ({"block_name_to_quantize": "model.layers,model.visual"}, PACKED),
        ({"to_quant_block_names": ["model.visual"]}, UNQUANTIZED_SCHEME),
        ({"extra_config": {DOWN[0]: {"bits": 16}}}, UNQUANTIZED_SCHEME),
        (
            {"extra_config": {r".*\.3\.mlp.*": {"bits": 8, "group_size": 32}}},
            PACKED._replace(bits=8, group=32),
        ),
        ({"extra_config": {"(": {"bits": 8}}}, PACKED),
        ({"packing_format": "auto_round:auto_awq"}, WNA16._replace(layout="awq")),
        ({"data_type": "mx_fp", "bits": 4}, Scheme(kind="mxfp4", bits=4, group=32)),
        (
            {"data_type": "fp", "bits": 8, "group_size": [128, 128]},
            Scheme(kind="fp8_block", bits=8, group=128),
        ),
    ],
)
def test_an_auto_round_block_has_its_scheme(changes: dict[str, Any], expected: Scheme) -> None:
    assert scheme("auto-round", ROUND | changes) == expected


FLOAT8 = {"num_bits": 8, "type": "float"}
TOKEN8 = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("weights", "inputs", "expected"),
    [
        ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}, None, WNA16),
        (
            {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": 128,
                "actorder": "group",
            },
            None,
            Scheme(kind="wna16", bits=4, group=128, act_order=True),
        ),
        ({"num_bits": 8, "type": "int", "strategy": "channel"}, None, Scheme(kind="wna16", bits=8)),
        (
            {"num_bits": 8, "type": "int", "strategy": "channel"},
            {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
            Scheme(kind="int8", bits=8),
        ),
        (
            {"num_bits": 8, "type": "int", "strategy": "tensor"},
            {"num_bits": 8, "type": "int", "strategy": "tensor"},
            Scheme(kind="int8", bits=8, static_activation=True),
        ),
        (FLOAT8 | {"strategy": "channel"}, TOKEN8, Scheme(kind="fp8_token", bits=8)),
        (
            FLOAT8 | {"strategy": "tensor"},
            FLOAT8 | {"strategy": "tensor"},
            Scheme(kind="fp8_tensor", bits=8, static_activation=True),
        ),
        (
            FLOAT8 | {"strategy": "block", "block_structure": [128, 128]},
            TOKEN8 | {"strategy": "group"},
            Scheme(kind="fp8_block", bits=8, group=128),
        ),
        (
            FLOAT8 | {"strategy": "channel"},
            None,
            Scheme(kind="fp8_token", bits=8, weight_only=True),
        ),
        (
            FLOAT8 | {"strategy": "group", "group_size": 32},
            TOKEN8,
            Scheme(kind="mxfp8", bits=8, group=32),
        ),
        (
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            None,
            Scheme(kind="nvfp4", bits=4, group=16, weight_only=True),
        ),
        (
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
            TOKEN8,
            Scheme(kind="w4a8", bits=4, group=128),
        ),
    ],
)
def test_a_compressed_tensors_block_has_its_scheme(
    weights: dict[str, Any], inputs: dict[str, Any] | None, expected: Scheme
) -> None:
    assert compressed_scheme(weights, inputs) == expected


def test_compressed_tensors_ignores_and_targets_by_name_and_expression() -> None:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
    wide = {"num_bits": 8, "type": "int", "strategy": "channel"}
    assert (
        compressed_scheme(weights, ignore=["re:.*layers.3.*"])
        == compressed_scheme(weights, ignore=[DOWN[0]])
        == UNQUANTIZED_SCHEME
    )
    groups = {
        "a": {"targets": ["Linear"], "weights": weights},
        "b": {"targets": ["re:.*(q|k|v)_proj"], "weights": wide},
    }
    block = {"config_groups": groups | {"c": {"targets": ["LlamaAttention"], "weights": wide}}}
    assert scheme("compressed-tensors", block, QKV) == Scheme(kind="wna16", bits=8)
    assert scheme("compressed-tensors", block) == WNA16
    assert scheme("compressed-tensors", {"config_groups": {}}) == UNQUANTIZED_SCHEME


@pytest.mark.parametrize(
    ("method", "block"),
    [
        ("gptq", GPTQ | {"modules_in_block_to_quantize": ["q_proj"]}),
        ("awq", AWQ | {"modules_to_not_convert": ["q_proj"]}),
        ("auto-round", ROUND | {"extra_config": {"model.layers.3.self_attn.q_proj": {"bits": 16}}}),
        ("fp8", {"ignored_layers": ["model.layers.3.self_attn.q_proj"]}),
        ("modelopt", {"quant_algo": "FP8", "ignore": ["model.layers.3.self_attn.q_proj"]}),
    ],
)
def test_a_fused_layer_whose_parts_differ_is_unknown(method: str, block: dict[str, Any]) -> None:
    layer_scheme = scheme(method, block, QKV)
    assert isinstance(layer_scheme, UnknownScheme)
    assert "quantized differently" in layer_scheme.reason


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"quant_algo": "FP8"}, Scheme(kind="fp8_tensor", bits=8, static_activation=True)),
        (
            {"quantization": {"quant_algo": "nvfp4", "group_size": 16}},
            Scheme(kind="nvfp4", bits=4, group=16),
        ),
        (
            {"quantization": {"quant_algo": "MXFP8", "exclude_modules": ["*.mlp.*"]}},
            UNQUANTIZED_SCHEME,
        ),
        ({"quant_algo": "FP8", "ignore": ["model.layers.3*"]}, UNQUANTIZED_SCHEME),
        (
            {"quant_algo": "FP8", "ignore": ["*layers.4*"]},
            Scheme(kind="fp8_tensor", bits=8, static_activation=True),
        ),
        (
            {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {DOWN[0]: {"quant_algo": "FP8_PB_WO"}},
            },
            "fp8_block",
        ),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {}}, UNQUANTIZED_SCHEME),
    ],
)
def test_a_modelopt_block_has_its_scheme(block: dict[str, Any], expected: Scheme | str) -> None:
    layer_scheme = scheme("modelopt", block)
    assert layer_scheme == expected or layer_scheme.kind == expected


def test_a_star_that_engine_versions_read_differently_is_unknown() -> None:
    layer_scheme = scheme("modelopt", {"quant_algo": "FP8", "ignore": ["*mlp.down*"]})
    assert isinstance(layer_scheme, UnknownScheme)
    assert "exclusions" in layer_scheme.reason


def test_experts_are_asked_for_by_their_own_projections() -> None:
    experts = ("model.layers.0.mlp.experts", ())
    assert scheme("mxfp4", {}, experts, experts=True) == Scheme(
        kind="mxfp4", bits=4, group=32, weight_only=True, layout="mxfp4"
    )
    assert scheme("mxfp4", {}) == UNQUANTIZED_SCHEME
    block = {"ignored_layers": ["model.layers.0.mlp.experts.0.gate_proj"]}
    assert scheme("fp8", block, experts, experts=True) == UNQUANTIZED_SCHEME
    extra = ROUND | {"extra_config": {"model.layers.0.mlp.experts.0.up_proj": {"bits": 8}}}
    assert scheme("auto-round", extra, experts, experts=True).bits == 8


@pytest.mark.parametrize("projection", ["w1", "up_proj"])
def test_experts_that_a_mixed_block_lists_one_by_one_have_their_scheme(projection: str) -> None:
    layers = {
        "model.layers.0.moe.shared_experts.down_proj": {"quant_algo": "MXFP8"},
        f"model.layers.0.moe.experts.0.{projection}": {"quant_algo": "NVFP4"},
    }
    block = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    experts = ("model.layers.0.moe.experts", ())
    assert scheme("modelopt", block, experts, experts=True).kind == "nvfp4"
    assert scheme("modelopt", block, ("model.layers.1.moe.experts", ()), experts=True) == (
        UNQUANTIZED_SCHEME
    )


def test_experts_missing_in_a_mixed_block_follow_the_module_beside_them() -> None:
    layers = {"model.layers.0.moe.gate_proj": {"quant_algo": "FP8"}}
    quant = Quant(
        method="modelopt", config={"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    )
    name = "model.layers.0.moe.experts"
    later = frozenset({EXPERTS_BY_SIBLINGS})
    assert parse(quant).scheme_of(name, has_experts=True) == UNQUANTIZED_SCHEME
    layer_scheme = parse(quant, traits=later).scheme_of(name, has_experts=True)
    assert layer_scheme == Scheme(kind="fp8_tensor", bits=8, static_activation=True)


@pytest.mark.parametrize(("more", "kind"), [({}, "mxfp4"), ({"moe_quant_algo": "NVFP4"}, "nvfp4")])
def test_experts_of_4_bits_in_an_fp8_block_have_their_scheme(
    more: dict[str, str], kind: str
) -> None:
    block = {"weight_block_size": [128, 128], "expert_dtype": "fp4", **more}
    assert scheme("fp8", block, ("layers.0.ffn.experts", ()), experts=True).kind == kind
    assert scheme("fp8", block).kind == "fp8_block"


@pytest.mark.parametrize("method", ["quark", "gguf"])
def test_methods_without_rules_are_unknown(method: str) -> None:
    assert scheme(method, {}) == UnknownScheme(
        reason=f"no rules for the quantization method {method}"
    )


@pytest.mark.parametrize(
    ("method", "block"),
    [
        ("gptq", {}),
        ("gptq", GPTQ | {"bits": "4"}),
        ("gptq", GPTQ | {"dynamic": {"+:(": {}}}),
        ("fp8", {"weight_block_size": [128]}),
        ("modelopt", {"quant_algo": "W4A8_AWQ"}),
        ("auto-round", ROUND | {"data_type": "nv_fp"}),
        (
            "compressed-tensors",
            {
                "config_groups": {
                    "a": {"targets": ["Linear"], "weights": {"num_bits": 3, "type": "float"}}
                }
            },
        ),
        ("compressed-tensors", {"config_groups": {"a": {"targets": ["Linear"], "weights": 4}}}),
    ],
)
def test_blocks_that_are_not_understood_say_so(method: str, block: dict[str, Any]) -> None:
    layer_scheme = scheme(method, block)
    assert isinstance(layer_scheme, UnknownScheme)
    assert layer_scheme.reason


METHODS = st.sampled_from(
    ["gptq", "awq", "auto-round", "compressed-tensors", "mxfp4", "modelopt", "fp8", "bitsandbytes"]
)
KEYS = sorted(
    {key for block in QUANTS.values() for key in block}
    | {"weights", "targets", "quantization", "quantized_layers"}
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["re:.*", "Linear", "FP8"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=8,
)
NEARLY = st.builds(
    lambda block, changes: block | changes,
    st.sampled_from([QUANTS[name] for name in sorted(QUANTS)]),
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3),
)
BLOCKS = NEARLY | st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6)


@given(METHODS, BLOCKS)
def test_no_block_raises(method: str, block: dict[str, Any]) -> None:
    quantization = parse(
        Quant(method=method, config=block),
        (("model.", "language_model.model."), (".self_attn.", ".attn.")),
    )
    for name, parts in (QKV, DOWN, ("lm_head", ()), ("", ())):
        for experts in (False, True):
            assert isinstance(
                quantization.scheme_of(name, parts, has_experts=experts), Scheme | UnknownScheme
            )


@pytest.mark.parametrize(
    ("block", "numbered"),
    [
        ({}, False),
        ({"ignored_layers": ["lm_head", "mlp.gate"]}, False),
        ({"ignored_layers": ["model.layers.3.mlp.down_proj"]}, True),
        ({"ignored_layers": ["layers.3"]}, True),
        ({"modules_to_not_convert": ["3.mlp"]}, True),
    ],
)
def test_only_a_block_that_can_tell_layers_by_their_number_is_asked_for_each(
    block: dict[str, Any], numbered: bool
) -> None:
    assert parse(Quant(method="fp8", config=block)).is_numbered is numbered


@pytest.mark.parametrize("entry", ["re:.*layers.1.mlp.*", "model.layers.*.mlp", "layers.[13].mlp"])
def test_a_pattern_may_tell_them_by_their_number(entry: str) -> None:
    assert parse(Quant(method="compressed-tensors", config={"ignore": [entry]})).is_numbered


@given(
    st.lists(st.text("lm.13", min_size=1, max_size=4), max_size=3),
    st.sampled_from(["fp8", "awq", "modelopt"]),
)
def test_layers_of_a_block_without_numbers_have_one_scheme(entries: list[str], method: str) -> None:
    config = {
        "bits": 4,
        "group_size": 128,
        "quant_algo": "FP8",
        "exclude_modules": entries,
        "modules_to_not_convert": entries,
    }
    quantization = parse(Quant(method=method, config=config))
    names = [f"l.{number}.m" for number in (1, 3, 11, 13, 31)]
    assert quantization.is_numbered or len({quantization.scheme_of(name) for name in names}) == 1


@pytest.mark.parametrize(
    "entry",
    ["lm_head", "re:.*mlp.gate$", r"re:^model\.visual\..*", "re:.*self_attn.*", "re:lm_head"],
)
def test_a_pattern_without_numbers_asks_for_one_layer_of_a_kind(entry: str) -> None:
    assert not tells_numbers(entry)


@pytest.mark.parametrize(
    "entry",
    [
        "model.layers.0.mlp",
        r"re:.*layers\.[12]\..*",
        "re:.*layers.0.mlp",
        "re:.*layers..mlp",
        "re:.*layers.+mlp",
        r"re:.*\d",
    ],
)
def test_a_pattern_about_some_numbers_asks_for_each_layer(entry: str) -> None:
    assert tells_numbers(entry)


_PARTS = ("model", "layers", "mlp", "gate", "_", ".", "..", r"\.", ".*", ".+", "^", "$", "s", "1")


@given(
    parts=st.lists(st.sampled_from(_PARTS), max_size=8),
    number=st.integers(0, 200),
    other_layer=st.integers(0, 200),
)
def test_a_pattern_that_tells_no_numbers_matches_all_layers_of_a_kind_or_none(
    parts: list[str], number: int, other_layer: int
) -> None:
    pattern = "".join(parts)
    if not tells_numbers(f"re:{pattern}"):
        for name in (
            "model.layers.{}.mlp.gate",
            "layers.{}.mlp_gate",
            "model.mlp.{}",
            "model.layers.{}.mlp.gate.0.gate",
        ):
            first, second = (
                re.match(pattern, name.format(layer)) is None for layer in (number, other_layer)
            )
            assert first == second


@pytest.mark.parametrize(
    ("block", "down", "gate"),
    [
        ({"ignored_layers": ["model.layers.3.mlp.gate"]}, "mxfp8", "unquantized"),
        ({"ignored_layers": None}, "mxfp8", "mxfp8"),
        ({"quant_algo": "MXFP8", "exclude_modules": ["*mlp.gate"]}, "mxfp8", "unquantized"),
    ],
)
def test_mxfp8_checkpoints_are_read_as_modelopt_ones(
    block: dict[str, Any], down: str, gate: str
) -> None:
    """MiniMax-M3 in MXFP8: ModelOptMxFp8Config.from_config in modelopt.py:1244 of 0.33.0."""
    assert scheme("mxfp8", block).kind == down
    assert scheme("mxfp8", block, ("model.layers.3.mlp.gate", ())).kind == gate
