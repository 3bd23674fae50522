"""All models of the gateway as the loop holds them in memory, and what follows from all of them: claims, ports, routes."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from gateway.controller.fleet.managed_model import ManagedModel, ReplicaState, route
from gateway.controller.fleet.room import Room
from gateway.core.failures.ending import environmental
from gateway.core.residence import Place
from gateway.core.sharing.again import again, outlived
from gateway.core.sharing.leaving import Leaver, leaving
from gateway.core.sharing.surplus import kept, part, surplus
from gateway.core.starts import Holder, Stage, shape
from gateway.domain import Attempt, Cap, Failure, Holding, Instance, Offer, Plan, Sharing, Wish
from gateway.domain.value import MOST_BYTES
from gateway.errors import Conflict
from gateway.routing.table import ModelRoute, RouteTable
from gateway.store.store import Store


class Fleet:
    """`models` is by name; only the loop and its effects change it."""

    def __init__(self, load_wait_s: float = 0.0, keep_alive: float = -1.0) -> None:
        """load_wait_s: how long a request waits for a model that is loaded on request. keep_alive: in seconds, of a model that has none of its own."""
        self.models: dict[str, ManagedModel] = {}
        self._load_wait_s = load_wait_s
        self._keep_alive = keep_alive
        self.set_apart: frozenset[str] = frozenset()
        """UUIDs of GPUs on which nothing is started now: they are being measured."""
        self.may_leave: Sequence[Place] = ()
        """The copies that could leave for another model, in the order in which it is asked of them."""
        self.unasked: Collection[str] = ()
        """The models that nobody asks now."""

    def load(self, store: Store) -> None:
        """Read the models and their attempts from the database."""
        history: dict[tuple[str, int], list[Attempt]] = {}
        for attempt in store.attempts():
            history.setdefault((attempt.model, attempt.replica), []).append(attempt)
        changes = store.changes()
        residences = store.residences()
        for wish, created_at, deleting, forgiven_at in store.models():
            generation, change = changes.get(wish.name, (0, None))
            model = ManagedModel(wish, created_at, deleting, forgiven_at=forgiven_at, generation=generation, change=change)
            self.models[wish.name] = model
            known = max((index + 1 for name, index in history if name == wish.name), default=1)
            own = ((index, past) for (name, index), past in history.items() if name == wish.name)
            alive = max((index + 1 for index, past in own if any(one.live for one in past)), default=0)
            for index in range(max(wish.replicas or known, alive) if wish.source else 0):
                past = history.get((wish.name, index), [])
                live = [attempt for attempt in past if attempt.live]
                replica = ReplicaState(wish.name, index, live[0] if live else None, generation=_generation(model, past))
                replica.made_room = _made_room(past)
                if len(live) > 1 and model.trial is None and live[0].generation != live[1].generation == model.wanted:
                    model.trial = ReplicaState(wish.name, index, live[1], generation=model.wanted, seeks=True)
                tried = model.trial.attempt if model.trial is not None else None
                mine = [one for one in past if one is not replica.attempt and one is not tried]
                replica.history = [_ended(store, one) if one.live else one for one in mine]
                model.replicas.append(replica)
            model.stopped, model.used_at = residences.get(wish.name, (False, 0.0))
            model.gave_way = model.on_request = not model.stopped and any(
                one.attempt is None and one.history and one.history[-1].state == "stopped" and one.history[-1].failure is None
                for one in model.replicas
            )
            for attempt in (one for replica in model.replicas for one in replica.attempts if one.started_at > forgiven_at):
                engine = attempt.plan.engine
                if engine.image and engine.digest:
                    model.pins[engine.image] = engine.digest

    def admit(self, model: ManagedModel) -> ManagedModel:
        """Take a new model in, with a replica for each that is wished for."""
        model.replicas = [
            ReplicaState(model.wish.name, index) for index in range((model.wish.replicas or 1) if model.wish.source else 0)
        ]
        self.models[model.wish.name] = model
        return model

    def replicas(self) -> Iterator[ReplicaState]:
        for model in self.models.values():
            yield from model.all_replicas

    def unblock(self) -> None:
        """Something of the machine became free: who found no plan looks again. Who waits for others hears of them when all have given."""
        for replica in self.replicas():
            if not replica.takes and replica.blocked is not None:
                replica.blocked, replica.looks_again = None, True

    def instance_names(self) -> set[str]:
        """Of every attempt that may still have an engine: where a replica serves, what served before it has none."""
        return {
            attempt.instance_name
            for replica in self.replicas()
            for attempt in replica.attempts
            if attempt is replica.attempt or replica.attempt is None or replica.attempt.state != "ready"
        }

    def room(self, model: ManagedModel, asking: ReplicaState, *, instead: bool = False) -> Room:
        """What a replica is planned with now. instead: what is tried is planned in the place of what serves."""
        wish, claims = model.wish_of(asking), self.claims(asking)
        # Beside what serves nothing is asked of others: that would be for as long as a change takes.
        aside = asking is model.trial and not instead
        if instead:
            replaced = _promised((one for one in model.replicas if one.index == asking.index), {})
            claims = {uuid: size - replaced.get(uuid, 0) for uuid, size in claims.items()}
        alike = (one for one in model.replicas if one is not asking and one.generation == asking.generation)
        like = next((one.attempt.plan for one in alike if one.attempt is not None), None)
        if like is None:
            sharing = self.sharing(model, wish, asking)
            every = [(name, one.index) for name, other in self.models.items() for one in reversed(other.replicas)]
            if_asked = () if model.unsettled else tuple(self._leaves(model, every))
            sharing = sharing._replace(offers=()) if aside else sharing._replace(again=_again(model, asking, sharing.cap))
            return Room(self.beside(wish), claims, sharing, if_asked=if_asked)
        # Copies are alike: each takes as many GPUs as the first.
        named = isinstance(wish.gpus, tuple)
        size = {"tensor_parallel": like.tensor_parallel.value} if named else {"gpus": max(1, len(like.gpus))}
        sharing = self.sharing(model, wish, asking)
        # For one more copy of what serves others leave at most.
        offers = tuple(one for one in sharing.offers if one.how != "surplus") if model.serving and not aside else ()
        sharing = sharing._replace(offers=offers, again=_again(model, asking, sharing.cap))
        return Room(wish.evolve(replicas=1, **size), claims, sharing, copy=True)

    def sharing(self, asking: ManagedModel | None, wish: Wish, replica: ReplicaState | None = None) -> Sharing:
        """How a replica of a model, or a model that is not here yet, shares the GPUs with the others. wish: that it would be planned by."""
        held = self._held(asking)
        others = {name: self.models[name] for name in held}
        pinned = {name for name, model in others.items() if model.wish.policy.pinned}
        holders = tuple(
            Holding(model=name, gives=gives, pinned=name in pinned) for name, gives in sorted(held.items()) if gives
        )
        givers = ((model, index) for model in others.values() for index in range(len(model.replicas)))
        found = [(place, offer) for model, index in givers for place, offer in enumerate(self._surplus(model, index))]
        # First of those that give most, so that few are asked; the second of each copy only where the first of all are too little.
        found.sort(key=lambda one: (one[0], -sum(one[1].gives.values())))
        caps = {name: _last_cap(model) for name, model in others.items()}
        may = self.leavers(asking)
        if asking is not None:
            asking.offered = frozenset(may)
        leaves = self._leaves(asking, may)
        past = _attempts(asking, replica) if asking is not None else []
        home = past[-1].plan.gpus if past else ()
        return Sharing(kept(past, caps), (*(offer for _, offer in found), *leaves), holders, home, self.leaves(wish))

    def _held(self, asking: ManagedModel | None) -> dict[str, dict[str, int]]:
        """What each of the other models has of the GPUs, and of RAM; those that are being removed are not asked for any of it."""
        others = (model for model in self.models.values() if model is not asking and not model.deleting)
        return {model.wish.name: self._returning(model.replicas, _promised(model.replicas, {})) for model in others}

    def leavers(self, asking: ManagedModel | None) -> list[Place]:
        """The copies of others that could leave for a model now: none where nobody asks for it, and for one more copy of what serves only those that
        nobody asks."""
        if asking is None:
            return [*self.may_leave]
        if not asking.serving:
            return [*self.may_leave] if asking.asks else []
        return [place for place in self.may_leave if place[0] in self.unasked] if asking.asked else []

    def _leaves(self, asking: ManagedModel | None, may: Iterable[Place]) -> list[Offer]:
        """What the others give by leaving. may: the copies that leave while they serve, in this order; who is pinned never does."""
        others = {name: model for name, model in self.models.items() if model is not asking and not model.deleting}
        pinned = {name for name, model in others.items() if model.wish.policy.pinned}
        known = {(name, one.index): one for name, model in others.items() for one in model.replicas}
        awake = [known[place] for place in may if place in known and place[0] not in pinned and not known[place].asleep]
        asleep = [one for one in known.values() if one.asleep and one.leaving is None]
        return leaving(*([one for one in map(self._leaver, some) if one.held] for some in (awake, asleep)))

    def _leaver(self, replica: ReplicaState) -> Leaver:
        attempt = replica.attempt
        sleeps = attempt is not None and attempt.serves and attempt.plan.sleep_mode.value
        copies = len(self.models[replica.model].replicas)
        return Leaver(replica.model, replica.index, copies, _promised([replica], {}), attempt if sleeps else None)

    def leaves(self, wish: Wish) -> str:
        """Why a model may have to leave its GPUs for a while; "" where it does not."""
        if wish.policy.pinned:
            return ""
        if self.keep_alive_s(wish) >= 0:
            return "it does not stay loaded for ever"
        others = (model.wish for name, model in self.models.items() if name != wish.name and not model.deleting)
        other = next((one.name for one in others if one.source and self.keep_alive_s(one) >= 0), None)
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
        return surplus(attempt.plan, model.wish, index) if attempt is not None and attempt.asleep is None else ()

    def asked_of(self, model: ManagedModel, take: Offer, asking: str) -> tuple[Offer, set[str]]:
        """What a replica gives at once, for whom: each time it gives it is started anew, so all that wait for it have theirs together."""
        taken = ((one.model, other) for one in self.replicas() for other in one.takes if other.model == model.wish.name)
        waiting = [(name, other) for name, other in taken if other.replica == take.replica and other.how == "surplus"]
        # What was to be had beside it was counted on by each of them.
        twice = sum(other.beside for _, other in waiting) - max((other.beside for _, other in waiting), default=0)
        count = sum(max(other.gives.values()) for _, other in waiting) + twice
        most = next((one for one in self._surplus(model, take.replica) if one.keeps <= take.keeps), take)
        return part(most, count), {asking, *(name for name, _ in waiting)}

    def beside(self, wish: Wish) -> Wish:
        """The wish beside all other models: who shares a machine takes few of its GPUs, unless somebody says otherwise."""
        others = any(model.wish.source and name != wish.name and not model.deleting for name, model in self.models.items())
        changed: Wish = wish.evolve(gpus="few") if others and wish.gpus is None else wish
        return changed

    def claims(self, asking: ReplicaState | None) -> dict[str, int]:
        """Bytes per GPU, and of RAM, that live attempts may use, and those that are to come back as they were, without those of the replica that asks."""
        others = [one for one in self.replicas() if one is not asking]
        return self._returning(others, _promised(others, dict.fromkeys(self.set_apart, MOST_BYTES)))

    def _returning(self, replicas: Iterable[ReplicaState], promised: dict[str, int]) -> dict[str, int]:
        """On top of what is promised already what replicas had that served until something outside of their plans ended that: whoever is started
        first after a power cut leaves the others what they had."""
        for replica in replicas:
            model = self.models[replica.model]
            here = not (model.stopped or model.hold or replica.leaving or model.deleting or model.trial is replica)
            comes = replica.attempt is None and replica.blocked is None and replica.shown.state != "quarantined"
            if here and comes and (plan := _outlived(replica)) is not None:
                _promise(plan, promised)
        return promised

    def held(self, model: ManagedModel, replica: ReplicaState | None = None) -> dict[str, int]:
        """Bytes per GPU that the model's own live attempts may use; of one replica, or of all."""
        return _promised([replica] if replica is not None else model.replicas, {})

    def holders(self, running: Collection[str], begun: set[str], now: float) -> Iterator[Holder]:
        """As the gate of starts wants it."""
        begun &= {replica.attempt.instance_name for replica in self.replicas() if replica.attempt is not None}
        for replica in self.replicas():
            for attempt in replica.attempts:
                name, gpus = attempt.instance_name, frozenset(attempt.plan.gpus)
                if name in running or name in begun:
                    model = self.models[replica.model]
                    ending = model.deleting or replica.leaving is not None or attempt is not replica.attempt
                    stage: Stage = "ends" if ending else replica.stage
                    measures, proved = replica.measures, attempt.state == "ready"
                    yield Holder(name, replica.model, gpus, shape(attempt.plan), stage, now, measures=measures, proved=proved)

    def disproved(self, attempt: Attempt) -> Failure | None:
        """As the gate of starts wants it."""
        model = self.models.get(attempt.model)
        for other in (one for replica in (model.replicas if model else ()) for one in replica.history):
            later = (other.ended_at or 0) > attempt.started_at
            if later and other.failure and not environmental(other.failure) and shape(other.plan) == shape(attempt.plan):
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

    def route_table(self, instances: Iterable[Instance], *, waits: bool = False) -> RouteTable:
        """Where requests for each model go, with the instances that there are now. waits: nobody has looked at them yet, so all requests wait."""
        attempts = [replica.attempt for replica in self.replicas() if replica.attempt is not None]
        plans = {attempt.instance_name: attempt.fingerprint for attempt in attempts}
        # An engine with another plan than the recorded plan is about to be replaced.
        own = [instance for instance in instances if instance.fingerprint == plans.get(instance.name)]
        running = {instance.name: instance for instance in own if instance.state == "running"}
        routes = {name: _route(model, running, self._load_wait_s) for name, model in self.models.items()}
        if waits:
            routes = {name: replace(one, wait_s=max(one.wait_s, self._load_wait_s)) for name, one in routes.items()}
        aliases = {alias: name for name, model in self.models.items() for alias in model.wish.aliases if alias not in routes}
        named = {alias: replace(routes[name], name=alias, alias_of=name) for alias, name in aliases.items()}
        for name, model in self.models.items():
            for adapter, source in model.wish.loras.items():
                card = replace(routes[name].card, adapter=source)
                named.setdefault(adapter, replace(routes[name], name=adapter, alias_of=name, card=card))
        return RouteTable({**named, **routes})

    def check_names(self, wish: Wish) -> None:
        """Raises Conflict where a name or an alias of a wish is a name of another model."""
        wishes = [one.wish for one in self.models.values()]
        wishes += [one.change.wish for one in self.models.values() if one.change is not None and not one.change.refused]
        taken = {name: other.name for other in wishes for name in names(other)}
        own = names(wish)
        if len(set(own)) < len(own):
            raise Conflict(
                f"A name is given twice, of {', '.join(own)}.", hint="Names, aliases and adapters are called differently."
            )
        for name in own:
            if taken.get(name, wish.name) != wish.name:
                raise Conflict(f"{name} is a name of the model {taken[name]}.", hint="Choose another one.")


