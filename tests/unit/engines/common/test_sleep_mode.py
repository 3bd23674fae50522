"""Which engines are made so that they can be put to sleep, and why the others are not."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.diagnosis.facts.known_facts import KnownFacts
from gateway.diagnosis.facts.sleep import failure_fact
from gateway.domain import Flag
from gateway.engines.common.sleep_mode import choose_sleep_mode
from tests.support.makers import GIB, attempt, engine, plan

PLAN = plan("3090")
SLEEPS = engine(flags={"enable-sleep-mode": Flag(type="bool")}, has_sleep_mode=True)
LEAVES = "it does not stay loaded for ever"


def choice(**fields: Any) -> tuple[bool, str]:
    options: dict[str, Any] = {
        "engine": SLEEPS,
        "leaves": LEAVES,
        "args": {},
        "env": {},
        "facts": KnownFacts(),
        "scope": PLAN.scope,
        "memory": PLAN.memory,
        "ranks": 1,
        "ram_bytes": 128 * GIB,
    }
    sleep_mode = choose_sleep_mode(**{**options, **fields})
    return sleep_mode.value, sleep_mode.reason


def test_a_model_that_may_have_to_leave_can_sleep() -> None:
    assert choice() == (True, f"{LEAVES}; from sleep it comes back in seconds")


FAILED = KnownFacts([failure_fact(attempt(plan=PLAN), "did not wake up", 1.0)])


@pytest.mark.parametrize(
    ("fields", "reason_part"),
    [
        ({"leaves": ""}, "never has to leave"),
        ({"engine": SLEEPS.evolve(device="cpu"), "leaves": ""}, "no engine on a CPU sleeps"),
        ({"engine": SLEEPS.evolve(has_sleep_mode=False)}, "no sleep mode"),
        ({"engine": SLEEPS.evolve(flags={})}, "no sleep mode"),
        ({"args": {"cpu-offload-gb": 4}}, "--cpu-offload-gb"),
        ({"has_adapters": True}, "LoRA adapters"),
        ({"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}, "expandable_segments"),
        ({"facts": FAILED}, "it failed here: "),
        ({"ram_bytes": 2 * GIB}, "of RAM, and the machine has 2.00 GiB"),
        ({"args": {"enable-sleep-mode": False}}, "set by the user"),
    ],
)
def test_models_without_sleep_name_the_reason(fields: dict[str, Any], reason_part: str) -> None:
    value, reason = choice(**fields)
    assert not value
    assert reason_part in reason


def test_a_failure_on_other_gpus_or_of_another_version_says_nothing() -> None:
    assert choice(facts=FAILED, scope={**PLAN.scope, "device": "another"})[0]
    assert choice(facts=FAILED, scope={**PLAN.scope, "engine": "vllm==1.0.0"})[0]


def test_a_user_may_force_sleep() -> None:
    assert choice(leaves="", args={"enable-sleep-mode": True}) == (True, "set by the user")
