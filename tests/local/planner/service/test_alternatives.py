"""Where a model has no plan: quantized variants that the Hub lists, and without a Hub the shapes
that would fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.domain import Decision
from gateway.models.catalog.hub import Hub
from gateway.planner.refusal_words import refusal_lines
from gateway.planner.service import alternatives
from gateway.planner.service.offline import OfflinePlanner
from gateway.profiles.profiles import Profiles
from tests.support.fake_hub import FakeHub, FakeRepo
from tests.support.makers import LLAMA_8B, wish
from tests.support.paths import MODELS

LARGE = json.loads((MODELS / "qwen3-30b-a3b.json").read_bytes())
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def repo(**config: Any) -> FakeRepo:
    return FakeRepo({"config.json": json.dumps({**LARGE, **config}).encode()})


def make_decision(source: str, hub: Hub, machine: str = "3090", **wished: Any) -> Decision:
    planner = OfflinePlanner(Profiles(), hub)
    request = wish(source=source, engines=("vllm==0.26.0",), **wished)
    return planner.decide(request, machine, include_alternatives=True)


def test_variants_of_the_hub_are_planned_without_reading_foreign_formats(
    tmp_path: Path,
) -> None:
    repos = {
        "org/large": repo(),
        "org/large-AWQ": repo(quantization_config=AWQ),
        "org/large-FP8": repo(
            quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"}
        ),
        "org/large-GGUF": repo(quantization_config=AWQ),
        "org/broken": FakeRepo({"config.json": b"{"}),
    }
    with FakeHub(repos) as fake:
        rows = [
            {"id": name, "tags": ["gguf"] if "GGUF" in name else []}
            for name in (*repos, "org/gone", "no name")
        ]
        fake.variants["org/large"] = rows[1:]
        decision = make_decision("org/large", Hub(fake.url(), None, tmp_path))
        assert not any("GGUF" in request.path for request in fake.requests)
    assert decision.would_fit is not None
    (form,) = decision.would_fit.forms
    assert (form.source, form.quantization) == ("org/large-AWQ", "awq")
    assert form.context >= 32768
    words = refusal_lines(decision)
    assert words[0].startswith("The weights take 56.87 GiB; at most 21.")
    assert words[-1].startswith(
        "Take another form of the model: org/large-AWQ (awq): 15.65 GiB, 40,960 tokens of context,"
        " vllm==0.26.0 on 1 GPU"
    )


def test_a_hub_that_does_not_answer_in_time_leaves_the_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alternatives, "_LIMIT_S", 0.3)
    with FakeHub({"org/large": repo()}) as fake:
        decision = make_decision("org/large", Hub(fake.url(), None, tmp_path))
    assert decision.would_fit is not None
    assert [(form.source, form.quantization) for form in decision.would_fit.forms] == [
        ("", "AWQ or GPTQ 4-bit")
    ]


def test_the_refusal_of_a_folder_shows_shapes_and_the_context_asked_for(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    hub = Hub(None, None, tmp_path)
    (folder / "config.json").write_text(
        json.dumps({**LLAMA_8B, "num_hidden_layers": 16, "num_key_value_heads": 32})
    )
    decision = make_decision(str(folder), hub, "3060", min_context=120000)
    assert decision.would_fit is not None
    assert 4096 < (decision.would_fit.context or 0) < 120000
    context = decision.would_fit.context
    assert refusal_lines(decision)[1].startswith(
        f"Take `--min-context {context}`: vllm==0.26.0 then runs on 1 GPU with {context:,} tokens"
    )
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    decision = make_decision(str(folder), hub, "3060", min_context=120000)
    assert decision.would_fit is not None
    form = decision.would_fit.forms[-1]
    assert form.quantization == "AWQ or GPTQ 4-bit"
    assert 4096 < form.context < 120000
    assert make_decision(str(folder), hub).would_fit is None


@pytest.mark.parametrize(
    ("model", "machine"),
    [
        ("deepseek-v3", "8xh100"),
        ("deepseek-v3", "2x3090"),
        ("qwen3-30b-a3b", "3090"),
        ("qwen3-next-80b-a3b", "2x3090"),
        ("llama-3.1-8b", "3090"),
    ],
)
def test_a_shape_that_is_not_looked_for_has_no_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, machine: str
) -> None:
    folder = tmp_path / model
    folder.mkdir()
    (folder / "config.json").write_bytes((MODELS / f"{model}.json").read_bytes())
    hub = Hub("http://127.0.0.1:1", None, tmp_path)
    calls: list[bool] = []

    def is_too_large(*arguments: Any) -> bool:
        calls.append(too_large(*arguments))
        return False

    decision = make_decision(str(folder), hub, machine)
    too_large = alternatives._is_too_large
    monkeypatch.setattr(alternatives, "_is_too_large", is_too_large)
    assert make_decision(str(folder), hub, machine).would_fit == decision.would_fit
    assert any(calls) is ((model, machine) not in {("llama-3.1-8b", "3090")})


def test_an_option_that_excludes_every_plan_is_named_with_the_plan_without_it(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    hub = Hub(None, None, tmp_path)
    decision = make_decision(str(folder), hub, "2x3090", tensor_parallel=3)
    assert decision.refusal[0] == "3 GPUs are needed, and the machine has 2."
    assert decision.refusal[1].startswith("Leave out `--tp`: vllm==0.26.0 then runs on ")
    beyond = make_decision(str(folder), hub, "2x3090", context="9m")
    assert "the model's own limit is" in beyond.refusal[0]
    tokens = int(beyond.refusal[1].partition("--context ")[2].partition("`")[0])
    fits = make_decision(str(folder), hub, "2x3090", context=tokens)
    assert fits.plans[0].max_model_len.value == tokens


@pytest.mark.parametrize(
    ("wished", "options"),
    [
        ({"min_context": "1m"}, "--min-context {}"),
        ({"min_context": "1m", "context": "2m"}, "--min-context {}"),
        ({"args": {"max-model-len": 9_000_000}}, "--arg max-model-len={}"),
        (
            {"args": {"max_model_len": 9_000_000}, "context": "1m"},
            "--arg max_model_len={} --context {}",
        ),
    ],
)
def test_a_shorter_context_is_told_by_the_option_that_demands_more(
    tmp_path: Path, wished: dict[str, Any], options: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    hub = Hub(None, None, tmp_path)
    change = make_decision(str(tmp_path), hub, "2x3090", **wished).refusal[1]
    tokens = int(change.partition("`:")[0].replace("=", " ").rpartition(" ")[2])
    assert change.startswith(f"Take `{options.format(tokens, tokens)}`: ")
    # The change gives the plan.
    option_names = [name for name in ("min_context", "context") if name in wished][:1]
    shorter: dict[str, Any] = {**wished, **dict.fromkeys(option_names, tokens)}
    shorter["args"] = dict.fromkeys(wished.get("args", {}), tokens)
    fits = make_decision(str(tmp_path), hub, "2x3090", **shorter)
    assert fits.plans[0].max_model_len.value == tokens
