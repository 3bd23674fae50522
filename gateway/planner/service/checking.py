"""From a forecast to a decision that engines were asked about: facts in, plan out, with the
engines' own answers among the facts."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from gateway.domain import Asked, EngineAnswer, Hardware, OpenQuestions, Question, RuleGap
from gateway.domain.image_name import exact
from gateway.engines.inquiry.document import ModelFiles, StatedGpus
from gateway.errors import HostError
from gateway.models.spec import Tensor

if TYPE_CHECKING:
    from gateway.engines.inquiry.inquirer import Inquirer  # asyncio, which most plans do not need

LIMIT_S = 60.0
"""For all questions about one model: two imports of an engine, and some dozen command lines."""

D = TypeVar("D")


class Forecast(NamedTuple, Generic[D]):
    """A decision, what engines can be asked about it (`open_questions`), and where what they said
    contradicts the rules."""

    decision: D
    open: Sequence[OpenQuestions]
    gaps: Sequence[RuleGap] = ()


class Checked(NamedTuple, Generic[D]):
    """The decision, and what came of asking."""

    decision: D
    asked: Asked


def model_files(config: Mapping[str, Any], tensors: Mapping[str, Tensor] | None) -> ModelFiles:
    """What an engine is told of a model. Names and shapes of tensors only where the weights are
    quantized: engines then read which
    layers are."""
    block = any(
        part.get("quantization_config") or part.get("compression_config")
        for part in (config, config.get("text_config") or {})
    )
    headers = None
    if block and tensors is not None:
        described = {
            name: {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (0, 0)}
            for name, tensor in tensors.items()
        }
        text = json.dumps(described).encode()
        headers = len(text).to_bytes(8, "little") + text
    return ModelFiles(json.dumps(config).encode(), headers)


async def checked(
    forecast: Forecast[D],
    decide: Callable[[Mapping[Question, EngineAnswer]], Awaitable[Forecast[D]]],
    inquirer: Inquirer,
    machine: Hardware,
    model: ModelFiles,
    limit_s: float = LIMIT_S,
    known_problems: Mapping[str, str] | None = None,
    known_pins: Mapping[str, str] | None = None,
) -> Checked[D]:
    """Ask the engine of the best plan, decide again, until the best plan was checked or the time is
    over.

    `decide` gets the answers so far. The forecast stands wherever an engine cannot be asked; those
    of `known_problems`, by name, are not. Images of `known_pins` are asked at these digests.
    """
    answers: dict[Question, EngineAnswer] = {}
    pins = dict(known_pins or {})
    problems = dict(known_problems or {})
    end = time.monotonic() + limit_s
    while found := next((one for one in forecast.open if str(one.engine) not in problems), None):
        name, capability = str(found.engine), found.questions[0].capability
        try:
            gpus = StatedGpus.of(machine, capability) if capability else None
            engine = await inquirer.exact(exact(found.engine, pins))
            fresh = await inquirer.answers(
                engine, gpus, model, found.questions, max(0, end - time.monotonic())
            )
        except HostError as error:
            problems[name] = str(error)
            continue
        if not fresh.keys() - answers.keys():
            problems[name] = f"{name} did not answer within {limit_s:g} s."
            continue
        answers |= fresh
        if engine.image and engine.digest:
            pins[engine.image] = engine.digest
        forecast = await decide(answers)
    await inquirer.contradicted(forecast.gaps)
    return Checked(forecast.decision, Asked(answers, problems, pins))
