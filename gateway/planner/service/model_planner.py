"""The one way from a request to a decision, for gateway, command line and check.

    model = WishedModel.read(wish, hub)
    planning = ModelPlanner(profiles, hub, engine_env).prepare(request, model, facts, startable)
    planning.decision()

read the model -> keep the facts that hold here -> divide engines into those that can start and the
others -> decide -> explain.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

from gateway.diagnosis.facts.known_facts import KnownFacts
from gateway.diagnosis.facts.scope import valid_facts
from gateway.domain import (
    Adapter,
    Decision,
    Engine,
    Fact,
    Hardware,
    ModelSpec,
    Plan,
    Rival,
    Wish,
)
from gateway.domain.plan_request import PlanRequest, RunningPlan
from gateway.domain.record import FrozenRecord
from gateway.engines.common.planning_input import PlanningInput
from gateway.engines.common.speed.correction import correct_by_measurement
from gateway.errors import FitserveError, NeedsRemoteCode
from gateway.models.adapter import check_base
from gateway.models.catalog.catalog import (
    CheckpointFiles,
    build_spec,
    check_weights,
    gather,
    load,
    load_adapter,
    load_drafter,
)
from gateway.models.catalog.hub import Hub
from gateway.models.drafter import Drafter
from gateway.planner.comparison import gpu_choice
from gateway.planner.decide import decide
from gateway.planner.parallel import drop_engines, free_bytes_by_gpu
from gateway.planner.refusal_words import held_by, refusal_lines
from gateway.planner.service.alternatives import UnplannedModel, add_alternatives
from gateway.planner.service.startable import Startable
from gateway.planner.sizes import needed_tokens, wanted_context
from gateway.profiles.profiles import Profiles


class WishedModel(NamedTuple):
    """The model of a wish as its files describe it, with its drafter and adapters."""

    files: CheckpointFiles
    spec: ModelSpec
    drafter: Drafter | None
    adapters: tuple[Adapter, ...]

    @classmethod
    def read(cls, wish: Wish, hub: Hub) -> Self:
        """hub: the Hub client, pinned to the commits of the wish. Raises BadModel."""
        files = gather(
            wish.source or "",
            wish.revision,
            allow_remote_code=wish.policy.allow_remote_code,
            hub=hub,
        )
        spec = build_spec(files)
        drafter = load_drafter(wish.drafter, hub=hub) if wish.drafter else None
        adapters = tuple(load_adapter(name, source, hub=hub) for name, source in wish.loras.items())
        for adapter in adapters:
            check_base(adapter, spec)
        return cls(files, spec, drafter, adapters)


class ModelPlanner:
    """Plans by profiles, with the variables that the settings give to all engines."""

    def __init__(self, profiles: Profiles, hub: Hub, engine_env: Mapping[str, str]) -> None:
        self.profiles = profiles
        self._hub = hub
        self._engine_env = engine_env

    def prepare(
        self,
        request: PlanRequest,
        model: WishedModel,
        facts: Iterable[Fact],
        startable: Startable | None = None,
        model_name: str = "",
    ) -> ModelPlanning:
        """The planning of this request. Raises NoPlan if no engine for the model can start.

        facts: all facts, including stale ones and those of other machines.
        startable: engine versions that may start; None for every version.
        model_name: the name of the model in messages.
        """
        wish = request.wish
        profiles = self.profiles
        spec = model.spec
        machine = request.machine or profiles.hardware(request.machine_name)
        engines, uninstalled_engines = self._split_engines(
            request, machine, startable, model_name or wish.name
        )
        if wish.chat_template is not None:
            from gateway.models.catalog.template_syntax import check  # not before there is one

            check(wish.chat_template.text, wish.chat_template.name)
        images = profiles.images | ({wish.image} if wish.image else set())
        valid = valid_facts(facts, machine.driver, images, request.pins)
        learned_facts: tuple[Fact, ...] = ()
        if request.running is not None:
            machine = drop_engines(machine, request.running.held_bytes)
            learned_facts = self._learn_from_traffic(request.running, spec, machine, valid)
            valid = _merge_facts(valid, learned_facts)
        inputs = PlanningInput(
            spec=spec,
            hardware=machine,
            wish=wish,
            facts=KnownFacts((*profiles.facts, *valid)),
            promised_bytes=request.promised_bytes,
            gpus=profiles.gpus,
            answers=dict(request.answers),
            speed_knowledge=profiles.speed_knowledge,
            parsers=profiles.parsers,
            global_env=self._engine_env,
            sharing=request.sharing._replace(plan_to_restore=None),
            adapters=model.adapters,
            drafter=model.drafter,
            hardware_name=request.machine_name or "this machine",
            key_classes=request.key_classes,
        )
        return ModelPlanning(
            profiles=profiles,
            hub=self._hub,
            request=request,
            base=inputs,
            engines=engines,
            uninstalled_engines=uninstalled_engines,
            startable=startable,
            learned_facts=learned_facts,
            facts=valid,
        )

    def _split_engines(
        self,
        request: PlanRequest,
        machine: Hardware,
        startable: Startable | None,
        model_name: str,
    ) -> tuple[list[Engine], list[Engine]]:
        """The engines to plan for, and those that an installation would add. Raises NoPlan."""
        engines = self.profiles.engines_for(machine, request.wish.engines, request.wish.image)
        # Where no engine fits the machine, all are refused by name: no installation helps.
        fitting_engines = _fitting_engines(engines, machine)
        if startable is None or (engines and not fitting_engines):
            return engines, []
        engines, uninstalled_engines = startable.split_startable(fitting_engines)
        is_optional = (
            request.include_uninstalled and not request.machine_name and uninstalled_engines
        )
        if not engines and (uninstalled_engines or startable.installed_only) and not is_optional:
            raise startable.no_engine_error(uninstalled_engines, model_name)
        return engines, uninstalled_engines

    def _learn_from_traffic(
        self,
        running_traffic: RunningPlan,
        spec: ModelSpec,
        machine: Hardware,
        facts: Sequence[Fact],
    ) -> tuple[Fact, ...]:
        """Facts from the traffic of the running plan, compared with its expected speed."""
        if not running_traffic.traffic:
            return ()
        # Only a gateway has running plans: a command does not pay for these imports.
        from gateway.engines.common.speed import client_traffic
        from gateway.engines.registry import engine_kind

        profiles = self.profiles
        engine = self.profiles.engine_in_image(running_traffic.plan.engine)
        gpu_facts = [fact for fact in facts if fact.kind == "machine_speed"]
        tables = client_traffic.ClockTables(profiles.gpus, profiles.speed_knowledge, gpu_facts)
        kind = engine_kind(engine.kind)
        clock = client_traffic.build_clock(
            plan=running_traffic.plan,
            spec=spec,
            engine=engine,
            kind=kind,
            machine=machine,
            tables=tables,
        )
        if clock is None:
            return ()
        return client_traffic.learn_from_traffic(
            running_traffic.plan, running_traffic.traffic, clock, facts, time.time()
        )


class ModelPlanning(FrozenRecord, frozen=True):
    """A request, ready for decisions. `facts` hold on this machine."""

    profiles: Profiles
    hub: Hub
    request: PlanRequest
    base: PlanningInput
    engines: Sequence[Engine]
    uninstalled_engines: Sequence[Engine]
    startable: Startable | None
    learned_facts: tuple[Fact, ...]
    facts: Sequence[Fact]

    def decide(self, engines: Sequence[Engine] | None = None, **changes: Any) -> Decision:
        """The decision with these engines, and with these fields of the PlanningInput.

        Raises BadFlag, and NeedsRemoteCode if every engine that has the architecture would run the
        repository's code.
        """
        engines = self.engines if engines is None else engines
        inputs = self.base.replace_fields(**changes)
        decision = self._decide(inputs, engines)
        verdicts = {rejection.verdict for rejection in decision.rejected}
        if (
            not decision.plans
            and "untrusted_code" in verdicts
            and verdicts <= {"untrusted_code", "unsupported_architecture"}
        ):
            raise NeedsRemoteCode.source_error(inputs.spec.source, inputs.spec.remote_code)
        return decision

    def _decide(self, inputs: PlanningInput, engines: Sequence[Engine]) -> Decision:
        rules = self.profiles.rules(engines)
        cluster = self.request.cluster
        if cluster is None:
            return decide(inputs, engines, rules)
        # Not for one machine.
        from gateway.planner.nodes.free_memory import cluster_beside
        from gateway.planner.nodes.over_nodes import decide_over_nodes

        cluster = cluster_beside(cluster, inputs.hardware)
        decision = decide_over_nodes(inputs, cluster, engines, rules)
        if self.request.machine_name:
            return decision
        from gateway.planner.service.node_starts import startable_on_nodes

        return startable_on_nodes(decision)

    def decision(self) -> Decision:
        """The whole answer to the request: with offers of other models, or with alternatives."""
        decision = self._decide_request()
        if decision.plans:
            return decision.evolve(gpu_choice=self._gpu_choice(decision.plans[0]))
        return decision.evolve(refusal=tuple(refusal_lines(decision)))

    def _gpu_choice(self, first: Plan) -> str:
        """The comparison with fewer and more GPUs as text, planned with the first plan's engine.

        "": the text is not requested, or there is no choice.
        """
        request = self.request
        wish = self.base.wish
        if not request.include_uninstalled or request.cluster is not None:
            return ""
        gpus = len(self.base.hardware.usable().gpus)
        if gpus < 2 or not first.gpus or wish.gpus not in (None, "few", "all"):
            return ""
        engine = [engine for engine in self.engines if engine.ref == str(first.engine)]
        plans_by_option = {
            value: plans[0]
            for value in ("few", "all")
            if value != wish.gpus
            and (plans := self.decide(engine, wish=wish.evolve(gpus=value)).plans)
        }
        return gpu_choice(first, gpus, plans_by_option)

    def _decide_request(self) -> Decision:
        sharing = self.base.sharing
        decision = self._decide_restoration() or self._choose_offers()
        # A holder is named only where no more than its memory is missing.
        if (
            not decision.plans
            and sharing.promises
            and self._decide_with(self.base.promised_bytes).plans
        ):
            decision = decision.evolve(holders=held_by(sharing.promises, self.base.hardware))
        lacks_device = {rejection.verdict for rejection in decision.rejected} == {"no_device"}
        if self.request.include_uninstalled or lacks_device:
            decision = self._add_alternatives(decision)
        if not self.request.include_uninstalled:
            return decision
        if self.startable is None or self.request.machine_name:
            return decision
        return self.startable.explain_engines(
            decision, self.engines, self.uninstalled_engines, self.base.wish, self.decide
        )

    def rival(self, decision: Decision) -> Rival | None:
        """A plan that should be better than the running one."""
        running_traffic = self.request.running
        facts = KnownFacts(self.facts)
        if running_traffic is None:
            return None
        from gateway.engines.common.speed.rival import rival

        plan = correct_by_measurement(
            running_traffic.plan, facts.select_plan(running_traffic.plan.fingerprint)
        )
        wish = self.base.wish
        return rival(plan, decision.plans, wish, needed_tokens(wish, self.base.spec))

    def _decide_restoration(self) -> Decision | None:
        """The decision for the plan to restore; None: there is none, or it cannot come back."""
        plan = self.request.sharing.plan_to_restore
        if plan is None:
            return None
        from gateway.planner.sharing.restore import restore_decision, wish_for_restore

        wish = wish_for_restore(self.base.wish, plan)
        try:
            engines = self.profiles.engines_for(self.base.hardware, wish.engines, wish.image)
            if self.startable is not None:
                engines, _ = self.startable.split_startable(engines)
            return restore_decision(
                self.decide(engines, wish=wish, sharing=self.request.sharing), plan
            )
        except FitserveError:
            return None  # its GPUs, or its engine, are not here any more

    def _choose_offers(self) -> Decision:
        """The decision with the fewest offers of other models that its plan needs."""
        offers = self.base.sharing.offers
        inputs = self.base
        if not offers:
            return self.decide()
        from gateway.planner.sharing.offers import decide_with_offers

        goal_context = wanted_context(inputs.spec, inputs.wish, {})
        return decide_with_offers(
            offers,
            self._decide_with,
            goal_context,
            free_bytes_by_gpu(inputs.hardware, inputs.promised_bytes),
        )

    def _decide_with(self, freed_bytes: Mapping[str, int], **changes: Any) -> Decision:
        """The decision if other models give these bytes, by GPU UUID."""
        promised_bytes = self.base.promised_bytes.items()
        return self.decide(
            hardware=drop_engines(self.base.hardware, freed_bytes),
            promised_bytes={
                uuid: count - freed_bytes.get(uuid, 0) for uuid, count in promised_bytes
            },
            **changes,
        )

    def _add_alternatives(self, decision: Decision) -> Decision:
        """The decision with other forms of the model that would fit better."""
        inputs = self.base

        def decide_form(spec: ModelSpec, wish: Wish) -> Decision:
            if wish.engines == inputs.wish.engines:
                return self.decide(spec=spec, wish=wish)
            engines = self.profiles.engines_for(inputs.hardware, wish.engines, wish.image)
            if self.startable is not None:
                # Where nothing can start, the installation comes first.
                installed_engines, uninstalled_engines = self.startable.split_startable(engines)
                engines = installed_engines or uninstalled_engines
            return self.decide(engines, spec=spec, wish=wish)

        def decide_on_empty(spec: ModelSpec, wish: Wish) -> Decision:
            return self._decide_with(inputs.promised_bytes, spec=spec, wish=wish)

        # The wish does not keep the commits of variants.
        hub = self.hub.pin_commits({})
        unplanned_model = UnplannedModel(
            inputs.spec,
            inputs.wish,
            decide_form,
            partial(load, hub=hub),
            decide_on_empty if any(inputs.promised_bytes.values()) else None,
        )
        return add_alternatives(decision, unplanned_model, hub)


def _fitting_engines(engines: Sequence[Engine], machine: Hardware) -> Sequence[Engine]:
    """The engines with a device on this machine."""
    if any(gpu.reservation_reason is None for gpu in machine.gpus):
        return engines
    return [engine for engine in engines if engine.device == "cpu"]


def check_weights_present(spec: ModelSpec, wish: Wish) -> None:
    """Raise BadModel if the engine of the wish would find no weights to load."""
    check_weights(spec, str(wish.args.get("load-format", wish.args.get("load_format", ""))))


def _merge_facts(facts: Iterable[Fact], newer_facts: Sequence[Fact]) -> list[Fact]:
    """Facts of which newer ones replace those about the same thing."""
    replaced_keys = {_fact_key(fact) for fact in newer_facts}
    return [fact for fact in facts if _fact_key(fact) not in replaced_keys] + [*newer_facts]


def _fact_key(fact: Fact) -> tuple[str, tuple[tuple[str, str], ...]]:
    return fact.kind, tuple(sorted(fact.scope.items()))