def _attempts(model: ManagedModel, replica: ReplicaState | None = None) -> list[Attempt]:
    """All starts of the model, or of one of its replicas, by its wanted wish, oldest first."""
    replicas = [replica] if replica is not None and replica is not model.trial else model.replicas
    known = (one for replica in replicas for one in replica.attempts if one.generation == model.wanted)
    return sorted(known, key=lambda attempt: attempt.id)


def _outlived(replica: ReplicaState) -> Plan | None:
    return outlived([one for one in replica.history if one.generation == replica.generation])


def _again(model: ManagedModel, replica: ReplicaState, cap: Cap | None) -> Plan | None:
    """What is tried beside is another plan, and so is what takes the place of one that serves."""
    serves = replica.attempt is not None and replica.attempt.state == "ready"
    plan = _outlived(replica) if not serves and replica is not model.trial else None
    return again(plan, cap) if plan is not None else None


def _last_cap(model: ManagedModel) -> Cap | None:
    return next((one.plan.cap for one in reversed(_attempts(model)) if one.plan.cap is not None), None)


def names(wish: Wish) -> tuple[str, ...]:
    """All names by which clients may ask for something of the model."""
    return wish.name, *wish.aliases, *wish.loras


def _promised(replicas: Iterable[ReplicaState], promised: dict[str, int]) -> dict[str, int]:
    """Bytes per GPU, and of RAM, that the live attempts of replicas may use, on top of what is promised already."""
    for attempt in (replica.attempt for replica in replicas if replica.attempt is not None):
        for uuid in attempt.plan.devices:
            promised[uuid] = promised.get(uuid, 0) + attempt.held(uuid)
    return promised


