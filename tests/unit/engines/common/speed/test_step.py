"""A step takes as long as its slowest part: number, distance and size make it slower or faster as
on a real machine."""

from __future__ import annotations

import pytest

from gateway.engines.common.layers.build import build
from gateway.engines.common.layers.stages import stage
from gateway.engines.common.speed.count import Model, rank_work
from gateway.engines.common.speed.expectation import lengths
from gateway.engines.common.speed.machine import Graphs, Machine, PeakShare, RankLink
from gateway.engines.common.speed.step import StepClock
from gateway.engines.common.speed.work import RankWork
from gateway.engines.registry import engine_kind
from gateway.models.rank import Rank
from gateway.profiles.profiles import Profiles
from tests.support.published import published_model
from tests.support.versions import NEWEST_VLLM, VLLM_REF

PROFILES = Profiles()
TABLE, VLLM = PROFILES.speed_knowledge.table, PROFILES.engine(VLLM_REF)
NONE = Graphs(0, 0)
WHOLE = PeakShare(memory=1, flops=1)
H100 = Machine(3.35e12, {"bfloat16": 989e12, "fp8": 1979e12}, RankLink(300e9, 8e-6), "")


def work(name: str, tp: int = 1, pp: int = 1) -> RankWork:
    spec = published_model(name)
    return rank_work(
        Model(spec.hidden, spec.vocab, spec.experts),
        stage(build(spec, frozenset()), VLLM, engine_kind(VLLM.kind), spec.architecture, pp),
        Rank(tp, pp, capability="9.0"),
        (),
        frozenset(),
    )


def test_one_request_reads_every_weight_once() -> None:
    """Where nothing but memory took time, a token of 8B in 16 bits would take 15 GB over the
    bandwidth."""
    free = TABLE.evolve(layer_s=0.0, step_s=0.0, request_s=0.0, dense=WHOLE, attention=WHOLE)
    assert StepClock(work("llama-3.1-8b"), H100, free).decode_s(1, 0) == pytest.approx(
        15.0e9 / 3.35e12, rel=0.01
    )


def test_a_prompt_takes_as_long_as_its_products() -> None:
    free = TABLE.evolve(
        layer_s=0.0, step_s=0.0, request_overhead_s=0.0, dense=WHOLE, attention=WHOLE
    )
    seconds = StepClock(work("llama-3.1-8b"), H100, free).first_token_s(8192, 8192)
    assert seconds == pytest.approx(2 * 7.0e9 * 8192 / 989e12, rel=0.2)


def test_few_requests_read_few_experts() -> None:
    experts = [product for product in work("qwen3-30b-a3b").products if product.experts]
    assert experts
    for expert in experts:
        assert expert.bytes_of_step(1) == pytest.approx(expert.bytes * 8 / 128)
        assert (
            expert.bytes_of_step(1)
            < expert.bytes_of_step(4)
            < expert.bytes_of_step(64)
            < expert.bytes
        )
        assert expert.bytes_of_step(4096) == pytest.approx(expert.bytes, rel=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "llama-3.1-8b",
        "qwen3-30b-a3b",
        "deepseek-v3",
        "gemma-3-27b",
        "nemotron-nano-9b-v2",
        "gpt-oss-20b",
    ],
)
def test_larger_batches_prompts_and_contexts_take_longer(name: str) -> None:
    whole = work(name)
    clock = StepClock(whole, H100, TABLE)
    base, prompt = clock.decode_s(32, 1000), clock.prompts_s(1, 4000, 8192)
    assert clock.decode_s(64, 1000) > base
    assert clock.decode_s(32, 16000) > base
    assert clock.prompts_s(1, 8000, 8192) > prompt
    assert clock.prompts_s(1, 4000, 512) >= prompt
    assert StepClock(whole, H100, TABLE, NONE).decode_s(32, 1000) > base
    assert StepClock(whole, H100.evolve(memory=H100.memory / 2), TABLE).decode_s(32, 1000) > base
    assert clock.total_per_s(64, 1024, 256, 8192) > clock.total_per_s(8, 1024, 256, 8192)


def test_ranks_that_reach_each_other_badly_gain_little() -> None:
    lone_step_clock = StepClock(work("llama-3.1-8b"), H100, TABLE)
    pair_work = work("llama-3.1-8b", tp=2)
    near = StepClock(pair_work, H100, TABLE).decode_s(1, 1000)
    far = StepClock(pair_work, H100.evolve(wire=RankLink(5e9, 100e-6)), TABLE).decode_s(1, 1000)
    assert near < lone_step_clock.decode_s(1, 1000) < far


