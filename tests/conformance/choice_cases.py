"""Questions to SGLang versions between those with rules: one model for each architecture, experts
of each family, dense layers and sizes of memory. known_choices.json keeps the answers.

`answers` runs in the process that has booted the engine (`python -m tests.conformance.engine`).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from gateway.engines.sglang.inside import attention as sglang_attention
from tests.conformance import (
    sglang_attention_questions,
    sglang_linear_questions,
    sglang_memory_questions,
    sglang_moe_questions,
)
from tests.support.paths import MODELS
from tests.support.versions import order

FILE = Path(__file__).parent / "known_choices.json"
FAMILIES = Path(__file__).parent / "family_configs.json"
REFUSED = "refused"
# Schemes of experts that are asked for, by the quantizer.
_EXPERT_SCHEMES = (
    ("none", "unquantized"),
    ("fp8", "fp8_tensor"),
    ("fp8", "fp8_block"),
    ("compressed-tensors", "fp8_token"),
    ("modelopt", "fp8_tensor"),
    ("modelopt", "nvfp4"),
    ("compressed-tensors", "nvfp4"),
    ("gptq", "wna16"),
    ("awq", "wna16"),
    ("compressed-tensors", "wna16"),
)
_GPT_OSS = "gpt-oss-20b"
_MEMORY_MODEL = "llama-3.1-8b"


class Case(NamedTuple):
    """One question. `of` is the file of rules that answers it."""

    of: str
    model: str = ""
    origin: str = ""
    kind: str = ""
    detail: str = ""  # the forced backend, the KV dtype, a scheme's form, or MiB and ranks

    @property
    def key(self) -> str:
        return " ".join(part for part in self if part)


def cases() -> Iterator[Case]:
    """One model for each architecture, experts of each family, dense layers, sizes of memory."""
    for name in first_models():
        yield Case("attention_backends", name)
    for name in sglang_attention_questions.KINDS:
        for dtype in ("fp8_e4m3", "fp8_e5m2"):
            yield Case("attention_backends", name, detail=f"kv={dtype}")
        for backend in sglang_attention_questions.FORCED:
            yield Case("attention_backends", name, detail=f"forced={backend}")
    # Before experts, whose models have no quantized linear layer (inside/layers.py).
    for scheme in linear_schemes():
        yield Case("linear", "", scheme.origin, scheme.kind, form_of(scheme))
    for name in sglang_moe_questions.NAMES:
        for origin, kind in _EXPERT_SCHEMES:
            if (name, origin) != ("mixtral-8x7b", "modelopt"):
                yield Case("moe", name, origin, kind)
    yield Case("moe", _GPT_OSS, "mxfp4", "mxfp4")
    for name in first_models():
        yield Case("memory", name)
    for memory, tp in product(sglang_memory_questions.MEMORIES, (1, 4)):
        yield Case("memory", _MEMORY_MODEL, detail=f"{memory} x{tp}")


@cache
def first_models() -> tuple[str, ...]:
    """The first model of each architecture."""
    models: dict[str, str] = {}
    names = [path.stem for path in sorted(MODELS.glob("*.json"))]
    for name in (*names, *json.loads(FAMILIES.read_text())):
        architecture = str((config_of(name).get("architectures") or [""])[0])
        if architecture:
            models.setdefault(architecture, name)
    return tuple(models.values())


@cache
def linear_schemes() -> tuple[sglang_linear_questions.Question, ...]:
    """Every scheme of dense layers, in a layer that every kernel takes."""
    k, n, tp, cut = sglang_linear_questions.SIZES[0]
    return tuple(
        scheme._replace(k=k, n=n, tp=tp, cut=cut) for scheme in sglang_linear_questions.schemes()
    )


def form_of(scheme: sglang_linear_questions.Question) -> str:
    """Bits, group and further properties of a scheme, as a key has them."""
    switches = ("symmetric", "act_order", "static", "weight_only")
    true_switches = [name for name in switches if getattr(scheme, name)]
    return ",".join([str(scheme.bits), str(scheme.group), *true_switches])


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


@cache
def read_answers() -> dict[str, dict[str, dict[str, Any]]]:
    """Version -> capability -> key of a case -> answer.

    Answers: [prefill, decode, page], [method, runner], a product's name, [prefill tokens, graphs,
    share, states of a request], or `refused`. The file has the differences from the last version
    with the capability, or from the capability before; null: no answer.
    """
    answers_by_form: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    last: dict[str, dict[str, Any]] = {}
    for by_capability in answers_by_form.values():
        before: dict[str, Any] = {}
        for capability, changes in by_capability.items():
            merged_answers = last.get(capability, before) | changes
            before = {key: value for key, value in merged_answers.items() if value is not None}
            last[capability] = by_capability[capability] = before
    return answers_by_form


def keep_answers(version: str, answers: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the answers of a version by capability beside those of the others."""
    answers_by_form = {name: dict(gpu_answers) for name, gpu_answers in read_answers().items()}
    answers_by_form[version] = answers_by_form.get(version, {}) | {
        gpu: dict(gpu_answers) for gpu, gpu_answers in answers.items()
    }
    last: dict[str, dict[str, Any]] = {}
    rows = []
    for form in sorted(answers_by_form, key=order):
        lines, before = [], dict[str, Any]()
        for gpu in sorted(answers_by_form[form], key=order):
            base, answer = last.get(gpu, before), answers_by_form[form][gpu]
            changes = {key: answer.get(key) for key in sorted({*base, *answer})}
            changes = {key: value for key, value in changes.items() if base.get(key) != value}
            lines.append(f"    {json.dumps(gpu)}: {json.dumps(changes)}")
            last[gpu] = before = answer
        rows.append(f"  {json.dumps(form)}: {{\n" + ",\n".join(lines) + "\n  }")
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    read_answers.cache_clear()


