"""All variants of one engine version through the gates: a refused variant may be cured by changing
one thing. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Mapping
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
from gateway.engines.common.evidence import Evidence
from gateway.engines.common.layers.build import asked, build, loaded_as
from gateway.engines.common.layers.built_model import BuiltModel
from gateway.engines.common.layers.stages import dealt, repeated
from gateway.engines.common.layers.weights import weights_bytes
from gateway.engines.common.planning_input import PlanningInput
from gateway.engines.common.quantization.block import UnknownScheme
from gateway.engines.common.refusal import Refused
from gateway.engines.common.speculative.speculation import Speculation
from gateway.engines.common.speculative.speculative import Target, left_out, speculate
from gateway.engines.common.speed.correction import measured
from gateway.engines.common.speed.expectation import READ, WRITTEN
from gateway.engines.common.speed.machine import machine_of
from gateway.engines.common.speed.objective import concurrency
from gateway.engines.common.variant import Variant, given_up, plain
from gateway.errors import BadModel
from gateway.models.drafter import Drafter
from gateway.models.experts import ExpertTraits, expert_traits
from gateway.models.rank import Rank
from gateway.models.spec import stacked
from gateway.planner.asked import evidence_of, gaps
from gateway.planner.flags import canonical
from gateway.planner.gates import (
    gate_alike,
    gate_devices,
    gate_driver,
    gate_dtype,
    gate_kernels,
    gate_kv,
    gate_method,
    gate_model,
    gate_peers,
    refused_before,
    stands_in,
    without_media,
)
from gateway.planner.layer_kernels import Seen, layer_kernels
from gateway.planner.parallel import GpuGroups, dealt_layers
from gateway.planner.propose import propose, question
from gateway.planner.repairs import lengthened, repairs
from gateway.planner.sizes import Batch, wanted_context
from gateway.planner.sizing import batch_of, sizes
from gateway.variables import STAGES

# An engine version is given up after so many variants; a longer search finds nothing that a user
# would want.
_MOST_VARIANTS = 64
# Of a variant that is laid out, and nothing more.
_UNSAID = Speculation(
    method=StrChoice(value="none", reason="nothing is said of it yet", source="planner")
)
_NONE_YET = Evidence()
_KERNEL_VERDICTS = ("no_kernel", "no_backend", "runtime_fail", "known_bad")


class Shared:
    """What all engine versions share, computed once: what is built of the model, and the groups of
    GPUs."""

    def __init__(self, given: PlanningInput) -> None:
        self.given = given
        self.groups = GpuGroups(given.hardware, given.claims)
        self._built: dict[tuple[frozenset[str], str], BuiltModel] = {}
        self._experts: dict[bool, ExpertTraits | None] = {}

    def experts(self, *, online: bool) -> ExpertTraits | None:
        """What the model's config says of its experts. online: their weights are quantized while
        they load."""
        if online not in self._experts:
            self._experts[online] = expert_traits(self.given.spec, online=online)
        return self._experts[online]

    def built(self, traits: frozenset[str], quantization: str) -> BuiltModel:
        """What engines of these traits build of the model, its weights quantized while they load.
        Raises BadModel."""
        key = traits, quantization
        if key not in self._built:
            self._built[key] = build(loaded_as(self.given.spec, quantization), traits)
        return self._built[key]


def _held(part: Candidate, layers: tuple[int, ...]) -> int:
    """Bytes of weights of this stage, if the stages had so many layers each; without layers, what
    it holds beside them."""
    stage = dealt(
        part.built, layers, part.part, repeated(part.engine, part.given.spec.architecture)
    )
    return weights_bytes(stage, part.rank, part.engine.traits) or 0


class Search:
    """The search of one engine version: `run` fills `plans`, `rejected` and `gaps`.

    args: the user's checked flags by this engine's names; `canonical` are the same by the planner's
        names.
    """

    def __init__(
        self,
        given: PlanningInput,
        engine: Engine,
        rules: EngineRules,
        args: Mapping[str, Scalar],
        env: dict[str, str],
        shared: Shared,
        drafter: Drafter | None = None,
    ) -> None:
        self.given, self.engine, self.rules, self.env = given, engine, rules, env
        self.shared, self.drafter = shared, drafter
        self.canonical = canonical(engine, args)
        self.traits = asked(given.spec, engine.traits)
        self.plans: list[Plan] = []
        self.rejected: list[Rejected] = []
        self.gaps: list[RuleGap] = []
        self._commands: dict[Hashable, int] = {}
        self._ways: dict[Hashable, Variant] = {}
        self._seen: dict[str, Seen] = {}
        self._backends: dict[Hashable, tuple[LayerAttention, ...]] = {}
        self._rows: dict[Hashable, tuple[LayerKernel, ...]] = {}

    def run(self) -> None:
        given, engine, rules = self.given, self.engine, self.rules
        gpus = len(given.hardware.gpus)
        gpus = min(gpus, given.wish.gpus) if isinstance(given.wish.gpus, int) else gpus
        kv_dtype = rules.declared_kv_dtype(given.spec.quant, engine)
        variants = deque(plain(engine, gpus, self.canonical, given.wish.tensor_parallel, kv_dtype))
        before = given.sharing.again
        if before is not None:
            had = [
                given_up(one, before) for one in variants if one.tp == before.tensor_parallel.value
            ]
            variants = deque(dict.fromkeys([*had, *variants]))
        try:
            self._known_model(variants[0])
            gate_driver(given, engine)
        except Refused as refusal:
            self.rejected.append(rejection(engine, variants[0], refusal))
            return
        users = self.canonical.keys() | ({"dtype"} if given.wish.dtype != "auto" else set())
        users |= {"tensor-parallel-size"} if given.wish.tensor_parallel else set()
        reached: dict[Variant, int] = {}  # tokens of context that a plan with fewer changes has
        wanted, seen = wanted_context(given.spec, given.wish, self.canonical), set(variants)
        held: deque[Variant] = deque()
        # Where many are to be served, memory for half of them is worth a look at what gives it.
        many = (
            concurrency(given.wish) * (READ + WRITTEN) // 2
            if given.wish.goal == "throughput"
            else 0
        )
        enough = False  # a layout holds the wanted context as it is
        for _ in range(_MOST_VARIANTS):
            if not variants and not enough:
                variants, held = (
                    held,
                    deque(),
                )  # one step of giving up, of all layouts, where nothing before was enough
            if not variants:
                break
            variant = variants.popleft()
            changed: list[Variant] = []
            try:
                plan = self._plan(variant)
                if self._known_way(variant, plan.kernels, plan.attention):
                    continue
                context = plan.max_model_len.value
                reach = plan.memory.kv_tokens if many else context
                crowded = bool(plan.memory.kv_bytes_per_token) and plan.memory.kv_tokens < many
                if reach > reached.get(variant, 0):  # else what it gives up is for nothing
                    self._take(plan)
                if before is not None and plan.fingerprint == before.fingerprint:
                    break
                enough |= (
                    context >= wanted
                    and not crowded
                    and not plan.halved
                    and not variant.conservative
                )
                changed += lengthened(
                    variant, context, context + 1 if crowded else wanted, engine, gpus, users
                )
                changed += self._uneven(variant, plan.memory, wanted)
                reached.update(dict.fromkeys(changed, max(reach, reached.get(variant, 0))))
            except Refused as refusal:
                if self._known_way(variant, refusal.evidence.kernels, refusal.evidence.attention):
                    continue
                # The refusal of the unchanged variant tells what the change could not cure.
                if not variant.because or refusal.verdict == "known_bad":
                    self.rejected.append(rejection(engine, variant, refusal))
                changed += repairs(
                    variant,
                    refusal,
                    engine,
                    rules,
                    gpus,
                    users,
                    quantized=given.spec.quant is not None,
                )
                changed += self._whole_cache(variant, refusal, users)
                changed += self._uneven(variant, refusal.evidence.memory, wanted)
                if refusal.verdict == "known_bad" and (memory := refusal.evidence.memory):
                    enough |= memory.kv_tokens >= wanted and not (
                        variant.conservative or "quantization" in variant.because
                    )
                    # What failed with a short context says nothing of what has a longer one.
                    changed += lengthened(variant, memory.kv_tokens, wanted, engine, gpus, users)
            fresh = [other for other in changed if other not in seen]
            seen.update(fresh)
            for other in fresh:
                (held if other.gives_up else variants).append(other)

    def _known_way(
        self,
        variant: Variant,
        kernels: tuple[LayerKernel, ...],
        attention: tuple[LayerAttention, ...],
    ) -> bool:
        """Another variant, which is the same but for what keeps the engine from a kernel, has these
        kernels too: what follows from this one
        would only take the place of others in the search."""
        if not (variant.disabled or variant.backends):
            return False
        chosen = tuple((row.layer, row.scheme, row.kernel) for row in kernels)
        way = (
            replace(variant, disabled=(), backends=()),
            chosen,
            tuple(row.backend for row in attention),
        )
        return bool(chosen) and self._ways.setdefault(way, variant) != variant

    def _whole_cache(
        self, variant: Variant, refusal: Refused, users: Collection[str]
    ) -> list[Variant]:
        """Where no backend takes the KV cache that the checkpoint declares: one in the dtype of the
        activations, if the engine's flag wins."""
        declared = (
            variant.kv_dtype != "auto"
            and "kv_dtype" not in variant.because
            and "kv-cache-dtype" not in users
        )
        if (
            refusal.verdict != "no_backend"
            or not declared
            or not self.rules.kv_flag_wins(self.given.spec.quant, self.engine)
        ):
            return []
        dtype = self._laid_out(variant).dtype.value
        why = (
            f"the checkpoint declares {variant.kv_dtype}, which no attention backend takes here:"
            f" {refusal}"
        )
        return [variant.changed("kv_dtype", dtype, why, refusal.source)]

    def _uneven(self, variant: Variant, memory: Memory | None, wanted: int) -> list[Variant]:
        """The same with unlike stages for unlike GPUs: by what each holds, and by how fast each is.
        memory: with as many layers on each."""
        name = STAGES.get(self.engine.kind)
        settable = (
            name is not None
            and name not in self.env
            and (name in self.engine.user_env or self.engine.kind == "sglang")
        )
        if variant.pp == 1 or variant.tp > 1 or variant.layers or memory is None or not settable:
            return []
        if len({gpu.name for gpu in self.given.hardware.gpus}) < 2:
            return []
        layers, parts = stacked(self.given.spec), self._laid_out(variant).parts
        if layers is None or not parts:
            return []
        gpus = [part.group[0] for part in parts]
        fixed = memory.activation_bytes + memory.overhead_bytes
        ends = [
            _held(
                part,
                tuple(layers if place == int(part.part == 0) else 0 for place in range(variant.pp)),
            )
            for part in parts
        ]
        room = [
            (gpu.total_bytes or 0) * memory.budget_bytes / memory.gpu_bytes - fixed - end
            for gpu, end in zip(gpus, ends, strict=True)
        ]
        if min(room) <= 0:
            return []
        held = -(-layers // variant.pp)
        each = (
            _held(parts[0], (layers,) + (0,) * (variant.pp - 1)) - ends[0]
        ) / layers + memory.kv_bytes_per_token * wanted / held
        found = {dealt_layers(layers, room, [layers] * len(room)): "by what each GPU holds"}
        if self.given.pace is not None:
            known = (
                machine_of(
                    (gpu,), self.given.links, self.given.pace, self.given.measured, direct=True
                )
                for gpu in gpus
            )
            speeds = [one.memory if one else 0.0 for one in known]
            if min(speeds) > 0:
                found.setdefault(
                    dealt_layers(layers, speeds, [size / each for size in room]),
                    "by how fast each GPU is",
                )
        names = " and ".join(gpu.name for gpu in gpus)
        return [
            variant.changed(
                "layers",
                dealt,
                f"{' and '.join(map(str, dealt))} layers on {names}, {why}",
                "planner",
            )
            for dealt, why in found.items()
            if dealt is not None and len(set(dealt)) > 1
        ]

    def _take(self, plan: Plan) -> None:
        """One more plan; of two with the same command the one that counts as changed less."""
        command = plan.gpus, plan.argv, tuple(sorted(plan.env.items()))
        place = self._commands.setdefault(command, len(self.plans))
        if place == len(self.plans):
            self.plans.append(plan)
        elif plan.cost < self.plans[place].cost:
            self.plans[place] = plan

    def _known_model(self, first: Variant) -> None:
        """This engine version may have the model. Raises Refused; where transformers' class of the
        model could stand in for one that
        the version lacks, its answer may overrule that."""
        try:
            gate_model(self.given, self.engine)
        except Refused as refusal:
            if refusal.verdict != "unsupported_architecture" or not stands_in(
                self.given.spec, self.engine
            ):
                raise
            try:
                bare = self._laid_out(first)
            except Refused:
                raise refusal from None
            asked = question(bare, batch_of(bare), self._environment(first))
            answer = self.given.answers.get(asked)
            if answer is None:
                raise refusal.open(asked) from None
            if answer.refused:
                raise refusal.said(answer) from None

    def _plan(self, variant: Variant) -> Plan:
        """One variant through all gates. Raises Refused, whose evidence is what was computed until
        then."""
        bare = self._laid_out(variant)
        batch = batch_of(bare)
        asked = partial(question, bare, batch, self._environment(variant))
        answer = self.given.answers.get(asked()) if self.given.answers else None
        refusal: Refused | None = None
        try:
            candidate = self._forecast(bare)
        except Refused as error:
            if answer is None:
                raise error.open(asked()) from None
            candidate, refusal = bare, error
        if answer is not None:
            self.gaps += gaps(asked(), candidate, refusal, answer)
        if answer is not None and not answer.refused:
            return self._sized(
                replace(candidate, evidence=evidence_of(answer, candidate.evidence)), batch
            )
        try:
            plan: Plan = self._sized(candidate, batch).evolve(question=asked())
        except Refused as error:
            # What was guessed of sizes refuses nothing that the engine was not asked about.
            unsure = bool(self.given.spec.guessed) or error.verdict == "unsupported_quantization"
            if answer is None and (unsure or error.verdict in _KERNEL_VERDICTS):
                raise error.open(asked()) from None
            if answer is None or error.verdict not in _KERNEL_VERDICTS:
                raise
            raise error.said(answer) from None
        if answer is not None:
            raise Refused(
                "engine_refuses", answer.refused, answer.source, evidence=candidate.evidence
            )
        return plan

    def _sized(self, candidate: Candidate, batch: Batch) -> Plan:
        """The plan of a candidate whose kernels are known. batch: without what drafts. Raises
        Refused."""
        known, facts = candidate.evidence, self.given.facts
        refusal: Refused | None = None
        try:
            gate_kernels(known, self.engine, facts, candidate.rank.capability or None)
        except Refused as error:
            refusal = error
        # A variant without a kernel is sized too, so that its refusal also shows the memory that it
        # would need.
        try:
            plan = self._proposed(candidate, batch)
        except Refused as error:
            raise (refusal or error).knowing(known.sized(error.evidence.memory)) from None
        if refusal is not None:
            raise refusal.knowing(known.sized(plan.memory))
        try:
            return self._judged(plan)
        except Refused as error:
            if plan.speculation.value == "none":
                raise
            # What drafts is an extra, which may have been what failed.
            return self._judged(self._alone(candidate, error))

    def _laid_out(self, variant: Variant) -> Candidate:
        """The variant on its GPUs, before anything is said of its layers. Raises Refused."""
        given, engine = self.given, self.engine
        built = self._built(variant)
        group = gate_devices(given, engine, built, variant, self.shared.groups)
        gate_peers(given, engine, group)
        dtype = gate_dtype(given, engine, group, self.canonical, variant)
        return Candidate(
            given,
            engine,
            self.rules,
            built,
            variant,
            group,
            dtype,
            self.canonical,
            _UNSAID,
            _NONE_YET,
        )

    def _forecast(self, bare: Candidate) -> Candidate:
        """The candidate with everything but its sizes, by the rules. Raises Refused."""
        given, engine, rules, built, variant, group = (
            self.given,
            self.engine,
            self.rules,
            bare.built,
            bare.variant,
            bare.group,
        )
        capability = group[0].capability if group else None
        method = gate_method(given, engine, self.canonical, variant, bare.dtype.value, capability)
        self._readable(built, variant)
        gate_kv(engine, rules, variant.kv_dtype)
        rank = bare.rank
        target = Target(
            given.spec,
            rank,
            build,
            lambda groups: self._attention(groups, rank, variant, 0, drafts=True),
        )
        speculation = speculate(target, self.drafter, given.wish, engine, rules.speculative)
        evidence = Evidence(method=method)
        if rules.known and group:
            if not capability:
                reason = "the compute capability, which decides the kernels, could not be read"
                raise Refused("unknown_capability", reason, "probe")
            rows = self._attention(built.attention, rank, variant, bare.devices.least)
            evidence = Evidence(self._kernels(built, rank, variant), rows, method=method)
        for gpu in {gpu.capability: gpu for gpu in group if gpu.capability != capability}.values():
            other = self._forecast(replace(bare, group=(gpu,))).evidence
            gate_kernels(other, engine, given.facts, gpu.capability)
            gate_alike(evidence, other, gpu)
        return Candidate(
            given,
            engine,
            rules,
            built,
            variant,
            group,
            bare.dtype,
            bare.args,
            speculation,
            evidence,
        )

    def _proposed(self, candidate: Candidate, batch: Batch) -> Plan:
        """The plan of this candidate, or of the model alone where there is no room for what drafts
        beside it."""
        try:
            beside = batch_of(candidate) if candidate.speculation.slots else batch
            return propose(
                candidate, sizes(candidate, beside), self._environment(candidate.variant)
            )
        except Refused as error:
            if not candidate.speculation.config:
                raise
            return self._alone(candidate, error)

    def _alone(self, candidate: Candidate, error: Refused) -> Plan:
        """The plan without what drafts."""
        alone = replace(
            candidate, speculation=left_out(candidate.speculation, self.engine, str(error))
        )
        try:
            return propose(
                alone, sizes(alone, batch_of(alone)), self._environment(candidate.variant)
            )
        except Refused as second:
            raise (second if second.evidence.memory else second.knowing(error.evidence)) from None

    def _built(self, variant: Variant) -> BuiltModel:
        """What this version builds of the model. Raises Refused for a config.json that these rules
        cannot read."""
        try:
            return self.shared.built(self.traits, variant.quantization)
        except BadModel as error:
            raise Refused(
                "unsupported_quantization", error.message, f"profile {self.engine.ref}"
            ) from None

    def _readable(self, built: BuiltModel, variant: Variant) -> None:
        """These rules know how this version computes the quantized weights. Raises Refused."""
        engine, source = self.engine, f"profile {self.engine.ref}"
        method = self.given.spec.quant.method if self.given.spec.quant else variant.quantization
        if not method:
            return
        if not self.rules.known:
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
        if key not in self._rows:
            self._rows[key] = self._chosen(built, rank, variant)
        return self._rows[key]

    def _chosen(self, built: BuiltModel, rank: Rank, variant: Variant) -> tuple[LayerKernel, ...]:
        spec, capability = self.given.spec, rank.capability
        if capability not in self._seen:
            self._seen[capability] = refused_before(self.given.facts, self.engine, capability)
        disabled = frozenset(self.env.get("VLLM_DISABLED_KERNELS", "").split(",")) | frozenset(
            variant.disabled
        )
        return layer_kernels(
            built.linears,
            self.rules,
            rank.computing,
            disabled - {""},
            variant.backend("linear-backend"),
            experts=self.shared.experts(online=bool(variant.quantization and spec.quant is None)),
            moe_backend=variant.backend("moe-backend"),
            variables=frozenset(
                name for name, value in self.env.items() if value.lower() in ("1", "true")
            ),
            seen=self._seen[capability],
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
        """The backend of attention layers, on one rank. `drafts`: of the layers that draft, the
        model's own or a drafter's."""
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
            spec, args = self.given.spec, {**dict(variant.backends), **self.canonical}
            if drafts:
                rows = self.rules.drafter_attention(groups, rank, spec, self.drafter, args)
            else:
                rows = self.rules.layer_attention(groups, rank, spec, args, gpu_bytes)
            self._backends[key] = rows
        return self._backends[key]

    def _environment(self, variant: Variant) -> dict[str, str]:
        env = self.env
        if variant.layers:
            env = {**env, STAGES[self.engine.kind]: ",".join(map(str, variant.layers))}
        if not variant.disabled:
            return env
        users = [name for name in env.get("VLLM_DISABLED_KERNELS", "").split(",") if name]
        return {**env, "VLLM_DISABLED_KERNELS": ",".join([*users, *variant.disabled])}

    def _judged(self, plan: Plan) -> Plan:
        """The plan as it is safe to start, with what facts say of it. Raises Refused for a plan
        that failed here before."""
        evidence = Evidence(plan.kernels, plan.attention, plan.memory)
        try:
            plan = without_media(self.given, self.engine, self.rules, plan)
        except Refused as refusal:
            raise refusal.knowing(evidence) from None
        # A fingerprint costs more than a look at whether there is any to compare.
        known = (
            self.given.facts.about_plan(plan.fingerprint) if self.given.facts.about_plans else ()
        )
        if bad := next((fact for fact in known if fact.kind == "plan_failed"), None):
            raise Refused(
                "known_bad",
                f"this exact plan failed here before: {bad.source}",
                "fact",
                evidence=evidence,
            )
        # With another driver or image nothing is proved; facts of another digest are not among
        # these.
        proof = any(
            fact.kind == "plan_verified" and _without_digest(fact) == plan.under for fact in known
        )
        plan = measured(plan, known)
        return plan.evolve(grade="verified") if proof else plan


def _without_digest(fact: Fact) -> dict[str, str]:
    return {name: value for name, value in fact.under.items() if name != "digest"}


def rejection(engine: Engine, variant: Variant, refusal: Refused) -> Rejected:
    evidence = refusal.evidence
    return Rejected(
        engine=EngineRef(kind=engine.kind, version=engine.version, image=engine.image),
        tensor_parallel=variant.tp,
        pipeline_parallel=variant.pp,
        verdict=refusal.verdict,
        layer=refusal.layer,
        reasons=(str(refusal),),
        source=refusal.source,
        kernels=evidence.kernels,
        attention=evidence.attention,
        memory=evidence.memory,
        question=refusal.question,
    )
