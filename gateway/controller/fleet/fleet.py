"""All models of the gateway as the loop holds them in memory, and what follows from all of them:
who has what of the GPUs, claims, ports."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence

from gateway.controller.decisions.eviction import Place
from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState
from gateway.controller.fleet.planning_context import PlanningContext
from gateway.diagnosis.ending import environmental
from gateway.domain import Attempt, Cap, Failure, Holding, Offer, Plan, Sharing, Wish
from gateway.domain.value import MOST_BYTES
from gateway.errors import Conflict, no_model
from gateway.planner.sharing.enough import reserved
from gateway.planner.sharing.leaving import Leaver, leaving
from gateway.planner.sharing.restore import again, outlived
from gateway.planner.sharing.surplus import kept, last_cap, part, surplus
from gateway.planner.starts import Holder, Stage, shape


class Fleet:
    """`models` is by name; only the loop and its effects change it."""

    def __init__(self, keep_alive: float = -1.0) -> None:
        """keep_alive: in seconds, of a model that has none of its own."""
        self.models: dict[str, ManagedModel] = {}
        self._keep_alive = keep_alive
        self.set_apart: frozenset[str] = frozenset()
        """UUIDs of GPUs on which nothing is started now: they are being measured."""
        self.eviction_order: Sequence[Place] = ()
        """The copies that could leave for another model, in the order in which it is asked of
        them."""
        self.unasked: Collection[str] = ()
        """The models that nobody asks now."""

    def admit(self, model: ManagedModel) -> ManagedModel:
        """Take a new model in, with a replica for each that is wished for."""
        model.replicas = [
            ReplicaState(model.wish.name, index)
            for index in range((model.wish.replicas or 1) if model.wish.source else 0)
        ]
        self.models[model.wish.name] = model
        return model

    def model(self, name: str) -> ManagedModel:
        """By its name. Raises NotFound."""
        model = self.models.get(name)
        if model is None:
            names = {
                known: one.wish.name
                for one in self.models.values()
                for known in (one.wish.name, *one.wish.aliases)
            }
            raise no_model(name, names)
        return model

    def replicas(self) -> Iterator[ReplicaState]:
        for model in self.models.values():
            yield from model.all_replicas

    def unblock(self) -> None:
        """Something of the machine became free: who found no plan looks again. Who waits for others
        hears of them when all have given."""
        for replica in self.replicas():
            if not replica.takes and replica.blocked is not None:
                replica.blocked, replica.looks_again = None, True

    def instance_names(self) -> set[str]:
        """Of every attempt that may still have an engine: where a replica serves, what served
        before it has none."""
        return {
            attempt.instance_name
            for replica in self.replicas()
            for attempt in replica.attempts
            if attempt is replica.attempt
            or replica.attempt is None
            or replica.attempt.state != "ready"
        }

    def planning_context(
        self, model: ManagedModel, requester: ReplicaState, *, instead: bool = False
    ) -> PlanningContext:
        """What a replica is planned with now. instead: what is tried is planned in the place of
        what serves."""
        wish, claims = model.wish_of(requester), self.claims(requester)
        # Beside what serves nothing is asked of others: that would be for as long as a change
        # takes.
        aside = requester is model.trial and not instead
        if instead:
            replaced = _promised(
                (one for one in model.replicas if one.index == requester.index), {}
            )
            claims = {uuid: size - replaced.get(uuid, 0) for uuid, size in claims.items()}
        alike = (
            one
            for one in model.replicas
            if one is not requester and one.generation == requester.generation
        )
        like = next((one.attempt.plan for one in alike if one.attempt is not None), None)
        if like is None:
            sharing = self.sharing(model, wish, requester)
            every = [
                (name, one.index)
                for name, other in self.models.items()
                for one in reversed(other.replicas)
            ]
            if_asked = () if model.unsettled else tuple(self._eviction_offers(model, every))
            sharing = (
                sharing._replace(offers=())
                if aside
                else sharing._replace(again=_again(model, requester, sharing.cap))
            )
            return PlanningContext(
                self.wish_beside_others(wish), claims, sharing, if_asked=if_asked
            )
        # Copies are alike: each takes as many GPUs as the first.
        named = isinstance(wish.gpus, tuple)
        size = (
            {"tensor_parallel": like.tensor_parallel.value}
            if named
            else {"gpus": max(1, len(like.gpus))}
        )
        sharing = self.sharing(model, wish, requester)
        # For one more copy of what serves others leave at most.
        offers = (
            tuple(one for one in sharing.offers if one.how != "surplus")
            if model.serving and not aside
            else ()
        )
        sharing = sharing._replace(offers=offers, again=_again(model, requester, sharing.cap))
        return PlanningContext(wish.evolve(replicas=1, **size), claims, sharing, copy=True)

    def sharing(
        self, requester: ManagedModel | None, wish: Wish, replica: ReplicaState | None = None
    ) -> Sharing:
        """How a replica of a model, or a model that is not here yet, shares the GPUs with the
        others. wish: that it would be planned by."""
        held = self._held_by_others(requester)
        others = {name: self.models[name] for name in held}
        pinned = {name for name, model in others.items() if model.wish.policy.pinned}
        holders = tuple(
            Holding(model=name, gives=gives, pinned=name in pinned)
            for name, gives in sorted(held.items())
            if gives
        )
        givers = (
            (model, index) for model in others.values() for index in range(len(model.replicas))
        )
        found = [
            (place, offer)
            for model, index in givers
            for place, offer in enumerate(self._surplus(model, index))
        ]
        # First of those that give most, so that few are asked; the second of each copy only where
        # the first of all are too little.
        found.sort(key=lambda one: (one[0], -sum(one[1].gives.values())))
        caps = {name: _last_caps(model) for name, model in others.items()}
        may = self.evictable_copies(requester)
        if requester is not None:
            requester.offered = frozenset(may)
        leaves = self._eviction_offers(requester, may)
        past = _attempts(requester, replica) if requester is not None else []
        home = past[-1].plan.gpus if past else ()
        return Sharing(
            kept(past, caps),
            (*(offer for _, offer in found), *leaves),
            holders,
            home,
            self.eviction_risk(wish),
        )

    def _held_by_others(self, requester: ManagedModel | None) -> dict[str, dict[str, int]]:
        """What each of the other models has of the GPUs, and of RAM; those that are being removed
        are not asked for any of it."""
        others = (
            model for model in self.models.values() if model is not requester and not model.deleting
        )
        return {
            model.wish.name: self._with_returning(model.replicas, _promised(model.replicas, {}))
            for model in others
        }

    def evictable_copies(self, requester: ManagedModel | None) -> list[Place]:
        """The copies of others that could leave for a model now: none where nobody asks for it, and
        for one more copy of what serves only those that
        nobody asks."""
        if requester is None:
            return [*self.eviction_order]
        if not requester.serving:
            return [*self.eviction_order] if requester.asks else []
        return (
            [place for place in self.eviction_order if place[0] in self.unasked]
            if requester.has_requests
            else []
        )

    def _eviction_offers(self, requester: ManagedModel | None, may: Iterable[Place]) -> list[Offer]:
        """What the others give by leaving. may: the copies that leave while they serve, in this
        order; who is pinned never does."""
        others = {
            name: model
            for name, model in self.models.items()
            if model is not requester and not model.deleting
        }
        pinned = {name for name, model in others.items() if model.wish.policy.pinned}
        known = {(name, one.index): one for name, model in others.items() for one in model.replicas}
        awake = [
            known[place]
            for place in may
            if place in known and place[0] not in pinned and not known[place].asleep
        ]
        asleep = [one for one in known.values() if one.asleep and one.leaving is None]
        return leaving(
            *([one for one in map(self._leaver, some) if one.held] for some in (awake, asleep))
        )

    def _leaver(self, replica: ReplicaState) -> Leaver:
        attempt = replica.attempt
        sleeps = attempt is not None and attempt.serves and attempt.plan.sleep_mode.value
        copies = len(self.models[replica.model].replicas)
        return Leaver(
            replica.model,
            replica.index,
            copies,
            _promised([replica], {}),
            attempt if sleeps else None,
        )

    def eviction_risk(self, wish: Wish) -> str:
        """Why a model may have to leave its GPUs for a while; "" where it does not."""
        if wish.policy.pinned:
            return ""
        if self.keep_alive_s(wish) >= 0:
            return "it does not stay loaded for ever"
        others = (
            model.wish
            for name, model in self.models.items()
            if name != wish.name and not model.deleting
        )
        other = next(
            (one.name for one in others if one.source and self.keep_alive_s(one) >= 0), None
        )
        return f"it may have to leave for {other}" if other else ""

    def keep_alive_s(self, wish: Wish) -> float:
        own = wish.policy.keep_alive
        return self._keep_alive if own is None else own

    def _surplus(self, model: ManagedModel, index: int) -> tuple[Offer, ...]:
        """What a replica of a model could give of its KV cache now."""
        if (
            index >= len(model.replicas)
            or model.trial is not None
            or model.unsettled
            or model.replicas[index].leaving is not None
            or model.keeps_until > time.monotonic()
        ):
            return ()
        attempt = model.replicas[index].attempt
        return (
            surplus(attempt.plan, model.wish, index)
            if attempt is not None and attempt.asleep is None
            else ()
        )

    def combined_offer(
        self, model: ManagedModel, take: Offer, requester: str
    ) -> tuple[Offer, set[str]]:
        """What a replica gives at once, for whom: each time it gives it is started anew, so all
        that wait for it have theirs together."""
        taken = (
            (one.model, other)
            for one in self.replicas()
            for other in one.takes
            if other.model == model.wish.name
        )
        waiting = [
            (name, other)
            for name, other in taken
            if other.replica == take.replica and other.how == "surplus"
        ]
        # What was to be had beside it was counted on by each of them.
        twice = sum(other.beside for _, other in waiting) - max(
            (other.beside for _, other in waiting), default=0
        )
        count = sum(max(other.gives.values()) for _, other in waiting) + twice
        most = next(
            (one for one in self._surplus(model, take.replica) if one.keeps <= take.keeps), take
        )
        return part(most, count), {requester, *(name for name, _ in waiting)}

    def wish_beside_others(self, wish: Wish) -> Wish:
        """The wish beside all other models: who shares a machine takes few of its GPUs, unless
        somebody says otherwise."""
        others = any(
            model.wish.source and name != wish.name and not model.deleting
            for name, model in self.models.items()
        )
        changed: Wish = wish.evolve(gpus="few") if others and wish.gpus is None else wish
        return changed

    def claims(self, requester: ReplicaState | None) -> dict[str, int]:
        """Bytes per GPU, and of RAM, that live attempts may use, and those that are to come back as
        they were, without those of the replica that asks."""
        others = [one for one in self.replicas() if one is not requester]
        return self._with_returning(
            others, _promised(others, dict.fromkeys(self.set_apart, MOST_BYTES))
        )

    def _with_returning(
        self, replicas: Iterable[ReplicaState], promised: dict[str, int]
    ) -> dict[str, int]:
        """On top of what is promised already what replicas had that served until something outside
        of their plans ended that: whoever is started
        first after a power cut leaves the others what they had. And what others gave for replicas
        that are to be planned now.
        """
        for replica in replicas:
            model = self.models[replica.model]
            here = not (
                model.stopped
                or model.hold
                or replica.leaving
                or model.deleting
                or model.trial is replica
            )
            comes = (
                replica.attempt is None
                and replica.blocked is None
                and replica.status.state != "quarantined"
            )
            if here and comes and (plan := _outlived(replica)) is not None:
                _promise(plan, promised)
            elif here and replica.attempt is None:
                given = (
                    *replica.received_offers,
                    *(take for take in replica.takes if self.has_given(take, replica.model)),
                )
                for uuid, count in reserved(given).items():
                    promised[uuid] = promised.get(uuid, 0) + count
        return promised

    def has_given(self, take: Offer, requester: str) -> bool:
        """Whether a replica has given KV cache, and for this model: whoever asked while it gave to
        another has none of that."""
        giver = self.models.get(take.model)
        if take.how != "surplus" or giver is None or take.replica >= len(giver.replicas):
            return False
        replica = giver.replicas[take.replica]
        cap = replica.attempt.plan.cap if replica.attempt is not None else None
        return cap is not None and cap.bytes <= take.keeps and requester in replica.gave_to

    def held_bytes(
        self, model: ManagedModel, replica: ReplicaState | None = None
    ) -> dict[str, int]:
        """Bytes per GPU that the model's own live attempts may use; of one replica, or of all."""
        return _promised([replica] if replica is not None else model.replicas, {})

    def holders(self, running: Collection[str], begun: set[str], now: float) -> Iterator[Holder]:
        """As the gate of starts wants it."""
        begun &= {
            replica.attempt.instance_name
            for replica in self.replicas()
            if replica.attempt is not None
        }
        for replica in self.replicas():
            for attempt in replica.attempts:
                name, gpus = attempt.instance_name, frozenset(attempt.plan.gpus)
                if name in running or name in begun:
                    model = self.models[replica.model]
                    ending = (
                        model.deleting
                        or replica.leaving is not None
                        or attempt is not replica.attempt
                    )
                    stage: Stage = "ends" if ending else replica.stage
                    measures, proved = replica.measures, attempt.state == "ready"
                    yield Holder(
                        name,
                        replica.model,
                        gpus,
                        shape(attempt.plan),
                        stage,
                        now,
                        measures=measures,
                        proved=proved,
                    )

    def copy_failure(self, attempt: Attempt) -> Failure | None:
        """As the gate of starts wants it."""
        model = self.models.get(attempt.model)
        for other in (
            one for replica in (model.replicas if model else ()) for one in replica.history
        ):
            later = (other.ended_at or 0) > attempt.started_at
            if (
                later
                and other.failure
                and not environmental(other.failure)
                and shape(other.plan) == shape(attempt.plan)
            ):
                return other.failure
        return None

    def users(self) -> dict[str, list[str]]:
        """The names of models that have a GPU, by its UUID."""
        users: dict[str, list[str]] = {}
        for replica in self.replicas():
            for uuid in replica.attempt.plan.gpus if replica.attempt is not None else ():
                users.setdefault(uuid, []).append(replica.model)
        return users

    def ports(self) -> set[int]:
        """The ports of all starts that are recorded and not ended."""
        return {replica.attempt.port for replica in self.replicas() if replica.attempt is not None}

    def check_names(self, wish: Wish) -> None:
        """Raises Conflict where a name or an alias of a wish is a name of another model."""
        wishes = [one.wish for one in self.models.values()]
        wishes += [
            one.change.wish
            for one in self.models.values()
            if one.change is not None and not one.change.refused
        ]
        taken = {name: other.name for other in wishes for name in names(other)}
        own = names(wish)
        if len(set(own)) < len(own):
            raise Conflict(
                f"A name is given twice, of {', '.join(own)}.",
                hint="Names, aliases and adapters are called differently.",
            )
        for name in own:
            if taken.get(name, wish.name) != wish.name:
                raise Conflict(
                    f"{name} is a name of the model {taken[name]}.", hint="Choose another one."
                )


