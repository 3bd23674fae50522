"""Structures agree with the engine: the learner on a made-up engine, the kept ones on published
models."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.engines.common.layers.build import build
from gateway.errors import BadModel
from gateway.models.catalog.structure_files import structure_text
from gateway.models.families import registry
from gateway.models.families.config import Fields
from gateway.models.families.model_structure import structure_blueprint
from tests.conformance import parameter_questions
from tests.conformance.forecast_cases import config as forecast_config
from tests.conformance.golden import pairs
from tests.conformance.layer_cases import TENSOR_PARALLEL
from tests.conformance.structures import variations
from tests.conformance.structures.document import Unlearned, document
from tests.conformance.structures.facts import Facts
from tests.conformance.structures.learn import learn, one_shape
from tests.conformance.structures.terms import (
    flagged_term,
    last_layer_term,
    layers_term,
    size_term,
)
from tests.conformance.test_families import rank_bytes
from tests.support.published import TRAITS, model_from_config

VERSION = "0.33.0"
# The share of the weights: small parameters, such as routers in float32, may be left out.
TOLERANCE = 0.002
BASE: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 160,
    "first_dense": 1,
    "num_shared_experts": 0,
    "mlp_bias": False,
    "layer_types": ["full", "slide", "slide", "full"],
}


def made_up_engine(config: dict[str, Any]) -> dict[str, Any]:
    """Rows that an engine with these rules would build."""
    rows: dict[str, Any] = {}
    heads, head = config["num_attention_heads"], config["head_dim"]
    narrow = config["num_key_value_heads"] * head
    for number in range(config["num_hidden_layers"]):
        path, hidden_size = f"model.layers.{number}", config["hidden_size"]
        rows[f"{path}.qkv_proj"] = {
            "what": "linear",
            "shard": "qkv",
            "k": hidden_size,
            "parts": [heads * head, narrow, narrow],
            "bias": 0,
        }
        width = config["intermediate_size"]
        if number >= config["first_dense"] and config["num_shared_experts"]:
            rows[f"{path}.shared.up"] = {
                "what": "linear",
                "shard": "column",
                "k": hidden_size,
                "parts": [width * config["num_shared_experts"] // 2],
                "bias": int(config["mlp_bias"]),
            }
        if config["layer_types"][number] == "slide":
            rows[f"{path}.gate"] = {
                "what": "parameter",
                "shape": [hidden_size + 2 * heads],
                "dtype": "",
            }
    return rows


def observe_configs() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    changes: list[dict[str, Any]] = [{}]
    changes += [{name: 2 * value} for name, value in BASE.items() if type(value) is int and value]
    changes = [change for change in changes if "num_hidden_layers" not in change]
    changes += [{"mlp_bias": True}, {"layer_types": ["slide", "slide", "full", "full"]}]
    changes += [{"num_shared_experts": 1, **change} for change in changes]
    changes += [{"num_shared_experts": 2}, {"first_dense": 0, "num_shared_experts": 2}]
    configs = [BASE | change for change in changes]
    return [(config, made_up_engine(config)) for config in configs]


def test_the_rules_of_a_made_up_engine_are_learned() -> None:
    rows = {row.name: row for row in learn(observe_configs())}
    qkv, shared_row = rows["model.layers.*.qkv_proj"], rows["model.layers.*.shared.up"]
    assert (qkv.when, qkv.layers, qkv.of) == ("always", "all", "num_hidden_layers")
    assert qkv.sizes["parts.0"] == "head_dim*num_attention_heads"
    assert qkv.sizes["parts.1"] == "head_dim*num_key_value_heads"
    assert (shared_row.when, shared_row.layers) == ("num_shared_experts", "i >= first_dense")
    assert shared_row.sizes["parts.0"] == "intermediate_size*num_shared_experts//2"
    assert shared_row.sizes["bias"] == "mlp_bias"
    gate = rows["model.layers.*.gate"]
    assert gate.layers == "layer_types[i] == 'slide'"
    assert gate.sizes["shape.0"] == "hidden_size + 2*num_attention_heads"


def test_a_document_of_learned_rows_gives_the_sizes_of_another_config() -> None:
    facts = Facts({}, {}, set(), {}, {}, {})
    text = document("MadeUp", "vllm==0.33.0", {}, learn(observe_configs()), facts)
    config = BASE | {"num_shared_experts": 3, "first_dense": 2, "head_dim": 24, "mlp_bias": True}
    config |= {"architectures": ["MadeUp"], "model_type": "made_up", "vocab_size": 10}
    blueprint = registry.build_blueprint(config, "m", structure=text)
    shapes = {
        layer.name.replace("*", str(number)): (layer.k, [*layer.parts], int(layer.bias))
        for layer in blueprint.linears
        for number in layer.numbers
    }
    engine = {
        name: (row["k"], row["parts"], row["bias"])
        for name, row in made_up_engine(config).items()
        if row["what"] == "linear"
    }
    assert shapes == engine


def test_a_size_without_a_small_term_is_not_learned() -> None:
    rows = [({"width": width}, width**3 + 7) for width in (3, 6, 8)]
    assert size_term({"width"}, rows) is None
    assert layers_term({"first"}, [({"first": 1}, 5, (0, 3)), ({"first": 2}, 5, (1, 4))]) is None
    with pytest.raises(Unlearned):
        observations = [
            ({"width": width, "num_hidden_layers": 1}, {"up": _row(width**3 + 7)})
            for width in (3, 6, 8)
        ]
        document(
            "MadeUp", "vllm==0.33.0", {}, learn(observations), Facts({}, {}, set(), {}, {}, {})
        )


def _row(width: int) -> dict[str, Any]:
    return {"what": "linear", "shard": "column", "k": 4, "parts": [width], "bias": 0}


QUESTIONS = [
    (question, answer)
    for question, answer in pairs(parameter_questions, VERSION, "9.0")
    if structure_text(parameter_questions.question_config(question[0], question[1]))
]


@pytest.mark.parametrize(("question", "answer"), QUESTIONS)
def test_a_kept_structure_gives_the_bytes_that_the_engine_builds(
    question: Any, answer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a reader of the family exists: the structure alone gives them."""
    model, changes, task = question
    config = parameter_questions.question_config(model, changes)
    monkeypatch.setattr(registry, "_exact_blueprint", lambda *_: None)
    structure = structure_text(config)
    spec = model_from_config(config, source=model, task=task, structure=structure)
    built_model = build(spec.evolve(source=f"{model} by structure"), TRAITS[VERSION])
    for tp, engine_bytes in zip(TENSOR_PARALLEL, answer["bytes"], strict=True):
        planner_bytes = rank_bytes(built_model, tp)
        assert (planner_bytes is None) == (engine_bytes is None), tp
        assert planner_bytes is None or abs(planner_bytes / engine_bytes - 1) < TOLERANCE, tp


