"""Laws of every plan for any input: models, machines and wishes made up to break the planner, and
real ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.diagnosis.facts.known_facts import KnownFacts
from gateway.domain import Decision, Engine, Fact, Hardware, ModelSpec, Plan, Wish
from gateway.engines.common.expert_warmups import VARIABLE
from gateway.engines.common.planning_input import PlanningInput
from gateway.errors import BadModel, FitserveError
from gateway.models.read_drafter import read_drafter
from gateway.planner.decide import rank_plans
from gateway.planner.sizes import COMFORTABLE_CONTEXT, MIN_USEFUL
from gateway.profiles.profile_tables import shipped_profiles
from gateway.profiles.profiles import Profiles
from tests.conformance.layer_cases import QUANTS
from tests.conformance.speculative_questions import DRAFTERS
from tests.support.examples import quicker
from tests.support.paths import MODELS
from tests.support.planning import decide
from tests.support.published import CONFIGS, JSON, config, model_from_config
from tests.support.versions import VLLM_REF

PROFILES = Profiles()
ENGINES = {ref: PROFILES.engine(ref) for ref in PROFILES.engine_files}
RULES = PROFILES.rules(ENGINES.values())
NAMES = sorted(path.stem for path in MODELS.glob("*.json"))
MACHINES = sorted(path.stem for path in (shipped_profiles() / "hardware").glob("*.json"))
GIB = 1024**3
SIZES = st.integers(0, 70) | st.sampled_from([96, 100, 127, 1000, 2880, 10**6])


def several(count: int) -> settings:
    """Examples differ too much for shrinking to be worth its time; a failing one is printed
    whole."""
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    return settings(
        max_examples=quicker(count),
        deadline=None,
        suppress_health_check=checks,
        phases=[Phase.explicit, Phase.generate],
    )


# --- made up ---


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where everything is in a JSON document; of lists only the beginning."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:3])
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield (*at, key)
        yield from paths(inner, (*at, key))


@st.composite
def bent(draw: st.DrawFn, sources: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One of these configs, and often a quantization block, with a few fields gone or wrong at any
    depth."""
    document = dict(sources[draw(st.sampled_from(sorted(sources)))])
    if draw(st.booleans()):
        document["quantization_config"] = QUANTS[draw(st.sampled_from(sorted(QUANTS)))]
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(0, 3))):
        *path, last = draw(st.sampled_from(list(paths(document)) or [("x",)]))
        holder = document
        for key in path:
            holder = holder[key]
        if draw(st.integers(0, 3)) == 0:
            del holder[last]
        else:
            holder[last] = draw(SIZES | JSON)
    return document


PUBLISHED = {name: config(name) for name in NAMES}
_CAPABILITIES = st.sampled_from(
    [None, "5.2", "7.0", "7.5", "8.6", "8.9", "9.0", "10.0", "12.1", "99.99"]
)
_TOTALS = st.sampled_from([None, 1, GIB, 24 * GIB, 2**50])
_FREE = st.sampled_from([None, 0, 1, GIB, 23 * GIB, 2**50])


@st.composite
def machines(draw: st.DrawFn) -> Hardware:
    """A snapshot with fewer GPUs, or with readings that are missing or odd."""
    hardware = PROFILES.hardware(draw(st.sampled_from(MACHINES)))
    gpus = hardware.gpus[: draw(st.integers(1, 8))]
    if draw(st.booleans()):
        gpus = tuple(
            gpu.evolve(
                capability=draw(_CAPABILITIES), total_bytes=draw(_TOTALS), free_bytes=draw(_FREE)
            )
            for gpu in gpus
        )
    driver = draw(st.sampled_from([hardware.driver] * 4 + [None, "", "1", "abc.def", "9" * 64]))
    odd = hardware.evolve(
        gpus=gpus, driver=driver, links=hardware.links[: draw(st.integers(0, 60))]
    )
    return Hardware.model_validate(odd.model_dump())


_VALUES = (
    st.integers(0, 64)
    | st.integers()
    | st.text(max_size=8)
    | st.booleans()
    | st.sampled_from(["fp8", "FLASH_ATTN", "marlin", "auto", "0.5"])
)


