"""No plan computes more requests at once than its own KV cache has states for, whatever the model,
the machine and the engine version."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gateway.diagnosis.facts.scope import batch_scope
from gateway.domain import Decision, Fact, ModelSpec, Plan
from gateway.domain.units import GIB
from gateway.engines.common.candidate import Budget, Footprint
from gateway.planner import sizing
from gateway.planner.sizes import Batch, Sizes
from tests.support.makers import wish
from tests.support.planning import decide
from tests.support.published import config
from tests.support.stateful_cases import (
    CASES,
    ENGINES,
    MACHINES,
    REFS,
    RULES,
    spec_of,
)
from tests.support.versions import SGLANG_REF, VLLM_REF


@pytest.fixture
def recorded_sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Footprint, Sizes]]:
    """Every sizing of the test."""
    rows: list[tuple[Footprint, Sizes]] = []
    real = sizing._sizes_within

    def note_sizes(footprint: Footprint, batch: Batch, bounds: Budget) -> Sizes:
        sizes = real(footprint, batch, bounds)
        rows.append((footprint, sizes))
        return sizes

    monkeypatch.setattr(sizing, "_sizes_within", note_sizes)
    return rows


def decision(spec: ModelSpec, machine: str, *refs: str, **fields: Any) -> Decision:
    engines = [engine for engine in ENGINES if not refs or engine.ref in refs]
    return decide(spec, MACHINES[machine], engines, wish(**fields), rules=RULES)


# Each model meets every sixth machine, and all of them meet all machines.
@pytest.mark.parametrize(("number", "name"), list(enumerate(CASES)))
def test_no_plan_contradicts_its_own_cache(
    number: int, name: str, recorded_sizes: list[tuple[Footprint, Sizes]]
) -> None:
    for machine in list(MACHINES)[number % 6 :: 6]:
        for plan in decision(CASES[name], machine).plans:
            assert plan.max_num_seqs.value >= 1
    for footprint, sizes in recorded_sizes:
        cache, kv_bytes = footprint.cache, sizes.memory.kv_bytes
        if cache.states_per_request:
            fits = cache.states(kv_bytes) // cache.states_per_request
            assert sizes.batch.seqs.value <= fits, (footprint.candidate.engine.ref, sizes)


def first(name: str, machine: str, ref: str, **fields: Any) -> Plan:
    return decision(CASES[name], machine, ref, **fields).plans[0]


@pytest.mark.parametrize(
    ("name", "machine", "lower_bound"),
    [
        # The source is vllm-project/recipes#831, with 104 blocks by our own figures.
        (
            "qwen-27b modelopt-nvfp4",
            "5090",
            64,
        ),
        # The source is vllm-project/vllm#49064, which reports 856 blocks on one GPU.
        (
            "qwen-27b fp8-block",
            "2xh100",
            512,
        ),
        ("qwen-27b", "2xh100", 256),
    ],
)
def test_a_default_beyond_the_states_is_lowered_and_says_why(
    name: str, machine: str, lower_bound: int
) -> None:
    plan = first(name, machine, VLLM_REF, tensor_parallel=1)
    requests = plan.max_num_seqs
    match = re.fullmatch(
        r"about (\d+) state blocks fit into [\d.]+ GiB of KV cache, one for each request; fewer,"
        r" since that size is an estimate",
        requests.reason,
    )
    assert match
    assert lower_bound <= requests.value < int(match[1])
    assert requests.source == "state blocks"
    assert f"--max-num-seqs={requests.value}" in plan.argv


@pytest.mark.parametrize("ref", [ref for ref in REFS if ref.startswith("vllm")])
@pytest.mark.parametrize(
    ("name", "share", "measured"),
    [("qwen-27b fp8-block", None, 939), ("qwen-27b", None, 556), ("qwen-27b", 0.95, 556)],
)
def test_blocks_that_a_user_counted_on_another_gpu_suffice(
    ref: str, name: str, share: float | None, measured: int
) -> None:
    """vllm-project/recipes#831: those in 16 bits with a larger share of the memory."""
    arguments = {"args": {"gpu-memory-utilization": share}} if share else {}
    plan = first(name, "rtx-pro-6000", ref, text_only=True, **arguments)
    assert measured // 2 <= plan.max_num_seqs.value <= measured


def test_a_default_within_the_states_stays() -> None:
    plan = first("qwen3.5-9b", "h200", VLLM_REF)
    assert plan.max_num_seqs.value == 1024
    assert plan.max_num_seqs.reason.startswith("the engine's default")


def test_a_model_without_states_is_never_lowered() -> None:
    plan = decision(spec_of("m", config("qwen3-8b")), "2x3090", VLLM_REF).plans[0]
    assert plan.max_num_seqs.reason.startswith(("the engine's default", "fewer requests"))


def decision_for(requests: int, *, name: str = "qwen-27b", ref: str = VLLM_REF) -> Decision:
    args = {"max-num-seqs": requests}
    return decision(CASES[name], "2xh100", ref, tensor_parallel=1, args=args)


def test_the_users_setting_stays_with_a_warning() -> None:
    plan = decision_for(360).plans[0]
    assert plan.max_num_seqs.value == 360
    (warning,) = (text for text in plan.warnings if "state blocks" in text)
    assert warning.startswith("--max-num-seqs=360 was set, and about ")
    assert not any("state blocks" in text for text in decision_for(8).plans[0].warnings)


