"""The task of a model by its architecture, its labels and its other files."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.models.task import read_task

ONE = {"id2label": {"0": "LABEL_0"}}
TWO = {"id2label": {"0": "no", "1": "yes"}}


@pytest.mark.parametrize(
    ("architecture", "fields", "task"),
    [
        ("LlamaForCausalLM", {}, "generate"),
        ("Qwen2VLForConditionalGeneration", {}, "generate"),
        ("GPT2LMHeadModel", {}, "generate"),
        ("ChatGLMModel", {}, "generate"),
        ("InternVLChatModel", {}, "generate"),
        ("MiDashengLMModel", {}, "generate"),
        ("Qwen2_5OmniModel", {}, "generate"),
        ("WhisperForConditionalGeneration", {}, "transcribe"),
        ("CohereAsrForConditionalGeneration", {}, "transcribe"),
        ("BertModel", {}, "embed"),
        ("Qwen3Model", {}, "embed"),
        ("ColPaliForRetrieval", {}, "embed"),
        ("ColQwen3", {}, "embed"),
        ("BertForMaskedLM", {}, "embed"),
        ("XLMRobertaForSequenceClassification", ONE, "rerank"),
        ("XLMRobertaForSequenceClassification", TWO, "classify"),
        ("BertForSequenceClassification", {}, "classify"),  # transformers' default: two labels
        ("BertForSequenceClassification", {"num_labels": 1}, "rerank"),
        ("Qwen3ForSequenceClassification", {"is_original_qwen3_reranker": True}, "classify"),
        ("BertForTokenClassification", ONE, "classify"),
        ("JinaVLForRanking", {}, "rerank"),
        ("Qwen2ForRewardModel", {}, "classify"),
    ],
)
def test_an_architecture_names_its_task(
    architecture: str, fields: dict[str, Any], task: str
) -> None:
    config = {"architectures": [architecture], **fields}
    assert read_task(config, is_encoder=False, hint=None).task == task


def test_a_reranker_of_two_tokens_has_one_label() -> None:
    config = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["no", "yes"],
        "is_original_qwen3_reranker": True,
    }
    assert read_task(config, is_encoder=False, hint=None).task == "rerank"


def test_other_files_and_encoders_embed() -> None:
    config = {"architectures": ["Qwen3ForCausalLM"]}
    task = read_task(config, is_encoder=False, hint="embed")
    assert task == ("embed", "the files of sentence-transformers")
    assert read_task({"architectures": ["A"]}, is_encoder=True, hint=None).task == "embed"