def wishes(engine: Engine) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {},
        optional={
            "min_context": st.integers(1, 10**7),
            "max_context": st.integers(1, 10**7),
            "tensor_parallel": st.integers(1, 9),
            "replicas": st.integers(1, 9),
            "dtype": st.sampled_from(["auto", "bfloat16", "float16", "float32"]),
            "speculative": st.sampled_from(["auto", "off", "mtp", "ngram"]),
            "args": st.dictionaries(st.sampled_from(sorted(engine.flags)), _VALUES, max_size=3),
        },
    )


def wish(**fields: Any) -> Wish:
    return Wish.model_validate({"name": "m", "source": "m", **fields})


def sound(plan: Plan, request: Wish) -> None:
    """The laws of every plan."""
    engine = ENGINES[str(plan.engine)]
    flag_names = [item.removeprefix("--").partition("=")[0] for item in plan.argv]
    flags = [name if name in engine.flags else name.removeprefix("no-") for name in flag_names]
    assert set(flags) <= set(engine.flags), "a flag that this version does not have"
    assert len(flags) == len(set(flags)), "a flag twice"
    skips = [VARIABLE] if engine.expert_warmups else []
    assert set(plan.env) <= {*engine.user_env, *engine.eager_env, *skips}, (
        "a variable that this version does not have"
    )
    assert plan.max_model_len.value >= (request.min_context or 1)
    if (
        "max-model-len" not in " ".join(str(key).replace("_", "-") for key in request.args)
        and "context-length" not in request.args
    ):
        assert plan.max_model_len.value <= (request.max_context or plan.max_model_len.value)
    assert len(set(plan.gpus)) == len(plan.gpus)
    stages = plan.tensor_parallel.value * plan.pipeline_parallel.value
    assert not plan.gpus or len(plan.gpus) == stages * plan.data_parallel.value
    assert all(row.status not in ("none", "crash") for row in plan.kernels)
    assert all(row.status != "none" for row in plan.attention)


@several(80)
@given(bent(PUBLISHED) | CONFIGS, machines(), st.sampled_from(sorted(ENGINES)), st.data())
def test_no_input_raises_anything_but_our_own_errors(
    fields: dict[str, Any], hardware: Hardware, ref: str, data: st.DataObject
) -> None:
    try:
        request = wish(**data.draw(wishes(ENGINES[ref])))
    except ValidationError:
        return  # a wish that contradicts itself is answered before it is planned for
    try:
        spec = model_from_config(fields)
        decision = decide(spec, hardware, [ENGINES[ref]], request, PROFILES.facts, rules=RULES)
    except FitserveError:
        return
    decision.model_dump_json()
    assert decision.plans or decision.rejected
    for plan in decision.plans:
        sound(plan, request)


@several(25)
@given(
    bent(DRAFTERS),
    st.sampled_from(["llama-3.1-8b", "qwen3-8b", "gemma-4-31b"]),
    st.sampled_from(sorted(RULES)),
)
def test_no_drafter_raises_anything_but_our_own_errors_or_costs_the_model(
    fields: dict[str, Any], name: str, ref: str
) -> None:
    spec = model_from_config(PUBLISHED[name])
    hardware = PROFILES.hardware("8xh100")
    try:
        drafter = read_drafter("org/drafter", None, fields)
    except BadModel:
        return
    assume(spec.architecture in ENGINES[ref].architectures)
    request = wish(drafter="org/drafter")
    decision = decide(
        spec, hardware, [ENGINES[ref]], request, PROFILES.facts, rules=RULES, drafter=drafter
    )
    # SGLang's media loader is unsafe, so models that see have no plan there with or without a
    # drafter.
    lone_decision = decide(spec, hardware, [ENGINES[ref]], wish(), PROFILES.facts, rules=RULES)
    assert bool(decision.plans) == bool(lone_decision.plans)
    for plan in decision.plans:
        sound(plan, request)


# --- real: changes by a fact, or by more memory ---


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    fields = dict(PUBLISHED[draw(st.sampled_from(NAMES))])
    if draw(st.booleans()):
        fields["quantization_config"] = QUANTS[draw(st.sampled_from(sorted(QUANTS)))]
    return model_from_config(fields)


def make_decision(
    spec: ModelSpec, hardware: Hardware, ref: str, facts: tuple[Fact, ...] = (), **fields: Any
) -> Decision:
    request = wish(**{"text_only": True, **fields})
    return decide(spec, hardware, [ENGINES[ref]], request, PROFILES.facts + facts, rules=RULES)


