"""Which product does each dense linear layer come to in SGLang? The questions, and how the engine
is asked.

The engine's own layer is built on the meta device from the quantization block that a checkpoint
would have, its weights are prepared as after loading, and it is called until it reaches a function
that multiplies (engine/sglang_layers.py): the answer is that function's name. "method": the engine
refuses the checkpoint as a whole; "none": it refuses the layer. The shapes that Marlin then refuses
stand in its CUDA files, which nothing here can run.
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from gateway.engines.sglang.inside import layers as sglang_layers
from gateway.engines.sglang.inside import model as sglang_model
from tests.conformance.moe_blocks import block as quantization_block
from tests.support.paths import MODELS

ENGINE = "sglang"
CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1")
MODEL = MODELS / "llama-3.1-8b.json"


class Question(NamedTuple):
    origin: str  # quantizer: the quant_method of the checkpoint; "online": --quantization fp8
    kind: str
    bits: int
    group: int = -1
    symmetric: bool = True
    act_order: bool = False
    static: bool = False
    weight_only: bool = False
    dtype: str = "bfloat16"
    k: int = 4096  # of the whole layer
    n: int = 4096
    tp: int = 1
    cut: str = ""  # divided side: row (k), column (n), merged (n, of two modules)

    @property
    def parts(self) -> tuple[int, int, tuple[int, ...]]:
        """(k, n, outputs of each module) of one rank."""
        if self.cut == "row":
            return self.k // self.tp, self.n, (self.n,)
        n = self.n // self.tp
        return self.k, n, (n // 2, n // 2) if self.cut == "merged" else (n,)


SIZES = (
    (4096, 4096, 1, ""),
    (2048, 32, 1, ""),
    (2048, 64, 2, "column"),
    (2048, 100, 1, ""),
    (2880, 2880, 1, ""),
    (2112, 4096, 1, ""),
    (1152, 4096, 2, "row"),
    (11008, 4096, 4, "row"),
    (18944, 3584, 8, "row"),
    (4096, 1088, 2, "column"),
    (4096, 22016, 2, "merged"),
    (4096, 5760, 2, "merged"),
    (128, 704, 1, ""),
    (96, 128, 1, ""),
    (192, 256, 1, ""),
)


def schemes() -> Iterator[Question]:
    for bits, group, act_order in itertools.product((4, 8), (-1, 32, 128), (False, True)):
        yield Question("gptq", "wna16", bits, group, act_order=act_order)
    for bits, group, symmetric in (
        (4, 64, True),
        (4, 16, True),
        (4, 256, True),
        (3, 128, True),
        (4, 128, False),
        (8, 128, False),
    ):
        yield Question("gptq", "wna16", bits, group, symmetric)
    for group in (-1, 16, 32, 64, 128):
        yield Question("awq", "wna16", 4, group, symmetric=False)
    yield Question("awq", "wna16", 4, 128)
    for bits, symmetric, group in itertools.product((4, 8), (True, False), (-1, 32, 128)):
        yield Question("auto-round", "wna16", bits, group, symmetric)
        yield Question("compressed-tensors", "wna16", bits, group, symmetric)
    for origin in ("auto-round", "compressed-tensors"):
        yield Question(origin, "wna16", 3, 128)
    yield Question("compressed-tensors", "wna16", 4, 128, act_order=True)
    for static in (False, True):
        yield Question("fp8", "fp8_tensor", 8, static=static)
        yield Question("compressed-tensors", "fp8_tensor", 8, static=static)
        yield Question("compressed-tensors", "int8", 8, static=static)
    yield Question("compressed-tensors", "fp8_token", 8)
    yield Question("online", "fp8_tensor", 8)
    for origin in ("fp8", "compressed-tensors"):
        yield Question(origin, "fp8_block", 8, 128)
    for kind in ("fp8_tensor", "fp8_token", "fp8_block"):
        yield Question(
            "compressed-tensors", kind, 8, 128 if kind == "fp8_block" else -1, weight_only=True
        )
    yield Question("modelopt", "fp8_tensor", 8, static=True)
    for origin, weight_only in itertools.product(("compressed-tensors", "modelopt"), (False, True)):
        yield Question(origin, "nvfp4", 4, 16, weight_only=weight_only)
    yield Question("modelopt", "mxfp8", 8, 32)
    for kind in ("mxfp4", "mxfp8"):
        yield Question("compressed-tensors", kind, 4 if kind == "mxfp4" else 8, 32)
    yield Question("compressed-tensors", "w4a8", 4, 128)


def questions(version: str) -> Iterator[Question]:
    """The same of every version."""
    del version
    for scheme in schemes():
        for k, n, tp, cut in SIZES:
            yield scheme._replace(k=k, n=n, tp=tp, cut=cut)
        for k, n, tp, cut in SIZES[:2]:
            yield scheme._replace(k=k, n=n, tp=tp, cut=cut, dtype="float16")


def answers(version: str) -> list[str]:
    """Ask the engine that this process has booted. Questions that share a configuration are asked
    together."""
    question_list = list(questions(version))
    answers_by_question: dict[Question, str] = {}
    for _, group in itertools.groupby(
        sorted(question_list, key=_configuration), key=_configuration
    ):
        group_items = list(group)
        try:
            config = _configure(group_items[0])
        except sglang_layers.REFUSALS as error:
            answers_by_question |= dict.fromkeys(
                group_items, sglang_layers.refusal_text("method", error)
            )
            continue
        answers_by_question |= {question: _answer(question, config) for question in group_items}
    return [answers_by_question[question] for question in question_list]


def answer(q: Question) -> str:
    """Ask the engine about one layer."""
    try:
        config = _configure(q)
    except sglang_layers.REFUSALS as error:
        return sglang_layers.refusal_text("method", error)
    return _answer(q, config)


def _configuration(q: Question) -> tuple[str, str, int]:
    return json.dumps(quantization_block(q)), q.dtype, q.tp


def _configure(q: Question) -> Any:
    block = quantization_block(q)
    config = json.loads(MODEL.read_text()) | ({"quantization_config": block} if block else {})
    options = {"quantization": "fp8"} if q.origin == "online" else {}
    return sglang_layers.configure(config, q.dtype, q.tp, arguments=options).quantization


def _answer(q: Question, config: Any) -> str:
    linear: Any = importlib.import_module("sglang.srt.layers.linear")
    options = {"bias": False, "quant_config": config, "prefix": "model.layers.0.mlp.down_proj"}
    try:
        with sglang_model.meta(q.dtype):
            if q.cut == "row":
                layer = linear.RowParallelLinear(q.k, q.n, **options)
            elif q.cut == "column":
                layer = linear.ColumnParallelLinear(q.k, q.n, **options)
            elif q.cut == "merged":
                layer = linear.MergedColumnParallelLinear(q.k, [q.n // 2] * 2, **options)
            else:
                layer = linear.ReplicatedLinear(q.k, q.n, **options)
            return sglang_layers.product(layer, q.parts[0], q.dtype)
    except sglang_layers.REFUSALS as error:
        return sglang_layers.refusal_text("none", error)
