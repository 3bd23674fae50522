"""Engines on a CPU share its RAM by bytes, as others share a GPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import Decision, Hardware
from gateway.domain.plan import RAM
from gateway.engines.common.resources import reserved_ram_bytes
from tests.support.makers import GIB, engine, machine, spec, wish
from tests.support.planning import decide

ENGINE = engine("cpu")
WORDS = st.tuples(st.booleans(), st.sampled_from((512, 4096, 8192, 32768)))


def cpu_machine(gibs: int) -> Hardware:
    return machine("cpu").evolve(ram_total_bytes=gibs * GIB)


def make_decision(gibs: int, claimed: int, context: int | None = None, **args: int) -> Decision:
    return decide(
        spec(),
        cpu_machine(gibs),
        [ENGINE],
        wish(max_context=context, args=args),
        promised_bytes={RAM: claimed},
    )


@given(gibs=st.integers(16, 256), moves=st.lists(WORDS, max_size=12))
def test_the_promises_to_engines_never_exceed_the_ram(
    gibs: int, moves: list[tuple[bool, int]]
) -> None:
    """Models come and go; the first keeps its own memory, and a leaving model gives all of it
    back."""
    promises: list[tuple[int, int]] = []
    for comes, context in moves:
        if not comes and promises:
            size, of = promises.pop()
            second_plan = make_decision(gibs, sum(promise for promise, _ in promises), of).plans[0]
            assert second_plan.memory.promised_bytes == size, (
                "the same room holds the same plan again"
            )
            continue
        plans = make_decision(gibs, sum(promise for promise, _ in promises), context).plans
        if plans:
            assert plans[0].gpus == ()
            promises.append((plans[0].memory.promised_bytes, context))
    assert sum(promise for promise, _ in promises) + reserved_ram_bytes(gibs * GIB) <= gibs * GIB


def test_one_context_may_take_most_of_the_ram_and_two_plans_share_it() -> None:
    lone_memory = make_decision(64, 0).plans[0].memory
    assert 2 * lone_memory.promised_bytes <= 64 * GIB - reserved_ram_bytes(64 * GIB)
    tight = lone_memory.weights_bytes + lone_memory.activation_bytes + lone_memory.overhead_bytes
    gibs = -(-tight // GIB) + 6
    lone_plan = make_decision(gibs, 0, 32768).plans[0]
    assert lone_plan.max_model_len.value == 32768
    assert lone_plan.memory.promised_bytes > gibs * GIB // 2
    assert not make_decision(gibs, 6 * GIB, 32768).plans


@pytest.mark.parametrize("claimed", [60 * GIB, 61 * GIB, 64 * GIB])
def test_a_model_without_enough_memory_beside_others_is_refused_with_its_need(
    claimed: int,
) -> None:
    decision = make_decision(64, claimed)
    assert not decision.plans
    assert "the RAM that other engines leave" in decision.rejected[0].reasons[0]


def test_a_kv_cache_that_the_user_set_has_to_fit() -> None:
    assert (
        make_decision(64, 0, **{"kv-cache-memory-bytes": 8 * GIB}).plans[0].memory.kv_bytes
        == 8 * GIB
    )
    (rejection,) = make_decision(64, 40 * GIB, **{"kv-cache-memory-bytes": 8 * GIB}).rejected
    assert rejection.reasons[0].startswith(f"--kv-cache-memory-bytes={8 * GIB} was set; together")