def _promise(plan: Plan, promised: dict[str, int]) -> None:
    for uuid in plan.devices:
        promised[uuid] = promised.get(uuid, 0) + plan.memory.promised_bytes


def _generation(model: ManagedModel, past: list[Attempt]) -> int:
    """Of a replica, by its attempts."""
    if not past or _made_room(past):
        return model.wanted
    return next((attempt for attempt in past if attempt.live), past[-1]).generation


def _made_room(past: list[Attempt]) -> bool:
    """What served last was stopped, for an engine by the wish that is wanted."""
    return bool(past) and not any(one.live for one in past) and past[-1].state == "stopped" and past[-1].ready_at is not None


def _ended(store: Store, attempt: Attempt) -> Attempt:
    """Of two attempts of a replica that were live when the gateway died the older one serves: the other was being tried, and is no more."""
    ended: Attempt = attempt.evolve(state="stopped", ended_at=time.time())
    store.save_attempt(ended)
    return ended


def _route(model: ManagedModel, running: Mapping[str, Instance], load_wait_s: float) -> ModelRoute:
    """As `route`. An error that nobody expected leaves this model without a route, not all of them."""
    try:
        return route(model, running, load_wait_s)
    except Exception as error:
        if not model.setback.rest_s:
            model.setback.broke(error)
        return ModelRoute(model.wish.name, "starting", model.setback.problem or "", int(model.created_at), (), None)
