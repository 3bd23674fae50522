"""Questions to engines about a decision, until its best plan is checked."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gateway.domain import EngineAnswer, Hardware, InquiryResult, OpenQuestions, Question, RuleGap
from gateway.domain.image_name import exact
from gateway.engines.inquiry.inquiry_document import ModelFiles, StatedGpus
from gateway.errors import HostError
from gateway.models.tensor import Tensor

if TYPE_CHECKING:
    from gateway.engines.inquiry.inquirer import Inquirer  # asyncio, which most plans do not need

LIMIT_S = 60.0
"""The seconds for all questions about one model: two imports of an engine, and some dozen command
lines."""

REQUESTED_LIMIT_S = 300.0
"""The same where the check is all that was requested: inquiries yield to all other work, so a
busy machine takes several times as long."""


def check_limit_s(load: float, cores: int) -> float:
    """The seconds for the questions of a start on a machine with this load. A machine that is too
    busy for answers within REQUESTED_LIMIT_S delays no start for longer than an idle one.

    load: processes that want a core.
    """
    stretched_s = round(LIMIT_S * max(1.0, load / max(1, cores)))
    return stretched_s if stretched_s <= REQUESTED_LIMIT_S else LIMIT_S


def model_files(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None,
    quant_files: Mapping[str, Mapping[str, Any]] | None = None,
) -> ModelFiles:
    """The files of a model that engines are asked with.

    Names and shapes of tensors only if the weights are quantized: engines then read which layers
    are. quant_files: contents of the files that describe the quantization, by name.
    """
    quantized = bool(quant_files) or any(
        part.get("quantization_config") or part.get("compression_config")
        for part in (config, config.get("text_config") or {})
    )
    headers = None
    if quantized and tensors is not None:
        described_tensors = {
            name: {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (0, 0)}
            for name, tensor in tensors.items()
        }
        text = json.dumps(described_tensors).encode()
        headers = len(text).to_bytes(8, "little") + text
    quant_json = json.dumps(quant_files).encode() if quant_files else b""
    return ModelFiles(json.dumps(config).encode(), headers, quant_json)


class EngineCheck:
    """The check of one decision: ask the engine of the best plan and decide again, until `query`
    returns False. A plan whose sizes an answer changed is asked about once more.

    A decision stands as forecast if its engine cannot be asked; `problems` says why, by engine.
    Images of `pins` are asked at these digests.
    """

    def __init__(
        self,
        inquirer: Inquirer,
        machine: Hardware,
        model: ModelFiles,
        limit_s: float = LIMIT_S,
        problems: Mapping[str, str] | None = None,
        pins: Mapping[str, str] | None = None,
    ) -> None:
        self._inquirer = inquirer
        self._machine = machine
        self._model = model
        self._limit_s, self._end = limit_s, time.monotonic() + limit_s
        is_short = limit_s < REQUESTED_LIMIT_S
        self._cure = " `fitserve plan MODEL --check` gives it more time." if is_short else ""
        self.answers: dict[Question, EngineAnswer] = {}
        self.problems = dict(problems or {})
        self.pins = dict(pins or {})

    @property
    def outcome(self) -> InquiryResult:
        return InquiryResult(self.answers, self.problems, self.pins)

    async def query(self, questions: Sequence[OpenQuestions]) -> bool:
        """Ask the first of these engines that can be asked; False: none has a new answer."""
        for open_questions in questions:
            name = str(open_questions.engine)
            if name not in self.problems and await self._query_engine(name, open_questions):
                return True
        return False

    async def report(self, gaps: Sequence[RuleGap]) -> None:
        """Record where answers contradict the rules."""
        await self._inquirer.record_contradictions(gaps)

    async def _query_engine(self, name: str, open_questions: OpenQuestions) -> bool:
        """Ask an engine. Returns whether an answer is new; if not, `problems` says why."""
        capability = open_questions.questions[0].capability
        try:
            gpus = StatedGpus.match_machine(self._machine, capability) if capability else None
            engine = await self._inquirer.exact(exact(open_questions.engine, self.pins))
            answers = await self._inquirer.answers(
                engine=engine,
                gpus=gpus,
                model=self._model,
                questions=open_questions.questions,
                limit_s=max(0, self._end - time.monotonic()),
                starts=dict(open_questions.starts),
                unproven_questions=self.answers,
            )
        except HostError as error:
            self.problems[name] = str(error)
            return False
        if all(self.answers.get(question) == answer for question, answer in answers.items()):
            self.problems[name] = f"{name} did not answer within {self._limit_s:g} s.{self._cure}"
            return False
        self.answers |= answers
        if engine.image and engine.digest:
            self.pins[engine.image] = engine.digest
        return True
