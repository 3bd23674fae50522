"""Decisions and the facts of their measured speed."""

from __future__ import annotations

from typing import Any

from gateway.domain import Bench, BenchLevel, Decision, Fact, Plan
from gateway.engines.common.speed.correction import learn_from_bench as learn
from gateway.engines.common.speed.machine import SpeedKnowledge
from gateway.profiles.profiles import Profiles
from tests.support.makers import engine, machine, spec, wish
from tests.support.planning import decide

PROFILES = Profiles()


def make_decision(
    facts: tuple[Fact, ...] = (),
    version: str = "9.9.0",
    pace: SpeedKnowledge | None = PROFILES.speed_knowledge,
    **fields: Any,
) -> Decision:
    request = wish(**{"gpus": 1, "replicas": 1, **fields})
    return decide(
        spec(), machine("2x3090"), [engine("cuda", version)], request, facts, speed_knowledge=pace
    )


def bench(plan: Plan, part: float, concurrency: int | None = None) -> Bench:
    """As if everything were done at so much of the expected speed."""
    speed = plan.speed
    assert speed is not None
    level = BenchLevel(
        concurrency=concurrency or speed.concurrency,
        requests=4,
        seconds=5,
        tokens_per_s=speed.total.value * part,
        latency_p50_s=1,
        latency_p95_s=1,
        first_token_p50_s=1,
        first_token_p95_s=1,
    )
    return Bench(
        model="m",
        at=1.0,
        fingerprint=plan.fingerprint,
        prompt=1024,
        answer=256,
        stream=speed.stream.value * part,
        first_token_2k_s=speed.first_token_2k_s.value / part,
        levels=(level,),
    )


def learn_facts(plan: Plan, part: float, earlier_facts: tuple[Fact, ...] = ()) -> tuple[Fact, ...]:
    return learn(plan, bench(plan, part), earlier_facts, 5.0)
