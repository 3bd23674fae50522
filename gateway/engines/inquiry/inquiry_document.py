"""The JSON document of questions, and a strict reader of its answers: an image may answer
anything."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from gateway.domain import EngineAnswer, Hardware, Question, StartSettings
from gateway.domain.base import ValidationError
from gateway.domain.record import FrozenRecord

MAX_LINE = 8 * 1024 * 1024
"""Bytes of one line of an answer; a version's flags and packages take 300 kB."""
MAX_BYTES = 64 * 1024 * 1024
"""Bytes of all answers: those about a hundred command lines take a tenth of it."""


class ModelFiles(FrozenRecord, frozen=True):
    """The parts of a model that an inquiry gets: neither weights nor code.

    headers: a safetensors file without its data; None: no such file.
    quant_files: JSON of the files that describe the quantization, by name; empty: none.
    """

    config: bytes
    headers: bytes | None = None
    quant_files: bytes = b""

    @property
    def content_by_name(self) -> dict[str, bytes]:
        files = {"config.json": self.config}
        if self.headers is not None:
            files["model.safetensors"] = self.headers
        quant_files = json.loads(self.quant_files or b"{}")
        return files | {name: json.dumps(content).encode() for name, content in quant_files.items()}


class StatedGpus(FrozenRecord, frozen=True):
    """Equal GPUs that the engine answers for. The GPUs are stated, not used: a question does not
    disturb a serving GPU."""

    capability: str
    memory_bytes: int
    count: int
    name: str

    @classmethod
    def match_machine(cls, machine: Hardware, capability: str) -> StatedGpus:
        """The machine's GPUs that have this capability."""
        same_capability = [gpu for gpu in machine.gpus if gpu.capability == capability]
        return cls(
            capability,
            min(gpu.total_bytes or 0 for gpu in same_capability),
            len(machine.gpus),
            same_capability[0].name,
        )


IDENTITY_QUESTION = json.dumps({"kind": None}).encode()
"""The document that asks which engine is installed."""


def document(
    kind: str,
    gpus: StatedGpus | None,
    *,
    has_version: bool = False,
    model: ModelFiles | None = None,
    questions: Sequence[Question] = (),
    starts: Mapping[Question, StartSettings] = MappingProxyType({}),
) -> bytes:
    """The document that `inside/__main__.py` reads.

    The questions are about `model`, and share one environment, because an engine reads its
    environment once.

    starts: the start to rehearse with each of some questions.
    """
    inquiry: dict[str, Any] = {
        "kind": kind,
        "version": has_version,
        "gpu": None,
        "env": dict(questions[0].env) if questions else {},
    }
    if gpus is not None:
        inquiry["gpu"] = gpus.as_dict()
    if model is not None:
        files = {
            name: base64.b64encode(content).decode()
            for name, content in model.content_by_name.items()
        }
        inquiry["models"] = [
            {
                "files": files,
                "questions": [
                    _question_row(question, starts.get(question)) for question in questions
                ],
            }
        ]
    return json.dumps(inquiry).encode()


def _question_row(question: Question, start: StartSettings | None) -> dict[str, Any]:
    row: dict[str, Any] = {"argv": [*question.argv]}
    return row if start is None else row | {"start": start.model_dump(mode="json")}


class BadAnswer(Exception):
    """The output is not an answer of an inquiry."""


def read_version(line: bytes) -> Mapping[str, Any] | None:
    """The engine's description of its version; None: the line has none. Raises BadAnswer."""
    answer = _json_object(line).get("version")
    if answer is not None and not isinstance(answer, dict):
        raise BadAnswer("the version is not an object")
    return answer


def read_engine(line: bytes) -> tuple[str, str]:
    """Kind and version of the engine that is installed; both are empty where there is none. Raises
    BadAnswer."""
    answer = _json_object(line).get("engine")
    if answer is None:
        return "", ""
    result = (answer.get("kind"), answer.get("version")) if isinstance(answer, dict) else ()
    if len(result) != 2 or not all(
        isinstance(item, str) and re.fullmatch(r"[\w.+-]{1,60}", item) for item in result
    ):
        raise BadAnswer("an engine without kind and version")
    return str(result[0]), str(result[1])


def read_answers(
    lines: Iterable[bytes], questions: Sequence[Question], source: str
) -> dict[Question, EngineAnswer]:
    """The answers of whole lines, by question. Raises BadAnswer."""
    result = {}
    for line in lines:
        answer = _json_object(line)
        if "question" not in answer:
            continue
        number = answer["question"]
        if not isinstance(number, int) or not 0 <= number < len(questions):
            raise BadAnswer("an answer to a question that was not asked")
        body = (
            answer["answer"]
            if isinstance(answer.get("answer"), dict)
            else {"refused": answer.get("refused")}
        )
        try:
            result[questions[number]] = EngineAnswer.model_validate({**body, "source": source})
        except ValidationError as error:
            raise BadAnswer(
                str(error.errors(include_url=False, include_input=False)[0]["msg"])
            ) from None
    return result


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        raise BadAnswer("a line that is not JSON") from None
    if not isinstance(answer, dict):
        raise BadAnswer("a line that is not an object")
    return answer
