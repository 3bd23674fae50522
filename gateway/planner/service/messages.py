"""Messages between the gateway and the plan process, with their limits.

A message is frames, each after its length:

direction    frames
first        JSON of WorkerConfig
request      JSON of PlanRequest; facts, one a line
answer       JSON of PlanAnswer; JSON of PlanResult without its byte fields; these fields

The search process has the same first message. A request is JSON of SearchRequest. An answer is
any number of JSON objects of SearchProgress, then JSON of PlanAnswer and of the models.
"""

from __future__ import annotations

import json
import struct
import traceback
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import TypeAdapter

from gateway.domain import Hardware
from gateway.domain.plan_request import PlanRequest, PlanResult
from gateway.domain.units import GIB, MIB
from gateway.errors import FitserveError
from gateway.models.catalog.hub_search import Use
from gateway.secret import Secret, secret_text

# Headers of 500,000 tensors, more than any model has, take less than half of it.
MEMORY_BYTES = 2 * GIB
# Processor time, not wall time: a slow Hub or a busy machine is not a fault of the model.
PROCESSOR_S = 60
# The plan of a real model takes 10 KB. The longest decision of the published models on all machines
# takes 1 MB.
PLAN_BYTES = MIB
DECISION_BYTES = 8 * MIB
# Names and shapes of the tensors of a quantized model: 100 bytes for each.
HEADER_BYTES = 64 * MIB

# Characters of a message, which may quote a config.json.
MAX_TEXT = 4000

LENGTH = struct.Struct(">I")
ANSWER_FRAMES = 6


class WorkerConfig(NamedTuple):
    """The first message: settings of all requests. The message comes by stdin, so no process list
    shows it.

    roots: folders of profiles, as `Profiles.roots`.
    data: the gateway's data folder, with installed engines and caches.
    models: the folder of downloads.
    installed_only: engines run as processes, so only installed engines can be planned.
    allowed_images: patterns of `AllowedImages`, if engines run in containers.
    engine_env: variables that the settings give to all engines.
    """

    roots: tuple[str, ...]
    data: str
    hf_endpoint: Secret | None
    hf_token: Secret | None
    installed_only: bool
    allowed_images: tuple[str, ...] | None = None
    engine_env: tuple[tuple[str, str], ...] = ()
    models: str | None = None

    @classmethod
    def read(cls, frame: bytes) -> WorkerConfig:
        """The configuration of a first frame."""
        config = cls(*json.loads(frame))
        return config._replace(
            hf_endpoint=Secret(str(config.hf_endpoint)) if config.hf_endpoint is not None else None,
            hf_token=Secret(str(config.hf_token)) if config.hf_token is not None else None,
        )

    @property
    def frame(self) -> bytes:
        return json.dumps(self, default=secret_text).encode()


class SearchProgress(NamedTuple):
    """The progress of a search.

    phase: `waiting` for other searches, `searching` the Hub, `reading` or `planning` models; `none`
        without a search.
    place, total: models that are finished, of all; both 0: not counted.
    """

    phase: str = "waiting"
    place: int = 0
    total: int = 0


class PlanAnswer(NamedTuple):
    """The head of an answer.

    error: class and fields of a FitserveError.
    last: the process ends after this answer.
    """

    error: dict[str, str | None] | None = None
    last: bool = False


class SearchRequest(NamedTuple):
    """A search for models, with the machine that they are judged for.

    words, use, limit, folders: the fields of ModelSearch.
    held_bytes: bytes that this gateway's engines hold, by GPU UUID; these bytes count as free.
    """

    words: str
    use: Use | None
    limit: int
    folders: tuple[str, ...]
    machine: Hardware
    held_bytes: dict[str, int]


REQUEST = TypeAdapter(PlanRequest)
SEARCH_REQUEST = TypeAdapter(SearchRequest)
RESULT = TypeAdapter(PlanResult)


def error_fields(error: FitserveError) -> dict[str, str | None]:
    """The fields of a PlanAnswer's error."""
    # The class that the gateway knows: subclasses may be of modules that only read models.
    name = next(
        kind.__name__ for kind in type(error).__mro__ if kind.__module__ == FitserveError.__module__
    )
    return message_fields(name, error.message[:MAX_TEXT], error.hint, error.param)


def failure_answer(error: Exception, memory_error: FitserveError) -> PlanAnswer:
    """The answer of a program for an error of its work. memory_error: for one of memory, after
    which the process ends."""
    if isinstance(error, MemoryError):
        return PlanAnswer(error_fields(memory_error), last=True)
    if isinstance(error, FitserveError):
        return PlanAnswer(error_fields(error))
    trace = "".join(traceback.format_exception(error))[-MAX_TEXT:]
    return PlanAnswer(message_fields("", f"{type(error).__name__}: {error}"[:500], trace))


def message_fields(
    class_name: str, message: str, hint: str, param: str | None = None
) -> dict[str, str | None]:
    """An error's fields. class_name: of a FitserveError; "": a fault of the program."""
    return {"class": class_name, "message": message, "hint": hint[:MAX_TEXT], "param": param}


def request_frames(request: PlanRequest, facts: Sequence[str]) -> list[bytes]:
    """The frames of a request. facts: JSON without line breaks."""
    return [REQUEST.dump_json(request, by_alias=True), "\n".join(facts).encode()]


def result_frames(result: PlanResult) -> list[bytes]:
    """The frames of a result, after those of its PlanAnswer."""
    head = RESULT.dump_json(
        result._replace(decision=b"", config=b"", tensor_headers=b"", quant_files=b""),
        by_alias=True,
    )
    return [head, result.decision, result.config, result.tensor_headers, result.quant_files]


def read_result(frames: Sequence[bytes]) -> PlanResult:
    """The result of `result_frames`."""
    head, decision, config, tensor_headers, quant_files = frames
    return RESULT.validate_json(head)._replace(
        decision=decision, config=config, tensor_headers=tensor_headers, quant_files=quant_files
    )


def pack(frames: Sequence[bytes]) -> bytes:
    """The frames as they go through the pipe."""
    return b"".join(piece for frame in frames for piece in (LENGTH.pack(len(frame)), frame))
