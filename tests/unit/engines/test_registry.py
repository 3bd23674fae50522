"""A third kind of engines is one folder and one line in the registry: the planner is unchanged."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest

from gateway.domain import AttentionGroup, Choice, Decision, Engine, LayerAttention, Plan, Scalar
from gateway.engines.common.candidate import Budget, Candidate, Default, Footprint
from gateway.engines.common.code_sources import CodeSources
from gateway.engines.common.span import Rendezvous
from gateway.engines.kind_rules import rules_class, rules_without_files
from gateway.engines.registry import KINDS, KindEntry, engine_kind
from gateway.profiles.profile_tables import shipped_profiles
from gateway.profiles.profiles import Profiles
from tests.support.makers import wish
from tests.support.planning import decide
from tests.support.published import published_model
from tests.support.versions import NEWEST_VLLM

GIB = 1024**3
VllmRules = rules_class("vllm")


class ToyKind:
    """Gives the first stages the layers that are left over, and has no adapters."""

    env_prefixes = ("TOY_",)
    stage_layers_env = "TOY_STAGE_LAYERS"
    disabled_kernels_env = "TOY_PASSED_OVER"
    whole_tower_flag: tuple[str, Scalar] = ("toy-whole-tower", True)
    code_sources = CodeSources(
        auto_dtype="toy/dtype.py",
        bfloat16="toy/gpu.py",
        other_dtype="toy/gpu.py",
        ranks="toy/ranks.py",
        stages="toy/stages.py",
        unlike_ranks="planner",
        expert_adapters="planner",
    )
    limits_answers = False
    thoughts = "reasoning"
    classify_path = "/classify"
    weights_prefix = ""
    forked_calls = ()
    kernel_warmups = ()
    kernel_builds: Mapping[str, str] = MappingProxyType({})
    address_env = "TOY_ADDRESS"
    magnitudes: Mapping[str, int] = MappingProxyType({})

    def node_flags(self, meeting: Rendezvous, node_rank: int, /) -> dict[str, Scalar]:
        return {"meet": f"{meeting.address}:{meeting.port}", "place": node_rank}

    def rank_command(self, command: tuple[str, ...], /) -> tuple[str, ...]:
        return command

    def serve_command(self, argv: tuple[str, ...], /) -> tuple[str, ...]:
        return argv

    def stage_remainder(self, stages: int, extra: int) -> range:
        return range(min(stages, extra))

    def ports(self, port: int, _groups: int, /) -> frozenset[int]:
        return frozenset({port})

    def adapter_slots(self, adapters: int) -> int:
        return 2 * adapters

    def adapter_name(self, model: str, adapter: str, /) -> str:
        return f"{model}/{adapter}"

    def priority_factor(self, _argv: tuple[str, ...], /) -> int:
        return 0

    def has_default_priority(self, _argv: tuple[str, ...], /) -> bool:
        return True

    def priority_flags(self, _engine: Engine, /) -> dict[str, Scalar]:
        return {}

    def prompt_piece_flags(self, _engine: Engine, _tokens: int, /) -> dict[str, Scalar]:
        return {}

    def priority_objection(self, _args: Mapping[str, Scalar], /) -> str:
        return ""

    def compile_variables(
        self, _engine: Engine, _env: Mapping[str, str], /
    ) -> dict[str, Choice[str]]:
        return {}

    def start_method(
        self, _engine: Engine, _args: Mapping[str, Scalar], _architecture: str, /
    ) -> dict[str, Choice[str]]:
        return {}


@dataclass(frozen=True, eq=False)
class ToyRules(ToyKind, VllmRules):  # type: ignore[misc,valid-type]
    """Computes attention by one backend, eight requests at once, in half of each GPU."""

    def layer_attention(
        self, groups: tuple[AttentionGroup, ...], *_: object
    ) -> tuple[LayerAttention, ...]:
        return tuple(
            LayerAttention(
                kind=group.kind,
                layers=group.layers,
                head_dim=group.head_dim,
                backend="toy",
                status="ok",
            )
            for group in groups
        )

    def default_seqs(self, candidate: Candidate) -> Default:
        return 8, "as many as it was made for", candidate.source

    def budget(self, footprint: Footprint, context: int) -> Budget:
        half = footprint.candidate.devices.least_bytes // 2
        return Budget(half, {"gpu-memory-utilization": 0.5}, "one half")

    def largest_budget(self, footprint: Footprint, usual: Budget) -> None:
        return None


def profiles_with_a_third_kind(folder: Path) -> Profiles:
    """Those of the newest vLLM under another name."""
    kind = folder / "engines" / "toy"
    kind.mkdir(parents=True)
    engines = shipped_profiles() / "engines" / "vllm"
    text = (
        (engines / f"{NEWEST_VLLM}.yaml")
        .read_text()
        .replace("kind: vllm", "kind: toy", 1)
        .replace(f"version: {NEWEST_VLLM}", "version: 1.0.0", 1)
    )
    (kind / "1.0.0.yaml").write_text(text)
    shutil.copytree(engines / NEWEST_VLLM, kind / "1.0.0")
    return Profiles(folder)


def decision_of(profiles: Profiles, engine: Engine, hardware: str, **fields: object) -> Decision:
    return decide(
        published_model("llama-3.1-8b"),
        profiles.hardware(hardware),
        [engine],
        wish(**fields),
        rules=profiles.rules([engine]),
    )


def make_plan(
    profiles: Profiles, engine: Engine, hardware: str = "2x3090", **fields: object
) -> Plan:
    return decision_of(profiles, engine, hardware, **fields).plans[0]


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Profiles:
    monkeypatch.setitem(KINDS, "toy", KindEntry(ToyKind(), f"{__name__}:ToyRules"))
    return profiles_with_a_third_kind(tmp_path)


def test_a_third_kind_gets_a_plan_by_its_own_rules(toy: Profiles) -> None:
    plan = make_plan(toy, toy.engine("toy==1.0.0"))
    assert str(plan.engine) == "toy==1.0.0"
    assert {row.backend for row in plan.attention} == {"toy"}
    assert (plan.max_num_seqs.value, plan.max_num_seqs.reason) == (8, "as many as it was made for")
    assert plan.memory.budget_bytes == 12 * GIB
    assert plan.scope["budget"] == "one half"


def test_a_third_kind_has_conventions_of_its_own(toy: Profiles) -> None:
    assert engine_kind("toy").adapter_name("base", "sql") == "base/sql"
    assert rules_without_files("toy").stage_layers_env == "TOY_STAGE_LAYERS"
    assert [*engine_kind("toy").stage_remainder(4, 2)] == [0, 1]


def test_refusals_of_a_third_kind_name_its_own_code(toy: Profiles) -> None:
    decision = decision_of(toy, toy.engine("toy==1.0.0"), "3x3090", tensor_parallel=3)
    assert {rejected.source for rejected in decision.rejected} == {"toy/ranks.py"}


def test_a_kind_that_is_not_registered_is_planned_like_vllm(tmp_path: Path) -> None:
    profiles = profiles_with_a_third_kind(tmp_path)
    assert (
        make_plan(profiles, profiles.engine("toy==1.0.0")).attention
        == make_plan(profiles, profiles.engine(f"vllm=={NEWEST_VLLM}")).attention
    )


@pytest.mark.parametrize("name", KINDS)
def test_every_line_of_the_registry_names_rules_of_the_same_conventions(name: str) -> None:
    rules = rules_class(name)()
    assert isinstance(rules, type(engine_kind(name)))
    assert not rules.has_rules
