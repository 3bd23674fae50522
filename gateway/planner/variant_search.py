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
    Engine,
    EngineRef,
    LayerAttention,
    LayerKernel,
    Memory,
    Plan,
    RejectedPlan,
    RuleGap,
    Scalar,
)
from gateway.engines.common.candidate import EngineRules
from gateway.engines.common.planning_input import PlanningInput
from gateway.engines.common.refusal import RefusalError
from gateway.engines.common.span import NodeSpan
from gateway.engines.common.speed.expectation import ANSWER_TOKENS, PROMPT_TOKENS
from gateway.engines.common.speed.objective import concurrency
from gateway.engines.common.variant import (
    Layouts,
    Variant,
    apply_former_concessions,
    plain_variants,
)
from gateway.models.spec import pipeline_layers
from gateway.planner.flags import canonical
from gateway.planner.gates.gpu_gates import gate_driver
from gateway.planner.media import gate_media
from gateway.planner.parallel import sufficient_ranks
from gateway.planner.repairs import longer_variants, repairs
from gateway.planner.sizes import wanted_context
from gateway.planner.unequal_stages import unequal_stages
from gateway.planner.variants.shared_layouts import SharedLayouts
from gateway.planner.variants.variant_kernels import VariantKernels
from gateway.planner.variants.variant_planner import VariantPlanner

# The search of an engine version ends after this many variants; later ones are of no use.
_MAX_VARIANTS = 64
_SIZES = {"tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size"}


class _VariantQueue:
    """Variants in the order of the search, each once.

    Variants that give something up wait until all others are planned.
    """

    def __init__(self, first: Sequence[Variant]) -> None:
        self._ready, self._deferred = deque(first), deque[Variant]()
        self._queued = set(first)

    def pop(self, *, is_satisfied: bool) -> Variant | None:
        """The next variant; None: no more. is_satisfied: no variant has to give anything up."""
        if not self._ready and not is_satisfied:
            # All layouts give up one more thing.
            self._ready, self._deferred = self._deferred, deque()
        return self._ready.popleft() if self._ready else None

    def add(self, variants: Iterable[Variant]) -> None:
        new_variants = [variant for variant in variants if variant not in self._queued]
        self._queued.update(new_variants)
        for variant in new_variants:
            (self._deferred if variant.gives_up else self._ready).append(variant)

    def clear(self) -> None:
        self._ready.clear()
        self._deferred.clear()


