"""Questions about the KV cache to vLLM versions between those with rules: a model of each kind of
content. The answers are kept in cache_answers.json.

`answers` runs in the process that has booted the engine (`python -m tests.conformance.engine`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gateway.engines.vllm.inside.model import build_from_config, prepare
from tests.conformance import kv_questions
from tests.support.versions import order

FILE = Path(__file__).parent / "cache_answers.json"
_GROWING = ("llama-3.2-1b", "gemma-3-1b", "gpt-oss-20b", "gemma-4-26b-a4b", "deepseek-v3.2")
_RECURRENT = (
    "qwen3.6-35b-a3b, mamba_ssm_dtype float32", "granite-4.0-h-micro", "nemotron-3-nano-30b-a3b",
)  # fmt: skip
_KEPT = ("preferred", "cache", "needed", "planned")


class Case(NamedTuple):
    """One question. prefixes: prefix caching; None: the version's default."""

    model: str
    prefixes: bool | None

    @property
    def key(self) -> str:
        return self.model if self.prefixes is None else f"{self.model}, prefixes {self.prefixes}"


def cases() -> list[Case]:
    return [Case(model, None) for model in _GROWING] + [
        Case(model, prefixes) for model in _RECURRENT for prefixes in (None, True)
    ]


def read_answers() -> dict[str, dict[str, dict[str, Any]]]:
    """Version -> capability -> key of a case -> a part of the answer of kv_questions."""
    document: dict[str, dict[str, dict[str, Any]]] = json.loads(FILE.read_text())
    return document


def keep_answers(version: str, answers: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the answers of a version by capability beside those of the others."""
    answers_by_case = read_answers() if FILE.is_file() else {}
    answers_by_case.setdefault(version, {}).update(
        {gpu: dict(gpu_answers) for gpu, gpu_answers in answers.items()}
    )
    rows = [
        f"  {json.dumps(case)}: {{\n"
        + ",\n".join(
            f"    {json.dumps(gpu)}: {{\n"
            + ",\n".join(
                f"      {json.dumps(key)}: {json.dumps(answer)}"
                for key, answer in sorted(answers_by_case[case][gpu].items())
            )
            + "\n    }"
            for gpu in sorted(answers_by_case[case])
        )
        + "\n  }"
        for case in sorted(answers_by_case, key=order)
    ]
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def answers(version: str) -> dict[str, Any]:
    """The engine's answers by key. A case that the engine or the stand-ins refuse is left out."""
    del version
    prepare()
    rows: dict[str, Any] = {}
    for case in cases():
        arguments: dict[str, Any] = {"enable_prefix_caching": case.prefixes}
        try:
            with build_from_config(kv_questions.config(case.model), 1, **arguments) as (
                configuration,
                _,
            ):
                answer = kv_questions.answer(configuration)
        except Exception as error:  # an engine's own code fails in many ways
            del error
            continue
        rows[case.key] = {name: answer[name] for name in _KEPT}
    return rows
