"""A third kind of engines is one class and one line in the registry: the planner is not touched."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.domain import AttentionGroup, Engine, LayerAttention, Plan
from gateway.engines.common.candidate import Budget, Candidate, Default, Footprint
from gateway.engines.registry import KINDS
from gateway.engines.vllm.engine import VllmRules
from gateway.profiles.profiles import Profiles, shipped
from tests.support.makers import wish
from tests.support.planning import decide
from tests.support.published import published

GIB = 1024**3


@dataclass(frozen=True, eq=False)
class MadeUpRules(VllmRules):
    """Computes attention by one backend, eight requests at once, in half of each GPU."""

    def layer_attention(
        self, groups: tuple[AttentionGroup, ...], *_: object
    ) -> tuple[LayerAttention, ...]:
        return tuple(
            LayerAttention(
                kind=one.kind,
                layers=one.layers,
                head_dim=one.head_dim,
                backend="made-up",
                status="ok",
            )
            for one in groups
        )

    def default_seqs(self, candidate: Candidate) -> Default:
        return 8, "as many as it was made for", candidate.source

    def budget(self, footprint: Footprint, context: int) -> Budget:
        half = footprint.candidate.devices.least // 2
        return Budget(half, {"gpu-memory-utilization": 0.5}, "one half")

    def most(self, footprint: Footprint, usual: Budget) -> None:
        return None


def profiles_with_a_third_kind(folder: Path) -> Profiles:
    """Those of vLLM 0.33.0 under another name."""
    kind = folder / "engines" / "made-up"
    kind.mkdir(parents=True)
    engines = shipped() / "engines" / "vllm"
    text = (
        (engines / "0.33.0.yaml")
        .read_text()
        .replace("kind: vllm", "kind: made-up", 1)
        .replace("version: 0.33.0", "version: 1.0.0", 1)
    )
    (kind / "1.0.0.yaml").write_text(text)
    shutil.copytree(engines / "0.33.0", kind / "1.0.0")
    return Profiles(folder)


def planned(profiles: Profiles, engine: Engine) -> Plan:
    hardware = profiles.hardware("2x3090")
    return decide(
        published("llama-3.1-8b"), hardware, [engine], wish(), rules=profiles.rules([engine])
    ).plans[0]


def test_a_made_up_kind_gets_a_plan_by_its_own_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "made-up", MadeUpRules)
    profiles = profiles_with_a_third_kind(tmp_path)
    plan = planned(profiles, profiles.engine("made-up==1.0.0"))
    assert str(plan.engine) == "made-up==1.0.0"
    assert {row.backend for row in plan.attention} == {"made-up"}
    assert (plan.max_num_seqs.value, plan.max_num_seqs.reason) == (8, "as many as it was made for")
    assert plan.memory.budget_bytes == 12 * GIB
    assert plan.scope["budget"] == "one half"


def test_a_kind_that_is_not_registered_is_planned_like_vllm(tmp_path: Path) -> None:
    profiles = profiles_with_a_third_kind(tmp_path)
    assert (
        planned(profiles, profiles.engine("made-up==1.0.0")).attention
        == planned(profiles, profiles.engine("vllm==0.33.0")).attention
    )