class Search:
    """The search of one engine version: `run` fills `plans`, `rejections` and `gaps`.

    inputs: the planning input with the variables of this engine (`PlanningInput.replace_env`).
    args: the user's checked flags by this engine's names; `canonical` has them by the planner's
        names.
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
        self.inputs = inputs
        self.engine = engine
        self.rules = rules
        self.env = env
        self.canonical = canonical(engine, args)
        kernels = VariantKernels(
            inputs=inputs,
            engine=engine,
            rules=rules,
            canonical=self.canonical,
            env=env,
            layouts=layouts,
        )
        self._planner = VariantPlanner(kernels)
        self.plans: list[Plan] = []
        self.rejections: list[RejectedPlan] = []

        wish = inputs.wish
        gpus = len(inputs.hardware.gpus)
        self._max_gpus = min(gpus, wish.gpus) if isinstance(wish.gpus, int) else gpus
        self._user_flags = self.canonical.keys() | ({"dtype"} if wish.dtype != "auto" else set())
        self._user_flags |= {"tensor-parallel-size"} if wish.tensor_parallel else set()
        self._user_flags |= {"data-parallel-size"} if wish.data_parallel else set()
        # The division of ranks among nodes is final: no repair changes their number.
        self._user_flags |= _SIZES if inputs.span else set()
        self._context_wanted = wanted_context(inputs.spec, wish, self.canonical)
        # Throughput needs a KV cache that holds at least half of the concurrent requests.
        self._wanted_kv_tokens = (
            concurrency(wish) * (PROMPT_TOKENS + ANSWER_TOKENS) // 2
            if wish.goal == "throughput"
            else 0
        )
        self._is_satisfied = False  # a variant that gives nothing up has the context that is wanted
        self._queue = _VariantQueue(())
        # The context, or the KV cache, of a plan with fewer changes, by variant.
        self._reached: dict[Variant, int] = {}

        self._commands: dict[Hashable, int] = {}
        self._first_by_kernels: dict[Hashable, Variant] = {}

    @property
    def gaps(self) -> list[RuleGap]:
        """The places where answers of the engine contradict the rules."""
        return self._planner.gaps

    def run(self) -> None:
        """Plan the plain variants, then variants that repair, lengthen or balance them."""
        first = self._first_variants()
        if not first:
            return
        try:
            self._planner.check_model(first[0])
            gate_driver(self.inputs, self.engine)
            gate_media(self.inputs, self.engine, self.rules)
        except RefusalError as refusal:
            self.rejections.append(rejection(self.engine, first[0], refusal))
            return
        self._queue = _VariantQueue(first)
        for _ in range(_MAX_VARIANTS):
            variant = self._queue.pop(is_satisfied=self._is_satisfied)
            if variant is None:
                break
            try:
                plan = self._planner.plan(variant)
            except RefusalError as refusal:
                self._queue.add(self._follow_refusal(variant, refusal))
            else:
                self._queue.add(self._follow_plan(variant, plan))

    def _first_variants(self) -> list[Variant]:
        """The variants without changes; before them the variants of a plan to restore."""
        inputs = self.inputs
        engine = self.engine
        gpus = inputs.hardware.gpus
        kv_dtype = self.rules.adopted_kv_dtype(
            inputs.spec, engine, gpus[0].capability if gpus else None
        )
        sufficient = None
        if not self.rules.grouped_refusal(inputs.spec, engine):
            sufficient = partial(sufficient_ranks, inputs.spec.attention)
        variants = [
            *plain_variants(
                engine,
                Layouts(self._max_gpus, sufficient, self.rules.counts_groups),
                self.canonical,
                inputs.wish,
                kv_dtype,
            )
        ]
        if inputs.span:
            return [*self._node_variants(inputs.span, variants[0])]
        restored = inputs.sharing.plan_to_restore
        if restored is None:
            return variants
        size = restored.tensor_parallel.value, restored.data_parallel.value
        former_variants = [
            apply_former_concessions(variant, restored)
            for variant in variants
            if (variant.tp, variant.dp) == size
        ]
        return list(dict.fromkeys([*former_variants, *variants]))

    def _node_variants(self, span: NodeSpan, basis: Variant) -> Iterator[Variant]:
        """The variants whose ranks are on all nodes of the span, with the user's sizes."""
        wish = self.inputs.wish
        flags = self.canonical
        tp = flags.get("tensor-parallel-size", wish.tensor_parallel)
        dp = flags.get("data-parallel-size", wish.data_parallel)
        pp = flags.get("pipeline-parallel-size")
        for layout in span.layouts:
            sizes = ((layout.tp, tp), (layout.pp, pp), (layout.dp, dp))
            if any(wished_size not in (None, size) for size, wished_size in sizes):
                continue
            variant = replace(basis, tp=layout.tp, pp=1, dp=layout.dp, ep=basis.ep or layout.dp > 1)
            reason = f"the layers are shared by {span.nodes} nodes"
            yield (
                variant.add_change("pp", layout.pp, reason, "planner") if layout.pp > 1 else variant
            )

    def _follow_plan(self, variant: Variant, plan: Plan) -> list[Variant]:
        """Keep the plan if it reaches more than a plan with fewer changes; the variants to try."""
        if self._has_same_kernels(variant, plan.kernels, plan.attention):
            return []
        memory = plan.memory
        context = plan.max_model_len.value
        is_crowded = bool(memory.kv_bytes_per_token) and memory.kv_tokens < self._wanted_kv_tokens
        reach = memory.kv_tokens if self._wanted_kv_tokens else context
        former_reach = self._reached.get(variant, 0)
        if reach > former_reach:
            self._add_plan(plan)
        restored = self.inputs.sharing.plan_to_restore
        if restored is not None and plan.fingerprint == restored.fingerprint:
            self._queue.clear()
            return []
        self._is_satisfied |= (
            context >= self._context_wanted
            and not is_crowded
            and not plan.quantizes_weights
            and not variant.conservative
        )
        context_wanted = context + 1 if is_crowded else self._context_wanted
        changed_variants = [
            *longer_variants(
                variant=variant,
                context=context,
                context_wanted=context_wanted,
                engine=self.engine,
                max_gpus=self._max_gpus,
                args=self._user_flags,
            ),
            *self._unequal_stages(variant, memory),
        ]
        self._reached.update(dict.fromkeys(changed_variants, max(reach, former_reach)))
        return changed_variants

    def _follow_refusal(self, variant: Variant, refusal: RefusalError) -> list[Variant]:
        """Keep the refusal of an unchanged variant; the variants that may cure it."""
        evidence = refusal.evidence
        engine = self.engine
        gpus = self._max_gpus
        if self._has_same_kernels(variant, evidence.kernels, evidence.attention):
            return []
        # The refusal of the unchanged variant names the problem that the change could not cure.
        if not variant.reasons or refusal.verdict == "known_bad":
            self.rejections.append(rejection(engine, variant, refusal))
        is_quantized = self.inputs.spec.quant is not None
        changed_variants = [
            *repairs(
                variant=variant,
                refusal=refusal,
                engine=engine,
                rules=self.rules,
                max_gpus=gpus,
                args=self._user_flags,
                is_quantized=is_quantized,
            ),
            *self._unquantized_cache(variant, refusal),
            *self._unequal_stages(variant, evidence.memory),
        ]
        if refusal.verdict == "known_bad" and evidence.memory is not None:
            reach = evidence.memory.kv_tokens
            self._is_satisfied |= reach >= self._context_wanted and not (
                variant.conservative or "quantization" in variant.reasons
            )
            # A failure with a short context says nothing about a longer one.
            changed_variants += longer_variants(
                variant=variant,
                context=reach,
                context_wanted=self._context_wanted,
                engine=engine,
                max_gpus=gpus,
                args=self._user_flags,
            )
        return changed_variants

    def _has_same_kernels(
        self,
        variant: Variant,
        kernels: tuple[LayerKernel, ...],
        attention: tuple[LayerAttention, ...],
    ) -> bool:
        """Whether a variant that differs only in excluded kernels had the same kernels before.

        The successors of such a variant would only take places of others in the search.
        """
        if not (variant.disabled or variant.backends):
            return False
        kernel_rows = tuple(
            (layer_kernel.layer, layer_kernel.scheme, layer_kernel.kernel)
            for layer_kernel in kernels
        )
        key = (
            replace(variant, disabled=(), backends=()),
            kernel_rows,
            tuple(layer_attention.backend for layer_attention in attention),
        )
        return bool(kernel_rows) and self._first_by_kernels.setdefault(key, variant) != variant

    def _unquantized_cache(self, variant: Variant, refusal: RefusalError) -> list[Variant]:
        """The variant with a KV cache in the dtype of the activations.

        Only if no backend takes the dtype that the checkpoint declares, and the engine's flag wins.
        """
        is_declared = (
            variant.kv_dtype != "auto"
            and "kv_dtype" not in variant.reasons
            and "kv-cache-dtype" not in self._user_flags
        )
        if (
            refusal.verdict != "no_backend"
            or not is_declared
            or not self.rules.prefers_kv_flag(self.inputs.spec.quant, self.engine)
        ):
            return []
        dtype = self._planner.place(variant).dtype.value
        reason = (
            f"the checkpoint declares {variant.kv_dtype}, which no attention backend takes here:"
            f" {refusal}"
        )
        return [variant.add_change("kv_dtype", dtype, reason, refusal.source)]

    def _unequal_stages(self, variant: Variant, memory: Memory | None) -> list[Variant]:
        """The variant with unequal pipeline stages for unequal GPUs.

        memory: the need of the variant with equally many layers on each GPU.
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
        return unequal_stages(self._planner.place(variant), layers, memory, self._context_wanted)

    def _add_plan(self, plan: Plan) -> None:
        """Add the plan; of two with the same command keep the one with fewer changes."""
        command = plan.gpus, plan.argv, tuple(sorted(plan.env.items()))
        index = self._commands.setdefault(command, len(self.plans))
        if index == len(self.plans):
            self.plans.append(plan)
        elif plan.cost < self.plans[index].cost:
            self.plans[index] = plan


def rejection(engine: Engine, variant: Variant, refusal: RefusalError) -> RejectedPlan:
    """The refusal of a variant, as decisions show it."""
    evidence = refusal.evidence
    return RejectedPlan(
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
