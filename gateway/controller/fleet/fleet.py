"""All models in memory, and the use of GPUs, ports and names that follows from them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence

from gateway.controller.decisions.eviction import CopyId
from gateway.controller.fleet.engine_ports import engine_ports
from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.fleet.planning_context import PlanningContext
from gateway.controller.fleet.replica_promises import (
    combined_bytes,
    last_caps,
    list_attempts,
    live_promises,
    outlived_plan,
    restorable_plan,
)
from gateway.diagnosis.ending import is_environmental
from gateway.domain import Attempt, Failure, Offer, Plan, Promise, Sharing, Wish
from gateway.domain.value import MAX_BYTES
from gateway.errors import Conflict, no_model_error
from gateway.planner.sharing.leaving import EvictionCandidate, leave_offers
from gateway.planner.sharing.offers import gift_bytes
from gateway.planner.sharing.promised_bytes import sum_promises
from gateway.planner.sharing.surplus import current_cap, partial_offer, surplus_offers
from gateway.planner.starts import EnginePhase, PlacedEngine, shape

# States of a replica that is not started before somebody changes something.
_FAILED_STATES = ("no_plan", "quarantined")


class Fleet:
    """All models in memory, with their use of GPUs, ports and names.

    `models` is by name. Only the loop and its effects change it.
    """

    def __init__(self, keep_alive: float = -1.0) -> None:
        """`keep_alive`, in seconds, holds for models without their own."""
        self.models: dict[str, ManagedModel] = {}
        self._keep_alive = keep_alive
        self.set_apart: frozenset[str] = frozenset()
        """UUIDs of GPUs that are being measured: nothing is started on them."""
        self.eviction_order: Sequence[CopyId] = ()
        """The copies that may be evicted for another model, first to last."""
        self.unasked_models: Collection[str] = ()
        """The models without requests now."""

    def add_model(self, model: ManagedModel) -> ManagedModel:
        """Add a new model, with one replica for each that its wish asks for."""
        model.replicas = [
            ReplicaState(model.wish.name, index)
            for index in range((model.wish.least_copies or 1) if model.wish.source else 0)
        ]
        self.models[model.wish.name] = model
        return model

    def model(self, name: str) -> ManagedModel:
        """The model of this name. Raises NotFound."""
        model = self.models.get(name)
        if model is None:
            names = {
                alias: known_model.wish.name
                for known_model in self.models.values()
                for alias in (known_model.wish.name, *known_model.wish.aliases)
            }
            raise no_model_error(name, names)
        return model

    def replicas(self) -> Iterator[ReplicaState]:
        for model in self.models.values():
            yield from model.all_replicas

    def schedule_replanning(self, names: Collection[str] | None = None) -> None:
        """Let replicas without a plan look again, as memory or GPUs became free.

        names: the models whose inputs changed; None: all models. Replicas that wait for other
        models look again once all have given. A plan that is made meanwhile rests on the memory
        before.
        """
        for replica in self.replicas():
            if names is not None and replica.model not in names:
                continue
            replica.planning.is_outdated = True
            if not replica.planning.awaited_offers and replica.planning.blocked_reason is not None:
                replica.planning.blocked_reason = None
                replica.planning.looks_again = True

    def forget_failed_plans(self) -> None:
        """Let all replicas without a plan look again, whatever their last plan rested on."""
        for replica in self.replicas():
            replica.planning.failed_planning = None
        self.schedule_replanning()

    def placed_attempts(self) -> tuple[tuple[object, ...], ...]:
        """The engines that have memory now, and their wishes: another value may make room."""
        return tuple(
            (name, model.generation, model.is_deleting, attempt.id, attempt.asleep is not None)
            for name, model in self.models.items()
            for replica in model.all_replicas
            if (attempt := replica.attempt) is not None
        )

    def instance_names(self) -> set[str]:
        """Instances of every attempt that may still have an engine.

        Earlier attempts of a serving replica have none.
        """
        return {
            attempt.instance_name
            for replica in self.replicas()
            for attempt in replica.attempts
            if attempt is replica.attempt
            or replica.attempt is None
            or replica.attempt.state != "ready"
        }

    def planning_context(
        self, model: ManagedModel, requester: ReplicaState, *, is_in_place: bool = False
    ) -> PlanningContext:
        """The input of the planner for a replica now. `is_in_place`: a trial is planned in the
        place of the serving engine."""
        wish = model.wish_of(requester)
        promised_bytes = self.bytes_promised_to_others(requester)
        # A trial next to the serving engine takes nothing from others, as that would last for the
        # whole change.
        is_trial = requester is model.trial and not is_in_place
        if is_in_place:
            replaced_bytes = sum_promises(
                live_promises(
                    replica for replica in model.replicas if replica.index == requester.index
                )
            )
            promised_bytes = {
                uuid: size - replaced_bytes.get(uuid, 0) for uuid, size in promised_bytes.items()
            }
        sharing = self.sharing(model, wish, requester)
        restorable = restorable_plan(model, requester, sharing.cap)
        sibling_plan = _sibling_plan(model, requester)
        if sibling_plan is not None:
            # A second copy may only evict others, not shrink them. One for the load does neither:
            # room for it is made by `gateway.controller.decisions.copies`.
            may_evict = model.serving and not is_trial and not model.is_for_load(requester)
            offers = [offer for offer in sharing.offers if may_evict and offer.kind != "surplus"]
            sharing = sharing._replace(offers=tuple(offers), plan_to_restore=restorable)
            wish = wish.evolve(replicas=1, copies=None, **_copy_size(wish, sibling_plan))
            return PlanningContext(wish, promised_bytes, sharing, is_copy=True)
        copy_ids = [
            (name, replica.index)
            for name, neighbour in self.models.items()
            for replica in reversed(neighbour.replicas)
        ]
        if_asked = (
            () if model.has_pending_changes else tuple(self._eviction_offers(model, copy_ids))
        )
        sharing = (
            sharing._replace(offers=())
            if is_trial
            else sharing._replace(plan_to_restore=restorable)
        )
        return PlanningContext(
            self.wish_beside_others(wish), promised_bytes, sharing, offers_on_request=if_asked
        )

    def sharing(
        self, requester: ManagedModel | None, wish: Wish, replica: ReplicaState | None = None
    ) -> Sharing:
        """How a replica, or a model that is not added yet, shares the GPUs with the others.

        `wish` is the one that it would be planned by.
        """
        held_bytes = self._bytes_of_others(requester)
        neighbours = {name: self.models[name] for name in held_bytes}
        pinned_names = {name for name, model in neighbours.items() if model.wish.policy.pinned}
        promises = tuple(
            Promise(model=name, bytes_by_gpu=given_bytes, is_pinned=name in pinned_names)
            for name, given_bytes in sorted(held_bytes.items())
            if given_bytes
        )
        givers = (
            (model, index) for model in neighbours.values() for index in range(len(model.replicas))
        )
        surplus = [
            (position, offer)
            for model, index in givers
            for position, offer in enumerate(self._surplus(model, index))
        ]
        # Replicas that give most come first, so that few have to give. The second offer of a copy
        # follows after the first offers of all copies.
        surplus.sort(key=lambda pair: (pair[0], -sum(pair[1].bytes_by_gpu.values())))
        caps = {name: last_caps(model) for name, model in neighbours.items()}
        may = [*self.evictable_copies(requester)]
        if requester is not None:
            requester.evictable_copies_at_last_plan = frozenset(may)
        evictions = self._eviction_offers(requester, may)
        past = list_attempts(requester, replica) if requester is not None else []
        former_gpus = past[-1].plan.gpus if past else ()
        return Sharing(
            current_cap(past, caps),
            (*(offer for _, offer in surplus), *evictions),
            promises,
            former_gpus,
            self.eviction_risk(wish),
        )

    def _bytes_of_others(self, requester: ManagedModel | None) -> dict[str, dict[str, int]]:
        """Bytes per GPU, and of RAM, that each other model uses. Models being removed are left
        out."""
        neighbours = (
            model
            for model in self.models.values()
            if model is not requester and not model.is_deleting
        )
        return {
            model.wish.name: sum_promises(self._promises(model.replicas)) for model in neighbours
        }

    def evictable_copies(self, requester: ManagedModel | None) -> Iterator[CopyId]:
        """The copies of others that may be evicted for a model now, in this order.

        Without requests there are none. A second copy evicts only models without requests.
        """
        if requester is None or (requester.needs_evictions and not requester.serving):
            yield from self.eviction_order
        elif requester.has_requests and requester.serving:
            yield from (
                copy_id for copy_id in self.eviction_order if copy_id[0] in self.unasked_models
            )

    def _eviction_offers(
        self, requester: ManagedModel | None, evictable_ids: Iterable[CopyId]
    ) -> list[Offer]:
        """The offers of others by eviction. `evictable_ids`: the copies to evict while they serve,
        in this order.

        Pinned models are never evicted.
        """
        neighbours = {
            name: model
            for name, model in self.models.items()
            if model is not requester and not model.is_deleting
        }
        pinned_names = {name for name, model in neighbours.items() if model.wish.policy.pinned}
        replicas = {
            (name, replica.index): replica
            for name, model in neighbours.items()
            for replica in model.replicas
        }
        awake_replicas = [
            replicas[copy_id]
            for copy_id in evictable_ids
            if copy_id in replicas
            and copy_id[0] not in pinned_names
            and not replicas[copy_id].is_asleep
        ]
        asleep_replicas = [
            replica
            for replica in replicas.values()
            if replica.is_asleep and replica.eviction is None
        ]
        return leave_offers(
            *(
                [leaver for leaver in map(self._leaver, group) if leaver.held_bytes]
                for group in (awake_replicas, asleep_replicas)
            )
        )

    def _leaver(self, replica: ReplicaState) -> EvictionCandidate:
        attempt = replica.attempt
        sleeps = attempt is not None and attempt.serves and attempt.plan.sleep_mode.value
        copies = len(self.models[replica.model].replicas)
        return EvictionCandidate(
            replica.model,
            replica.index,
            copies,
            sum_promises(live_promises([replica])),
            attempt if sleeps else None,
        )

    def eviction_risk(self, wish: Wish) -> str:
        """Why a model may be evicted for a while; "" if it never is."""
        if wish.policy.pinned:
            return ""
        if self.keep_alive_s(wish) >= 0:
            return "its keep_alive is limited"
        wishes = (
            model.wish
            for name, model in self.models.items()
            if name != wish.name and not model.is_deleting
        )
        limited = next(
            (
                neighbour_wish.name
                for neighbour_wish in wishes
                if neighbour_wish.source and self.keep_alive_s(neighbour_wish) >= 0
            ),
            None,
        )
        return f"it may be unloaded for {limited}" if limited else ""

    def keep_alive_s(self, wish: Wish) -> float:
        keep_alive = wish.policy.keep_alive
        return self._keep_alive if keep_alive is None else keep_alive

    def _surplus(self, model: ManagedModel, index: int) -> tuple[Offer, ...]:
        """The KV cache that a replica could give now."""
        if (
            index >= len(model.replicas)
            or model.trial is not None
            or model.has_pending_changes
            or model.replicas[index].eviction is not None
            or model.no_giving_until_s > time.monotonic()
        ):
            return ()
        attempt = model.replicas[index].attempt
        return (
            surplus_offers(attempt.plan, model.wish, index)
            if attempt is not None and attempt.asleep is None
            else ()
        )

    def combined_offer(
        self, model: ManagedModel, offer: Offer, requester: str
    ) -> tuple[Offer, set[str]]:
        """The offer that a replica makes immediately, and the models that get it.

        Each gift is a restart, so waiting models are served together as far as the gift suffices.
        The others plan again with the memory that those leave.
        """
        awaited_offers = (
            (replica.model, awaited_offer)
            for replica in self.replicas()
            for awaited_offer in replica.planning.awaited_offers
        )
        waiting_offers = sorted(
            (
                (name, awaited_offer)
                for name, awaited_offer in awaited_offers
                if (awaited_offer.model, awaited_offer.replica, awaited_offer.kind)
                == (model.wish.name, offer.replica, "surplus")
            ),
            key=lambda name_and_offer: name_and_offer[0] != requester,
        )
        largest_offer = next(
            (
                surplus
                for surplus in self._surplus(model, offer.replica)
                if surplus.keeps <= offer.keeps
            ),
            offer,
        )
        chosen_offers: list[Offer] = []
        names = {requester}
        for name, awaited_offer in waiting_offers:
            if not chosen_offers or combined_bytes([*chosen_offers, awaited_offer]) <= max(
                largest_offer.bytes_by_gpu.values()
            ):
                chosen_offers.append(awaited_offer)
                names.add(name)
        return partial_offer(largest_offer, combined_bytes(chosen_offers or [offer])), names

    def wish_beside_others(self, wish: Wish) -> Wish:
        """The wish on a shared machine: few GPUs, unless the wish names them."""
        has_neighbours = any(
            model.wish.source and name != wish.name and not model.is_deleting
            for name, model in self.models.items()
        )
        return wish.evolve(gpus="few") if has_neighbours and wish.gpus is None else wish

    def bytes_promised_to_others(self, requester: ReplicaState | None) -> dict[str, int]:
        """Bytes of each GPU and of RAM that are promised to others than the requester.

        Live attempts have promises, and so have engines that will be restored.
        """
        replicas = [replica for replica in self.replicas() if replica is not requester]
        return sum_promises([*self._promises_set_apart(), *self._promises(replicas)])

    def bytes_promised_to_other_models(self, model: ManagedModel) -> dict[str, int]:
        """Bytes per GPU, and of RAM, that are taken for models other than this one."""
        replicas = [replica for replica in self.replicas() if replica.model != model.wish.name]
        return sum_promises([*self._promises_set_apart(), *self._promises(replicas)])

    def _promises_set_apart(self) -> Iterator[tuple[str, int]]:
        return ((uuid, MAX_BYTES) for uuid in self.set_apart)

    def _promises(self, replicas: Collection[ReplicaState]) -> Iterator[tuple[str, int]]:
        """The bytes per device that the replicas may use now, or once they are restored."""
        yield from live_promises(replicas)
        for replica in replicas:
            yield from self._restored_promises(replica)

    def _restored_promises(self, replica: ReplicaState) -> Iterator[tuple[str, int]]:
        """The bytes per device of a replica that will be restored, or of its gifts.

        Such replicas served until something outside of their plans ended them. So the first start
        after a power cut leaves the others their memory.
        """
        model = self.models[replica.model]
        must_stay = not (
            model.is_stopped
            or model.load_block_reason
            or replica.eviction
            or model.is_deleting
            or model.trial is replica
        )
        comes = (
            replica.attempt is None
            and replica.planning.blocked_reason is None
            and replica.status.state != "quarantined"
        )
        if must_stay and comes and (plan := outlived_plan(replica)) is not None:
            planned_bytes = plan.memory.promised_bytes
            yield from plan.promises(lambda _: planned_bytes)
        elif must_stay and replica.attempt is None:
            awaited_gifts = (
                offer
                for offer in replica.planning.awaited_offers
                if self.has_given(offer, replica.model)
            )
            yield from gift_bytes((*replica.planning.received_offers, *awaited_gifts)).items()

    def has_given(self, offer: Offer, requester: str) -> bool:
        """Whether a replica has given KV cache to this requester. A requester that came later gets
        nothing."""
        giver = self.models.get(offer.model)
        if offer.kind != "surplus" or giver is None or offer.replica >= len(giver.replicas):
            return False
        replica = giver.replicas[offer.replica]
        cap = replica.attempt.plan.cap if replica.attempt is not None else None
        return cap is not None and cap.bytes <= offer.keeps and requester in replica.cache_receivers

    def held_bytes(
        self, model: ManagedModel, replica: ReplicaState | None = None
    ) -> dict[str, int]:
        """Bytes per GPU that live attempts of the model may use; of one replica, or of all."""
        return sum_promises(live_promises([replica] if replica is not None else model.replicas))

    def live_bytes(self) -> dict[str, int]:
        """Bytes per GPU that live attempts of all models may use."""
        return sum_promises(live_promises(self.replicas()))

    def holders(
        self, running_names: Collection[str], begun_names: set[str], now: float
    ) -> Iterator[PlacedEngine]:
        """See `Engines.holders` of the start gate."""
        begun_names &= {
            replica.attempt.instance_name
            for replica in self.replicas()
            if replica.attempt is not None
        }
        for replica in self.replicas():
            for attempt in replica.attempts:
                name = attempt.instance_name
                gpus = frozenset(attempt.plan.gpus)
                if name in running_names or name in begun_names:
                    model = self.models[replica.model]
                    ending = (
                        model.is_deleting
                        or replica.eviction is not None
                        or attempt is not replica.attempt
                    )
                    engine_phase: EnginePhase = "stopping" if ending else replica.engine_phase
                    measures = replica.measures
                    proved = attempt.state == "ready"
                    yield PlacedEngine(
                        instance=name,
                        model=replica.model,
                        gpus=gpus,
                        shape=shape(attempt.plan),
                        phase=engine_phase,
                        phase_since=now,
                        is_measuring=measures,
                        is_proved=proved,
                    )

    def copy_failure(self, attempt: Attempt) -> Failure | None:
        """See `Engines.copy_failure` of the start gate."""
        model = self.models.get(attempt.model)
        for sibling in (
            past_attempt
            for replica in (model.replicas if model else ())
            for past_attempt in replica.history
        ):
            is_later = (sibling.ended_at or 0) > attempt.started_at
            if (
                is_later
                and sibling.failure
                and not is_environmental(sibling.failure)
                and shape(sibling.plan) == shape(attempt.plan)
            ):
                return sibling.failure
        return None

    def users(self) -> dict[str, list[str]]:
        """The names of models that use each GPU, by its UUID."""
        users: dict[str, list[str]] = {}
        for replica in self.replicas():
            for uuid in replica.attempt.plan.gpus if replica.attempt is not None else ():
                users.setdefault(uuid, []).append(replica.model)
        return users

    def ports(self) -> set[int]:
        """The ports of all starts that are recorded and not ended."""
        attempts = [replica.attempt for replica in self.replicas() if replica.attempt is not None]
        return {port for attempt in attempts for port in engine_ports(attempt.plan, attempt.port)}

    def check_new(self, wish: Wish) -> None:
        """Check that a new model can have the names of the wish. Raises Conflict."""
        if (model := self.models.get(wish.name)) is not None:
            has_failed = bool(model.replicas) and all(
                replica.status.state in _FAILED_STATES for replica in model.replicas
            )
            raise Conflict.name_error(
                wish.name, is_leaving=model.is_deleting, has_failed=has_failed
            )
        self.check_names(wish)

    def check_names(self, wish: Wish) -> None:
        """Check that no name or alias of the wish belongs to another model. Raises Conflict."""
        wishes = [model.wish for model in self.models.values()]
        wishes += [
            model.change.wish
            for model in self.models.values()
            if model.change is not None and not model.change.refusal_text
        ]
        owners = {name: other_wish.name for other_wish in wishes for name in names(other_wish)}
        wish_names = names(wish)
        if len(set(wish_names)) < len(wish_names):
            raise Conflict(
                f"Two of these names are equal: {', '.join(wish_names)}.",
                hint="Give each name, alias and adapter a different name.",
            )
        for name in wish_names:
            if owners.get(name, wish.name) != wish.name:
                raise Conflict(
                    f"{name} is already a name of the model {owners[name]}.",
                    hint="Choose another name.",
                )


def names(wish: Wish) -> tuple[str, ...]:
    """All names under which clients can call the model."""
    return wish.name, *wish.aliases, *wish.loras


def _sibling_plan(model: ManagedModel, requester: ReplicaState) -> Plan | None:
    """The plan of another copy by the same wish."""
    siblings = (
        replica.attempt
        for replica in model.replicas
        if replica is not requester and replica.generation == requester.generation
    )
    return next((attempt.plan for attempt in siblings if attempt is not None), None)


def _copy_size(wish: Wish, sibling_plan: Plan) -> dict[str, int]:
    """The size of a further copy, as a part of its wish: as many GPUs as the first one has."""
    if isinstance(wish.gpus, tuple):
        return {
            "tensor_parallel": sibling_plan.tensor_parallel.value,
            "data_parallel": sibling_plan.data_parallel.value,
        }
    return {"gpus": max(1, len(sibling_plan.gpus))}
