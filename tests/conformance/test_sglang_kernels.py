"""The kernels of SGLang, of dense layers and of experts: every kept answer of the engine equals the
planner's."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.engines.common.kernels.expert_kernels import MoeChoice
from gateway.engines.common.kernels.linear import choose
from gateway.models.scheme import LinearShape
from tests.conformance import (
    sglang_linear_questions,
    sglang_moe_questions,
    sglang_runner_questions,
)
from tests.conformance.golden import golden
from tests.conformance.known_choices import refused_as_a_whole
from tests.conformance.moe_blocks import block
from tests.support.published import config
from tests.support.sglang_kernels import ENGINES, linear, moe_choice, scheme_of
from tests.support.versions import SGLANG, since


def known_count(table: dict[str, int], version: str) -> int:
    """The table's number of the newest version in it that is not newer than this one."""
    return next(
        count for first_version, count in reversed(table.items()) if since(version, first_version)
    )


def known_from(table: dict[str, set[tuple[str, str]]], version: str) -> set[tuple[str, str]]:
    """The table's entry of the newest version in it that is not newer than this one."""
    return next(
        names for first_version, names in reversed(table.items()) if since(version, first_version)
    )


# Layers that the rules leave unknown: of GPTQ and its kin the layers of which a rank holds no whole
# groups, or whose activations the plain kernel was not written for; INT8 from 10.0 on.
LINEAR_UNKNOWN = {
    "0.5.10.post1": {("gptq", "wna16"), ("auto-round", "wna16"), ("compressed-tensors", "wna16"),
        ("compressed-tensors", "int8"),
                     ("compressed-tensors", "w4a8"), ("modelopt", "mxfp8")},
    "0.5.23": {("gptq", "wna16"), ("auto-round", "wna16"), ("compressed-tensors", "wna16"),
        ("compressed-tensors", "int8"),
               ("compressed-tensors", "w4a8")},
}  # fmt: skip


# Marlin alone refuses sizes in its CUDA files, after the code that is asked here has chosen it.
MARLIN = ("apply_gptq_marlin_linear", "apply_fp8_marlin_linear")


@pytest.mark.parametrize("version", SGLANG)
def test_a_dense_layer_uses_the_product_of_the_engine(version: str) -> None:
    wrong: list[Any] = []
    unknown_layers, agreement = set(), 0
    for capability, answers in golden(sglang_linear_questions, version).items():
        for question, answer in zip(
            sglang_linear_questions.questions(version), answers, strict=True
        ):
            if answer == "method" and refused_as_a_whole(ENGINES[version], question, capability):
                continue
            k, n, parts = question.parts
            sizes: dict[str, Any] = {
                "k": k,
                "n": n,
                "full_k": question.k,
                "full_n": question.n,
                "parts": parts,
            }
            shape = LinearShape(
                scheme=scheme_of(question), dtype=question.dtype, origin=question.origin, **sizes
            )
            choice = choose(linear(version), shape, capability)
            kernel = (
                choice.refusals[-1].kernel
                if choice.refusals and choice.refusals[-1].kernel in MARLIN
                else "none"
            )
            if choice.status == "unknown":
                unknown_layers.add((question.origin, question.kind))
            elif answer not in ((choice.kernel,) if choice.kernel else (kernel, "none", "method")):
                wrong.append((capability, question, answer, choice))
            else:
                agreement += 1
    assert wrong == []
    assert unknown_layers == known_from(LINEAR_UNKNOWN, version)
    assert agreement > 7_000, agreement


# Runners that stand-ins alone would answer, methods that have none, layers that are left
# unquantized without a word: see moe.yaml.
MOE_UNKNOWN = {
    "0.5.10.post1": {
        ("none", "unquantized"), ("online", "fp8_tensor"), ("fp8", "fp8_block"),
        ("compressed-tensors", "fp8_token"),
        ("gptq", "wna16"), ("compressed-tensors", "wna16"), ("awq", "wna16"),
        ("compressed-tensors", "w4a8"),
        ("compressed-tensors", "nvfp4"), ("modelopt", "nvfp4"), ("modelopt", "fp8_tensor"),
        ("modelopt", "mxfp8"), ("mxfp4", "mxfp4"),
    },
    "0.5.23": {
        ("none", "unquantized"), ("online", "fp8_tensor"), ("fp8", "fp8_block"),
        ("compressed-tensors", "fp8_token"),
        ("gptq", "wna16"), ("compressed-tensors", "wna16"), ("awq", "wna16"),
        ("auto-round", "wna16"), ("compressed-tensors", "w4a8"),
        ("compressed-tensors", "nvfp4"), ("compressed-tensors", "mxfp4"), ("modelopt", "nvfp4"),
        ("modelopt", "fp8_tensor"),
        ("modelopt", "mxfp8"), ("mxfp4", "mxfp4"),
    },
}  # fmt: skip


# The engine's treatment of a checkpoint that the planner refuses as a whole. Where it names the
# plain method of AWQ or GPTQ, it may leave experts unquantized without a word, or have none for
# them.
REFUSED = ("method", "none", ["UnquantizedFusedMoEMethod", "triton"])


def answer_of(choice: MoeChoice) -> Any:
    if choice.kernel is None:
        return "none"
    return [choice.method, None if choice.kernel == choice.method else choice.kernel]


@pytest.mark.parametrize("version", SGLANG)
def test_experts_get_the_runner_that_the_engine_chooses(version: str) -> None:
    wrong: list[Any] = []
    unknown_layers, agreement = set(), 0
    for capability, answers in golden(sglang_moe_questions, version).items():
        for question, answer in zip(sglang_moe_questions.questions(version), answers, strict=True):
            choice = moe_choice(version, question, capability)
            family = str(config(question.model)["model_type"])
            if block(question) and refused_as_a_whole(
                ENGINES[version], question, capability, family
            ):
                if answer not in REFUSED:
                    wrong.append((capability, question, answer, None))
                continue
            if choice.status == "unknown":
                unknown_layers.add((question.origin, question.kind))
            elif answer_of(choice) != ("none" if answer == "method" else answer):
                wrong.append((capability, question, answer, choice))
            else:
                agreement += 1
    assert wrong == []
    assert unknown_layers == known_from(MOE_UNKNOWN, version)
    assert agreement > 1_800, agreement


# Answers about a forced runner that the rules describe, of 40.
RUNNER_AGREEMENT = {"0.5.10.post1": 18, "0.5.23": 26}


@pytest.mark.parametrize("version", SGLANG)
def test_a_runner_that_a_user_names_is_the_one_of_the_engine(version: str) -> None:
    """A method without a runner loads, and fails at the first request."""
    wrong: list[Any] = []
    agreement = 0
    for capability, answers in golden(sglang_runner_questions, version).items():
        for question, answer in zip(
            sglang_runner_questions.questions(version), answers, strict=True
        ):
            choice = moe_choice(version, question.experts, capability, question.runner)
            has_runner = answer not in ("none", "method") and answer[1] is not None
            if choice.status == "unknown":
                continue
            if answer_of(choice) == (answer if has_runner else "none"):
                agreement += 1
            else:
                wrong.append((capability, question, answer, choice))
    assert wrong == []
    assert agreement >= known_count(RUNNER_AGREEMENT, version), agreement
