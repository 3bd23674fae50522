"""KV cache that a model gives, keeps and has back: models that come and go on one machine."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gateway.domain import (
    Attempt,
    Cap,
    Decision,
    Failure,
    Hardware,
    ModelSpec,
    Offer,
    Plan,
    Policy,
    Promise,
    Sharing,
    Wish,
)
from gateway.planner.parallel import drop_engines, free_bytes_by_gpu
from gateway.planner.sharing.leaving import EvictionCandidate, leave_offers
from gateway.planner.sharing.offers import decide_with_offers
from gateway.planner.sharing.restore import (
    interrupted_plan,
    plan_to_restore,
    restore_decision,
    wish_for_restore,
)
from gateway.planner.sharing.surplus import (
    cap_after_giving,
    current_cap,
    last_cap,
    partial_offer,
    surplus_offers,
)
from gateway.planner.sizes import wanted_context
from gateway.planner.starts import cache_bytes
from gateway.profiles.profiles import Profiles
from tests.support.examples import quicker
from tests.support.makers import GIB, LLAMA_8B, plan, wish
from tests.support.planning import decide
from tests.support.published import config, model_from_config

PROFILES = Profiles()
ENGINES = [PROFILES.engine("vllm==0.26.0")]
RULES = PROFILES.rules(ENGINES)
SMALL = {
    **LLAMA_8B,
    "num_hidden_layers": 8,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "vocab_size": 32000,
    "head_dim": 64,
}
MODELS = {
    "small": SMALL,
    "llama-1b": config("llama-3.2-1b"),
    "qwen-1.5b": config("qwen2.5-1.5b"),
    "llama-8b": LLAMA_8B,
}


def attempt(number: int, planned: Plan, **fields: Any) -> Attempt:
    fields_of_attempt = {
        "state": "ready",
        "ready_at": 2.0,
        "port": 1,
        "started_at": 1.0,
        "replica": 0,
        "model": "m",
    }
    return Attempt.model_validate(
        {
            **fields_of_attempt,
            "id": number,
            "plan": planned,
            "fingerprint": planned.fingerprint,
            **fields,
        }
    )


def test_one_whole_context_and_the_wish_stay_after_giving() -> None:
    lone_plan = plan("h200", max_context=8192)
    first, last = surplus_offers(lone_plan, wish(max_context=8192))
    assert first.tokens >= 4 * 8192
    assert last.tokens >= 8192
    assert (
        0
        < sum(first.bytes_by_gpu.values())
        < sum(last.bytes_by_gpu.values())
        < lone_plan.memory.kv_bytes
    )
    assert (
        f"room for {first.tokens / 8192:.1f} of {lone_plan.memory.kv_tokens / 8192:.1f} requests of"
        " 8,192 tokens stays" in first.words
    )
    count = next(iter(first.bytes_by_gpu.values()))
    half = partial_offer(first, count // 2)
    assert set(half.bytes_by_gpu.values()) == {count // 2}
    assert half.keeps - first.keeps == count - count // 2
    assert half.tokens == pytest.approx((first.tokens + first.cache_tokens_before) / 2, rel=0.02)
    assert partial_offer(first, count + 1) is first
    offers = surplus_offers(lone_plan, wish(max_context=8192, concurrency=3))
    assert [surplus_offer.tokens >= 3 * 8192 for surplus_offer in offers] == [True]


def test_nothing_is_given_of_a_size_that_the_user_set_nor_of_little() -> None:
    assert (
        surplus_offers(plan("3090", max_context=8192), wish(args={"gpu_memory_utilization": 0.9}))
        == ()
    )
    assert surplus_offers(plan("3090"), wish(goal="context")) == ()
    assert (
        surplus_offers(
            plan("h200", max_context=8192), wish(max_context=8192, policy={"pinned": True})
        )
        == ()
    )


def test_the_cap_is_kept_until_the_others_are_gone_or_a_start_with_it_failed() -> None:
    free = plan("3090", max_context=8192)
    capped_plan = free.evolve(cap=Cap(bytes=8 * GIB, models=("other",)))
    caps_by_model: dict[str, tuple[Cap, ...]] = {"other": ()}
    assert current_cap([attempt(1, free)], caps_by_model) is None
    assert (
        current_cap(
            [attempt(1, free), attempt(2, capped_plan, state="stopped")], {**caps_by_model, "x": ()}
        )
        == capped_plan.cap
    )
    assert current_cap([attempt(1, free), attempt(2, capped_plan)], {"x": ()}) is None
    bad = Failure(kind="crash", phase="load", message="", proven_subject="plan")
    assert (
        current_cap(
            [attempt(1, free), attempt(2, capped_plan, state="failed", ready_at=None, failure=bad)],
            caps_by_model,
        )
        is None
    )
    failure = Failure(kind="killed", phase="load", message="", proven_subject="nothing")
    assert (
        current_cap(
            [attempt(2, capped_plan, state="failed", ready_at=None, failure=failure)], caps_by_model
        )
        == capped_plan.cap
    )


def test_memory_taken_when_others_came_beside_a_model_is_kept_for_it() -> None:
    free = plan("3090", max_context=8192)
    late, far = Cap(bytes=GIB, models=("m",)), Cap(bytes=GIB, models=("x",))
    caps_by_model: dict[str, tuple[Cap, ...]] = {"late": (late, far), "far": (far,), "x": ()}
    assert current_cap([attempt(1, free)], caps_by_model) == Cap(
        bytes=free.memory.promised_bytes, models=("late",)
    ), "whichever of its copies came beside it"
    assert current_cap([attempt(1, free, state="stopped", ready_at=None)], caps_by_model) is None
    bad = Failure(kind="crash", phase="load", message="", proven_subject="plan")
    assert (
        current_cap(
            [attempt(1, free), attempt(2, free, state="failed", ready_at=None, failure=bad)],
            caps_by_model,
        )
        is None
    )


class Machine:
    """A machine as the loop fills it: each copy of a model has a wish, its attempts, and the plan
    that serves. A copy is `model` or `model#number`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.hardware: Hardware = PROFILES.hardware(name)
        self.wishes: dict[str, Wish] = {}
        self.serving: dict[str, Plan] = {}
        self.lost: dict[str, Plan] = {}
        self.attempts: dict[str, list[Attempt]] = {}
        self.fixed: set[str] = set()
        self.plan_count = 0

    def promised_bytes(self, absent_model: str = "", *, come: bool = True) -> dict[str, int]:
        """come: whether to count the memory of those that are still to come back."""
        total: dict[str, int] = {}
        for name, held_plan in (*self.serving.items(), *(self.lost.items() if come else ())):
            for uuid in held_plan.gpus if name != absent_model else ():
                total[uuid] = total.get(uuid, 0) + held_plan.memory.promised_bytes
        return total

    def make_decision(
        self,
        name: str,
        sharing: Sharing,
        free: dict[str, int] | None = None,
        wish: Wish | None = None,
        **changes: Any,
    ) -> Decision:
        """As in the process that plans: memory that others give is free, and nobody holds it any
        more."""
        promised_bytes, hardware = self.promised_bytes(name), self.free(name)
        claims_after = {
            uuid: count - (free or {}).get(uuid, 0) for uuid, count in promised_bytes.items()
        }
        request = (wish or self.wishes[name]).evolve(**changes)
        hardware = drop_engines(hardware, free or {})
        return decide(
            spec_of(name),
            hardware,
            ENGINES,
            request,
            PROFILES.facts,
            promised_bytes=claims_after,
            rules=RULES,
            gpus=PROFILES.gpus,
            sharing=sharing,
        )

    def free(self, absent_model: str = "") -> Hardware:
        promised_bytes = self.promised_bytes(absent_model, come=False)
        gpus = (
            # The driver's memory is not read beside engines.
            (
                gpu.evolve(
                    free_bytes=max(0, (gpu.free_bytes or 0) - promised_bytes[gpu.uuid]),
                    processes=None,
                )
                if gpu.uuid in promised_bytes
                else gpu
            )
            for gpu in self.hardware.gpus
        )
        return self.hardware.evolve(gpus=tuple(gpus))

    def other_copies(self, name: str) -> dict[str, list[str]]:
        """The copies of the other models."""
        names_by_gpu: dict[str, list[str]] = {}
        for other_wish in self.wishes:
            if model_of(other_wish) != model_of(name):
                names_by_gpu.setdefault(model_of(other_wish), []).append(other_wish)
        return names_by_gpu

    def sharing(self, name: str) -> Sharing:
        other_copies = self.other_copies(name)
        has = self.serving | self.lost
        offers = [
            offer
            for model, copies in other_copies.items()
            for other_copy in copies
            for offer in (
                surplus_offers(
                    self.serving[other_copy],
                    self.wishes[other_copy].evolve(name=model),
                    number_of(other_copy),
                )
                if other_copy in self.serving
                else ()
            )
        ]
        holders = []
        for model, copies in other_copies.items():
            bytes_by_gpu: dict[str, int] = {}
            for engine_plan in (has[copy] for copy in copies if copy in has):
                bytes_by_gpu |= {
                    uuid: bytes_by_gpu.get(uuid, 0) + engine_plan.memory.promised_bytes
                    for uuid in engine_plan.gpus
                }
            holders.append(Promise(model=model, bytes_by_gpu=bytes_by_gpu))
        caps = {model: self.last_caps(copies) for model, copies in other_copies.items()}
        past = self.attempts.get(name, [])
        cap, interruption = current_cap(past, caps), interrupted_plan(past)
        return Sharing(
            cap,
            tuple(offers),
            tuple(holders),
            past[-1].plan.gpus if past else (),
            "",
            plan_to_restore(interruption, cap) if interruption else None,
        )

    def last_caps(self, copies: list[str]) -> list[Cap]:
        caps_of_copies = (last_cap(self.attempts.get(copy, ())) for copy in copies)
        return [cap for cap in caps_of_copies if cap is not None]

    def add_copy(self, first: str, number: int) -> bool:
        """One more copy of a serving model, which nobody gives anything for."""
        name = copy_of(first, number)
        self.wishes[name] = self.wishes[first].evolve(
            name=name, replicas=1, gpus=len(self.serving[first].gpus)
        )
        if not self.plan_copy(name):
            del self.wishes[name]
            return False
        self.fixed |= {name} if first in self.fixed else set()
        return True

    def plan_copy(self, name: str) -> bool:
        decision = self.make_decision(name, self.sharing(name)._replace(offers=()))
        if decision.plans:
            self.start(name, decision.plans[0])
        return bool(decision.plans)

    def leave(self, name: str) -> None:
        del self.serving[name]

    def add(self, name: str, *, pinned: bool = False) -> bool:
        policy = Policy(pinned=pinned)
        self.wishes[name] = Wish(
            name=name, source="m", gpus="few" if self.serving else None, policy=policy
        )
        self.fixed |= {name} if pinned else set()
        sharing = self.sharing(name)
        context = wanted_context(spec_of(name), self.wishes[name], {})
        decision = decide_with_offers(
            sharing.offers,
            partial(self.make_decision, name, sharing),
            context,
            free_bytes_by_gpu(self.free(), self.promised_bytes()),
        )
        for take in decision.taken_offers:
            giver = copy_of(take.model, take.replica)
            old = self.serving[giver]
            cap = cap_after_giving(take, old, (name,))
            less = self.make_decision(
                giver,
                Sharing(cap, (), (), old.gpus),
                gpus=old.gpus,
                tensor_parallel=old.tensor_parallel.value,
            )
            assert less.plans, "what was offered can be given"
            assert less.plans[0].max_model_len.value >= min(old.max_model_len.value, 32768)
            assert less.plans[0].memory.kv_tokens >= take.tokens, "what stays is what the words say"
            assert less.plans[0].memory.promised_bytes <= take.keeps
            self.start(
                giver,
                less.plans[0].evolve(cap=cap.evolve(bytes=less.plans[0].memory.promised_bytes)),
            )
        new_decision = self.make_decision(name, sharing) if decision.taken_offers else decision
        assert bool(new_decision.plans) == bool(decision.plans), (
            "what was taken is there once it was given"
        )
        if new_decision.plans:
            self.start(name, new_decision.plans[0])
        return bool(new_decision.plans)

    def start(self, name: str, planned: Plan) -> None:
        self.serving[name] = planned
        self.plan_count += 1
        self.attempts.setdefault(name, []).append(
            attempt(self.plan_count, planned, model=model_of(name))
        )

    def load(self, name: str) -> tuple[Offer, ...] | None:
        """A model that is asked: copies of others leave for it where there is no room. Returns the
        copies that left; None where not even that makes room."""
        self.wishes[name] = Wish(name=name, source="m", gpus="few")
        offers = leave_offers(
            [
                EvictionCandidate(
                    model_of(owner),
                    number_of(owner),
                    1,
                    dict.fromkeys(plan.gpus, plan.memory.promised_bytes),
                )
                for owner, plan in reversed(self.serving.items())
                if owner not in self.fixed
            ],
            [],
        )
        sharing = self.sharing(name)._replace(offers=tuple(offers))
        context = wanted_context(spec_of(name), self.wishes[name], {})
        decision = decide_with_offers(offers, partial(self.make_decision, name, sharing), context)
        for take in decision.taken_offers:
            self.leave(copy_of(take.model, take.replica))
        if not decision.plans:
            return None
        new_decision = self.make_decision(name, sharing._replace(offers=()))
        assert new_decision.plans, "there is room once those have left that were asked to"
        self.start(name, new_decision.plans[0])
        return decision.taken_offers

    def remove(self, model: str) -> None:
        for name in [name for name in self.wishes if model_of(name) == model]:
            self.serving.pop(name, None)
            self.attempts.pop(name, None)
            del self.wishes[name]

    def restart_all(self, order: list[str]) -> None:
        """All start anew, one after the other. Their memory is left to those that are still to
        come."""
        self.lost, self.serving = self.serving, {}
        for name in self.lost:
            self.attempts[name][-1] = self.attempts[name][-1].evolve(state="failed", failure=GONE)
        for name in order:
            del self.lost[name]
            self.restart(name)

    def restart(self, name: str) -> None:
        sharing = self.sharing(name)._replace(offers=())
        before = sharing.plan_to_restore
        restored_decision = (
            restore_decision(
                self.make_decision(name, sharing, wish=wish_for_restore(self.wishes[name], before)),
                before,
            )
            if before
            else None
        )
        restored_decision = restored_decision or self.make_decision(
            name, sharing._replace(plan_to_restore=None)
        )
        assert restored_decision.plans, restored_decision.rejected
        self.start(name, restored_decision.plans[0])

    def full(self) -> bool:
        total = {gpu.uuid: gpu.total_bytes or 0 for gpu in self.hardware.gpus}
        return any(count > total[uuid] for uuid, count in self.promised_bytes().items())