def test_stages_help_many_requests_and_never_one() -> None:
    lone_step_clock = StepClock(work("llama-3.1-8b"), H100, TABLE)
    staged_clock = StepClock(work("llama-3.1-8b", pp=2), H100, TABLE)
    assert staged_clock.decode_s(1, 1000) > lone_step_clock.decode_s(1, 1000)
    totals = [clock.total_per_s(256, 1024, 256, 8192) for clock in (lone_step_clock, staged_clock)]
    assert totals[0] < totals[1] < 2 * totals[0]


def test_a_window_is_all_that_a_long_context_costs() -> None:
    sliding = next(reading for reading in work("gpt-oss-20b").readings if reading.window)
    assert sliding.visible_tokens(10) == 10
    assert sliding.visible_tokens(100_000) == sliding.window == 128
    assert sliding.pairs(100_000) == pytest.approx(128 * 100_000, rel=0.01)


def test_one_request_takes_the_sum_of_stages_and_many_the_slowest_pace() -> None:
    whole = work("llama-3.1-8b", pp=2)
    slow = H100.evolve(
        memory=H100.memory / 2, flops={name: peak / 2 for name, peak in H100.flops.items()}
    )
    quick, late = (StepClock(whole, machine, TABLE) for machine in (H100, slow))
    step_clock = StepClock(whole, H100, TABLE, other_stages=(late,))
    assert step_clock.decode_s(1, 0) == pytest.approx(
        (quick.decode_s(1, 0) + late.decode_s(1, 0)) / 2
    )
    assert step_clock.decode_s(64, 0) == pytest.approx(late.decode_s(64, 0))
    assert (
        quick.first_token_s(2048, 2048)
        < step_clock.first_token_s(2048, 2048)
        < late.first_token_s(2048, 2048)
    )
    assert StepClock(whole, H100, TABLE, other_stages=(quick,)).decode_s(1, 0) == pytest.approx(
        quick.decode_s(1, 0)
    )


def test_a_prompt_that_is_larger_than_any_graph_waits_for_the_cpu() -> None:
    slow = TABLE.evolve(experts=TABLE.experts.evolve(launch_s=0.1))
    clock = StepClock(work("qwen3-30b-a3b"), H100, slow, Graphs(512, 512))
    assert clock.prompts_s(1, 513, 8192) == pytest.approx(48 * 0.1, rel=0.1)
    assert clock.prompts_s(1, 512, 8192) < 0.1
    assert clock.prompts_s(1, 1024, 512) < 0.1  # in two batches
    dense = [
        StepClock(work("llama-3.1-8b"), H100, table, Graphs(512, 512)).prompts_s(1, 513, 8192)
        for table in (TABLE, slow)
    ]
    assert dense[0] == dense[1]


def test_a_step_of_more_requests_than_any_graph_waits_for_the_cpu() -> None:
    slow = TABLE.evolve(experts=TABLE.experts.evolve(launch_s=0.1))
    clock = StepClock(work("qwen3-30b-a3b"), H100, slow, Graphs(64, 64))
    assert clock.decode_s(65, 512) == pytest.approx(48 * 0.1, rel=0.01)
    assert clock.decode_s(64, 512) < 0.1


def test_the_cpu_and_the_gpu_take_turns_without_graphs() -> None:
    slow = TABLE.evolve(experts=TABLE.experts.evolve(launch_s=0.1))
    experts, dense = work("qwen3-30b-a3b"), work("llama-3.1-8b")
    graphs = StepClock(experts, H100, slow).decode_s(64, 512)
    assert StepClock(experts, H100, slow, NONE).decode_s(64, 512) == pytest.approx(
        48 * 0.1 + graphs
    )
    plain = [StepClock(dense, H100, table, NONE).decode_s(1, 512) for table in (TABLE, slow)]
    assert plain[0] == plain[1]


