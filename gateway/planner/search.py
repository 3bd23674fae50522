"""The search over the variants of one engine version. Pure.

state of a variant          successors
it has a plan               longer contexts and unequal stages, unless it is the plan to restore
it is refused               repairs: each changes one thing
it repeats known kernels    none
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from gateway.domain import (
    AttentionGroup,
    Engine,
    EngineRef,
    Fact,
    LayerAttention,
    LayerKernel,
    Memory,
    Plan,
    Rejected,
    RuleGap,
    Scalar,
    StrChoice,
)
from gateway.engines.common.candidate import Candidate, EngineRules
from gateway.engines.common.layers.build import build, loaded_as, relevant_traits
from gateway.engines.common.layers.built_model import BuiltModel
from gateway.engines.common.planning_input import PlanningInput
from gateway.engines.common.quantization.block import UnknownScheme
from gateway.engines.common.refusal import Refused, VariantEvidence
from gateway.engines.common.span import Span
from gateway.engines.common.speculative.speculative import DraftTarget, left_out, speculate
from gateway.engines.common.speculative.speculative_rules import Speculation
from gateway.engines.common.speed.correction import measured
from gateway.engines.common.speed.expectation import ANSWER_TOKENS, PROMPT_TOKENS
from gateway.engines.common.speed.objective import concurrency
from gateway.engines.common.variant import Layouts, Variant, given_up, plain
from gateway.errors import BadModel
from gateway.models.experts import ExpertTraits, expert_traits
from gateway.models.rank import Rank
from gateway.models.spec import pipeline_layers
from gateway.planner.asked import evidence_of, gaps
from gateway.planner.flags import canonical
from gateway.planner.gates import (
    gate_alike,
    gate_balance,
    gate_devices,
    gate_driver,
    gate_dtype,
    gate_groups,
    gate_kernels,
    gate_kv,
    gate_method,
    gate_model,
    gate_peers,
    gate_same_kernels,
    refused_before,
    stands_in,
)
from gateway.planner.layer_kernels import ObservedRefusals, layer_kernels
from gateway.planner.media import gate_media, without_media
from gateway.planner.parallel import GpuGroups, sufficient_ranks
from gateway.planner.propose import propose, question
from gateway.planner.rehearsed_start import is_proven, start_refusal, unrehearsed
from gateway.planner.repairs import lengthened, repairs
from gateway.planner.sizes import Batch, wanted_context
from gateway.planner.sizing import batch_of, sizes
from gateway.planner.unequal_stages import unequal_stages

# The search of an engine version ends after so many variants; later ones are of no use to anybody.
_MAX_VARIANTS = 64
# The speculation and the evidence of a variant that has only GPUs yet.
_UNDECIDED = Speculation(method=StrChoice(value="none", reason="not decided yet", source="planner"))
_NO_EVIDENCE = VariantEvidence()
_SIZES = {"tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size"}
_KERNEL_VERDICTS = ("no_kernel", "no_backend", "runtime_fail", "known_bad")


class SharedLayouts:
    """Layers of the model and groups of GPUs, computed once for all engine versions."""

    def __init__(self, inputs: PlanningInput) -> None:
        self.inputs = inputs
        self.groups = GpuGroups(inputs.hardware, inputs.claims)
        self._built: dict[tuple[frozenset[str], str], BuiltModel] = {}
        self._experts: dict[bool, ExpertTraits | None] = {}

    def experts(self, *, online: bool) -> ExpertTraits | None:
        """The experts by the model's config. online: weights are quantized while they load."""
        if online not in self._experts:
            self._experts[online] = expert_traits(self.inputs.spec, online=online)
        return self._experts[online]

    def built(self, traits: frozenset[str], quantization: str) -> BuiltModel:
        """The layers that engines with these traits build of the model.

        quantization: applied to the weights while they load; "": none. Raises BadModel.
        """
        key = traits, quantization
        if key not in self._built:
            self._built[key] = build(loaded_as(self.inputs.spec, quantization), traits)
        return self._built[key]


