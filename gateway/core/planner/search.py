"""All variants of one engine version through the gates: a refused variant may be cured by changing one thing. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

from gateway.core.attention.sglang_attention import server_attention
from gateway.core.attention.sglang_rules import BackendRules
from gateway.core.attention.vllm_attention import layer_attention
from gateway.core.layers.build import asked, build
from gateway.core.layers.built_model import BuiltModel
from gateway.core.memory.kv_dtype import declared
from gateway.core.model.experts import expert_traits
from gateway.core.model.rank import Rank
from gateway.core.planner.candidate import Candidate
from gateway.core.planner.engine_rules import Rules
from gateway.core.planner.evidence import Evidence
from gateway.core.planner.flags import canonical
from gateway.core.planner.gates import (
    gate_devices,
    gate_driver,
    gate_dtype,
    gate_kernels,
    gate_kv,
    gate_method,
    gate_model,
    gate_peers,
    refused_before,
    without_media,
)
from gateway.core.planner.layer_kernels import layer_kernels
from gateway.core.planner.parallel import spare_groups
from gateway.core.planner.planning_input import PlanningInput
from gateway.core.planner.propose import propose
from gateway.core.planner.refusal import Refused
from gateway.core.planner.sizes import sizes
from gateway.core.planner.variants import Variant, plain, repairs
from gateway.core.quantization.block import Unknown
from gateway.core.speculative.drafter import Drafter
from gateway.core.speculative.speculative import Speculation, left_out, speculate
from gateway.domain import AttentionGroup, Engine, EngineRef, IntChoice, LayerAttention, Plan, Quant, Rejected, Scalar
from gateway.errors import BadModel

# An engine version is given up after so many variants; a longer search finds nothing that a user would want.
_MOST_VARIANTS = 64
_KERNEL_VERDICTS = ("no_kernel", "no_backend", "runtime_fail", "known_bad")


@dataclass
class Search:
    """The search of one engine version: `run` fills `plans` and `rejected`.

    args: the user's checked flags by this engine's names. built_models: shared by engines that build the model alike.
    """

    given: PlanningInput
    engine: Engine
    rules: Rules | None
    args: Mapping[str, Scalar]
    env: dict[str, str]
    built_models: dict[tuple[frozenset[str], str], BuiltModel]
    drafter: Drafter | None = None
    plans: list[Plan] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)

    def run(self) -> None:
        given, engine = self.given, self.engine
        self.canonical = canonical(engine, self.args)
        self.asked = asked(given.spec, engine.traits)
        self.backends: dict[Hashable, tuple[LayerAttention, ...]] = {}
        gpus = len(given.hardware.gpus)
        kv_dtype = declared(given.spec.quant, engine)
        variants = deque(plain(engine, gpus, self.canonical, given.wish.tensor_parallel, kv_dtype))
        try:
            gate_model(given, engine)
            gate_driver(given, engine)
        except Refused as refusal:
            self.rejected.append(rejection(engine, variants[0], refusal))
            return
        seen = set(variants)
        for _ in range(_MOST_VARIANTS):
            if not variants:
                break
            variant = variants.popleft()
            found = Evidence()
            try:
                self.plans.append(self._plan(variant, found))
            except Refused as refusal:
                # The refusal of the unchanged variant tells what the change could not cure.
                if not variant.because or refusal.verdict == "known_bad":
                    self.rejected.append(rejection(engine, variant, refusal, found))
                users = self.canonical.keys() | ({"dtype"} if given.wish.dtype != "auto" else set())
                users |= {"tensor-parallel-size"} if given.wish.tensor_parallel else set()
                changed = repairs(variant, refusal, engine, self.rules, gpus, users, quantized=given.spec.quant is not None)
                fresh = [other for other in changed if other not in seen]
                seen.update(fresh)
                variants.extend(fresh)
        self._replicated()

    def _replicated(self) -> None:
        """Where no kernel lets more GPUs share the model, the others can only help as replicas."""
        sound = [len(plan.gpus) for plan in self.plans if plan.cost == 0]
        if self.given.wish.replicas is not None or not sound:
            return
        most = max(sound)
        wider = [one for one in self.rejected if one.tensor_parallel * one.pipeline_parallel > most]
        wider = [one for one in wider if one.verdict != "illegal_parallelism"]
        if not wider or any(one.verdict not in _KERNEL_VERDICTS for one in wider):
            return
        reason = f"no kernel lets {wider[0].tensor_parallel} GPUs share a copy, so each group of {most} serves its own"
        for index, plan in enumerate(self.plans):
            copies = spare_groups(self.given.hardware, len(plan.gpus), plan.memory.budget_bytes, self.given.claims)
            if len(plan.gpus) == most and copies > 1:
                replicas = IntChoice(value=copies, reason=reason, source=wider[0].source)
                self.plans[index] = plan.evolve(replicas=replicas)

    def _plan(self, variant: Variant, found: Evidence) -> Plan:
        """One variant through all gates. Raises Refused; `found` keeps what was computed until then."""
        given, engine, rules = self.given, self.engine, self.rules
        built = self._built_model(variant)
        group = gate_devices(given, engine, built, variant.tp, variant.pp, ep=variant.ep)
        gate_peers(given, engine, group)
        dtype = gate_dtype(given, group, self.canonical, variant)
        capability = group[0].capability if group else None
        found.method = gate_method(given, engine, self.canonical, variant, dtype.value, capability)
        self._readable(built, variant)
        gate_kv(engine, rules, variant.kv_dtype)
        rank = variant.rank(dtype.value, capability)
        speculation = self._speculation(rank, variant)
        pools = rules.memory if rules else None
        if rules is not None and group:
            self._compute(variant, found, built, rank)
        candidate = Candidate(given, engine, built, variant, group, dtype, self.canonical, speculation, pools, found)
        refusal: Refused | None = None
        try:
            gate_kernels(found, engine, given.facts, capability)
        except Refused as error:
            refusal = error
        # A variant without a kernel is sized too, so that its refusal also shows the memory that it would need.
        try:
            plan = self._proposed(candidate)
        except Refused as error:
            raise refusal or error from None
        if refusal is not None:
            raise refusal
        try:
            return self._judged(plan)
        except Refused as error:
            if plan.speculation.value == "none":
                raise
            # What drafts is an extra, which may have been what failed.
            return self._judged(self._alone(candidate, error))

    def _proposed(self, candidate: Candidate) -> Plan:
        """The plan of this candidate, or of the model alone where there is no room for what drafts beside it."""
        try:
            return propose(candidate, sizes(candidate), self._environment(candidate.variant))
        except Refused as error:
            if not candidate.speculation.config:
                raise
            return self._alone(candidate, error)

    def _alone(self, candidate: Candidate, error: Refused) -> Plan:
        """The plan without what drafts."""
        alone = replace(candidate, speculation=left_out(candidate.speculation, self.engine, str(error)))
        return propose(alone, sizes(alone), self._environment(candidate.variant))

    def _built_model(self, variant: Variant) -> BuiltModel:
        """What this version builds of the model. Raises Refused for a config.json that these rules cannot read."""
        key = self.asked, variant.quantization
        if key in self.built_models:
            return self.built_models[key]
        spec = self.given.spec
        if variant.quantization == "fp8" and spec.quant is None:
            quant = Quant(method="fp8", config={"quant_method": "fp8", "activation_scheme": "dynamic"})
            spec = spec.evolve(quant=quant, config={**spec.config, "quantization_config": quant.config})
        try:
            built = self.built_models[key] = build(spec, self.asked)
        except BadModel as error:
            raise Refused("unsupported_quantization", error.message, f"profile {self.engine.ref}") from None
        return built

    def _readable(self, built: BuiltModel, variant: Variant) -> None:
        """These rules know how this version computes the quantized weights. Raises Refused."""
        engine, source = self.engine, f"profile {self.engine.ref}"
        method = self.given.spec.quant.method if self.given.spec.quant else variant.quantization
        if not method:
            return
        if self.rules is None:
            reason = f"the weights are quantized ({method}), and which kernel {engine.ref} would use for them is not known"
            raise Refused("unsupported_quantization", reason, source)
        for layer in built.linears:
            if isinstance(layer.scheme, Unknown):
                reason = f"{layer.name}: {layer.scheme.reason}"
                raise Refused("unsupported_quantization", reason, source, layer=layer.name)

    def _compute(self, variant: Variant, found: Evidence, built: BuiltModel, rank: Rank) -> None:
        """The kernel of every linear layer and the backend of every attention layer, on one rank."""
        given, engine, rules = self.given, self.engine, self.rules
        if rules is None:
            return
        if not rank.capability:
            raise Refused("unknown_capability", "the compute capability, which decides the kernels, could not be read", "probe")
        disabled = frozenset(self.env.get("VLLM_DISABLED_KERNELS", "").split(",")) | frozenset(variant.disabled)
        found.kernels = layer_kernels(
            built.linears,
            rules,
            rank,
            disabled - {""},
            variant.backend("linear-backend"),
            experts=expert_traits(given.spec, online=bool(variant.quantization and given.spec.quant is None)),
            moe_backend=variant.backend("moe-backend"),
            variables=frozenset(name for name, value in self.env.items() if value.lower() in ("1", "true")),
            seen=refused_before(given.facts, engine, rank.capability),
        )
        found.attention = self._attention(built.attention, rank, variant)

    def _attention(
        self, groups: tuple[AttentionGroup, ...], rank: Rank, variant: Variant, *, drafts: bool = False
    ) -> tuple[LayerAttention, ...]:
        """`drafts`: these are the layers of what drafts, the model's own or those of a drafter."""
        if self.rules is None or not rank.capability:
            return ()
        if self.rules.attention_backends is not None and not drafts:
            return self._server_attention(groups, self.rules.attention_backends, rank, variant)
        rules = self.rules.attention
        if rules is None:
            return ()
        block, forced = self.canonical.get("block-size"), self.canonical.get("attention-backend")
        spec, own = self.given.spec, self.drafter if drafts else None
        key = groups, replace(rank, pp=1, ep=1), drafts
        if key not in self.backends:
            self.backends[key] = layer_attention(
                groups,
                rules,
                rank,
                block_size=None if block is None else int(block),
                forced=None if forced is None or drafts else str(forced),
                drafter=drafts,
                architecture=own.architecture if own else spec.architecture,
                config=None if own else spec.config,
            )
        return self.backends[key]

    def _server_attention(
        self, groups: tuple[AttentionGroup, ...], rules: BackendRules, rank: Rank, variant: Variant
    ) -> tuple[LayerAttention, ...]:
        spec, gpus = self.given.spec, self.given.groups.get(variant.tp * variant.pp) or ()
        smallest = min((gpu.total_bytes or 0 for gpu in gpus), default=0)
        args = {**dict(variant.backends), **self.canonical}
        return server_attention(groups, rules, rank, spec.architecture, spec.config, smallest, args)

    def _speculation(self, rank: Rank, variant: Variant) -> Speculation:
        return speculate(
            self.given.spec,
            self.drafter,
            self.given.wish,
            self.engine,
            self.rules.speculative if self.rules else None,
            lambda groups: self._attention(groups, rank, variant, drafts=True),
            rank,
        )

    def _environment(self, variant: Variant) -> dict[str, str]:
        if not variant.disabled:
            return self.env
        users = [name for name in self.env.get("VLLM_DISABLED_KERNELS", "").split(",") if name]
        return {**self.env, "VLLM_DISABLED_KERNELS": ",".join([*users, *variant.disabled])}

    def _judged(self, plan: Plan) -> Plan:
        """The plan as it is safe to start, with what facts say of it. Raises Refused for one that failed here before."""
        plan = without_media(self.given, self.engine, self.rules, plan)
        known = [fact for fact in self.given.facts if "fingerprint" in fact.scope]
        if not known:
            return plan
        fingerprint = plan.fingerprint
        known = [fact for fact in known if fact.scope["fingerprint"] == fingerprint]
        if bad := next((fact for fact in known if fact.kind == "plan_failed"), None):
            raise Refused("known_bad", f"this exact plan failed here before: {bad.source}", "fact")
        # With another driver or image nothing is proved.
        proof = any(fact.kind == "plan_verified" and fact.under == plan.under for fact in known)
        return plan.evolve(grade="verified") if proof else plan


def rejection(engine: Engine, variant: Variant, refusal: Refused, found: Evidence | None = None) -> Rejected:
    found = found or Evidence()
    return Rejected(
        engine=EngineRef(kind=engine.kind, version=engine.version, image=engine.image),
        tensor_parallel=variant.tp,
        pipeline_parallel=variant.pp,
        verdict=refusal.verdict,
        layer=refusal.layer,
        reasons=(str(refusal),),
        source=refusal.source,
        kernels=found.kernels,
        attention=found.attention,
        memory=found.memory,
    )
