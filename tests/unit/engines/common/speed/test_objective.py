"""Of several plans the one that its owner would choose comes first."""

from __future__ import annotations

from gateway.domain import Estimate, Speed
from gateway.engines.common.speed.objective import Demerits, Outcome, rating, share, worth


def speed(stream: float, total: float) -> Speed:
    def told(value: float) -> Estimate:
        return Estimate(value=value, low=value, high=value)

    return Speed(
        stream=told(stream), total=told(total), concurrency=8, first_token_2k_s=told(1), source=""
    )


def test_each_goal_has_its_own_best() -> None:
    quick = Outcome(speed(200, 1000), 8_000, 8_000, 1)
    wide = Outcome(speed(50, 9000), 8_000, 8_000, 1)
    roomy = Outcome(speed(40, 800), 128_000, 8_000, 1)
    every = [quick, wide, roomy]
    assert max(every, key=lambda one: worth(one, "latency", 0)) is quick
    assert max(every, key=lambda one: worth(one, "throughput", 0)) is wide
    assert max(every, key=lambda one: worth(one, "context", 0)) is roomy
    both = Outcome(speed(150, 6000), 8_000, 8_000, 1)
    assert max([*every, both], key=lambda one: worth(one, "balanced", 0)) is both


def test_more_gpus_have_to_be_worth_it_where_others_might_want_them() -> None:
    one, two = (
        Outcome(speed(100, 1000), 8_000, 8_000, 1),
        Outcome(speed(130, 1300), 8_000, 8_000, 2),
    )
    assert worth(two, "balanced", share(None)) > worth(one, "balanced", share(None))
    assert worth(two, "balanced", share("few")) < worth(one, "balanced", share("few"))
    barely = Outcome(speed(104, 1040), 8_000, 8_000, 2)
    assert worth(barely, "balanced", share(None)) < worth(one, "balanced", share(None))
    assert worth(barely, "balanced", share("all")) > worth(one, "balanced", share("all"))


def test_where_nothing_is_known_few_gpus_are_best() -> None:
    few, many = Outcome(None, 8_000, 8_000, 1), Outcome(None, 8_000, 8_000, 8)
    assert worth(few, "balanced", share("all")) > worth(many, "balanced", share("all"))


def test_what_else_is_known_decides_between_plans_that_are_nearly_as_good() -> None:
    plain = Demerits(weak=False, changes=0, older=0)
    for worse in (Demerits(True, 0, 0), Demerits(False, 3, 0), Demerits(False, 0, 3)):
        assert rating(100, plain) > rating(104, worse)
        assert rating(100, plain) < rating(120, worse)


def test_a_published_weakness_outweighs_a_few_tokens_of_context() -> None:
    assert rating(26_048, Demerits(False, 0, 1)) > rating(26_624, Demerits(True, 0, 0))


def test_one_engine_is_better_than_copies_that_give_no_more() -> None:
    one, copies = Demerits(False, 0, 0), Demerits(False, 0, 0, copies=True)
    assert rating(100, one) > rating(101, copies)
    assert rating(100, one) < rating(104, copies)