class _VariantQueue:
    """Variants in the order of the search, each once.

    Variants that give something up wait until all others are planned.
    """

    def __init__(self, first: Sequence[Variant]) -> None:
        self._ready, self._deferred = deque(first), deque[Variant]()
        self._queued = set(first)

    def pop(self, *, satisfied: bool) -> Variant | None:
        """The next variant; None: no more. satisfied: no variant has to give anything up."""
        if not self._ready and not satisfied:
            # All layouts give up one more thing.
            self._ready, self._deferred = self._deferred, deque()
        return self._ready.popleft() if self._ready else None

    def add(self, variants: Iterable[Variant]) -> None:
        new = [variant for variant in variants if variant not in self._queued]
        self._queued.update(new)
        for variant in new:
            (self._deferred if variant.gives_up else self._ready).append(variant)

    def clear(self) -> None:
        self._ready.clear()
        self._deferred.clear()


class Search:
    """The search of one engine version: `run` fills `plans`, `rejected` and `gaps`.

    inputs: with the variables of this engine (`PlanningInput.under`). args: the user's checked
    flags by this engine's names; `canonical` has them by the planner's names.
    """

    def __init__(
        self,
        inputs: PlanningInput,
        engine: Engine,
        rules: EngineRules,
        args: Mapping[str, Scalar],
        env: dict[str, str],
        layouts: SharedLayouts,
    ) -> None:
        self.inputs, self.engine, self.rules = inputs, engine, rules
        self.env, self.layouts = env, layouts
        self.canonical = canonical(engine, args)
        self.traits = relevant_traits(inputs.spec, engine.traits)
        self.plans: list[Plan] = []
        self.rejected: list[Rejected] = []
        self.gaps: list[RuleGap] = []

        wish, gpus = inputs.wish, len(inputs.hardware.gpus)
        self._max_gpus = min(gpus, wish.gpus) if isinstance(wish.gpus, int) else gpus
        self._user_flags = self.canonical.keys() | ({"dtype"} if wish.dtype != "auto" else set())
        self._user_flags |= {"tensor-parallel-size"} if wish.tensor_parallel else set()
        self._user_flags |= {"data-parallel-size"} if wish.data_parallel else set()
        # Ranks that are dealt to nodes stay so: no repair changes their number.
        self._user_flags |= _SIZES if inputs.span else set()
        self._context_wanted = wanted_context(inputs.spec, wish, self.canonical)
        # For throughput the KV cache should hold at least half of the requests at once.
        self._wanted_kv_tokens = (
            concurrency(wish) * (PROMPT_TOKENS + ANSWER_TOKENS) // 2
            if wish.goal == "throughput"
            else 0
        )
        self._satisfied = False  # a variant that gives nothing up has the context that is wanted
        self._queue = _VariantQueue(())
        # By variant the context, or the KV cache, of a plan with fewer changes.
        self._reached: dict[Variant, int] = {}

        self._commands: dict[Hashable, int] = {}
        self._first_by_kernels: dict[Hashable, Variant] = {}
        self._refused_kernels: dict[str, ObservedRefusals] = {}
        self._backends: dict[Hashable, tuple[LayerAttention, ...]] = {}
        self._kernel_rows: dict[Hashable, tuple[LayerKernel, ...]] = {}

    def run(self) -> None:
        """Plan the plain variants, then variants that repair, lengthen or balance them."""
        first = self._first_variants()
        if not first:
            return
        try:
            self._check_model(first[0])
            gate_driver(self.inputs, self.engine)
            gate_media(self.inputs, self.engine, self.rules)
        except Refused as refusal:
            self.rejected.append(rejection(self.engine, first[0], refusal))
            return
        self._queue = _VariantQueue(first)
        for _ in range(_MAX_VARIANTS):
            variant = self._queue.pop(satisfied=self._satisfied)
            if variant is None:
                break
            try:
                plan = self._plan(variant)
            except Refused as refusal:
                self._queue.add(self._after_refusal(variant, refusal))
            else:
                self._queue.add(self._after_plan(variant, plan))

    def _first_variants(self) -> list[Variant]:
        """The variants without changes; before them the variants of a plan to restore."""
        inputs, engine = self.inputs, self.engine
        gpus = inputs.hardware.gpus
        kv_dtype = self.rules.adopted_kv_dtype(
            inputs.spec, engine, gpus[0].capability if gpus else None
        )
        sufficient = None
        if not self.rules.grouped_refusal(inputs.spec, engine):
            sufficient = partial(sufficient_ranks, inputs.spec.attention)
        variants = [
            *plain(
                engine,
                Layouts(self._max_gpus, sufficient, self.rules.counts_groups),
                self.canonical,
                inputs.wish,
                kv_dtype,
            )
        ]
        if inputs.span:
            return [*self._over_nodes(inputs.span, variants[0])]
        restored = inputs.sharing.restored
        if restored is None:
            return variants
        size = restored.tensor_parallel.value, restored.data_parallel.value
        former = [
            given_up(variant, restored) for variant in variants if (variant.tp, variant.dp) == size
        ]
        return list(dict.fromkeys([*former, *variants]))

    def _over_nodes(self, span: Span, basis: Variant) -> Iterator[Variant]:
        """The variants whose ranks are on all nodes of the span, with the user's sizes."""
        wish, flags = self.inputs.wish, self.canonical
        tp = flags.get("tensor-parallel-size", wish.tensor_parallel)
        dp = flags.get("data-parallel-size", wish.data_parallel)
        pp = flags.get("pipeline-parallel-size")
        for layout in span.layouts:
            sizes = ((layout.tp, tp), (layout.pp, pp), (layout.dp, dp))
            if any(wished not in (None, size) for size, wished in sizes):
                continue
            variant = replace(basis, tp=layout.tp, pp=1, dp=layout.dp, ep=basis.ep or layout.dp > 1)
            why = f"the layers are shared by {span.nodes} nodes"
            yield variant.changed("pp", layout.pp, why, "planner") if layout.pp > 1 else variant

    def _after_plan(self, variant: Variant, plan: Plan) -> list[Variant]:
        """Keep the plan if it reaches more than a plan with fewer changes; the variants to try."""
        if self._same_kernels_seen(variant, plan.kernels, plan.attention):
            return []
        memory, context = plan.memory, plan.max_model_len.value
        crowded = bool(memory.kv_bytes_per_token) and memory.kv_tokens < self._wanted_kv_tokens
        reach = memory.kv_tokens if self._wanted_kv_tokens else context
        before = self._reached.get(variant, 0)
        if reach > before:
            self._add_plan(plan)
        restored = self.inputs.sharing.restored
        if restored is not None and plan.fingerprint == restored.fingerprint:
            self._queue.clear()
            return []
        self._satisfied |= (
            context >= self._context_wanted
            and not crowded
            and not plan.halved
            and not variant.conservative
        )
        context_wanted = context + 1 if crowded else self._context_wanted
        changed = [
            *lengthened(
                variant, context, context_wanted, self.engine, self._max_gpus, self._user_flags
            ),
            *self._unequal_stages(variant, memory),
        ]
        self._reached.update(dict.fromkeys(changed, max(reach, before)))
        return changed

    def _after_refusal(self, variant: Variant, refusal: Refused) -> list[Variant]:
        """Keep the refusal of an unchanged variant; the variants that may cure it."""
        evidence, engine, gpus = refusal.evidence, self.engine, self._max_gpus
        if self._same_kernels_seen(variant, evidence.kernels, evidence.attention):
            return []
        # The refusal of the unchanged variant tells what the change could not cure.
        if not variant.reasons or refusal.verdict == "known_bad":
            self.rejected.append(rejection(engine, variant, refusal))
        quantized = self.inputs.spec.quant is not None
        changed = [
            *repairs(
                variant, refusal, engine, self.rules, gpus, self._user_flags, quantized=quantized
            ),
            *self._unquantized_cache(variant, refusal),
            *self._unequal_stages(variant, evidence.memory),
        ]
        if refusal.verdict == "known_bad" and evidence.memory is not None:
            reach = evidence.memory.kv_tokens
            self._satisfied |= reach >= self._context_wanted and not (
                variant.conservative or "quantization" in variant.reasons
            )
            # A failure with a short context says nothing about a longer one.
            changed += lengthened(
                variant, reach, self._context_wanted, engine, gpus, self._user_flags
            )
        return changed

    def _same_kernels_seen(
        self,
        variant: Variant,
        kernels: tuple[LayerKernel, ...],
        attention: tuple[LayerAttention, ...],
    ) -> bool:
        """Whether a variant that differs only in excluded kernels had the same kernels before.

        Its successors would only take places of others in the search.
        """
        if not (variant.disabled or variant.backends):
            return False
        chosen = tuple((row.layer, row.scheme, row.kernel) for row in kernels)
        key = (
            replace(variant, disabled=(), backends=()),
            chosen,
            tuple(row.backend for row in attention),
        )
        return bool(chosen) and self._first_by_kernels.setdefault(key, variant) != variant

    def _unquantized_cache(self, variant: Variant, refusal: Refused) -> list[Variant]:
        """The variant with a KV cache in the dtype of the activations.

        Only if no backend takes the dtype that the checkpoint declares, and the engine's flag wins.
        """
        declared = (
            variant.kv_dtype != "auto"
            and "kv_dtype" not in variant.reasons
            and "kv-cache-dtype" not in self._user_flags
        )
        if (
            refusal.verdict != "no_backend"
            or not declared
            or not self.rules.kv_flag_wins(self.inputs.spec.quant, self.engine)
        ):
            return []
        dtype = self._placed(variant).dtype.value
        why = (
            f"the checkpoint declares {variant.kv_dtype}, which no attention backend takes here:"
            f" {refusal}"
        )
        return [variant.changed("kv_dtype", dtype, why, refusal.source)]

    def _unequal_stages(self, variant: Variant, memory: Memory | None) -> list[Variant]:
        """The variant with unequal pipeline stages for unequal GPUs.

        memory: of the variant with as many layers on each GPU.
        """
        name = self.rules.stage_layers_env
        settable = (
            bool(name)
            and name not in self.env
            and (name in self.engine.user_env or name.startswith(self.engine.open_switches))
        )
        if variant.pp == 1 or variant.tp > 1 or variant.layers or memory is None or not settable:
            return []
        if len({gpu.name for gpu in self.inputs.hardware.gpus}) < 2:
            return []
        layers = pipeline_layers(self.inputs.spec)
        if layers is None:
            return []
        return unequal_stages(self._placed(variant), layers, memory, self._context_wanted)

    def _add_plan(self, plan: Plan) -> None:
        """Add the plan; of two with the same command keep the one with fewer changes."""
        command = plan.gpus, plan.argv, tuple(sorted(plan.env.items()))
        index = self._commands.setdefault(command, len(self.plans))
        if index == len(self.plans):
            self.plans.append(plan)
        elif plan.cost < self.plans[index].cost:
            self.plans[index] = plan

    def _check_model(self, first: Variant) -> None:
        """Raise Refused if this engine version cannot have the model.

        An answer of the engine overrules a refusal where transformers' own class of the model could
        replace the architecture that the version lacks.
        """
        try:
            gate_model(self.inputs, self.engine, self.rules)
        except Refused as refusal:
            if refusal.verdict != "unsupported_architecture" or not stands_in(
                self.inputs.spec, self.engine
            ):
                raise
            try:
                placed = self._placed(first)
            except Refused:
                raise refusal from None
            open_question = question(placed, batch_of(placed), self._environment(first))
            answer = self.inputs.answers.get(open_question)
            if answer is None:
                raise refusal.open(open_question) from None
            if answer.refused:
                raise refusal.in_engine_words(answer) from None

    def _plan(self, variant: Variant) -> Plan:
        """The plan of the variant, through all gates.

        Raises Refused with everything that was computed until then as its evidence.
        """
        placed = self._placed(variant)
        batch = batch_of(placed)
        ask = partial(question, placed, batch, self._environment(variant))
        answer = self.inputs.answers.get(ask()) if self.inputs.answers else None
        refusal: Refused | None = None
        try:
            candidate = self._predicted(placed)
        except Refused as error:
            if answer is None:
                raise error.open(ask()) from None
            candidate, refusal = placed, error
        if answer is not None:
            self.gaps += gaps(ask(), candidate, refusal, answer)
        if answer is not None and not answer.refused:
            checked = candidate.evolve(evidence=evidence_of(answer, candidate.evidence))
            planned = self._sized(checked, batch)
            if words := start_refusal(planned, answer):
                sized = checked.evidence.sized(planned.memory)
                raise Refused("engine_refuses", words, answer.source, evidence=sized)
            planned = planned.evolve(unrehearsed=unrehearsed(planned, answer))
            # Sizes that the answer changed are rehearsed once more.
            return planned if is_proven(planned, answer) else planned.evolve(question=ask())
        try:
            plan = self._sized(candidate, batch).evolve(question=ask())
        except Refused as error:
            # A guess about sizes refuses only a model that the engine was asked about.
            unsure = bool(self.inputs.spec.guessed) or error.verdict == "unsupported_quantization"
            if answer is None and (unsure or error.verdict in _KERNEL_VERDICTS):
                raise error.open(ask()) from None
            if answer is None or error.verdict not in _KERNEL_VERDICTS:
                raise
            raise error.in_engine_words(answer) from None
        if answer is not None:
            raise Refused(
                "engine_refuses", answer.refused, answer.source, evidence=candidate.evidence
            )
        return plan

    def _sized(self, candidate: Candidate, batch: Batch) -> Plan:
        """The plan of a candidate with known kernels. Raises Refused.

        batch: without the drafter.
        """
        evidence, facts = candidate.evidence, self.inputs.facts
        refusal: Refused | None = None
        try:
            gate_kernels(evidence, self.engine, facts, candidate.rank.capability or None)
        except Refused as error:
            refusal = error
        # A variant without a kernel is sized too: its refusal also shows the memory it would need.
        try:
            plan = self._proposed(candidate, batch)
        except Refused as error:
            raise (refusal or error).knowing(evidence.sized(error.evidence.memory)) from None
        if refusal is not None:
            raise refusal.knowing(evidence.sized(plan.memory))
        try:
            return self._apply_facts(plan)
        except Refused as error:
            if plan.speculation.value == "none":
                raise
            # Drafting is optional, and may be the part that failed.
            return self._apply_facts(self._without_drafter(candidate, error))

    def _placed(self, variant: Variant) -> Candidate:
        """The variant on its GPUs, without kernels and sizes. Raises Refused."""
        inputs, engine = self.inputs, self.engine
        built = self._built(variant)
        gate_groups(inputs, engine, self.rules, variant)
        group = gate_devices(inputs, engine, built, variant, self.layouts.groups)
        gate_peers(inputs, engine, group)
        if len({gpu.name for gpu in group}) > 1:
            gate_balance(engine, variant.tp, [inputs.available[gpu.uuid] for gpu in group])
        dtype = gate_dtype(inputs, engine, group, self.canonical, variant)
        return Candidate(
            inputs,
            engine,
            self.rules,
            built,
            variant,
            group,
            dtype,
            self.canonical,
            _UNDECIDED,
            _NO_EVIDENCE,
        )

    def _predicted(self, placed: Candidate) -> Candidate:
        """The candidate with the kernels that the rules predict. Raises Refused."""
        inputs, engine, rules = self.inputs, self.engine, self.rules
        built, variant, group = placed.built, placed.variant, placed.group
        capability = group[0].capability if group else None
        method = gate_method(
            inputs, engine, self.canonical, variant, placed.dtype.value, capability
        )
        self._check_schemes(built, variant)
        gate_kv(self.inputs.spec, engine, rules, variant.kv_dtype)
        rank = placed.rank
        target = DraftTarget(
            inputs.spec,
            rank,
            build,
            lambda groups: self._attention(groups, rank, variant, 0, drafts=True),
        )
        speculation = speculate(target, inputs.drafter, inputs.wish, engine, rules.speculative)
        evidence = VariantEvidence(method=method)
        if rules.has_rules and group:
            if not capability:
                reason = "the compute capability, which decides the kernels, could not be read"
                raise Refused("unknown_capability", reason, "probe")
            rows = self._attention(built.attention, rank, variant, placed.devices.least)
            evidence = VariantEvidence(self._kernels(built, rank, variant), rows, method=method)
        for gpu in {gpu.capability: gpu for gpu in group if gpu.capability != capability}.values():
            on_gpu = self._predicted(placed.evolve(group=(gpu,))).evidence
            gate_kernels(on_gpu, engine, inputs.facts, gpu.capability)
            gate_alike(evidence, on_gpu, gpu)
            if variant.tp > 1:
                gate_same_kernels(evidence, on_gpu, (group[0], gpu))
        return placed.evolve(speculation=speculation, evidence=evidence)

    def _proposed(self, candidate: Candidate, batch: Batch) -> Plan:
        """The plan of the candidate, without its drafter if there is no memory for both."""
        try:
            with_drafter = batch_of(candidate) if candidate.speculation.slots else batch
            return propose(
                candidate, sizes(candidate, with_drafter), self._environment(candidate.variant)
            )
        except Refused as error:
            if not candidate.speculation.config:
                raise
            return self._without_drafter(candidate, error)

    def _without_drafter(self, candidate: Candidate, error: Refused) -> Plan:
        """The plan of the model alone; `error` is why. Raises Refused."""
        plain = candidate.evolve(
            speculation=left_out(candidate.speculation, self.engine, str(error))
        )
        try:
            return propose(
                plain, sizes(plain, batch_of(plain)), self._environment(candidate.variant)
            )
        except Refused as second:
            raise (second if second.evidence.memory else second.knowing(error.evidence)) from None

    def _built(self, variant: Variant) -> BuiltModel:
        """The layers that this version builds. Raises Refused if the config.json is unreadable."""
        try:
            return self.layouts.built(self.traits, variant.quantization)
        except BadModel as error:
            raise Refused(
                "unsupported_quantization", error.message, f"profile {self.engine.ref}"
            ) from None

    def _check_schemes(self, built: BuiltModel, variant: Variant) -> None:
        """Raise Refused unless the rules know how this version computes the quantized weights."""
        engine, source = self.engine, f"profile {self.engine.ref}"
        method = self.inputs.spec.quant.method if self.inputs.spec.quant else variant.quantization
        if not method:
            return
        if not self.rules.has_rules:
            reason = (
                f"the weights are quantized ({method}), and which kernel {engine.ref} would use for"
                " them is not known"
            )
            raise Refused("unsupported_quantization", reason, source)
        for layer in built.linears:
            if isinstance(layer.scheme, UnknownScheme):
                reason = f"{layer.name}: {layer.scheme.reason}"
                raise Refused("unsupported_quantization", reason, source, layer=layer.name)

    def _kernels(self, built: BuiltModel, rank: Rank, variant: Variant) -> tuple[LayerKernel, ...]:
        """The kernel of every linear layer, on one rank."""
        # The layers are one object for all variants that load the weights alike.
        key = built, rank.computing, variant.quantization, variant.disabled, variant.backends
        if key not in self._kernel_rows:
            self._kernel_rows[key] = self._choose_kernels(built, rank, variant)
        return self._kernel_rows[key]

    def _choose_kernels(
        self, built: BuiltModel, rank: Rank, variant: Variant
    ) -> tuple[LayerKernel, ...]:
        spec, capability = self.inputs.spec, rank.capability
        if capability not in self._refused_kernels:
            self._refused_kernels[capability] = refused_before(
                self.inputs.facts, self.engine, capability
            )
        disabled = frozenset(self.env.get("VLLM_DISABLED_KERNELS", "").split(",")) | frozenset(
            variant.disabled
        )
        return layer_kernels(
            built.linears,
            self.rules,
            rank.computing,
            disabled - {""},
            variant.backend("linear-backend"),
            experts=self.layouts.experts(online=bool(variant.quantization and spec.quant is None)),
            moe_backend=variant.backend("moe-backend"),
            variables=frozenset(
                name for name, value in self.env.items() if value.lower() in ("1", "true")
            ),
            refusals=self._refused_kernels[capability],
        )

    def _attention(
        self,
        groups: tuple[AttentionGroup, ...],
        rank: Rank,
        variant: Variant,
        gpu_bytes: int,
        *,
        drafts: bool = False,
    ) -> tuple[LayerAttention, ...]:
        """The backend of attention layers, on one rank. drafts: the layers are those that draft."""
        if not rank.capability:
            return ()
        key = (
            groups,
            rank.tp,
            rank.dtype,
            rank.kv_dtype,
            rank.capability,
            variant.backends,
            gpu_bytes,
            drafts,
        )
        if key not in self._backends:
            spec, args = self.inputs.spec, {**dict(variant.backends), **self.canonical}
            if drafts:
                rows = self.rules.drafter_attention(groups, rank, spec, self.inputs.drafter, args)
            else:
                rows = self.rules.layer_attention(groups, rank, spec, args, gpu_bytes)
            self._backends[key] = rows
        return self._backends[key]

    def _environment(self, variant: Variant) -> dict[str, str]:
        """The user's variables, with those that the variant adds."""
        env = self.env
        if variant.layers:
            env = {**env, self.rules.stage_layers_env: ",".join(map(str, variant.layers))}
        if not variant.disabled:
            return env
        disabled = [name for name in env.get("VLLM_DISABLED_KERNELS", "").split(",") if name]
        return {**env, "VLLM_DISABLED_KERNELS": ",".join([*disabled, *variant.disabled])}

    def _apply_facts(self, plan: Plan) -> Plan:
        """The plan as facts allow it, with what they prove or correct.

        Raises Refused for a plan that failed here before.
        """
        evidence = VariantEvidence(plan.kernels, plan.attention, plan.memory)
        plan = without_media(self.inputs, self.engine, self.rules, plan)
        # A fingerprint costs more than a look at whether there is any to compare.
        facts = self.inputs.facts.of_plan(plan.fingerprint) if self.inputs.facts.has_plans else ()
        if failure := next((fact for fact in facts if fact.kind == "plan_failed"), None):
            raise Refused(
                "known_bad",
                f"this exact plan failed here before: {failure.source}",
                "fact",
                evidence=evidence,
            )
        # With another driver or image nothing is proved; facts of another digest are not among
        # these.
        verified = any(
            fact.kind == "plan_verified" and _without_digest(fact) == plan.under for fact in facts
        )
        plan = measured(plan, facts)
        return plan.evolve(grade="verified") if verified else plan


def _without_digest(fact: Fact) -> dict[str, str]:
    return {name: value for name, value in fact.under.items() if name != "digest"}


def rejection(engine: Engine, variant: Variant, refusal: Refused) -> Rejected:
    """The refusal of a variant, as decisions show it."""
    evidence = refusal.evidence
    return Rejected(
        engine=EngineRef(kind=engine.kind, version=engine.version, image=engine.image),
        tensor_parallel=variant.tp,
        pipeline_parallel=variant.pp,
        data_parallel=variant.dp,
        verdict=refusal.verdict,
        layer=refusal.layer,
        reasons=(str(refusal),),
        source=refusal.source,
        kernels=evidence.kernels,
        attention=evidence.attention,
        memory=evidence.memory,
        question=refusal.question,
    )