REAL = st.sampled_from([name for name in MACHINES if name != "cpu"]).map(PROFILES.hardware)
REFS = st.sampled_from(sorted(RULES))


@several(20)
@given(specs(), REAL, REFS)
def test_the_same_input_gives_the_same_bytes(spec: ModelSpec, hardware: Hardware, ref: str) -> None:
    second_model = model_from_config(copy.deepcopy(spec.config))
    first_decision = make_decision(spec, hardware, ref)
    second = make_decision(second_model, hardware, ref)
    assert first_decision.model_dump_json() == second.model_dump_json()


@several(20)
@given(specs(), REAL, REFS, st.data())
def test_a_plan_that_failed_is_never_proposed_again(
    spec: ModelSpec, hardware: Hardware, ref: str, data: st.DataObject
) -> None:
    decision = make_decision(spec, hardware, ref)
    assume(decision.plans)
    failed_plan = data.draw(st.sampled_from(decision.plans))
    fact = Fact(
        kind="plan_failed",
        scope={"fingerprint": failed_plan.fingerprint},
        grade="failed",
        source="it broke",
    )
    later_decision = make_decision(spec, hardware, ref, (fact,))
    assert failed_plan.fingerprint not in {plan.fingerprint for plan in later_decision.plans}
    check_others(spec, decision, later_decision, {failed_plan.fingerprint})


@several(20)
@given(specs(), REAL, REFS, st.data())
def test_a_context_that_the_engine_named_is_kept(
    spec: ModelSpec, hardware: Hardware, ref: str, data: st.DataObject
) -> None:
    decision = make_decision(spec, hardware, ref)
    assume(decision.plans)
    plan_of_error = data.draw(st.sampled_from(decision.plans))
    most = data.draw(st.integers(0, plan_of_error.max_model_len.value + 100))
    fact = Fact(
        kind="max_context",
        scope=plan_of_error.scope,
        value=most,
        grade="failed",
        source="it said so",
    )
    decision_after = make_decision(spec, hardware, ref, (fact,))

    def exceeds(plan: Plan) -> bool:
        """Whether the fact is about the plan, perhaps as a part of its layout, and refuses it."""
        is_about = all(plan.scope.get(key) == value for key, value in fact.scope.items())
        return is_about and plan.max_model_len.value > most

    assert not any(exceeds(plan) for plan in decision_after.plans)
    fingerprints = {plan.fingerprint for plan in decision.plans if exceeds(plan)}
    check_others(spec, decision, decision_after, fingerprints)


@pytest.mark.parametrize("quant", ["fp8-block", "w4a16"])
def test_layouts_without_a_known_speed_keep_their_order_without_a_third(quant: str) -> None:
    fields = {**PUBLISHED["qwen1.5-moe-a2.7b"], "quantization_config": QUANTS[quant]}
    spec = model_from_config(fields)
    hardware = PROFILES.hardware("2x3090")
    decision = make_decision(spec, hardware, "vllm==0.26.0")
    first, *rest = decision.plans
    assert len(rest) == 2
    assert all(plan.speed is None for plan in rest)
    fact = Fact(kind="max_context", scope=first.scope, value=0, grade="failed", source="it said so")
    decision_after = make_decision(spec, hardware, "vllm==0.26.0", (fact,))
    assert [plan.fingerprint for plan in decision_after.plans] == [
        plan.fingerprint for plan in rest
    ]
    assert [plan.pipeline_parallel.value for plan in rest] == [1, 2]


def test_a_measured_layer_split_says_nothing_of_another_split() -> None:
    spec = model_from_config(PUBLISHED["qwen3-vl-30b-a3b"])
    hardware, ref = PROFILES.hardware("3090+4090"), VLLM_REF
    decision = make_decision(spec, hardware, ref)
    even_plan, uneven = decision.plans[:2]
    assert even_plan.scope["layers"] != uneven.scope["layers"]
    fact = Fact(
        kind="max_context", scope=even_plan.scope, value=4096, grade="failed", source="it said so"
    )
    decision_after = make_decision(spec, hardware, ref, (fact,))
    assert uneven.fingerprint in {plan.fingerprint for plan in decision_after.plans}
    assert even_plan.fingerprint not in {plan.fingerprint for plan in decision_after.plans}