def _attempts(model: ManagedModel, replica: ReplicaState | None = None) -> list[Attempt]:
    """All starts of the model, or of one of its replicas, by its wanted wish, oldest first."""
    replicas = [replica] if replica is not None and replica is not model.trial else model.replicas
    known = (
        one for replica in replicas for one in replica.attempts if one.generation == model.wanted
    )
    return sorted(known, key=lambda attempt: attempt.id)


def _outlived(replica: ReplicaState) -> Plan | None:
    return outlived([one for one in replica.history if one.generation == replica.generation])


def _again(model: ManagedModel, replica: ReplicaState, cap: Cap | None) -> Plan | None:
    """What is tried beside is another plan, and so is what takes the place of one that serves."""
    serves = replica.attempt is not None and replica.attempt.state == "ready"
    plan = _outlived(replica) if not serves and replica is not model.trial else None
    return again(plan, cap) if plan is not None else None


def _last_caps(model: ManagedModel) -> list[Cap]:
    """Of each copy: they have different neighbours."""
    found = (last_cap(_attempts(model, replica)) for replica in model.replicas)
    return [cap for cap in found if cap is not None]


def names(wish: Wish) -> tuple[str, ...]:
    """All names by which clients may ask for something of the model."""
    return wish.name, *wish.aliases, *wish.loras


def _promised(replicas: Iterable[ReplicaState], promised: dict[str, int]) -> dict[str, int]:
    """Bytes per GPU, and of RAM, that the live attempts of replicas may use, on top of what is
    promised already."""
    for attempt in (replica.attempt for replica in replicas if replica.attempt is not None):
        for uuid in attempt.plan.devices:
            promised[uuid] = promised.get(uuid, 0) + attempt.held(uuid)
    return promised


def _promise(plan: Plan, promised: dict[str, int]) -> None:
    for uuid in plan.devices:
        promised[uuid] = promised.get(uuid, 0) + plan.memory.promised_bytes
