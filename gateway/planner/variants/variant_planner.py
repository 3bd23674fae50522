"""The way of one variant through the gates to a plan. Pure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gateway.domain import EngineAnswer, Fact, Plan, Question, RuleGap, StrChoice
from gateway.domain.facts import BUILD_KEYS
from gateway.engines.common.candidate import Candidate
from gateway.engines.common.layers.build import build, relevant_traits
from gateway.engines.common.layers.built_model import BuiltModel, drop_tower, replicate_tower
from gateway.engines.common.quantization.block import UnknownScheme
from gateway.engines.common.refusal import RefusalError, VariantEvidence
from gateway.engines.common.speculative.speculative import DraftTarget, drop_drafter, speculate
from gateway.engines.common.speculative.speculative_rules import Speculation
from gateway.engines.common.speed.correction import correct_by_measurement
from gateway.engines.common.variant import Variant
from gateway.errors import BadModel
from gateway.planner.engine_answers import gaps, read_evidence
from gateway.planner.gates.gpu_gates import (
    gate_balance,
    gate_devices,
    gate_groups,
    gate_nodes,
    gate_peers,
    keeps_tower_whole,
)
from gateway.planner.gates.kernel_gates import gate_alike, gate_kernels, gate_same_kernels
from gateway.planner.gates.model_gates import gate_model, stands_in
from gateway.planner.gates.number_gates import gate_dtype, gate_kv, gate_method
from gateway.planner.media import drop_media
from gateway.planner.propose import propose, question
from gateway.planner.rehearsed_start import is_proven, missing_stages, start_refusal
from gateway.planner.sizes import Batch
from gateway.planner.sizing import choose_batch, sizes
from gateway.planner.variants.variant_kernels import VariantKernels

# The speculation and the evidence of a variant that has only GPUs yet.
_NO_SPECULATION = Speculation(
    method=StrChoice(value="none", reason="not decided yet", source="planner")
)
_NO_EVIDENCE = VariantEvidence()
_KERNEL_VERDICTS = ("no_kernel", "no_backend", "runtime_fail", "known_bad")


class VariantPlanner:
    """Plans single variants of one engine version, through all gates.

    gaps: the contradictions between answers of the engine and the rules.
    """

    def __init__(self, kernels: VariantKernels) -> None:
        self.inputs = kernels.inputs
        self.engine = kernels.engine
        self.rules = kernels.rules
        self.canonical = kernels.canonical
        self.env = kernels.env
        self.layouts = kernels.layouts
        self.gaps: list[RuleGap] = []
        self._traits = relevant_traits(self.inputs.spec, self.engine.traits)
        self._kernels = kernels

    def check_model(self, first: Variant) -> None:
        """Raise RefusalError if this engine version cannot have the model.

        An answer of the engine overrules a refusal where transformers' own class of the model could
        replace the architecture that the version lacks.
        """
        try:
            gate_model(self.inputs, self.engine, self.rules)
        except RefusalError as refusal:
            if refusal.verdict != "unsupported_architecture" or not stands_in(
                self.inputs.spec, self.engine
            ):
                raise
            try:
                placed_candidate = self.place(first)
            except RefusalError:
                raise refusal from None
            open_question = question(
                placed_candidate, choose_batch(placed_candidate), self._variant_environment(first)
            )
            answer = self.inputs.answers.get(open_question)
            if answer is None:
                raise refusal.copy_with_question(open_question) from None
            if answer.refusal_text:
                raise refusal.quote_engine(answer) from None

    def plan(self, variant: Variant) -> Plan:
        """The plan of the variant, through all gates.

        Raises RefusalError with everything that was computed until then as its evidence.
        """
        placed_candidate = self.place(variant)
        batch = choose_batch(placed_candidate)
        ask = partial(question, placed_candidate, batch, self._variant_environment(variant))
        answer = self.inputs.answers.get(ask()) if self.inputs.answers else None
        refusal: RefusalError | None = None
        try:
            candidate = self._predict_kernels(placed_candidate)
        except RefusalError as error:
            if answer is None:
                raise error.copy_with_question(ask()) from None
            candidate = placed_candidate
            refusal = error
        if answer is not None:
            self.gaps += gaps(ask(), candidate, refusal, answer)
        if answer is not None and not answer.refusal_text:
            return self._plan_by_answer(candidate, batch, answer, ask)
        try:
            plan = self._sized_plan(candidate, batch).evolve(question=ask())
        except RefusalError as error:
            if answer is None and self._is_open(error):
                raise error.copy_with_question(ask()) from None
            if answer is None or error.verdict not in _KERNEL_VERDICTS:
                raise
            raise error.quote_engine(answer) from None
        if answer is not None:
            raise RefusalError(
                "engine_refuses", answer.refusal_text, answer.source, evidence=candidate.evidence
            )
        return plan

    def _plan_by_answer(
        self,
        candidate: Candidate,
        batch: Batch,
        answer: EngineAnswer,
        ask: Callable[..., Question],
    ) -> Plan:
        """The plan of a candidate that the engine takes. Raises RefusalError.

        ask: makes the question for sizes that the answer has not proven.
        """
        checked = candidate.evolve(evidence=read_evidence(answer, candidate.evidence))
        plan = self._sized_plan(checked, batch)
        if text := start_refusal(plan, answer):
            evidence = checked.evidence.add_sizes(plan.memory)
            raise RefusalError("engine_refuses", text, answer.source, evidence=evidence)
        plan = plan.evolve(unrehearsed=missing_stages(plan, answer))
        # Sizes that the answer changed are rehearsed once more.
        return plan if is_proven(plan, answer) else plan.evolve(question=ask())

    def _is_open(self, refusal: RefusalError) -> bool:
        """Whether the engine itself could take the refused variant. A guess about sizes refuses
        only a model that the engine was asked about."""
        is_unsure = bool(self.inputs.spec.guessed) or refusal.verdict == "unsupported_quantization"
        return is_unsure or refusal.verdict in _KERNEL_VERDICTS

    def _sized_plan(self, candidate: Candidate, batch: Batch) -> Plan:
        """The plan of a candidate with known kernels. Raises RefusalError.

        batch: the batch without the drafter.
        """
        evidence = candidate.evidence
        facts = self.inputs.facts
        refusal: RefusalError | None = None
        try:
            gate_kernels(evidence, self.engine, facts, candidate.rank.capability or None)
        except RefusalError as error:
            refusal = error
        # A variant without a kernel is sized too: its refusal also shows the memory it would need.
        try:
            plan = self._propose(candidate, batch)
        except RefusalError as error:
            raise (refusal or error).copy_with_evidence(
                evidence.add_sizes(error.evidence.memory)
            ) from None
        if refusal is not None:
            raise refusal.copy_with_evidence(evidence.add_sizes(plan.memory))
        try:
            return self._apply_facts(plan)
        except RefusalError as error:
            if plan.speculation.value == "none":
                raise
            # Drafting is optional, and may be the part that failed.
            return self._apply_facts(self._plan_target(candidate, error))

    def place(self, variant: Variant) -> Candidate:
        """The variant on its GPUs, without kernels and sizes. Raises RefusalError."""
        inputs = self.inputs
        engine = self.engine
        built_model = self._build_layers(variant)
        if variant.tp > 1 and keeps_tower_whole(inputs, engine, built_model, variant.tp):
            built_model = replicate_tower(built_model)
        if self.rules.leaves_towers(inputs.spec, self.canonical):
            built_model = drop_tower(built_model)
        gate_groups(inputs, engine, self.rules, variant)
        gate_nodes(inputs, engine, variant)
        group = gate_devices(inputs, engine, built_model, variant, self.layouts.groups)
        gate_peers(inputs, engine, group)
        if len({gpu.name for gpu in group}) > 1:
            gate_balance(engine, variant.tp, [inputs.available[gpu.uuid] for gpu in group])
        dtype = gate_dtype(inputs, engine, group, self.canonical, variant)
        return Candidate(
            inputs=inputs,
            engine=engine,
            rules=self.rules,
            built_model=built_model,
            variant=variant,
            gpus=group,
            dtype=dtype,
            args=self.canonical,
            speculation=_NO_SPECULATION,
            evidence=_NO_EVIDENCE,
        )

    def _predict_kernels(self, placed_candidate: Candidate) -> Candidate:
        """The candidate with the kernels that the rules predict. Raises RefusalError."""
        inputs = self.inputs
        engine = self.engine
        rules = self.rules
        built_model = placed_candidate.built_model
        variant = placed_candidate.variant
        gpus = placed_candidate.gpus
        capability = gpus[0].capability if gpus else None
        method = gate_method(
            inputs=inputs,
            engine=engine,
            args=self.canonical,
            variant=variant,
            dtype=placed_candidate.dtype.value,
            capability=capability,
        )
        self._check_schemes(built_model, variant)
        gate_kv(self.inputs.spec, engine, rules, variant.kv_dtype)
        rank = placed_candidate.rank
        target = DraftTarget(
            inputs.spec,
            rank,
            build,
            lambda groups: self._kernels.attention(groups, rank, variant, 0, has_drafter=True),
        )
        speculation = speculate(target, inputs.drafter, inputs.wish, engine, rules.speculative)
        evidence = VariantEvidence(method=method)
        if rules.has_rules and gpus:
            if not capability:
                reason = "the compute capability, which decides the kernels, could not be read"
                raise RefusalError("unknown_capability", reason, "probe")
            rows = self._kernels.attention(
                built_model.attention, rank, variant, placed_candidate.devices.least_bytes
            )
            evidence = VariantEvidence(
                self._kernels.kernels(built_model, rank, variant), rows, method=method
            )
        for gpu in {gpu.capability: gpu for gpu in gpus if gpu.capability != capability}.values():
            on_gpu = self._predict_kernels(placed_candidate.evolve(gpus=(gpu,))).evidence
            gate_kernels(on_gpu, engine, inputs.facts, gpu.capability)
            gate_alike(evidence, on_gpu, gpu)
            if variant.tp > 1:
                gate_same_kernels(evidence, on_gpu, (gpus[0], gpu), self.engine)
        return placed_candidate.evolve(speculation=speculation, evidence=evidence)

    def _propose(self, candidate: Candidate, batch: Batch) -> Plan:
        """The plan of the candidate, without its drafter if there is no memory for both."""
        try:
            with_drafter = choose_batch(candidate) if candidate.speculation.config else batch
            return propose(
                candidate,
                sizes(candidate, with_drafter),
                self._variant_environment(candidate.variant),
            )
        except RefusalError as error:
            if not candidate.speculation.config:
                raise
            return self._plan_target(candidate, error)

    def _plan_target(self, candidate: Candidate, error: RefusalError) -> Plan:
        """The plan of the model without its drafter; `error` says why. Raises RefusalError."""
        plain_candidate = candidate.evolve(
            speculation=drop_drafter(candidate.speculation, self.engine, str(error))
        )
        try:
            return propose(
                plain_candidate,
                sizes(plain_candidate, choose_batch(plain_candidate)),
                self._variant_environment(candidate.variant),
            )
        except RefusalError as second:
            raise (
                second if second.evidence.memory else second.copy_with_evidence(error.evidence)
            ) from None

    def _build_layers(self, variant: Variant) -> BuiltModel:
        """The layers that this version builds. Raises RefusalError if the config.json is
        unreadable."""
        try:
            return self.layouts.build_layers(self._traits, variant.quantization)
        except BadModel as error:
            raise RefusalError(
                "unsupported_quantization", error.message, f"profile {self.engine.ref}"
            ) from None

    def _check_schemes(self, built_model: BuiltModel, variant: Variant) -> None:
        """Raise RefusalError unless the rules know how this version computes quantized weights."""
        engine = self.engine
        source = f"profile {self.engine.ref}"
        method = self.inputs.spec.quant.method if self.inputs.spec.quant else variant.quantization
        if not method:
            return
        if not self.rules.has_rules:
            reason = (
                f"the weights are quantized ({method}), and which kernel {engine.ref} would use for"
                " them is not known"
            )
            raise RefusalError("unsupported_quantization", reason, source)
        for layer in built_model.linears:
            if isinstance(layer.scheme, UnknownScheme):
                reason = f"{layer.name}: {layer.scheme.reason}"
                raise RefusalError("unsupported_quantization", reason, source, layer=layer.name)

    def _variant_environment(self, variant: Variant) -> dict[str, str]:
        """The user's variables, with those that the variant adds."""
        env = self.env
        if variant.layers:
            env = {**env, self.rules.stage_layers_env: ",".join(map(str, variant.layers))}
        if not variant.disabled:
            return env
        variable = self.rules.disabled_kernels_env
        disabled = [name for name in env.get(variable, "").split(",") if name]
        return {**env, variable: ",".join([*disabled, *variant.disabled])}

    def _apply_facts(self, plan: Plan) -> Plan:
        """The plan as facts allow it, with their proofs and corrections.

        Raises RefusalError for a plan that failed here before.
        """
        evidence = VariantEvidence(plan.kernels, plan.attention, plan.memory)
        plan = drop_media(self.inputs, self.engine, self.rules, plan)
        # A fingerprint costs more than a look at whether there is any to compare.
        facts = (
            self.inputs.facts.select_plan(plan.fingerprint) if self.inputs.facts.has_plans else ()
        )
        if failure := next((fact for fact in facts if fact.kind == "plan_failed"), None):
            raise RefusalError(
                "known_bad",
                f"this exact plan failed here before: {failure.source}",
                "fact",
                evidence=evidence,
            )
        # A start with another driver or image proves nothing. Facts about another digest are left
        # out before, and a start compares the build once more.
        verified = any(
            fact.kind == "plan_verified" and _drop_build(fact) == plan.software for fact in facts
        )
        plan = correct_by_measurement(plan, facts)
        return plan.evolve(grade="verified") if verified else plan


def _drop_build(fact: Fact) -> dict[str, str]:
    """The software of a fact without the build of its engine, which a plan does not name."""
    return {name: value for name, value in fact.software.items() if name not in BUILD_KEYS}
