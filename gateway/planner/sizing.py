"""The sizes of a candidate: batch, memory budget, KV cache, context. Pure.

Candidate -> Batch -> Footprint -> Budget -> Memory -> the largest context that fits: Sizes
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from gateway.diagnosis.facts.scope import batch_scope
from gateway.domain import Cap, Choice, Memory, Plan, bool_choice, int_choice
from gateway.domain.choice import GRAPHS_ARE_FASTER
from gateway.domain.units import MIB, gib
from gateway.engines.common.candidate import Budget, Candidate, Footprint
from gateway.engines.common.refusal import RefusalError, RepairHint, VariantEvidence
from gateway.engines.common.speed.expectation import ANSWER_TOKENS, PROMPT_TOKENS
from gateway.engines.common.speed.objective import concurrency
from gateway.models.workload import Workload
from gateway.planner.flags import CACHE_BYTES
from gateway.planner.sizes import (
    COMFORTABLE_CONTEXT,
    UNCERTAINTY_PARTS,
    Batch,
    Sizes,
    context_limit,
    needed_tokens,
    wanted_context,
)
from gateway.planner.starts import KEPT_BACK
from gateway.planner.stateful_requests import limit_to_states, stateful_requests

# Two starts of the same plan use memory alike to about so much.
_NOISE_BYTES = 64 * MIB
# No plan goes lower by itself: blocks of some KV caches are as long as this, and have to fit into a
# batch.
_MIN_TOKENS = 2048
_GRAPHS = bool_choice(False, GRAPHS_ARE_FASTER, "planner")
# Concurrent requests of a plan that is short of memory.
_FEW_SEQS = 16
# The planner's name of the flag for an engine's share of a GPU.
_SHARE = "gpu-memory-utilization"
_SMALLER_CACHE = RepairHint(may_shrink_cache=True)


def sizes(candidate: Candidate, batch: Batch) -> Sizes:
    """The sizes of a plan: within the engine's usual share, or within all free memory where the
    share holds too little context. Raises RefusalError, whose evidence has the missing memory."""
    if candidate.stage_candidates:
        return _stage_sizes(candidate, batch)
    footprint = _compute_footprint(candidate, batch)
    context_wanted = wanted_context(candidate.inputs.spec, candidate.inputs.wish, candidate.args)
    sizes_found = None
    refusal = None
    for limit, limit_cap in _limits(footprint, batch):
        try:
            sizes_in_limit = _sizes_within(footprint, batch, limit)
        except RefusalError as error:
            refusal = error
            continue
        cap = limit_cap or _cap_beside_others(candidate, sizes_in_limit.memory)
        sizes_found = sizes_in_limit._replace(cap=cap) if cap else sizes_in_limit
        if sizes_found.context.value >= context_wanted:
            return sizes_found
    if sizes_found is None:
        assert refusal is not None  # noqa: S101 - one of the two is there
        raise refusal
    return sizes_found


def _limits(footprint: Footprint, batch: Batch) -> Iterator[tuple[Budget, Cap | None]]:
    """The budgets of a candidate, smallest first: its cap, its need next to other models, the
    engine's usual share, all that is free."""
    candidate = footprint.candidate
    rules = footprint.candidate.rules
    usual_budget = rules.budget(footprint, _comfortable_tokens(candidate))
    cap = _cap(candidate)
    restored = candidate.inputs.sharing.plan_to_restore
    if (
        restored is not None
        and _chooses_memory(candidate)
        and {gpu.uuid for gpu in candidate.gpus} == set(restored.gpus)
    ):
        yield _former_budget(footprint, usual_budget, restored), cap
        return
    if cap is not None:
        yield _limit_budget(footprint, usual_budget, cap), cap
    if _takes_only_needed_cache(candidate):
        yield _needed_budget(footprint, batch, usual_budget), None
    yield usual_budget, None
    largest_budget = rules.largest_budget(footprint, usual_budget)
    if largest_budget is not None:
        yield largest_budget, None


def _cap(candidate: Candidate) -> Cap | None:
    """The cap of the model, on the GPUs that it was made for."""
    sharing = candidate.inputs.sharing
    if sharing.cap is None or not _chooses_memory(candidate):
        return None
    return sharing.cap if {gpu.uuid for gpu in candidate.gpus} == set(sharing.former_gpus) else None