@several(25)
@given(specs(), REAL, REFS, st.data())
def test_a_kernel_that_fails_is_in_no_plan(
    spec: ModelSpec, hardware: Hardware, ref: str, data: st.DataObject
) -> None:
    decision = make_decision(spec, hardware, ref)
    rows = [
        row
        for plan in decision.plans
        for row in plan.kernels
        if row.kernel and row.scheme != "unquantized"
    ]
    assume(rows)
    row = data.draw(st.sampled_from(rows[:20]))
    about = {
        "engine": ref,
        "scheme": row.scheme,
        "k": str(row.k),
        "n": str(row.n),
        "capability": str(hardware.gpus[0].capability),
    }
    keys = data.draw(st.sets(st.sampled_from(sorted(about))))
    scope = {"kernel": str(row.kernel), **{key: about[key] for key in keys}}
    fact = Fact(kind="kernel_fails", scope=scope, grade="failed", source="it broke")

    def is_hit(plan: Plan) -> bool:
        tells = (
            {
                **about,
                "kernel": kernel.kernel,
                "scheme": kernel.scheme,
                "k": str(kernel.k),
                "n": str(kernel.n),
            }
            for kernel in plan.kernels
        )
        return any(all(tell[key] == value for key, value in scope.items()) for tell in tells)

    decision_after = make_decision(spec, hardware, ref, (fact,))
    assert not any(is_hit(plan) for plan in decision_after.plans)
    check_others(
        spec,
        decision,
        decision_after,
        {plan.fingerprint for plan in decision.plans if is_hit(plan)},
    )


def test_a_kernel_that_fails_hides_no_layer_without_one() -> None:
    """Qwen3-VL in FP8 blocks on eight B200: some ranks have no kernel for a layer, whose cure is
    another, and one that fails."""
    fields = PUBLISHED["qwen3-vl-8b"] | {"quantization_config": QUANTS["fp8-ct-block"]}
    spec = model_from_config(fields)
    hardware = PROFILES.hardware("8xb200")
    scope = {"kernel": "w8a8_block_fp8_matmul_deepgemm", "scheme": "fp8_block"}
    fact = Fact(kind="kernel_fails", scope=scope, grade="failed", source="it broke")
    before, after = (
        make_decision(spec, hardware, "sglang==0.5.10.post1", facts) for facts in ((), (fact,))
    )
    fingerprints = {
        plan.fingerprint
        for plan in before.plans
        if any(row.kernel == scope["kernel"] for row in plan.kernels)
    }
    assert 0 < len(fingerprints) < len(before.plans)
    check_others(spec, before, after, fingerprints)


def test_the_substitute_of_a_kernel_hides_no_other_layout() -> None:
    """Seed-OSS in INT8 on two 3090: there are eighteen backends to force, of which few compute
    these layers."""
    fields = PUBLISHED["seed-oss-36b"] | {"quantization_config": QUANTS["int8"]}
    spec = model_from_config(fields)
    hardware = PROFILES.hardware("2x3090")
    for k in ("13824", "27648"):
        scope = {"kernel": "CutlassInt8ScaledMMLinearKernel", "k": k}
        fact = Fact(kind="kernel_fails", scope=scope, grade="failed", source="it broke")
        before, after = (
            make_decision(spec, hardware, "vllm==0.26.0", facts) for facts in ((), (fact,))
        )
        fingerprints = {
            plan.fingerprint
            for plan in before.plans
            if any(str(row.k) == k for row in plan.kernels)
        }
        stays = {plan.fingerprint for plan in before.plans} - fingerprints
        assert fingerprints
        assert stays
        assert stays <= {plan.fingerprint for plan in after.plans}