GONE = Failure(kind="exited", phase="serving", message="", proven_subject="nothing")


def copy_of(model: str, number: int) -> str:
    return f"{model}#{number}" if number else model


def model_of(name: str) -> str:
    return name.partition("#")[0]


def number_of(name: str) -> int:
    return int(name.partition("#")[2] or 0)


def spec_of(name: str) -> ModelSpec:
    return model_from_config(MODELS[name.partition("/")[0]])


COPIES = st.lists(
    st.tuples(st.sampled_from(sorted(MODELS)), st.booleans(), st.integers(1, 3)),
    min_size=2,
    max_size=6,
)
PROPERTY = settings(
    max_examples=quicker(25), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def fill_machine(name: str, kinds: list[tuple[str, bool, int]]) -> Machine:
    """A machine with those of these models that find room, in this order. Claims never exceed a
    GPU, and nobody pinned is touched."""
    machine = Machine(name)
    for number, (kind, is_pinned, copies) in enumerate(kinds):
        before = {owner: machine.serving[owner] for owner in machine.fixed & machine.serving.keys()}
        if machine.add(f"{kind}/{number}", pinned=is_pinned):
            for copy in range(1, copies):
                machine.add_copy(f"{kind}/{number}", copy)
        else:
            machine.remove(f"{kind}/{number}")
        assert not machine.full()
        assert {owner: machine.serving[owner] for owner in before} == before
    return machine


@PROPERTY
@given(
    COPIES, st.sampled_from(["3090", "2x3090", "h200", "4xh100"]), st.randoms(use_true_random=False)
)
def test_every_copy_has_its_former_gpus_and_plan_after_a_power_cut(
    kinds: list[tuple[str, bool, int]], name: str, chance: Any
) -> None:
    machine = fill_machine(name, kinds)
    had = dict(machine.serving)
    for _ in range(2):
        names = list(machine.serving)
        chance.shuffle(names)
        machine.restart_all(names)
        for owner, plan_before in had.items():
            now = machine.serving[owner]
            assert (now.gpus, now.fingerprint, now.memory) == (
                plan_before.gpus,
                plan_before.fingerprint,
                plan_before.memory,
            )
            assert plan_before.cap in (None, now.cap)
        assert not machine.full()


@PROPERTY
@given(
    COPIES, st.sampled_from(["3090", "2x3090", "h200", "4xh100"]), st.randoms(use_true_random=False)
)
def test_the_last_model_has_everything_back_at_its_next_start_when_all_others_go(
    kinds: list[tuple[str, bool, int]], name: str, chance: Any
) -> None:
    machine = fill_machine(name, kinds)
    models = [*dict.fromkeys(map(model_of, machine.serving))]
    chance.shuffle(models)
    for model in models[:-1]:
        machine.remove(model)
    names = list(machine.serving)
    machine.restart_all(names)
    new_machine = Machine(machine.name)
    new_machine.wishes[models[-1]] = machine.wishes[models[-1]]
    first = machine.serving[models[-1]]
    assert first.memory == new_machine.make_decision(models[-1], Sharing()).plans[0].memory
    assert all(plan.cap is None for plan in machine.serving.values())
    assert not machine.full()


@PROPERTY
@example(
    [("llama-1b", False, 1), ("small", False, 1), ("small", True, 2), ("small", False, 2)],
    "llama-1b",
    "4xh100",
)
@given(COPIES, st.sampled_from(sorted(MODELS)), st.sampled_from(["2x3090", "4xh100"]))
def test_copies_leave_for_a_model_that_is_asked_and_come_back_when_it_goes(
    kinds: list[tuple[str, bool, int]], model_name: str, name: str
) -> None:
    machine = fill_machine(name, kinds)
    had = dict(machine.serving)
    evicted_names = machine.load(f"{model_name}/asked")
    assert not machine.full()
    copies = {copy_of(take.model, take.replica) for take in evicted_names or ()}
    assert not copies & machine.fixed, "a pinned model never leaves"
    assert {
        name_of_copy: machine.serving[name_of_copy] for name_of_copy in had.keys() - copies
    } == {name_of_copy: had[name_of_copy] for name_of_copy in had.keys() - copies}
    if evicted_names is None:
        assert not copies
        return
    gpus = set(machine.serving[f"{model_name}/asked"].gpus)
    assert all(set(had[other_copy].gpus) & gpus for other_copy in copies), (
        "nobody leaves another GPU"
    )
    machine.remove(f"{model_name}/asked")
    for name_of_copy in sorted(copies):
        plan_copy = machine.plan_copy(name_of_copy)
        # The first copy to come back may take the place of another, which then gets room from a
        # model with more than it needs.
        if len(copies) == 1:
            assert plan_copy, "there is room again"
            now, before = machine.serving[name_of_copy], had[name_of_copy]
            assert (
                now.memory.promised_bytes
                >= before.memory.promised_bytes - before.memory.gpu_bytes // 50
            )
    assert not machine.full()


def test_five_small_models_share_a_card_without_a_flag() -> None:
    machine = Machine("3090")
    assert all(machine.add(f"small/{number}") for number in range(5))
    assert not machine.full()
    assert machine.promised_bytes()[machine.hardware.gpus[0].uuid] <= 24 * GIB


def test_an_encoder_leaves_the_card_to_others_though_it_came_first() -> None:
    MODELS["encoder"] = config("bge-m3")
    machine = Machine("3090")
    assert machine.add("encoder/0")
    assert machine.promised_bytes()[machine.hardware.gpus[0].uuid] < 6 * GIB
    assert machine.add("llama-1b/1")
    assert (
        machine.serving["llama-1b/1"].memory.kv_bytes > 8 * GIB
        or machine.serving["llama-1b/1"].cap is not None
    )


@pytest.mark.parametrize("name", ["3090", "h200"])
@pytest.mark.parametrize("second", ["llama-1b", "llama-8b", "qwen-1.5b"])
def test_giver_and_receiver_get_their_kv_cache_bytes_and_start_side_by_side(
    name: str, second: str
) -> None:
    machine = Machine(name)
    assert machine.add("llama-1b/0")
    if not machine.add(f"{second}/1"):
        assert (name, second) == ("3090", "llama-8b")
        return
    cache_sizes = {
        name_of_copy: cache_bytes(plan) for name_of_copy, plan in machine.serving.items()
    }
    assert all(cache_sizes.values()), cache_sizes