def _chooses_memory(candidate: Candidate) -> bool:
    """Whether the planner chooses the engine's memory: not on a CPU, nor against the user's own
    size."""
    set_by_user = {_SHARE, CACHE_BYTES} & candidate.args.keys()
    return not set_by_user and candidate.engine.device != "cpu"


def _neighbours(candidate: Candidate) -> tuple[str, ...]:
    """The models that have a part of its GPUs, or keep to theirs for its sake."""
    sharing = candidate.inputs.sharing
    if not (sharing.promises or sharing.cap) or not _chooses_memory(candidate):
        return ()
    uuids = {gpu.uuid for gpu in candidate.gpus}
    cap = sharing.cap
    names = {holder.model for holder in sharing.promises if uuids & holder.bytes_by_gpu.keys()}
    return tuple(sorted(names.union(cap.models if cap is not None else ())))


def _takes_only_needed_cache(candidate: Candidate) -> bool:
    """Whether the plan takes only the KV cache that the wish needs. Other models, or a host with
    shared memory, use the rest."""
    beside_host = candidate.has_unified_memory and _chooses_memory(candidate)
    return bool(_neighbours(candidate) or beside_host) and candidate.inputs.wish.goal != "context"


def _cap_beside_others(candidate: Candidate, memory: Memory) -> Cap | None:
    """The cap of a model with neighbours: the same memory, in any order of starts."""
    neighbours = _neighbours(candidate)
    return Cap(bytes=memory.promised_bytes, models=neighbours) if neighbours else None


def _limit_budget(footprint: Footprint, budget: Budget, cap: Cap) -> Budget:
    """The budget within the cap of the model."""
    rules = footprint.candidate.rules
    # Engines take a budget as a rounded part of the GPU, and readings of a GPU's size differ a
    # little.
    return rules.narrow_budget(
        footprint,
        budget,
        cap.bytes - rules.divide_budget(footprint, 0).beside_bytes,
        round_count=round,
    )


def _former_budget(footprint: Footprint, budget: Budget, restored: Plan) -> Budget:
    """The former budget, to the byte. Raises RefusalError if others have some of it.

    A share is rounded from a size that differs a little at each reading. Another variant, with more
    or less outside its budget, gets no more in all.
    """
    candidate = footprint.candidate
    rules = footprint.candidate.rules
    bytes_per_gpu = restored.memory.promised_bytes
    free_bytes = min(candidate.inputs.available[gpu.uuid] for gpu in candidate.gpus)
    if free_bytes < bytes_per_gpu:
        reason = f"it had {gib(bytes_per_gpu)} of each GPU, and {gib(free_bytes)} are available"
        raise RefusalError(
            "no_memory", reason, "claims of other models", evidence=candidate.evidence
        )
    # The former number of requests may be lower than the batch's: states limit it.
    load = footprint.load._replace(seqs=restored.max_num_seqs.value)
    beside_bytes = rules.divide_budget(footprint.evolve(load=load), 0).beside_bytes
    flag = f"--{candidate.engine.spelling.get(_SHARE, _SHARE)}="
    share = next(
        (argument.removeprefix(flag) for argument in restored.argv if argument.startswith(flag)),
        None,
    )
    if share is not None and beside_bytes == restored.memory.beside_bytes:
        return rules.budget_of_share(footprint, float(share))._replace(
            bytes=restored.memory.budget_bytes
        )
    return rules.narrow_budget(
        footprint,
        budget._replace(flags={_SHARE: 1.0}),
        bytes_per_gpu - beside_bytes,
        round_count=math.floor,
    )


