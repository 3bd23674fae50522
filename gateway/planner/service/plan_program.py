"""The program that reads models and plans: it gets requests on stdin, and answers on stdout.

A model folder, a Hub and what a user wrote into a config.json are foreign, and what reads them may
need minutes and gigabytes. So it is a process of its own with little to spare: the kernel ends it
first when memory is short, and each
request has a limit of memory and of processor time. It ends when its stdin closes, so it never
outlives the gateway.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import resource
import threading
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from gateway.diagnosis.facts.known_facts import KnownFacts
from gateway.diagnosis.facts.scope import standing
from gateway.domain import (
    Decision,
    Engine,
    Fact,
    Hardware,
    ModelSpec,
    Plan,
    Rival,
    Served,
    Sharing,
    Wish,
)
from gateway.domain.image_name import AllowedImages
from gateway.domain.units import MIB, gib
from gateway.engines.common.chat.template import chosen
from gateway.engines.common.speed import served
from gateway.engines.common.speed.correction import measured
from gateway.engines.common.speed.rival import rival
from gateway.engines.inquiry.document import ModelFiles
from gateway.engines.registry import engine_kind
from gateway.errors import BadModel, FitserveError
from gateway.models.catalog.catalog import check_weights, gather, load, load_drafter, spec_of
from gateway.models.catalog.hub import Hub
from gateway.planner.asked import open_questions
from gateway.planner.explain import held_by, why_no_plan
from gateway.planner.parallel import freed, rooms
from gateway.planner.service.alternatives import Unplanned, with_alternatives
from gateway.planner.service.checking import model_files
from gateway.planner.service.messages import (
    ANSWERS,
    DECISION_BYTES,
    FACTS,
    GAPS,
    HEADER_BYTES,
    LENGTH,
    MEMORY_BYTES,
    OPEN,
    PLAN_BYTES,
    PROCESSOR_S,
    SEEN,
    SHARING,
    TAKES,
    Answer,
    Frames,
    Request,
    Start,
    packed,
)
from gateway.planner.service.offline import decide_with, read_adapters
from gateway.planner.service.startable import Startable
from gateway.planner.sharing.offers import shared
from gateway.planner.sharing.restore import same, there
from gateway.planner.sizes import needed_tokens, wanted_context
from gateway.profiles.profiles import Profiles

# What the library of the Hub writes into its cache is within the limits of gateway.models.catalog.
_FILE_BYTES = 256 * MIB
# A process that holds more ends after its answer: the allocator gives little back.
_KEPT_BYTES = 384 * MIB
# Of a message: what a config.json says may be in it.
_WORDS = 4000
# As `fitserve plan`: a plan makes a few hundred thousand objects, nearly none of them in cycles.
_OBJECTS = 100_000


class Decided(NamedTuple):
    """The decision; what engines are told of the model, where they will be asked about it; the
    rival of the plan that runs; the commits of
    the repositories that were read; what is learned from what the plan that runs gave its clients;
    the chat template that engines are given.
    """

    decision: Decision
    files: ModelFiles | None = None
    rival: Rival | None = None
    commits: Mapping[str, str] = {}
    learned: tuple[Fact, ...] = ()
    unasked: tuple[str, ...] = ()
    template: str = ""


class Planner:
    """Plans for this machine by requests from the gateway."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._data = Path(start.data)
        self._profiles = Profiles(
            roots=tuple(map(Path, start.roots)), learned=self._data / "learned"
        )
        self._hub = Hub(
            start.hf_endpoint,
            start.hf_token,
            self._data / "hub",
            models=Path(start.models) if start.models else None,
        )
        self._facts: dict[bytes, Fact] = {}

    def decide(self, request: Request) -> Decided:
        fields = json.loads(request.wish)
        wish, name = Wish.model_validate(fields["wish"]), fields["snapshot"]
        machine = (
            self._profiles.hardware(name) if name else Hardware.model_validate_json(request.machine)
        )
        # Most were there the last time too.
        self._facts = {
            line: self._facts.get(line) or Fact.model_validate_json(line)
            for line in request.facts.splitlines()
        }
        hub = self._hub.with_commits(wish.commits)
        read = gather(
            wish.source or "",
            wish.revision,
            allow_remote_code=wish.policy.allow_remote_code,
            hub=hub,
        )
        spec = spec_of(read)
        if not fields["others"]:  # a plan that is only shown may be of a model that is not here yet
            check_weights(spec, str(wish.args.get("load-format", wish.args.get("load_format", ""))))
        engines = self._profiles.engines_for(machine, wish.engines, wish.image)
        allowed = self._start.allowed_images
        startable = Startable(
            self._data,
            self._start.installed_only and not name,
            AllowedImages(allowed) if allowed is not None else None,
        )
        engines, away = startable.split(engines)
        tell = fields["others"] and not name
        if not engines and (away or startable.installed_only) and not (tell and away):
            raise startable.refusal(away, wish.name)
        images = self._profiles.images | ({wish.image} if wish.image else set())
        learned = standing(self._facts.values(), machine.driver, images, fields["pins"])
        drafter = load_drafter(wish.drafter, hub=hub) if wish.drafter else None
        adapters = read_adapters(wish, spec, hub)
        here, machine, claims = (
            name or "this machine",
            freed(machine, fields["held"]),
            fields["claims"],
        )
        shares = SHARING.validate_python(fields["sharing"])
        sharing = shares._replace(again=None)
        answers = dict(ANSWERS.validate_json(request.answers))
        everywhere = dict(self._start.engine_env)

        running, seen = (
            fields["running"] and Plan.model_validate(fields["running"]),
            SEEN.validate_python(fields["seen"]),
        )
        taught = self._taught(running, spec, machine, seen, learned) if seen else ()
        # What is known by now of what runs is known of the others too.
        anew = {(fact.kind, tuple(sorted(fact.scope.items()))) for fact in taught}
        learned = [
            fact for fact in learned if (fact.kind, tuple(sorted(fact.scope.items()))) not in anew
        ] + [*taught]

        def decided(
            engines: list[Engine],
            given: Mapping[str, int] | None = None,
            spec: ModelSpec = spec,
            wish: Wish = wish,
            sharing: Sharing = sharing,
        ) -> Decision:
            """given: bytes by UUID that others give."""
            room = freed(machine, given or {})
            left = {uuid: count - (given or {}).get(uuid, 0) for uuid, count in claims.items()}
            return decide_with(
                *(
                    self._profiles,
                    engines,
                    spec,
                    drafter,
                    room,
                    wish,
                    learned,
                    left,
                    here,
                    answers,
                    everywhere,
                    sharing,
                ),
                adapters=adapters,
            )

        def empty(spec: ModelSpec, wish: Wish) -> Decision:
            return decided(engines, claims, spec, wish)

        def now(spec: ModelSpec, wish: Wish) -> Decision:
            return decided(engines, None, spec, wish)

        def again(before: Plan) -> Decision | None:
            named = there(wish, before)
            try:
                here, _ = startable.split(
                    self._profiles.engines_for(machine, named.engines, wish.image)
                )
                return same(decided(here, wish=named, sharing=shares), before)
            except FitserveError:
                return None  # its GPUs, or its engine, are not here any more

        wanted, room = wanted_context(spec, wish, {}), rooms(machine, claims)
        decision = again(shares.again) if shares.again is not None else None
        decision = decision or shared(sharing.offers, partial(decided, engines), wanted, room)
        decision = _told_of(hub.unconfirmed, decision)
        if not decision.plans:
            decision = decision.evolve(holders=held_by(sharing.holders, machine))
        if fields["others"]:
            other = self._hub.with_commits(
                {}
            )  # what is read of variants is nothing that the model is kept at
            asked = Unplanned(
                spec, wish, now, partial(load, hub=other), empty if any(claims.values()) else None
            )
            decision = with_alternatives(decision, asked, other)
        if tell:
            decision = startable.told(decision, engines, away, wish, decided)
        better = None
        if running is not None:
            known, against = KnownFacts(learned), fields["against"]
            others = decision.plans
            if against is not None:
                one = Plan.model_validate(against)
                others = (measured(one, known.about_plan(one.fingerprint)),)
            better = rival(
                measured(running, known.about_plan(running.fingerprint)),
                others,
                wish,
                needed_tokens(wish, spec),
            )
        files = model_files(read.config, read.tensors) if fields["asking"] else None
        used = chosen(spec, wish.chat_template, self._profiles.parsers.repairs)
        template = used.text if used.digest and used.text else ""
        return Decided(
            decision, files, better, hub.resolved, taught, tuple(sorted(hub.unconfirmed)), template
        )

    def _taught(
        self,
        running: Plan,
        spec: ModelSpec,
        machine: Hardware,
        seen: Sequence[Served],
        known: Sequence[Fact],
    ) -> tuple[Fact, ...]:
        """What the engines of a plan gave their clients, beside what is expected of it."""
        profiles, engine = self._profiles, self._profiles.of(running.engine)
        gpu_facts = [fact for fact in known if fact.kind == "machine_speed"]
        tables = served.ClockTables(profiles.gpus, profiles.pace, gpu_facts)
        kind = engine_kind(engine.kind)
        clock = served.clock_of(running, spec, engine, kind, machine, tables)
        return served.learned(running, seen, clock, known, time.time()) if clock is not None else ()


