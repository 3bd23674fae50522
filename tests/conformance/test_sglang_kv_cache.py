"""The pools of SGLang's KV cache are those of the engine."""

from __future__ import annotations

from functools import cache

import pytest

from tests.conformance import sglang_attention_questions
from tests.conformance.golden import golden
from tests.support.published import published_model
from tests.support.token_pools import pool
from tests.support.versions import SGLANG


@cache
def published_architecture(name: str) -> str:
    return published_model(name).architecture


@pytest.mark.parametrize("version", SGLANG)
def test_windows_save_memory_only_where_the_engine_keeps_them_apart(version: str) -> None:
    """As its own ModelConfig says (is_hybrid_swa), of every model that was asked about."""
    rules = pool("llama-3.1-8b", version).rules
    for answers in golden(sglang_attention_questions, version).values():
        for question, answer in zip(
            sglang_attention_questions.questions(version), answers, strict=True
        ):
            if (
                not isinstance(answer, str)
                and question.model not in sglang_attention_questions.OTHERS
            ):
                assert (published_architecture(question.model) in rules.hybrid_swa) == answer[4], (
                    question
                )
