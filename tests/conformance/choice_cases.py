"""What SGLang versions between those with rules are asked: one model for each architecture, experts
of each family. The answers are kept in known_choices.json.

`answers` runs in the process that has booted the engine (`python -m tests.conformance.engine`).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from gateway.engines.sglang.inside import attention as sglang_attention
from tests.conformance import sglang_attention_questions, sglang_moe_questions
from tests.support.paths import MODELS
from tests.support.versions import order

FILE = Path(__file__).parent / "known_choices.json"
FAMILIES = Path(__file__).parent / "family_configs.json"
REFUSED = "refused"
# Schemes of experts that are asked for, by who quantized.
_SCHEMES = (
    ("fp8", "fp8_block"),
    ("modelopt", "fp8_tensor"),
    ("modelopt", "nvfp4"),
    ("none", "unquantized"),
)


class Case(NamedTuple):
    """One question. `of` is the file of rules that answers it."""

    of: str
    model: str
    origin: str = ""
    kind: str = ""

    @property
    def key(self) -> str:
        return " ".join(part for part in self if part)


def cases() -> Iterator[Case]:
    """One model for each architecture, then experts of each family."""
    asked: set[str] = set()
    names = [path.stem for path in sorted(MODELS.glob("*.json"))]
    for name in (*names, *json.loads(FAMILIES.read_text())):
        architecture = str((config_of(name).get("architectures") or [""])[0])
        if architecture and architecture not in asked:
            asked.add(architecture)
            yield Case("attention_backends", name)
    for name in sglang_moe_questions.NAMES:
        for origin, kind in _SCHEMES:
            if (name, origin) != ("mixtral-8x7b", "modelopt"):
                yield Case("moe", name, origin, kind)


@cache
def config_of(name: str) -> dict[str, Any]:
    """config.json of a model of tests/models, or of a family."""
    if (MODELS / f"{name}.json").is_file():
        return sglang_attention_questions.config_of(name)
    entry: dict[str, Any] = json.loads(FAMILIES.read_text())[name]
    return entry if "architectures" in entry else dict(entry["config"])


def question_of(case: Case) -> sglang_moe_questions.Question:
    scheme = next(
        scheme
        for scheme in sglang_moe_questions.schemes()
        if (scheme.origin, scheme.kind) == (case.origin, case.kind) and not scheme.weight_only
    )
    return scheme._replace(model=case.model)


def read_answers() -> dict[str, dict[str, dict[str, Any]]]:
    """Version -> capability -> key of a case -> [prefill, decode, page], [method, runner], or
    `refused`."""
    kept: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return kept


def keep_answers(version: str, capability: str, answers: Mapping[str, Any]) -> None:
    kept = read_answers()
    kept.setdefault(version, {})[capability] = dict(sorted(answers.items()))
    rows = [
        f"  {json.dumps(one)}: {{\n"
        + ",\n".join(f"    {json.dumps(gpu)}: {json.dumps(kept[one][gpu])}" for gpu in kept[one])
        + "\n  }"
        for one in sorted(kept, key=order)
    ]
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def answers(version: str) -> dict[str, Any]:
    """The engine's answers by key. A case without an answer, for a fault of the stand-ins, is left
    out."""
    del version
    sglang_attention.record_backends()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases():
            try:
                found[case.key] = _answer(Path(folder), case)
            except Exception as error:  # an engine's own code fails in many ways
                del error
    return found


def _answer(folder: Path, case: Case) -> Any:
    if case.of == "moe":
        said = sglang_moe_questions.answer(question_of(case))
        return REFUSED if isinstance(said, str) else said
    model = folder / case.model
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(config_of(case.model)))
    said = sglang_attention_questions.answer(
        folder, sglang_attention_questions.Question(case.model)
    )
    return REFUSED if isinstance(said, str) else said[:3]