def _needed_budget(footprint: Footprint, batch: Batch, budget: Budget) -> Budget:
    """The budget with as much KV cache as the wish needs, also in bytes next to neighbours: some
    requests with their whole context, and where memory is the host's a usual length for all."""
    candidate = footprint.candidate
    rules = footprint.candidate.rules
    inputs = footprint.candidate.inputs
    context = wanted_context(inputs.spec, inputs.wish, candidate.args)
    tokens = max(
        needed_tokens(inputs.wish, inputs.spec), int(candidate.args.get("max-model-len", 0))
    )
    used_bytes = rules.used_bytes(
        footprint, _correct_memory(footprint, rules.divide_budget(footprint, budget.bytes), batch)
    )
    cache = footprint.cache
    batched = batch.tokens.value
    kv_bytes = math.ceil(cache.bytes_for(context, batched) * tokens / max(1, context))
    if candidate.has_unified_memory:
        usual_length = min(context, PROMPT_TOKENS + ANSWER_TOKENS)
        kv_bytes = max(kv_bytes, concurrency(inputs.wish) * cache.bytes_for(usual_length, batched))
    needed_bytes = (
        used_bytes
        + used_bytes // UNCERTAINTY_PARTS
        + kv_bytes
        + min(gpu.total_bytes or 0 for gpu in candidate.gpus) // KEPT_BACK
    )
    return (
        rules.narrow_budget(footprint, budget, needed_bytes)
        if needed_bytes < budget.bytes
        else budget
    )


def _comfortable_tokens(candidate: Candidate) -> int:
    """Tokens of a comfortable context for the wish."""
    spec = candidate.inputs.spec
    wish = candidate.inputs.wish
    return min(context_limit(spec, wish), max(COMFORTABLE_CONTEXT, wish.least_context or 0))


def _stage_sizes(candidate: Candidate, batch: Batch) -> Sizes:
    """The sizes of unequal stages: each takes the same part of its GPU. Raises RefusalError.

    The stage with room for the fewest tokens decides: engines keep the same tokens on every rank.
    """
    context_wanted = wanted_context(candidate.inputs.spec, candidate.inputs.wish, candidate.args)
    footprints = [
        _compute_footprint(stage_candidate, batch) for stage_candidate in candidate.stage_candidates
    ]
    budgets = _stage_budgets(candidate, footprints, batch)
    best_sizes: Sizes | None = None
    for budget, cap in budgets:
        try:
            stage_sizes = _sizes_of_narrowest_stage(candidate, footprints, batch, budget)
        except RefusalError:
            if budget is budgets[-1][0] and best_sizes is None:
                raise
            continue
        best_sizes = stage_sizes._replace(
            cap=cap or _cap_beside_others(candidate, stage_sizes.memory)
        )
        if best_sizes.context.value >= context_wanted:
            return best_sizes
    assert best_sizes is not None  # noqa: S101 - else the last refusal was raised
    return best_sizes


def _stage_budgets(
    candidate: Candidate, footprints: Sequence[Footprint], batch: Batch
) -> list[tuple[Budget, Cap | None]]:
    """The budgets that all stages may share, smallest first, as in `_limits`."""
    rules = candidate.rules
    context = _comfortable_tokens(candidate)
    usual_budgets = [rules.budget(footprint, context) for footprint in footprints]
    largest_budgets = [
        rules.largest_budget(footprint, budget) or budget
        for footprint, budget in zip(footprints, usual_budgets, strict=True)
    ]
    shared_usual = min(usual_budgets, key=_share_of_gpu)
    budgets: list[tuple[Budget, Cap | None]] = [
        (shared_usual, None),
        (min(largest_budgets, key=_share_of_gpu), None),
    ]
    pairs = list(zip(footprints, usual_budgets, strict=True))
    if _takes_only_needed_cache(candidate):
        needed_budget = max(
            (_needed_budget(footprint, batch, budget) for footprint, budget in pairs),
            key=_share_of_gpu,
        )
        budgets.insert(0, (min(shared_usual, needed_budget, key=_share_of_gpu), None))
    if (cap := _cap(candidate)) is not None:
        limited = max(
            (_limit_budget(footprint, budget, cap) for footprint, budget in pairs),
            key=_share_of_gpu,
        )
        budgets.insert(0, (min(shared_usual, limited, key=_share_of_gpu), cap))
    return budgets


