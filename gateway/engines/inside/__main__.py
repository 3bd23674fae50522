"""python -m inside < questions.json > answers.jsonl

One JSON document of questions in, one JSON document a line out, each as soon as it is known, so
that a limit of time costs only the questions without an answer:

    {"kind": "vllm", "sources": null, "gpu": {"capability": "8.6", "memory_bytes": 25769803776,
     "count": 2, "name": "..."}, "version": true, "models": [{"files": {"config.json": "base64...",
     "model.safetensors": "base64..."},
                 "questions": [{"argv": ["--tensor-parallel-size=2"], "start": {"argv":
                 ["--tensor-parallel-size=2", "--max-model-len=4096"], "kv_bytes": 1073741824}}]}]}

    {"engine": {"kind": "vllm", "version": "0.30.0"}}           only where the kind is null
    {"version": {...}}                                          inside/facts.py of the kind
    {"stand_ins": [...]}                                        only where "stand_ins": true asks
    {"model": 0, "question": 0, "answer": {...}}                inside/answers.py of the kind
    {"model": 0, "question": 1, "refused": "ValueError: ..."}   the engine's own words
    {"done": true}

A question with a `start` is answered, and then the start is rehearsed (KIND/inside/start.py).

Where the kind is null, `engine` names the engine that is installed here; null: none.

Where the kind is `measure`, nothing of an engine is asked: measuring/inside/ranks.py has the
forms of input and output.

env: variables that the engine has as it starts, for all questions alike. gpu: null means the
machine as it is, which is a CPU; else these GPUs answer, and none is touched. Nothing of the
model's repository is run: of its files only the given ones exist here, and `argv` never allows
remote code.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import sys
import traceback
from typing import Any, TextIO

from .crashes import clear_stand_in_uses, crashed_in, is_of_this_package

_WORDS = 2000


def main() -> None:
    """Answer the inquiry on stdin with lines of JSON on stdout."""
    # Engines print to standard output: that is reserved for our answers.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    inquiry = json.load(sys.stdin)
    if inquiry["kind"] is None:
        write_answer(output, engine=importlib.import_module(".installed", __package__).engine())
        return
    if inquiry["kind"] == "measure":
        write_answer(
            output,
            measured=importlib.import_module("...measuring.inside.ranks", __package__).measure(
                inquiry
            ),
        )
        return
    sys.argv[1:] = []  # the engines look at it while they build their parsers
    sys.dont_write_bytecode = True
    os.environ.update(inquiry.get("env", {}))
    os.environ.update(
        HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1"
    )
    boot(inquiry)
    kind = inquiry["kind"].removesuffix("-cpu")
    if inquiry.get("version"):
        facts_module = importlib.import_module(f"..{kind}.inside.facts", __package__)
        write_answer(output, version=facts_module.facts())
        if inquiry.get("stand_ins") and hasattr(facts_module, "stand_ins"):
            write_answer(output, stand_ins=facts_module.stand_ins())
    for index, model in enumerate(inquiry.get("models", ())):
        answer_questions(
            importlib.import_module(f"..{kind}.inside.answers", __package__), output, index, model
        )
    write_answer(output, done=True)
    sys.stderr.flush()
    os._exit(0)  # the engine's import leaves threads and half-made objects that need not end well


def write_answer(output: TextIO, **document: Any) -> None:
    output.write(json.dumps(document) + "\n")
    output.flush()


def boot(question: dict[str, Any]) -> None:
    """Make the engine answer for the GPUs that are asked about. Once per process."""
    gpu = question.get("gpu")
    capability = None
    if gpu is not None:
        major, minor = map(int, gpu["capability"].split("."))
        capability = major, minor
    boots = importlib.import_module(
        f"..{question['kind'].removesuffix('-cpu')}.inside.boot", __package__
    )
    if question.get("sources") is None:
        boots.boot_installation(capability, **_gpu_fields(gpu))
    else:
        boots.boot(question["sources"], capability, **_gpu_fields(gpu))


def _gpu_fields(gpu: dict[str, Any] | None) -> dict[str, Any]:
    return (
        {}
        if gpu is None
        else {name: gpu[name] for name in ("memory_bytes", "count", "name") if name in gpu}
    )


def answer_questions(answers: Any, output: TextIO, index: int, model: dict[str, Any]) -> None:
    """Answer every question about one model. A refusal of the engine is an answer, whatever it
    raises. Raises errors of this package."""
    files = {name: base64.b64decode(text) for name, text in model["files"].items()}
    package = answers.__package__.split(".")[-2]
    for number, question in enumerate(model["questions"]):
        numbers = {"model": index, "question": number}
        clear_stand_in_uses()
        try:
            answer = answers.answer_question(files, question["argv"])
            if (start := question.get("start")) is not None:
                starts = importlib.import_module(f"{answers.__package__}.start")
                rehearsal = starts.rehearse(files, start["argv"], start["kv_bytes"], error_text)
                answer["start"] = {"asked": start, **rehearsal}
            write_answer(output, **numbers, answer=answer)
        except Exception as error:
            # The engine did not say this. So the inquiry ends, and the forecast stays.
            if is_of_this_package(error):
                raise
            if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
                raise  # the limit of this process says nothing about the model
            crash = crashed_in(error, package)
            at = (
                f" at {crash.filename.rpartition(f'/{package}/')[2]}:{crash.lineno}"
                if crash
                else ""
            )
            write_answer(output, **numbers, refused=f"{error_text(error)}{at}")


def error_text(error: BaseException) -> str:
    """The engine's message on one line, without additions of pydantic; of an assertion without a
    message, its code."""
    message = str(error) or next(
        (frame.line or "" for frame in reversed(traceback.extract_tb(error.__traceback__))), ""
    )
    text = f"{type(error).__name__}: {message}".split(" [type=")[0]
    return " ".join(text.split())[:_WORDS]


if __name__ == "__main__":
    main()