def test_layers_count_up_to_the_named_one() -> None:
    rows = [({"layers": 24, "feature_layer": end}, count) for end, count in ((-2, 23), (3, 4))]
    term = last_layer_term(["layers"], rows)
    assert term == "layers + feature_layer + 1 if feature_layer < 0 else feature_layer + 1"


def test_sizes_follow_switches_squares_and_steps() -> None:
    envs = [
        {"new": new, "multi": multi, "kv": kv, "heads": heads}
        for new in (True, False)
        for multi in (True, False)
        for kv, heads in ((2, 8), (4, 8), (2, 16))
    ]
    examples = [
        (env, env["kv"] if env["new"] else 1 if env["multi"] else env["heads"]) for env in envs
    ]
    term = flagged_term({"new", "multi", "kv", "heads"}, examples)
    assert term == "kv if new else 1 if multi else kv if new else heads"
    squares = [
        ({"image": i, "patch": p}, (i // p) ** 2 + 1) for i, p in ((224, 14), (448, 14), (224, 28))
    ]
    assert size_term({"image", "patch"}, squares) == "(image//patch)*(image//patch) + 1"
    steps = [({"width": w, "step": s}, -(-w // s) * s) for w, s in ((100, 8), (201, 8), (100, 24))]
    assert size_term({"width", "step"}, steps) == "(width + step - 1)//step*step"


def test_every_zeroth_layer_is_none() -> None:
    """A list of words beside the field is not a list of layers."""

    def rows(holds: Any) -> list[tuple[dict[str, Any], int, list[int]]]:
        configs = [{"step": step, "architectures": ["Some"]} for step in (2, 3, 0)]
        return [(env, 6, [i for i in range(6) if holds(i, env["step"])]) for env in configs]

    fields = {"step", "architectures"}
    sparse = layers_term(fields, rows(lambda i, step: step and (i + 1) % step == 0))
    dense = layers_term(fields, rows(lambda i, step: not step or (i + 1) % step != 0))
    other_layers_term = layers_term(fields, rows(lambda i, step: step and (i + 1) % step != 0))
    assert (sparse, dense) == ("(i + 1) % step == 0", "(i + 1) % step != 0")
    assert other_layers_term == "step and (i + 1) % step != 0"
    row: dict[str, Any] = {"is": "linear", "when": "always", "of": "n", "shard": "column"}
    row |= {"k": "8", "bias": "0"}
    structure: dict[str, Any] = {"architecture": "A", "unknown": [], "fixed": {}}
    structure |= {"aliases": {}, "absent": {}}
    terms = {"sparse": sparse, "dense": dense, "other": other_layers_term}
    row_list = [row | {"name": n, "layers": term, "parts": ["8"]} for n, term in terms.items()]
    for step, counts in ((0, {"dense": 6}), (2, {"sparse": 3, "dense": 3, "other": 3})):
        config = Fields({"n": 6, "step": step}, "m")
        linears = structure_blueprint(json.dumps(structure | {"rows": row_list}), config).linears
        assert {layer.name: len(layer.numbers) for layer in linears} == counts


def test_layers_that_swap_their_kinds_keep_their_rows() -> None:
    """Sizes tell kinds apart where the layers of one become those of the other."""

    def build_row(config: dict[str, Any]) -> dict[str, Any]:
        return {
            f"model.layers.{number}.up": _row(config[kind])
            for number, kind in enumerate(config["layer_types"])
        }

    base = {"num_hidden_layers": 6, "wide": 64, "slim": 16, "layer_types": ["wide", *["slim"] * 5]}
    changes: list[dict[str, Any]] = [
        {},
        {"wide": 128},
        {"slim": 32},
        {"layer_types": ["slim", "slim", "wide", "slim", "slim", "wide"]},
    ]
    rows = learn([(base | change, build_row(base | change)) for change in changes])
    assert {(row.layers, row.sizes["parts.0"]) for row in rows} == {
        ("layer_types[i] == 'wide'", "wide"),
        ("layer_types[i] == 'slim'", "slim"),
    }


def test_parts_without_a_cut_are_marked() -> None:
    """As the indexer's key beside query, key and value, and a gate's inputs among merged parts."""

    def build_row(config: dict[str, Any]) -> dict[str, Any]:
        heads, few_heads, head = config["heads"], config["few"], config["head"]
        parts = [heads * head, *[few_heads * head] * 3, head]
        joint = {"what": "linear", "shard": "qkv", "k": 48, "bias": 0, "parts": parts}
        row_fields = {"what": "linear", "shard": "merged", "k": 48, "bias": 0}
        return {
            "qkv": joint | {"heads": heads, "kv_heads": few_heads},
            "up": row_fields | {"parts": [6 * head, head, 3 * head]},
        }

    base = {"heads": 8, "few": 4, "head": 6}
    changes: list[dict[str, Any]] = [{}, {"heads": 16}, {"few": 2}, {"head": 12}]
    structure_rows = learn([(base | change, build_row(base | change)) for change in changes])
    facts = Facts({}, {"qkv": (4,), "up": (1,)}, set(), {}, {}, {})
    rows = {
        row["name"]: row
        for row in json.loads(document("A", "v", {}, structure_rows, facts))["rows"]
    }
    assert rows["qkv"]["units"] == ["heads", "few", "few", "few", "1"]
    assert rows["up"]["units"] == ["0", "1", "0"]
    text = document("A", "v", {}, structure_rows, facts)
    layers = structure_blueprint(text, Fields(base, "m")).linears
    assert {layer.name: layer.units for layer in layers} == {
        "qkv": (8, 4, 4, 4, 1),
        "up": (0, 1, 0),
    }


def test_an_absent_list_follows_from_another_field() -> None:
    row: dict[str, Any] = {
        "is": "linear",
        "name": "layers.*.up",
        "when": "always",
        "of": "n",
        "shard": "column",
    }
    row |= {"k": "8", "parts": ["8"], "bias": "0"}
    absent = {
        "kinds": {"each": "(i + 1) % every == 0", "is": ["full", "slide"]},
        "packs": {"of": "ratios", "words": [[0, "none"], [4, "some"]]},
        "every": {"is": 3},
    }
    rows = [row | {"layers": "kinds[i] == 'full'"}, row | {"layers": "packs[i] == 'some'"}]
    structure = {"architecture": "A", "unknown": [], "fixed": {}, "aliases": {}, "absent": absent}
    text = json.dumps(structure | {"rows": rows})
    config = {"n": 6, "ratios": [0, 4, 4, 0, 0, 4], "kinds": []}
    linears = structure_blueprint(text, Fields(config, "m")).linears
    assert [[*layer.numbers] for layer in linears] == [[2, 5], [1, 2, 5]]


def test_a_structure_of_one_tower_is_not_taken_for_another() -> None:
    config = forecast_config("llava", "none")
    other_config = config | {"vision_config": config["vision_config"] | {"model_type": "another"}}
    text = structure_text(config)
    assert not structure_blueprint(text, Fields(config, "m")).guessed
    with pytest.raises(BadModel, match="another"):
        structure_blueprint(structure_text(other_config), Fields(other_config, "m"))
    assert structure_text(forecast_config("pixtral", "none")) != text


def test_a_structure_of_one_shape_holds_for_its_shape_and_any_vocabulary() -> None:
    config = {**BASE, "vocab_size": 300, "num_shared_experts": 1}
    rows = made_up_engine(config)
    rows["embed.weight"] = {"what": "vocab", "rows": 300, "columns": 48}
    rows["model.layers.2.attn#attention"] = {"what": "attention", "kind": "unseen Other"}
    shape = one_shape(config, rows)
    gate = next(row for row in shape if row.name == "model.layers.*.gate")
    assert (gate.layers, gate.of, gate.sizes["shape.0"]) == ("i in (1, 2)", "3", "60")
    facts = Facts({}, {}, set(), {}, {}, {})
    constants = {name: config[name] for name in ("hidden_size", "layer_types")}
    text = document("MadeUp", "vllm==0", constants, shape, facts)
    structure = json.loads(text)
    assert structure["unknown"] == ["its attention"]
    plan = structure_blueprint(text, Fields({**config, "vocab_size": 320}, "config"))
    assert {item.name: item.shape for item in plan.parameters}["embed.weight"] == (320, 48)
    assert {layer.name: len(layer.numbers) for layer in plan.linears} == {
        "model.layers.*.qkv_proj": 4,
        "model.layers.*.shared.up": 3,
    }
    with pytest.raises(BadModel, match="are known for"):
        structure_blueprint(text, Fields({**config, "hidden_size": 96}, "config"))


def test_each_number_of_layers_of_one_part_is_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"encoder_layers": 4, "decoder_layers": 4, "d_model": 48}

    def observe(config: dict[str, Any]) -> dict[str, Any]:
        towers = {"encoder": config["encoder_layers"], "decoder": config["decoder_layers"]}
        return {
            f"model.{tower}.layers.{number}.up": _row(config["d_model"])
            for tower, count in towers.items()
            for number in range(count)
        }

    monkeypatch.setattr(variations, "observe", observe)
    variation_list = variations.Variations({})
    variation_list.ask(config)
    variation_list.vary()
    rows = {row.name: row.of for row in learn(variation_list.observed)}
    assert rows == {
        "model.encoder.layers.*.up": "encoder_layers",
        "model.decoder.layers.*.up": "decoder_layers",
    }


@pytest.mark.parametrize(("encoder", "decoder"), [(32, 4), (4, 32), (32, 2)])
def test_encoder_and_decoder_of_whisper_have_their_own_layers(encoder: int, decoder: int) -> None:
    config = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "d_model": 1280,
        "encoder_layers": encoder,
        "decoder_layers": decoder,
        "vocab_size": 51866,
    }
    text = structure_text(config)
    assert text
    counts: dict[str, set[int]] = {"encoder": set(), "decoder": set()}
    for layer in structure_blueprint(text, Fields(config, "m")).linears:
        if "layers." in layer.name:
            counts[layer.name.split(".")[1]].add(len(layer.numbers))
    assert counts == {"encoder": {encoder}, "decoder": {decoder}}
    groups = structure_blueprint(text, Fields(config, "m")).attention
    assert {group.kind: group.layers for group in groups} == {
        "cross": decoder,
        "full": decoder,
        "vision": encoder,
    }


@pytest.mark.parametrize(
    ("family", "change", "alibi"),
    [("bloom", {}, True), ("falcon", {}, False), ("falcon", {"alibi": True}, True)],
)
def test_alibi_is_the_same_as_in_the_engine(
    family: str, change: dict[str, Any], alibi: bool
) -> None:
    config = forecast_config(family, "none") | change
    groups = structure_blueprint(structure_text(config), Fields(config, "m")).attention
    assert [group.alibi for group in groups] == [alibi]


def test_the_layers_of_kimi_and_minimax_are_no_guess() -> None:
    for family, kinds in (("kimi_k3", {"mla", "recurrent"}), ("minimax_m3_vl", {"full"})):
        config = forecast_config(family, "none")
        plan = structure_blueprint(structure_text(config), Fields(config, "m"))
        assert not plan.guessed
        assert {group.kind for group in plan.attention} == kinds | {"vision"}
    assert {group.index_dim for group in plan.attention if group.kind == "full"} == {None, 128}
