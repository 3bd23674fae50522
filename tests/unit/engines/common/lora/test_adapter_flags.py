"""An engine's own flags for adapters, their limits, and engines without adapters."""

from __future__ import annotations

import json

import pytest

from gateway.engines.common.lora.adapter_flags import list_arguments
from gateway.engines.registry import engine_kind
from tests.support.adapter_plans import PROFILES, SQL, decision, make_plan
from tests.support.published import published_model
from tests.support.versions import SGLANG, VLLM

VERSIONS = (
    *(f"vllm=={version}" for version in VLLM),
    *(f"sglang=={version}" for version in SGLANG),
)


@pytest.mark.parametrize("ref", VERSIONS)
def test_each_version_gets_adapters_by_its_own_flags(ref: str) -> None:
    plan, without = make_plan(ref, SQL), make_plan(ref)
    ranks = {item for item in plan.argv if item.startswith(("--max-lora-rank", "--max-loras"))}
    flags = (
        {"--max-lora-rank=16", "--max-loras=1"}
        if ref.startswith("vllm")
        else {"--max-lora-rank=12", "--max-loras-per-batch=2"}
    )
    assert ranks == flags
    assert "--enable-lora" in plan.argv
    assert not any("lora" in item for item in without.argv)
    assert (plan.loras.value, plan.adapters[0].revision) == ("sql (rank 12)", "0" * 40)
    assert plan.fingerprint != plan.evolve(adapters=()).fingerprint
    arguments = list_arguments(PROFILES.engine(ref), [("sql:v1", "/m/sql")])
    assert arguments[0] == ("--lora-modules" if ref.startswith("vllm") else "--lora-paths")
    assert list(json.loads(arguments[1]).values()) == ["sql-v1", "/m/sql"]


@pytest.mark.parametrize("ref", VERSIONS[: len(VLLM)])
def test_a_rank_that_the_engine_does_not_take_is_refused(ref: str) -> None:
    outcome = decision(ref, SQL.evolve(rank=1024))
    assert not outcome.plans
    assert outcome.rejected[0].verdict == "unsupported_lora"
    assert (
        f"the adapter sql has rank 1024, and {ref} takes at most 512" in outcome.rejected[0].reasons
    )


@pytest.mark.parametrize("ref", VERSIONS)
def test_adapters_beside_experts_are_not_promised(ref: str) -> None:
    outcome = decision(ref, SQL, model=published_model("qwen3-30b-a3b"))
    assert "unsupported_lora" in {rejection.verdict for rejection in outcome.rejected}
    assert not outcome.plans


def test_an_adapter_is_asked_for_by_the_name_that_its_engine_has_for_it() -> None:
    assert engine_kind("vllm").adapter_name("base", "team/sql:v1") == "team/sql-v1"
    assert engine_kind("sglang").adapter_name("base:8b", "sql") == "base-8b:sql"


def test_an_architecture_without_adapters_is_refused_before_its_start() -> None:
    outcome = decision("vllm==0.19.1", SQL, model=published_model("gemma-4-31b"))
    assert not outcome.plans
    assert (
        "vllm==0.19.1 has no adapters for Gemma4ForConditionalGeneration"
        in outcome.rejected[0].reasons
    )