def check_others(spec: ModelSpec, before: Decision, after: Decision, affected: set[str]) -> None:
    """The fact took away its subject, and the plan in its place does not rank before a better
    one."""
    old = [plan.fingerprint for plan in before.plans]
    stay = [name for name in old if name not in affected]
    now = [plan.fingerprint for plan in after.plans]
    assert [name for name in now if name in old] == [name for name in stay if name in now], (
        "what stays keeps its order"
    )
    # A search ends somewhere, and stand-ins take its time: of the variants that change something,
    # the later may be gone.
    plain = {plan.fingerprint for plan in before.plans if plan.cost == 0} - affected
    lost_plans = {*stay[:1], *plain} - set(now)
    for plan in before.plans:
        # A stand-in with as long a context and no more changes makes a plan needless.
        assert plan.fingerprint not in lost_plans or any(
            each_plan.fingerprint not in old
            and each_plan.cost <= plan.cost
            and each_plan.max_model_len.value >= plan.max_model_len.value
            for each_plan in after.plans
        ), "a plan that the fact says nothing about is gone"
    best = before.plans[0]
    if best.fingerprint not in affected:
        first_plan = after.plans[0]
        # A conservative stand-in may have room for a context that nothing had before, or reach a
        # step of the ranking (of any use, as wanted) that the plan it stands in for had missed:
        # from there on the ranking prefers few GPUs.
        least_context = min(COMFORTABLE_CONTEXT, spec.max_position)
        context = first_plan.max_model_len.value
        missing_contexts = [
            p.max_model_len.value for p in before.plans if p.fingerprint in affected
        ]
        is_reached = any(
            least < step <= context
            for least in missing_contexts
            for step in (min(MIN_USEFUL, least_context), least_context)
        )
        longer = context > best.max_model_len.value or (
            is_reached and len(first_plan.gpus) < len(best.gpus)
        )
        assert first_plan.fingerprint == best.fingerprint or longer, (
            "a stand-in ranks before what was better"
        )


@several(20)
@given(specs(), REAL, REFS, st.integers(1, 90), st.integers(0, 10), st.sampled_from([1, 2, 4]))
def test_more_free_memory_never_means_less_context(
    spec: ModelSpec, hardware: Hardware, ref: str, percent: int, more: int, tp: int
) -> None:
    def contexts(share: int) -> dict[int, int]:
        gpus = tuple(
            gpu.evolve(free_bytes=(gpu.total_bytes or 0) * share // 100) for gpu in hardware.gpus
        )
        plans = make_decision(spec, hardware.evolve(gpus=gpus), ref).plans
        # The plain variants: a change that spares memory is only looked for where memory is
        # short.
        return {
            plan.tensor_parallel.value: plan.max_model_len.value for plan in plans if plan.cost == 0
        }

    less, larger_context = contexts(percent), contexts(percent + more)
    assert set(less) <= set(larger_context)
    assert all(larger_context[size] >= length for size, length in less.items())


@several(20)
@given(specs(), REAL, REFS, st.integers(1, 10**6))
def test_the_least_context_is_never_undercut(
    spec: ModelSpec, hardware: Hardware, ref: str, min_context: int
) -> None:
    decision = make_decision(spec, hardware, ref, min_context=min_context)
    assert all(plan.max_model_len.value >= min_context for plan in decision.plans)
    assert decision.plans or decision.rejected


@several(25)
@given(
    st.sampled_from(["llama-3.1-8b", "qwen3.6-35b-a3b", "gpt-oss-20b"]),
    st.sampled_from(["2x3090", "8xh100", "5090+3090"]),
    st.data(),
)
def test_the_order_of_two_plans_does_not_depend_on_a_third(
    name: str, machine: str, data: st.DataObject
) -> None:
    spec = model_from_config(config(name))
    hardware = PROFILES.hardware(machine)
    wish = Wish(
        name="m",
        source="m",
        goal=data.draw(st.sampled_from(["balanced", "latency", "throughput", "context"])),
    )
    engines = PROFILES.engines((), device="cuda")
    plans = decide(
        spec,
        hardware,
        engines,
        wish,
        rules=RULES,
        gpus=PROFILES.gpus,
        speed_knowledge=PROFILES.speed_knowledge,
    ).plans
    kept_plans = [plan for plan in plans if data.draw(st.booleans())]
    order = {engine.ref: (bool(engine.advisories), index) for index, engine in enumerate(engines)}
    planning_input = PlanningInput(
        spec, hardware, wish, KnownFacts(()), {}, PROFILES.gpus, {}, PROFILES.speed_knowledge
    )
    permutation = data.draw(st.permutations(kept_plans))
    assert [plan.fingerprint for plan in rank_plans(planning_input, permutation, order)] == [
        plan.fingerprint for plan in kept_plans
    ]