def _sizes_of_narrowest_stage(
    candidate: Candidate, footprints: Sequence[Footprint], batch: Batch, budget: Budget
) -> Sizes:
    """The sizes of the stage with room for the fewest tokens, with the smallest batch of all.

    Raises RefusalError if a stage does not fit.
    """
    context = _comfortable_tokens(candidate)
    stages = [
        _sizes_within(
            footprint, batch, budget._replace(bytes=_stage_bytes(footprint, budget, context))
        )
        for footprint in footprints
    ]
    narrowest = min(stages, key=lambda stage: (stage.memory.kv_tokens, stage.context.value))
    return narrowest._replace(
        batch=min((stage.batch for stage in stages), key=lambda batch: batch.seqs.value)
    )


def _share_of_gpu(budget: Budget) -> float:
    return float(budget.flags.get(_SHARE, 0))


def _stage_bytes(footprint: Footprint, budget: Budget, context: int) -> int:
    """Bytes that the engine takes of this stage's GPU with these flags of a budget."""
    candidate = footprint.candidate
    return candidate.rules.budget(
        footprint.evolve(candidate=candidate.evolve(args={**candidate.args, **budget.flags})),
        context,
    ).bytes


def _sizes_within(footprint: Footprint, batch: Batch, budget: Budget) -> Sizes:
    """The sizes within this budget. Raises RefusalError."""
    candidate = footprint.candidate
    rules = footprint.candidate.rules
    seqs, state_warning = stateful_requests(footprint, batch.seqs, budget.bytes)
    if seqs is not batch.seqs:
        batch = batch._replace(seqs=seqs)
        footprint = _compute_footprint(candidate, batch)
    scope = candidate.scope | {"budget": budget.limit_text}
    estimate = rules.divide_budget(footprint, budget.bytes)
    memory = _correct_memory(footprint, estimate, batch)
    batch = batch._replace(seqs=limit_to_states(footprint, batch.seqs, memory.kv_bytes))
    evidence = candidate.evidence.add_sizes(memory)
    used_bytes = rules.used_bytes(footprint, memory)
    if used_bytes > budget.bytes:
        is_learned = rules.used_bytes(footprint, estimate) < used_bytes
        verb_text = "were needed here" if is_learned else "are needed"
        available_words = f"and {gib(budget.bytes)} are available ({budget.limit_text})"
        if gib(used_bytes) == gib(budget.bytes):
            available_words = (
                f"{math.ceil((used_bytes - budget.bytes) / MIB)} MiB more than are available"
                f" ({budget.limit_text})"
            )
        reason = f"{gib(used_bytes)} {verb_text} besides the KV cache, {available_words}"
        raise RefusalError(
            "no_memory", reason, "fact" if is_learned else "memory model", evidence=evidence
        )
    states = footprint.cache.states(memory.kv_bytes)
    per_request = footprint.cache.states_per_request
    if states < per_request:
        reason = (
            f"{states} state blocks fit into {gib(memory.kv_bytes)} of KV cache, and one request"
            f" takes {per_request}"
        )
        raise RefusalError("no_memory", reason, "memory model", evidence=evidence)
    context, warnings = _context(footprint, evidence, memory.kv_bytes, scope)
    if memory.kv_bytes:
        requests = footprint.cache.requests(memory.kv_bytes, context.value, batch.tokens.value)
        # The engine's own count of requests this long that fit. With windows the count is lower
        # than all bytes divided by those of a token.
        if math.isfinite(requests):
            tokens = round(requests * context.value)
            memory = memory.evolve(full_requests=round(requests, 2), kv_tokens=tokens)
    warning_texts = tuple(text for text in (budget.warning, state_warning, *warnings) if text)
    flags = {**budget.flags, **rules.cache_flags(candidate, memory)}
    return Sizes(
        batch=batch,
        memory=memory,
        context=context,
        flags=flags,
        scope=scope,
        warnings=warning_texts,
    )


def _compute_footprint(candidate: Candidate, batch: Batch) -> Footprint:
    graphs = not batch.eager.value and candidate.engine.device == "cuda"
    runner = candidate.rules.runner(candidate)
    load = Workload(
        device=candidate.engine.device,
        rank=candidate.rank,
        batched_tokens=batch.tokens.value,
        seqs=batch.seqs.value,
        graphs=graphs,
        runner=runner,
        query=1 + candidate.speculation.draft_tokens,
        has_drafter=bool(candidate.speculation.groups),
        context=int(candidate.args.get("max-model-len", 0))
        or context_limit(candidate.inputs.spec, candidate.inputs.wish),
    )
    resident = candidate.weights_bytes() + candidate.adapter_bytes + candidate.kept_bytes
    return Footprint(candidate, resident, candidate.cache, load)


