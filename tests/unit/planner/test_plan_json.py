"""docs/plan.md is the contract of `fitserve plan --json`: it names every field, verdict and choice
that plans have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.domain import (
    Choice,
    Decision,
    LayerAttention,
    LayerKernel,
    Memory,
    ModelRef,
    Offer,
    Plan,
    Promise,
    RejectedPlan,
)
from gateway.domain.decision import EngineAvailability, FitAdvice, ModelForm, RuleGap
from gateway.domain.start import ExpectedStart, StartConditions, StartTime
from gateway.models.read_drafter import read_drafter
from gateway.planner.matrix import Cell
from gateway.profiles.profiles import Profiles
from tests.conformance.layer_cases import QUANTS
from tests.conformance.speculative_questions import DRAFTERS
from tests.support.makers import wish
from tests.support.paths import MODELS, ROOT
from tests.support.planning import decide
from tests.support.published import config, model_from_config
from tests.support.versions import SGLANG_REF, VLLM_REF

DOCS = (ROOT / "docs" / "plan.md").read_text()
PROFILES = Profiles()
# Whose keys are names of variables, not fields.
FREE = ("env", "variables")


def documented_words(text: str) -> set[str]:
    """The words between backticks."""
    return {
        word for quote in re.findall(r"`([^`]+)`", text) for word in re.findall(r"[\w.]+", quote)
    }


def keys(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from keys(item)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from () if key in FREE else keys(inner)


def make_decision(
    name: str, hardware: str, *engines: str, quant: str = "", **fields: Any
) -> Decision:
    block = {"quantization_config": QUANTS[quant]} if quant else {}
    spec = model_from_config(config(name, **block), source="org/m")
    drafter = (
        read_drafter("org/d", None, DRAFTERS["dflash gemma-4-31b"]) if "drafter" in fields else None
    )
    hardware_value = PROFILES.hardware(hardware)
    engine_list = PROFILES.engines(engines, device="cuda" if hardware_value.gpus else "cpu")
    return decide(
        spec,
        hardware_value,
        engine_list,
        wish(**fields),
        PROFILES.facts,
        rules=PROFILES.rules(engine_list),
        drafter=drafter,
        speed_knowledge=PROFILES.speed_knowledge,
    )


DECISIONS = {
    "plans and rejections": lambda: make_decision(
        "qwen3.6-35b-a3b", "2x3090", quant="auto-round-language"
    ),
    "a drafter": lambda: make_decision(
        "gemma-4-31b", "2x3090", "vllm", quant="auto-round-language", drafter="org/d"
    ),
    "experts": lambda: make_decision("deepseek-v3", "8xh100", quant="fp8-block"),
    "a crash": lambda: make_decision("gpt-oss-20b", "rtx-pro-6000", "vllm", quant="mxfp4-ct"),
    "a fact": lambda: make_decision(
        "qwen3.5-9b", "gb10", "vllm==0.18.0", args={"quantization": "fp8"}
    ),
    "a processor": lambda: make_decision("llama-3.2-1b", "cpu"),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_every_key_is_documented(name: str) -> None:
    decision = DECISIONS[name]()
    names = set(keys(json.loads(decision.model_dump_json(by_alias=True))))
    assert names <= documented_words(DOCS), sorted(names - documented_words(DOCS))


@pytest.mark.parametrize("name", sorted(path.stem for path in MODELS.glob("*.json")))
def test_a_decision_is_the_same_after_json(name: str) -> None:
    decision = make_decision(name, "2x3090", VLLM_REF, SGLANG_REF)
    assert Decision.model_validate_json(decision.model_dump_json()) == decision


def test_every_field_that_could_be_there_is_documented() -> None:
    for kind in (
        Decision,
        Plan,
        Choice,
        ModelRef,
        LayerKernel,
        LayerAttention,
        Memory,
        RejectedPlan,
        Cell,
        EngineAvailability,
        ExpectedStart,
        FitAdvice,
        ModelForm,
        Offer,
        Promise,
        RuleGap,
        StartConditions,
        StartTime,
    ):
        names = {field.alias or name for name, field in kind.model_fields.items()}
        assert names <= documented_words(DOCS), (
            kind.__name__,
            sorted(names - documented_words(DOCS)),
        )


def test_every_verdict_of_the_gates_is_documented() -> None:
    code = "".join(path.read_text() for path in (ROOT / "gateway").rglob("*.py"))
    verdicts = set(re.findall(r'RefusalError\(\s*"(\w+)"', code))
    assert len(verdicts) >= 12
    assert verdicts <= documented_words(DOCS), sorted(verdicts - documented_words(DOCS))


def test_the_published_fields_stay() -> None:
    """The names of fitserve.plan/1, as users' programs read them: none is renamed or removed."""
    plan = (
        "rank grade verdict engine tensor_parallel pipeline_parallel replicas dtype max_model_len"
        " argv env kernels attention memory"
    )
    assert {*plan.split(), "warnings"} <= set(Plan.model_fields)
    assert {"layer", "count", "k", "n", "scheme", "kernel", "padded_to", "refused"} <= {
        field.alias or name for name, field in LayerKernel.model_fields.items()
    }
    assert {"layers", "kind", "head_dim", "backend", "refused"} <= {
        field.alias or name for name, field in LayerAttention.model_fields.items()
    }
    sizes = "gpu weights activation graph overhead kv"
    assert {
        *(f"{size}_bytes" for size in sizes.split()),
        "kv_bytes_per_token",
        "kv_tokens",
        "low",
        "high",
    } <= set(Memory.model_fields)
    assert {"engine", "tensor_parallel", "verdict", "layer", "reasons", "source"} <= set(
        RejectedPlan.model_fields
    )
    assert (
        json.loads(DECISIONS["a crash"]().model_dump_json(by_alias=True))["schema"]
        == "fitserve.plan/1"
    )
