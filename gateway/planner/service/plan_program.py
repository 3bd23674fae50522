"""The program of the plan process: requests on stdin, answers on stdout.

Model folders, Hubs and config.json files are foreign, and to read them may take minutes and
gigabytes. So the program is a process of its own: the kernel ends it first when memory is short,
and each request has a limit of memory and of processor time. The process ends when its stdin
closes, so it never outlives the gateway.
"""

from __future__ import annotations

import gc
import json
import queue
import resource
import threading
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

from gateway.domain import Decision, Fact
from gateway.domain.image_name import AllowedImages
from gateway.domain.plan_request import PlanRequest, PlanResult
from gateway.domain.units import MIB, gib
from gateway.errors import BadModel
from gateway.models.catalog.hub import Hub
from gateway.planner.engine_answers import open_questions
from gateway.planner.refusal_words import no_plan_reason
from gateway.planner.service.child_pipes import claim_pipes, read_request_frame
from gateway.planner.service.engine_check import model_files
from gateway.planner.service.messages import (
    DECISION_BYTES,
    HEADER_BYTES,
    MAX_TEXT,
    MEMORY_BYTES,
    PLAN_BYTES,
    PROCESSOR_S,
    REQUEST,
    PlanAnswer,
    WorkerConfig,
    failure_answer,
    pack,
    result_frames,
)
from gateway.planner.service.model_planner import (
    ModelPlanner,
    WishedModel,
    check_weights_present,
)
from gateway.planner.service.process_limits import limit_process, limit_processor_time
from gateway.planner.service.startable import Startable
from gateway.profiles.profiles import Profiles

# A process that holds more ends after its answer: the allocator gives little back.
_KEPT_BYTES = 384 * MIB
_MEMORY_ERROR = BadModel(
    f"Reading the model and planning took more than the {gib(MEMORY_BYTES)} of memory that they may"
    " take.",
    hint=(
        "Files of a real model take a tenth of that: look at config.json, the index and the headers"
        " of the weights."
    ),
)
# The same holds for `fitserve plan`: a plan makes a few hundred thousand objects, nearly none of
# them in cycles.
_OBJECTS = 100_000


class PlanWorker:
    """Answers plan requests of the gateway, for this machine."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._data = Path(config.data)
        self._profiles = Profiles(roots=tuple(map(Path, config.roots)), data=self._data)
        self._hub = Hub(
            config.hf_endpoint,
            config.hf_token,
            self._data / "hub",
            models=Path(config.models) if config.models else None,
        )
        self._planner = ModelPlanner(self._profiles, self._hub, dict(config.engine_env))
        self._facts: dict[bytes, Fact | None] = {}
        """The facts of the last request by their lines; None for one of another form."""

    def plan(self, request: PlanRequest, facts: bytes) -> PlanResult:
        """The result of a request. facts: JSON, one a line. Raises FitserveError."""
        wish = request.wish
        # Most lines are those of the last request.
        self._facts = {
            line: self._facts[line] if line in self._facts else _read_fact(line)
            for line in facts.splitlines()
        }
        readable_facts = [fact for fact in self._facts.values() if fact is not None]
        hub = self._hub.pin_commits(wish.commits)
        model = WishedModel.read(wish, hub)
        if request.needs_weights:
            check_weights_present(model.spec, wish)
        planning = self._planner.prepare(request, model, readable_facts, self._startable(request))
        decision = _add_hub_warnings(planning.decision(), hub.unconfirmed_repos)
        files = None
        if request.include_files:
            files = model_files(model.files.config, model.files.tensors, model.files.quant_files)
            files = files if len(files.headers or b"") <= HEADER_BYTES else None
        template = planning.base.template
        questions = open_questions(decision)
        return PlanResult(
            plan=decision.plans[0] if decision.plans else None,
            reason="" if decision.plans else no_plan_reason(decision)[:MAX_TEXT],
            decision=_checked_size(decision),
            # If the engine of the best plan cannot be asked, its forecast is started.
            questions=questions[:1] if decision.plans else questions,
            gaps=decision.gaps,
            rival=planning.rival(decision),
            commits=hub.resolved_commits,
            needed_offers=decision.taken_offers,
            learned=planning.learned_facts,
            unconfirmed_repos=tuple(sorted(hub.unconfirmed_repos)),
            template=template.text if template.digest and template.text else "",
            config=files.config if files is not None else b"",
            tensor_headers=(files.headers or b"") if files is not None else b"",
            quant_files=files.quant_files if files is not None else b"",
        )

    def _startable(self, request: PlanRequest) -> Startable:
        patterns = self._config.allowed_images
        return Startable(
            self._data,
            self._config.installed_only and not request.machine_name,
            AllowedImages(patterns) if patterns is not None else None,
        )


def _add_hub_warnings(decision: Decision, unconfirmed_repos: Collection[str]) -> Decision:
    """The decision with a warning for each repository whose Hub did not answer."""
    warnings = [
        f"The Hub could not be asked: {name} is taken as it was when a program of this machine last"
        " asked."
        for name in sorted(unconfirmed_repos)
    ]
    if not warnings:
        return decision
    return decision.evolve(
        plans=tuple(plan.evolve(warnings=(*plan.warnings, *warnings)) for plan in decision.plans)
    )


def _checked_size(decision: Decision) -> bytes:
    """JSON of the decision. Raises BadModel if the decision or its best plan is too long."""
    plan_bytes = len(decision.plans[0].model_dump_json(by_alias=True)) if decision.plans else 0
    text = decision.model_dump_json(by_alias=True).encode()
    if plan_bytes <= PLAN_BYTES and len(text) <= DECISION_BYTES:
        return text
    raise BadModel(
        f"The plans for {decision.model[:200]} take {len(text)} bytes, over the limit of"
        f" {DECISION_BYTES} ({PLAN_BYTES} for one).",
        hint=(
            "No real model has this many kinds of layers: look at its config.json. Naming one "
            "engine makes them fewer."
        ),
    )


def _read_fact(line: bytes) -> Fact | None:
    """The fact; None where this version cannot read its form."""
    try:
        return Fact.model_validate_json(line)
    except ValueError:
        return None


def answer_frames(worker: PlanWorker, request: PlanRequest, facts: bytes) -> list[bytes]:
    """The frames of an answer, also for a request that fails."""
    answer = PlanAnswer()
    result = PlanResult(None, "")
    try:
        result = worker.plan(request, facts)
    except Exception as error:
        answer = failure_answer(error, _MEMORY_ERROR)
    # Resident memory now. The peak of getrusage begins with that of the gateway, whose memory the
    # process had until its program was loaded.
    if int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() > _KEPT_BYTES:
        answer = answer._replace(last=True)
    return [json.dumps(answer).encode(), *result_frames(result)]


def main() -> None:
    """Answer requests until stdin closes."""
    gc.set_threshold(_OBJECTS)
    limit_process(PROCESSOR_S)
    requests, answers = claim_pipes()
    request_queue: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests, request_queue), daemon=True).start()
    worker = PlanWorker(WorkerConfig.read(request_queue.get()[0]))
    while True:
        head, facts = request_queue.get()
        limit_processor_time(PROCESSOR_S)
        answers.write(pack(answer_frames(worker, REQUEST.validate_json(head), facts)))
        answers.flush()


def _receive(requests: BinaryIO, request_queue: queue.SimpleQueue[list[bytes]]) -> None:
    """Read messages in a thread of its own, so that the end of the gateway ends the process."""
    count = 1
    while True:
        frames = [read_request_frame(requests) for _ in range(count)]
        request_queue.put(frames)
        count = 2


if __name__ == "__main__":
    main()