def _told_of(unasked: Collection[str], decision: Decision) -> Decision:
    words = [
        f"The Hub could not be asked: {name} is taken as it was when a program of this machine last"
        " asked."
        for name in sorted(unasked)
    ]
    if not words:
        return decision
    return decision.evolve(
        plans=tuple(plan.evolve(warnings=(*plan.warnings, *words)) for plan in decision.plans)
    )


def answered(planner: Planner, request: Request) -> list[bytes]:
    """The answer, and its frames."""
    try:
        decision, files, better, commits, taught, unasked, template = planner.decide(request)
        plan = decision.plans[0].model_dump_json(by_alias=True).encode() if decision.plans else b""
        whole = decision.model_dump_json(by_alias=True).encode()
        frames = Frames(
            plan, whole, OPEN.dump_json(open_questions(decision)), GAPS.dump_json(decision.gaps)
        )
        frames = frames._replace(learned=FACTS.dump_json(taught))
        if better is not None:
            frames = frames._replace(rival=better.model_dump_json(by_alias=True).encode())
        if decision.takes:
            frames = frames._replace(takes=TAKES.dump_json(decision.takes))
        if files is not None and len(files.headers or b"") <= HEADER_BYTES:
            frames = frames._replace(config=files.config, headers=files.headers or b"")
        if len(plan) > PLAN_BYTES or len(whole) > DECISION_BYTES:
            raise BadModel(  # noqa: TRY301 - told as any other
                f"The plans for {decision.model[:200]} take {len(whole)} bytes, over the limit of"
                f" {DECISION_BYTES} ({PLAN_BYTES} for one).",
                hint=(
                    "No real model has so many kinds of layers: look at its config.json. Naming one"
                    " engine makes them fewer."
                ),
            )
    except FitserveError as error:
        told = {
            # As the gateway knows it, which does not have what reads models.
            "class": next(
                kind.__name__
                for kind in type(error).__mro__
                if kind.__module__ == FitserveError.__module__
            ),
            "message": error.message[:_WORDS],
            "hint": error.hint[:_WORDS],
            "param": error.param,
        }
        answer, frames = Answer(told), Frames()
    except MemoryError:
        message = (
            f"Reading the model and planning took more than the {gib(MEMORY_BYTES)} of memory that"
            " they may take."
        )
        hint = (
            "Files of a real model take a tenth of that: look at config.json, the index and the"
            " headers of the weights."
        )
        told = {"class": "BadModel", "message": message, "hint": hint, "param": None}
        answer, frames = Answer(told, last=True), Frames()
    except Exception as error:
        told = {
            "class": "",
            "message": f"{type(error).__name__}: {error}"[:500],
            "hint": traceback.format_exc()[-4000:],
            "param": None,
        }
        answer, frames = Answer(told), Frames()
    else:
        answer = Answer(
            reason="" if decision.plans else why_no_plan(decision)[:_WORDS],
            commits=commits,
            unasked=unasked,
            template=template,
        )
    # Not the peak that getrusage tells: Linux has it begin with that of the gateway, whose memory
    # the process had until its program was here.
    if int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() > _KEPT_BYTES:
        answer = answer._replace(last=True)
    return [json.dumps(answer).encode(), *frames]