@pytest.mark.parametrize("ref", [ref for ref in REFS if ref.startswith("vllm")])
def test_requests_that_surely_have_no_states_are_refused(ref: str) -> None:
    """kaito-project/kaito#2319: 1,024 requests to a 27B model in 16 bits."""
    decision_of_1024 = decision_for(1024, ref=ref)
    reasons = [text for rejection in decision_of_1024.rejected for text in rejection.reasons]
    is_capped = any("the engine starts with no more" in text for text in reasons)
    # Earlier versions only compute larger batches without graphs.
    assert is_capped is (ref not in ("vllm==0.18.0", "vllm==0.19.1"))
    whole = [
        plan
        for plan in decision_of_1024.plans
        if plan.memory.weights_bytes > 50 * GIB and not plan.enforce_eager.value
    ]
    assert bool(whole) is not is_capped


def test_more_requests_without_full_graphs_are_no_refusal() -> None:
    args = {"max-num-seqs": 1024, "optimization-level": 1}
    plans = decision(CASES["qwen-27b"], "2xh100", VLLM_REF, tensor_parallel=1, args=args).plans
    assert plans[0].max_num_seqs.value == 1024


def test_more_requests_without_graphs_wait_for_a_state() -> None:
    args = {"max-num-seqs": 1024, "enforce-eager": True}
    plan = decision(CASES["qwen-27b"], "2xh100", VLLM_REF, tensor_parallel=1, args=args).plans[0]
    assert plan.max_num_seqs.value == 1024
    assert any("The engine may refuse" in text for text in plan.warnings)


def test_an_engine_that_caps_requests_gets_the_expected_number() -> None:
    plan = first("qwen-27b", "2xh100", SGLANG_REF, tensor_parallel=1, text_only=True)
    reason = plan.max_num_seqs.reason
    states, block_count = map(
        int, re.findall(r"about (\d+) state blocks .*, (\d+) for each", reason)[0]
    )
    assert states // block_count - 8 < plan.max_num_seqs.value <= states // block_count
    args = {"max-running-requests": 1024}
    large_plan = first(
        "qwen-27b", "2xh100", SGLANG_REF, tensor_parallel=1, text_only=True, args=args
    )
    assert large_plan.max_num_seqs.value == 1024
    assert any(text.endswith("The engine computes no more.") for text in large_plan.warnings)


def test_a_start_that_proved_the_plan_does_not_change_it() -> None:
    """Else each start would be followed by another plan."""
    plan = first("qwen-27b modelopt-nvfp4", "5090", VLLM_REF)
    used_bytes = plan.memory.budget_bytes - plan.memory.kv_bytes
    scope = {name: value for name, value in plan.scope.items() if name != "budget"}
    scope |= batch_scope(
        plan.max_num_batched_tokens.value,
        plan.max_num_seqs.value,
        is_eager=plan.enforce_eager.value,
    )
    fact = Fact(
        kind="needs_memory",
        scope=scope,
        value=used_bytes,
        grade="verified",
        source="it had that left",
    )
    second_plan = decide(
        CASES["qwen-27b modelopt-nvfp4"],
        MACHINES["5090"],
        [engine for engine in ENGINES if engine.ref == VLLM_REF],
        wish(),
        facts=[fact],
        rules=RULES,
    ).plans[0]
    assert second_plan.argv == plan.argv


def states_of(
    ref: str, name: str, recorded_sizes: list[tuple[Footprint, Sizes]], **args: Any
) -> int:
    """Requests at once by SGLang's states, with these flags."""
    recorded_sizes.clear()
    flags = {"max-running-requests": 4096, **args}
    plan = first(name, "h200", ref, args=flags, text_only=True)
    footprint, sizes = recorded_sizes[0]
    assert plan.max_num_seqs.value == 4096
    return footprint.cache.states(sizes.memory.kv_bytes) // max(
        1, footprint.cache.states_per_request
    )


def test_sglangs_flags_change_its_states(recorded_sizes: list[tuple[Footprint, Sizes]]) -> None:
    plain = states_of(SGLANG_REF, "qwen3.5-9b", recorded_sizes)
    share = {"mamba-full-memory-ratio": 0.45}
    assert states_of(SGLANG_REF, "qwen3.5-9b", recorded_sizes, **share) == pytest.approx(
        plain * (0.45 / 1.45) / (0.9 / 1.9), rel=0.02
    )
    options = {"mamba-radix-cache-strategy": "no_buffer"}
    assert states_of(SGLANG_REF, "qwen3.5-9b", recorded_sizes, **options) == pytest.approx(
        plain * 5 / 3, rel=0.02
    )
    assert (
        states_of(SGLANG_REF, "qwen3.5-9b", recorded_sizes, **{"max-mamba-cache-size": 100}) == 20
    )


def test_a_cache_without_the_states_of_one_request_is_refused() -> None:
    """SGLang would end after it loaded: its cache is too small to serve any requests."""
    rejections = decision(CASES["granite-4.0-h-micro"], "3060", SGLANG_REF).rejected
    reasons = [
        text
        for rejection in rejections
        for text in rejection.reasons
        if rejection.verdict == "no_memory"
    ]
    assert any("state blocks fit into" in text and "takes 5" in text for text in reasons)