def _correct_memory(footprint: Footprint, memory: Memory, batch: Batch) -> Memory:
    """The memory as earlier starts corrected it.

    A good start makes the band narrow, but gives no room back: the plan that worked stays the plan.
    """
    candidate = footprint.candidate
    if not candidate.inputs.facts.select_kind("needs_memory"):
        return memory
    scope = candidate.scope | batch_scope(
        batch.tokens.value, batch.seqs.value, is_eager=batch.eager.value
    )
    facts = list(candidate.inputs.facts.holding("needs_memory", scope))
    if not facts:
        return memory
    estimate = candidate.rules.used_bytes(footprint, memory)
    per_token = memory.kv_bytes_per_token
    verified_values = [fact.value or 0 for fact in facts if fact.grade == "verified"]
    corrected_bytes = max(fact.value or 0 for fact in facts)
    used_bytes = max(estimate, corrected_bytes)
    kv = max(0, memory.budget_bytes - used_bytes) if per_token else 0
    return memory.evolve(
        activation_bytes=max(0, memory.activation_bytes + used_bytes - estimate),
        kv_bytes=kv,
        kv_tokens=kv // per_token if per_token else 0,
        low=verified_values[-1] - _NOISE_BYTES if verified_values else memory.low,
        high=verified_values[-1] + _NOISE_BYTES
        if verified_values
        else max(used_bytes, memory.high),
        # A failure that needed more is believed before a start that went well. The good start
        # that needed most counts.
        measured_bytes=corrected_bytes if corrected_bytes in verified_values else None,
    )


def _limit_source(candidate: Candidate) -> str:
    return candidate.inputs.spec.sources.get("max_position", "not known")


def _context(
    footprint: Footprint, evidence: VariantEvidence, kv_bytes: int, scope: Mapping[str, str]
) -> tuple[Choice[int], tuple[str, ...]]:
    """The largest context that fits and is wanted, and a warning where it is not all that the model
    could do."""
    candidate = footprint.candidate
    spec = candidate.inputs.spec
    wish = candidate.inputs.wish
    limit = context_limit(spec, wish)
    user_context = int(candidate.args.get("max-model-len", 0))
    if user_context > spec.max_position and not spec.has_open_limit:
        flag = candidate.engine.spelling.get("max-model-len", "max-model-len")
        model_limit = f"the model's own limit is {spec.max_position} tokens"
        reason = f"--{flag} {user_context} was set, and {model_limit}"
        raise RefusalError("bad_flag", reason, _limit_source(candidate), evidence=evidence)
    longest_context = footprint.cache.largest(
        kv_bytes, footprint.load.batched_tokens, max(limit, spec.max_position, user_context)
    )
    fits = longest_context
    source = "memory model"
    for fact in candidate.inputs.facts.holding("max_context", scope):
        if fact.value is not None and fact.value < fits:
            fits, source = fact.value, f"fact: {fact.source}"
    if user_context:
        if user_context > fits:
            reason = f"--max-model-len {user_context} was set, and the KV cache holds {fits} tokens"
            raise RefusalError(
                "no_memory", reason, source, repair=_SMALLER_CACHE, evidence=evidence
            )
        return int_choice(user_context, "set by the user", "user"), ()
    context = min(limit, fits)
    least_context = wish.least_context or 1
    if context < least_context:
        reason = f"a context of {least_context} tokens was asked for, and {context} fit"
        raise RefusalError("no_memory", reason, source, repair=_SMALLER_CACHE, evidence=evidence)
    if fits >= limit:
        excess_words = (
            f"A context of {wish.max_context} tokens was asked for, and the model's own limit is"
            f" {spec.max_position}."
        )
        exceeds_limit = wish.max_context is not None and wish.max_context > limit
        if limit != spec.max_position:
            return int_choice(context, "the most that was asked for", "user"), ()
        origin = "an assumed" if spec.has_open_limit else "the model's own"
        limit_text = f"{origin} limit is {limit}"
        return int_choice(context, limit_text, _limit_source(candidate)), (
            excess_words,
        ) if exceeds_limit else ()
    reason = f"the largest that fits into {gib(kv_bytes)} of KV cache"
    if source != "memory model":
        reason = "the largest that the engine itself said fits"
    warning = f"The context is {context} tokens; the model could do {limit} with more memory."
    if _takes_only_needed_cache(candidate) and context >= wanted_context(
        spec, wish, candidate.args
    ):
        warning = (
            f"The context is {context} tokens, as its KV cache is what the wish needs; the"
            f" model could do {limit}, which --context {limit} asks for."
        )
    return int_choice(context, reason, source), (warning,)


