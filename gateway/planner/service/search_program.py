"""The program of the search process: models that a search finds, judged for one machine.

A search reads and plans dozens of foreign models, as the plan process reads one. So the program has
its limits, and one process serves one search. The process ends when its stdin closes.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

from gateway.domain.units import gib
from gateway.errors import BadModel
from gateway.models.catalog.hub import Hub
from gateway.planner.parallel import drop_engines
from gateway.planner.service.child_pipes import claim_pipes, read_request_frame
from gateway.planner.service.messages import (
    MEMORY_BYTES,
    SEARCH_REQUEST,
    PlanAnswer,
    SearchProgress,
    SearchRequest,
    WorkerConfig,
    failure_answer,
    pack,
)
from gateway.planner.service.model_finder import (
    ModelFinder,
    ModelSearch,
    SearchPhase,
    SearchReport,
    find_models,
    fitting_parameters,
)
from gateway.planner.service.offline import OfflinePlanner
from gateway.planner.service.process_limits import limit_process
from gateway.profiles.profiles import Profiles
from gateway.settings import Settings

# Fifty models and three quantized variants of each take less than half of it.
_PROCESSOR_S = 240
_MEMORY_ERROR = BadModel(
    f"The search took more than the {gib(MEMORY_BYTES)} of memory that it may take.",
    hint="Search for fewer models.",
)
# Seconds between two frames of progress.
_PROGRESS_S = 0.25


def search_models(
    config: WorkerConfig, request: SearchRequest, report: SearchReport
) -> dict[str, Any]:
    """The answer to a search: `data`, as JudgedModel.fields, and `note`; "": nothing to note.

    Raises BadRequest, BadModel.
    """
    words = request.words
    use = request.use
    machine = drop_engines(request.machine, request.held_bytes)
    hub = Hub(
        config.hf_endpoint,
        config.hf_token,
        Path(config.data) / "hub",
        models=Path(config.models) if config.models else None,
    )
    profiles = Profiles(roots=tuple(map(Path, config.roots)), data=Path(config.data))
    settings = Settings(data_dir=Path(config.data), engine_env=dict(config.engine_env))
    planner = OfflinePlanner(profiles, hub, settings)
    parameters = None if words else fitting_parameters(machine, use)
    search = ModelSearch(words, use, request.limit, tuple(map(Path, request.folders)), parameters)
    models, note = find_models(hub, search)
    finder = ModelFinder(planner, ("this machine", machine), use, report)
    judged_models = finder.judge(models, sorts_by_size=not words)
    return {"data": [model.fields() for model in judged_models], "note": note}


class ProgressFrames:
    """The frames of a search's progress, seldom enough to cost nothing."""

    def __init__(self, answers: BinaryIO) -> None:
        self._answers = answers
        self._next_s = 0.0
        self._phase = ""

    def __call__(self, phase: SearchPhase, count: int, total: int) -> None:
        """Send the progress, unless a frame of this phase was sent just before."""
        now_s = time.monotonic()
        if phase == self._phase and now_s < self._next_s:
            return
        self._next_s = now_s + _PROGRESS_S
        self._phase = phase
        progress = SearchProgress(phase, count, total)
        self._answers.write(pack([json.dumps(progress._asdict()).encode()]))
        self._answers.flush()


def answer_frames(
    config: WorkerConfig, request: SearchRequest, report: SearchReport = lambda *_: None
) -> list[bytes]:
    """The frames of an answer, also for a search that fails."""
    answer = PlanAnswer()
    models: dict[str, Any] = {}
    try:
        models = search_models(config, request, report)
    except Exception as error:
        answer = failure_answer(error, _MEMORY_ERROR)
    return [json.dumps(answer).encode(), json.dumps(models).encode()]


def main() -> None:
    """Answer one search."""
    limit_process(_PROCESSOR_S)
    requests, answers = claim_pipes()
    config = WorkerConfig.read(read_request_frame(requests))
    request = SEARCH_REQUEST.validate_json(read_request_frame(requests))
    threading.Thread(target=_stop_with_gateway, args=(requests,), daemon=True).start()
    answers.write(pack(answer_frames(config, request, ProgressFrames(answers))))
    answers.flush()
    # Threads that still read from a slow Hub do not keep the process.
    os._exit(0)


def _stop_with_gateway(requests: BinaryIO) -> None:
    """End the process when the gateway closes its pipe, or ends."""
    requests.read()
    os._exit(0)


if __name__ == "__main__":
    main()
