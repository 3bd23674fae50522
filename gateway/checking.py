"""From a forecast to a decision that engines were asked about: facts in, plan out, with the engines' own answers among the facts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gateway.core.model.spec import Tensor
from gateway.core.planner.asked import open_questions
from gateway.domain import Decision, EngineAnswer, Hardware, Question
from gateway.errors import HostError
from gateway.inquiry.document import ModelFiles, StatedGpus
from gateway.inquiry.inquirer import Inquirer

LIMIT_S = 60.0
"""For all questions about one model: two imports of an engine, and some dozen command lines."""


class Checked(NamedTuple):
    """The decision; what could not be asked, by engine, in words."""

    decision: Decision
    problems: dict[str, str]


def model_files(config: Mapping[str, Any], tensors: Mapping[str, Tensor] | None) -> ModelFiles:
    """What an engine is told of a model. Names and shapes of tensors only where the weights are quantized: engines then read which
    layers are."""
    block = any(
        part.get("quantization_config") or part.get("compression_config") for part in (config, config.get("text_config") or {})
    )
    headers = None
    if block and tensors is not None:
        described = {
            name: {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (0, 0)} for name, tensor in tensors.items()
        }
        text = json.dumps(described).encode()
        headers = len(text).to_bytes(8, "little") + text
    return ModelFiles(json.dumps(config).encode(), headers)


async def checked(
    decide: Callable[[Mapping[Question, EngineAnswer]], Decision],
    inquirer: Inquirer,
    machine: Hardware,
    model: ModelFiles,
    limit_s: float = LIMIT_S,
) -> Checked:
    """Decide, ask the engine of the best plan, decide again, until the best plan was checked or the time is over.

    The forecast stands wherever an engine cannot be asked.
    """
    answers: dict[Question, EngineAnswer] = {}
    problems: dict[str, str] = {}
    end = time.monotonic() + limit_s
    decision = decide(answers)
    while (found := open_questions(decision, problems)) and time.monotonic() < end:
        engine, questions = found
        try:
            capability = questions[0].capability
            gpus = StatedGpus.of(machine, capability) if capability else None
            fresh = await inquirer.answers(engine, gpus, model, questions, end - time.monotonic())
        except HostError as error:
            problems[str(engine)] = str(error)
            continue
        if not fresh:
            problems[str(engine)] = f"{engine} did not answer within {limit_s:g} s."
            continue
        answers |= fresh
        decision = decide(answers)
    await inquirer.contradicted(decision.gaps)
    return Checked(decision, problems)