# --- batch ---


def choose_batch(candidate: Candidate) -> Batch:
    """The engine's own defaults where no option is set: its authors measured them."""
    seqs = _size_choice(candidate, "max-num-seqs", *candidate.rules.default_seqs(candidate))
    tokens = _size_choice(
        candidate, "max-num-batched-tokens", *_batched_tokens(candidate, seqs.value)
    )
    return Batch(seqs, tokens, _eager_choice(candidate, seqs.value))


def _size_choice(
    candidate: Candidate, flag: str, default: int, reason: str, source: str
) -> Choice[int]:
    if flag in candidate.args:
        count = max(1, int(candidate.args[flag]) // candidate.counted_groups)
        return int_choice(count, "set by the user", "user")
    if candidate.variant.small and flag == "max-num-seqs" and default > _FEW_SEQS:
        small_reason, source = candidate.variant.reasons["small"]
        return int_choice(_FEW_SEQS, small_reason, source)
    if candidate.variant.conservative and flag == "max-num-seqs":
        small_reason = "a smaller batch, because the plan with the usual one failed"
        return int_choice(max(1, default // 8), small_reason, "fact")
    return int_choice(default, reason, source)


def _eager_choice(candidate: Candidate, seqs: int) -> Choice[bool]:
    """Whether the engine runs without CUDA graphs, with the reason."""
    if "enforce-eager" in candidate.args:
        return bool_choice(bool(candidate.args["enforce-eager"]), "set by the user", "user")
    if candidate.engine.device == "cpu":
        return bool_choice(
            True, "compiling for the CPU costs minutes at every start", candidate.source
        )
    if candidate.variant.eager:
        reason, source = candidate.variant.reasons["eager"]
        return bool_choice(True, reason, source)
    if candidate.variant.conservative:
        return bool_choice(True, "no graphs, because the plan with them failed", "fact")
    small_batch = (
        "; so few concurrent requests need graphs of few sizes, which leaves memory"
        if candidate.variant.small
        else ""
    )
    for flag, size in candidate.rules.graph_flags(candidate, seqs).items():
        small_batch = (
            f"; decoding gets them for the {size} planned concurrent requests (--{flag}={size})"
        )
    return (
        bool_choice(False, f"{GRAPHS_ARE_FASTER}{small_batch}", "planner")
        if small_batch
        else _GRAPHS
    )


def _batched_tokens(candidate: Candidate, seqs: int) -> tuple[int, str, str]:
    value, reason, source = candidate.rules.default_tokens(candidate)
    variant = candidate.variant
    is_smaller = (variant.conservative or variant.small) and value > _MIN_TOKENS
    if is_smaller and all(
        group.kind in ("encoder", "vision") for group in candidate.built_model.attention
    ):
        is_smaller = False  # it reads a whole input in one step
    if is_smaller and variant.conservative:
        value = max(_MIN_TOKENS, value // 4)
        reason = "a smaller batch, because the plan with the usual one failed"
        source = "fact"
    if is_smaller and variant.small and value > _MIN_TOKENS:
        value, (reason, source) = _MIN_TOKENS, variant.reasons["small"]
    # Drafted tokens take their places in the batch first; the engine refuses to start when nothing
    # is left next to them.
    drafted = candidate.speculation.slots * seqs
    if value <= drafted:
        return value + drafted, f"{reason}, plus {drafted} places for drafted tokens", source
    return value, reason, source