def test_graphs_equal_those_of_the_engine() -> None:
    assert TABLE.graphs("vllm", NEWEST_VLLM, 1024, is_eager=False) == Graphs(512, 512)
    assert TABLE.graphs("vllm", NEWEST_VLLM, 64, is_eager=False) == Graphs(128, 128)
    assert TABLE.graphs("vllm", NEWEST_VLLM, 64, is_eager=True) == NONE
    assert TABLE.graphs("sglang", "0.5.10.post1", 64, is_eager=False) == Graphs()
    assert TABLE.graphs("sglang", "0.5.9", 64, is_eager=False) == Graphs(prompts=0)


def test_a_step_that_waits_for_the_cpu_decodes_beside_the_prompt() -> None:
    """The GPU has the time."""
    slow = TABLE.evolve(experts=TABLE.experts.evolve(launch_s=0.01))
    waiting, graphs = (
        StepClock(work("qwen3-30b-a3b"), H100, slow, graphs)
        for graphs in (Graphs(64, 64), Graphs())
    )
    assert graphs.decode_s(64, 576) < 48 * 0.01
    seconds = 64 * 128 / waiting.mixed_tokens_per_s(64, 512, 128, 8192)
    steps_s = 64 * graphs.decode_s(64, 576) + 64 * 48 * 0.01
    assert seconds == pytest.approx(steps_s + TABLE.request_overhead_s)


def test_a_cache_of_eight_bits_is_read_sooner_but_not_twice_as_soon() -> None:
    free = TABLE.evolve(step_s=0.0, request_s=0.0)
    spec = published_model("llama-3.1-8b")

    def attention_s(kv_dtype: str) -> float:
        model = Model(spec.hidden, spec.vocab, spec.experts)
        rank = Rank(kv_dtype=kv_dtype, capability="9.0")
        clock = StepClock(
            rank_work(model, build(spec, frozenset()), rank, (), frozenset()), H100, free
        )
        return clock.decode_s(64, 4096) - clock.decode_s(64, 0)

    assert 0.5 * attention_s("auto") < attention_s("fp8") < attention_s("auto")


def test_prefill_attention_is_slower_with_narrow_heads_and_faster_with_an_8_bit_cache() -> None:
    wide, narrow = work("llama-3.1-8b"), work("llama-3.2-1b")
    assert [any(reading.is_narrow for reading in clock.readings) for clock in (wide, narrow)] == [
        False,
        True,
    ]
    whole, half = TABLE.evolve(narrow_head_share=1.0), TABLE.evolve(narrow_head_share=0.5)
    assert StepClock(narrow, H100, half).pairs_s(4096) == pytest.approx(
        2 * StepClock(narrow, H100, whole).pairs_s(4096)
    )
    assert StepClock(wide, H100, half).pairs_s(4096) == StepClock(wide, H100, whole).pairs_s(4096)
    small = wide.evolve(
        readings=tuple(reading._replace(has_8_bit_cache=True) for reading in wide.readings)
    )
    quick = TABLE.evolve(eight_bit_cache=TABLE.attention.evolve(flops=2 * TABLE.attention.flops))
    assert StepClock(small, H100, quick).pairs_s(4096) == pytest.approx(
        StepClock(wide, H100, quick).pairs_s(4096) / 2
    )


def test_requests_that_come_together_begin_one_behind_the_other() -> None:
    whole, late = work("llama-3.1-8b"), TABLE.evolve(admission_s=1.0)
    assert (
        StepClock(whole, H100, late).prompts_s(8, 512, 8192)
        > 8
        > StepClock(whole, H100, TABLE).prompts_s(8, 512, 8192)
    )


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_prompts_that_come_one_by_one_cost_most_where_they_have_steps_of_their_own(
    name: str,
) -> None:
    """A step of vLLM that computes a prompt decodes too."""
    mixed_clock, separate = (
        StepClock(work(name), H100, TABLE.kind_table(kind)) for kind in ("vllm", "sglang")
    )
    plain_clock = StepClock(
        work(name), H100, TABLE.kind_table("vllm").evolve(has_separate_prefill=True)
    )
    assert plain_clock.mixed_tokens_per_s(64, 512, 128, 8192) < mixed_clock.mixed_tokens_per_s(
        64, 512, 128, 8192
    )
    assert separate.mixed_tokens_per_s(64, 512, 128, 8192) < separate.total_per_s(
        64, 512, 128, 8192
    )


@pytest.mark.parametrize("context", [1, 2, 5, 4096, 10**6])
def test_each_context_has_a_prompt_and_an_answer(context: int) -> None:
    assert all(part >= 1 for part in lengths(context))
