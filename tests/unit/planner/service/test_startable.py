"""Engines that count in a plan for this machine, and the words about engines that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.domain import Decision, Engine, Estimate, Plan, Speed
from gateway.domain.image_name import AllowedImages
from gateway.errors import BadFlag, NoPlan
from gateway.machine.environment import COMPLETE, engine_dir
from gateway.planner.explain import gain_over, unavailable_gains
from gateway.planner.service.startable import Startable
from gateway.profiles.profiles import Profiles
from tests.support.makers import plan, wish
from tests.support.versions import NEWEST_VLLM, VLLM_REF

OLD, NEW = (Profiles().engine(ref) for ref in ("vllm==0.19.1", VLLM_REF))


def install_engine(tmp_path: Path, *engines: Engine) -> Path:
    for engine in engines:
        (engine_dir(tmp_path, engine)).mkdir(parents=True)
        (engine_dir(tmp_path, engine) / COMPLETE).touch()
    return tmp_path


def with_speed(engine: Engine, stream: float, total: float, context: int = 8192) -> Plan:
    def estimate(value: float) -> Estimate:
        return Estimate(value=value, low=value, high=value)

    new_plan = plan()
    speed = Speed(
        stream=estimate(stream),
        total=estimate(total),
        concurrency=1,
        first_token_2k_s=estimate(1),
        source="test",
    )
    return new_plan.evolve(
        speed=speed,
        engine=new_plan.engine.evolve(kind=engine.kind, version=engine.version),
        max_model_len=new_plan.max_model_len.evolve(value=context),
    )


def decision(*plans: Plan) -> Decision:
    return Decision(model="m", hardware="this machine", plans=plans)


def test_processes_start_installed_versions(tmp_path: Path) -> None:
    startable = Startable(install_engine(tmp_path, OLD), installed_only=True)
    assert startable.split_startable([OLD, NEW]) == ([OLD], [NEW])


def test_containers_start_images_that_may_be_pulled(tmp_path: Path) -> None:
    assert Startable(tmp_path, False, AllowedImages(["*:v0.19.1"])).split_startable([OLD, NEW]) == (
        [OLD],
        [NEW],
    )
    assert Startable(tmp_path, False).split_startable([OLD, NEW]) == ([OLD, NEW], []), (
        "an agent has its own word"
    )


def test_a_missing_engine_is_named_with_its_command_and_its_gain(tmp_path: Path) -> None:
    startable = Startable(install_engine(tmp_path, OLD), installed_only=True)
    old_decision = decision(with_speed(OLD, 100, 1000))
    new_decision = decision(with_speed(NEW, 110, 1500))
    explained_decision = startable.explain_engines(
        old_decision,
        [OLD],
        [NEW],
        wish(),
        lambda engines: new_decision if engines == [NEW] else old_decision,
    )
    assert [(engine.engine, engine.is_available) for engine in explained_decision.engines] == [
        (OLD.ref, True),
        (NEW.ref, False),
    ]
    assert explained_decision.engines[1].gain == 0.5
    assert unavailable_gains(explained_decision) == [
        f"vllm=={NEWEST_VLLM}: not installed here; `fitserve engine install vllm=={NEWEST_VLLM}`:"
        " 50% more"
        " tokens/s"
    ]
    assert explained_decision.plans == old_decision.plans, "what add would start is not touched"


def test_an_engine_that_gives_nothing_is_in_the_answer_and_not_in_the_text(tmp_path: Path) -> None:
    startable = Startable(install_engine(tmp_path, OLD), installed_only=True)
    old_decision = decision(with_speed(OLD, 100, 1000))
    for rival in (
        decision(with_speed(NEW, 90, 900)),
        decision(with_speed(NEW, 101, 1010)),
        decision(),
    ):
        engines = startable.explain_engines(
            old_decision,
            [OLD],
            [NEW],
            wish(),
            lambda _: rival,  # noqa: B023 - called during this call
        )
        assert unavailable_gains(engines) == []
        assert len(engines.engines) == 2


def test_an_engine_that_could_serve_is_named_if_none_is_here(tmp_path: Path) -> None:
    startable = Startable(tmp_path, installed_only=True)
    engines = startable.explain_engines(
        decision(), [], [OLD, NEW], wish(), lambda _: decision(with_speed(NEW, 1, 1))
    )
    (line,) = unavailable_gains(engines)
    assert f"fitserve engine install vllm=={NEWEST_VLLM}" in line
    assert "8,192 tokens of context" in line


def test_a_flag_that_only_engines_here_have_is_no_error(tmp_path: Path) -> None:
    def refuse(_: list[Engine]) -> Decision:
        raise BadFlag("no such flag")

    engines = Startable(tmp_path, True).explain_engines(
        decision(with_speed(OLD, 1, 1)), [OLD], [NEW], wish(), refuse
    )
    assert [engine.gain_text for engine in engines.engines] == ["", "no plan"]


def test_a_refusal_says_how_to_get_an_engine(tmp_path: Path) -> None:
    with pytest.raises(NoPlan, match="FITSERVE_ALLOWED_IMAGES"):
        raise Startable(tmp_path, False, AllowedImages(["x"])).no_engine_error([NEW], "m")
    with pytest.raises(NoPlan, match="engine install vllm"):
        raise Startable(tmp_path, True).no_engine_error([NEW], "m")


def test_plans_are_compared_by_the_goal() -> None:
    old_plan, new_plan = with_speed(OLD, 100, 1000), with_speed(NEW, 150, 900, context=16384)
    assert gain_over(old_plan, new_plan, "latency") == (
        0.5,
        "50% more tokens/s, 16,384 tokens of context",
    )
    assert gain_over(old_plan, new_plan, "throughput") == (
        -0.1,
        "10% fewer tokens/s, 16,384 tokens of context",
    )