def answers(version: str) -> dict[str, Any]:
    """The engine's answers by key. A case without an answer, for a fault of the stand-ins, is left
    out."""
    del version
    sglang_attention.record_backends()
    answers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases():
            try:
                answers[case.key] = _answer(Path(folder), case)
            except Exception as error:  # an engine's own code fails in many ways
                del error
    return answers


def _answer(folder: Path, case: Case) -> Any:
    if case.of == "memory":
        return _memory_answer(folder, case)
    if case.of == "linear":
        scheme = next(
            linear_scheme for linear_scheme in linear_schemes() if case_of(linear_scheme) == case
        )
        answer: Any = sglang_linear_questions.answer(scheme)
        return REFUSED if answer in ("method", "none") else answer
    if case.of == "moe":
        answer = sglang_moe_questions.answer(question_of(case))
        return REFUSED if isinstance(answer, str) else answer
    _write_config(folder, case.model)
    answer = sglang_attention_questions.answer(folder, attention_question(case))
    return REFUSED if isinstance(answer, str) else answer[:3]


def case_of(scheme: sglang_linear_questions.Question) -> Case:
    return Case("linear", "", scheme.origin, scheme.kind, form_of(scheme))


def attention_question(case: Case) -> sglang_attention_questions.Question:
    name, _, value = case.detail.partition("=")
    if name == "kv":
        return sglang_attention_questions.Question(case.model, value)
    return sglang_attention_questions.Question(case.model, attention=value or None)


def memory_of(case: Case) -> tuple[int, int]:
    """MiB of a GPU, and tensor parallel ranks."""
    memory, _, tp = (case.detail or f"{sglang_attention_questions.MIB} x1").partition(" x")
    return int(memory), int(tp)


def _memory_answer(folder: Path, case: Case) -> Any:
    _write_config(folder, case.model)
    memory, tp = memory_of(case)
    arguments, answer = sglang_memory_questions.resolve_memory(folder / case.model, memory, tp)
    if arguments:
        return [*answer, sglang_memory_questions.request_states(arguments)]
    if answer.startswith(("AssertionError", "ValueError")):
        return REFUSED
    raise LookupError(answer)


def _write_config(folder: Path, name: str) -> None:
    model = folder / name
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(config_of(name)))