def main() -> None:
    gc.set_threshold(_OBJECTS)
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    _limit(resource.RLIMIT_FSIZE, _FILE_BYTES)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    # Own copies of the pipes: nothing that prints can come between the answers, nor anything that
    # asks read from them.
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    came: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests, came), daemon=True).start()
    _limit_processor_time()
    planner = Planner(Start(*json.loads(came.get()[0])))
    while True:
        request = Request(*came.get())
        _limit_processor_time()
        answer = answered(planner, request)
        answers.write(packed(answer))
        answers.flush()


def _receive(requests: BinaryIO, came: queue.SimpleQueue[list[bytes]]) -> None:
    """Beside the planning, so that the end of the gateway is seen at once."""
    count = 1
    while True:
        frames = [_frame(requests) for _ in range(count)]
        came.put(frames)
        count = len(Request._fields)


def _frame(requests: BinaryIO) -> bytes:
    head = requests.read(LENGTH.size)
    if len(head) < LENGTH.size:
        os._exit(0)
    return requests.read(LENGTH.unpack(head)[0])


def _limit_processor_time() -> None:
    """Counted from now on; the kernel ends the process at the limit."""
    spent = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(spent.ru_utime + spent.ru_stime) + 1 + PROCESSOR_S)


def _limit(what: int, most: int) -> None:
    """Where the gateway itself has a lower limit, that stays."""
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main()
