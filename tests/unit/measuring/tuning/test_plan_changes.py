"""Changes that a search tries: over many models, machines and engine versions each one is one
change, planned, and no loss of quality."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gateway.domain import Decision, Hardware, Plan, Wish
from gateway.errors import FitserveError
from gateway.measuring.tuning.plan_changes import (
    BasePlan,
    PlanChange,
    concurrent_requests,
    engine_defaults,
    keeps_quality,
    may_win,
    neighbours,
    other_engines,
    pin_layout,
    speculation,
)
from gateway.profiles.profiles import Profiles
from tests.support.planning import decide
from tests.support.published import published_model
from tests.support.versions import NEWEST_SGLANG, NEWEST_VLLM, SGLANG_REF, VLLM, VLLM_REF

PROFILES = Profiles()
ENGINES = {name: PROFILES.engine(name) for name in (VLLM_REF, SGLANG_REF, f"vllm=={VLLM[0]}")}
RULES = PROFILES.rules(ENGINES.values())
MODELS = ("llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v2-lite", "gemma-3-27b", "qwen3-next-80b-a3b")
MACHINES = ("3090", "2x5090", "4xh100", "8xh200")
CASES = [
    (model, machine_name, ref) for model in MODELS for machine_name in MACHINES for ref in ENGINES
]


def make_decision(model: str, machine: Hardware, wish: Wish, *refs: str) -> Decision:
    engines = [ENGINES[ref] for ref in refs]
    options: dict[str, Any] = {"gpus": PROFILES.gpus, "speed_knowledge": PROFILES.speed_knowledge}
    return decide(published_model(model), machine, engines, wish, rules=RULES, **options)


def first_plan(model: str, machine: str, ref: str, **wish: Any) -> BasePlan | None:
    """The first plan of the model, as it would be tuned; None: there is none."""
    owner = Wish(name="m", source=f"/models/{model}", engines=(ref,), **wish)
    decision = make_decision(model, PROFILES.hardware(machine), owner, ref)
    if not decision.plans:
        return None
    plan = decision.plans[0]
    return BasePlan(owner, pin_layout(owner, plan), plan, ENGINES[ref])


def change_plan(base: BasePlan, machine: str, change: PlanChange) -> Plan | None:
    model = (change.wish.source or "").rpartition("/")[2]
    try:
        plans = make_decision(
            model, PROFILES.hardware(machine), change.wish, *change.wish.engines
        ).plans
    except FitserveError:
        return None
    return plans[0] if plans else None


def try_changes(
    model: str, machine: str, ref: str, **wish: Any
) -> Iterator[tuple[BasePlan, PlanChange, Plan]]:
    base = first_plan(model, machine, ref, **wish)
    if base is None:
        return
    for change in neighbours(base):
        plan = change_plan(base, machine, change)
        # A model without layers that draft keeps its plan, and a search starts no plan twice.
        is_known_change = (
            change in speculation(base) and plan is not None and plan.argv == base.plan.argv
        )
        if plan is not None and not is_known_change and keeps_quality(plan, base):
            yield base, change, plan


@pytest.mark.parametrize(("model", "machine", "ref"), CASES)
def test_each_change_is_another_start_and_no_loss_of_quality(
    model: str, machine: str, ref: str
) -> None:
    commands = set()
    changes = [*try_changes(model, machine, ref)]
    for base, change, plan in changes:
        assert plan.argv != base.plan.argv, change.change
        assert change.change
        assert change.reason
        assert plan.engine == base.plan.engine
        assert plan.quantization.value == base.plan.quantization.value
        assert plan.kv_cache_dtype.value in ("auto", base.plan.kv_cache_dtype.value)
        assert plan.max_model_len.value >= min(32768, base.plan.max_model_len.value)
        # The owner's wish is kept, but for the fields that a plan decides.
        fields = set(Wish.model_fields) - {"engines", "args", "speculative", *_LAYOUT}
        assert all(getattr(change.wish, name) == getattr(base.owner, name) for name in fields)
        commands.add((plan.argv, plan.replicas.value))
    assert len(commands) == len(changes)


_LAYOUT = ("tensor_parallel", "data_parallel", "replicas")


def test_a_model_with_a_plan_mostly_has_something_to_try() -> None:
    counts = [len([*try_changes(*case)]) for case in CASES if first_plan(*case) is not None]
    assert len(counts) >= 30
    assert sum(count >= 2 for count in counts) >= 0.9 * len(counts)


@pytest.mark.parametrize("ref", [VLLM_REF, SGLANG_REF])
def test_the_pinned_wish_gives_the_served_plan_again(ref: str) -> None:
    for model in MODELS:
        for machine in MACHINES:
            base = first_plan(model, machine, ref)
            if base is not None:
                second_change_plan = change_plan(base, machine, PlanChange("", "", base.wish))
                assert second_change_plan is not None
                assert second_change_plan.argv == base.plan.argv, (model, machine)


def test_flags_and_sizes_of_the_owner_are_not_touched() -> None:
    args = {"max-num-batched-tokens": 4096, "--max_num_seqs": 64}
    base = first_plan("llama-3.1-8b", "4xh100", VLLM_REF, args=args, tensor_parallel=2)
    assert base is not None
    for change in neighbours(base):
        assert change.wish.args.items() >= args.items()
        assert "max-num-seqs" not in change.wish.args
        assert change.wish.tensor_parallel == 2
        assert change.wish.replicas == base.plan.replicas.value


def test_layouts_are_tried_on_the_same_gpus() -> None:
    base = first_plan("llama-3.1-8b", "4xh100", VLLM_REF)
    assert base is not None
    whole = len(base.plan.gpus) * base.plan.replicas.value
    layouts = {
        (plan.tensor_parallel.value, plan.replicas.value)
        for _, _, plan in try_changes("llama-3.1-8b", "4xh100", VLLM_REF)
    }
    assert all(ranks * copies == whole for ranks, copies in layouts)
    assert len(layouts) >= min(2, whole)


def test_a_cache_of_less_precision_is_tried_only_with_leave() -> None:
    base = first_plan("llama-3.1-8b", "3090", VLLM_REF, max_context=8192)
    assert base is not None
    assert base.plan.kv_cache_dtype.value == "auto"
    assert not any("kv-cache-dtype" in change.wish.args for change in neighbours(base))
    lossy = BasePlan(base.owner, base.wish, base.plan, base.engine, allows_lossy=True)
    lossy_neighbours = [
        neighbour
        for neighbour in neighbours(lossy)
        if neighbour.wish.args.get("kv-cache-dtype") == "fp8"
    ]
    plan = change_plan(base, "3090", lossy_neighbours[0])
    assert plan is not None
    assert keeps_quality(plan, lossy)
    assert not keeps_quality(plan, base)


def test_a_cache_that_memory_made_smaller_is_tried_in_full() -> None:
    base = first_plan("qwen3-8b", "3090", SGLANG_REF)
    assert base is not None
    assert base.plan.kv_cache_dtype.source == "memory model"
    assert any(change.wish.args.get("kv-cache-dtype") == "auto" for change in neighbours(base))


def test_drafts_by_the_checkpoint_are_tried_where_the_version_has_them() -> None:
    draft_plans = {}
    for model in ("qwen3-next-80b-a3b", "llama-3.1-8b"):
        base = first_plan(model, "8xh200", VLLM_REF)
        assert base is not None
        (change,) = speculation(base)
        plan = change_plan(base, "8xh200", change)
        assert plan is not None
        draft_plans[model] = plan.speculation.value
        assert keeps_quality(plan, base)
    assert draft_plans == {"qwen3-next-80b-a3b": "mtp", "llama-3.1-8b": "none"}
    first_asked_plan = first_plan("qwen3-next-80b-a3b", "8xh200", VLLM_REF, speculative="off")
    assert first_asked_plan is not None
    assert speculation(first_asked_plan) == ()


def test_the_defaults_of_an_engine_are_one_gpu_and_its_own_batch() -> None:
    base = first_plan("qwen3-8b", "3090", SGLANG_REF)
    assert base is not None
    first = engine_defaults(base)[0]
    assert first.wish.tensor_parallel == 1
    assert first.wish.args["max-running-requests"] == base.engine.default_seqs
    assert first.wish.args["kv-cache-dtype"] == "auto"


def test_the_best_plan_of_another_engine_is_tried() -> None:
    owner = Wish(name="m", source="/models/llama-3.1-8b")
    machine = PROFILES.hardware("4xh100")
    plans = make_decision("llama-3.1-8b", machine, owner, *ENGINES).plans
    by_kind = {"vllm": NEWEST_VLLM, "sglang": NEWEST_SGLANG}
    for kind in by_kind:
        plan_of_kind = next(plan for plan in plans if plan.engine.kind == kind)
        (other_plan,) = other_engines(owner, plans, plan_of_kind)
        assert {kind, other_plan.wish.engines[0].partition("==")[0]} == {*by_kind}


def test_a_plan_expected_to_be_far_slower_is_not_started() -> None:
    base = first_plan("llama-3.1-8b", "4xh100", VLLM_REF)
    assert base is not None
    assert base.plan.speed is not None
    assert may_win(base.plan, base)
    speed = base.plan.speed
    slow = speed.evolve(
        stream=speed.stream.evolve(value=speed.stream.value / 3),
        total=speed.total.evolve(value=speed.total.value / 3),
    )
    assert not may_win(base.plan.evolve(speed=slow), base)
    assert may_win(base.plan.evolve(speed=None), base)


def test_requests_are_dealt_over_the_copies() -> None:
    base = first_plan("llama-3.1-8b", "3090", VLLM_REF, concurrency=10)
    assert base is not None
    copies = base.plan.replicas.evolve(value=4)
    assert concurrent_requests(base.owner, base.plan.evolve(replicas=copies)) == 3
