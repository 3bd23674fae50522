"""The task of a model, by its architecture and files. Pure.

Sources: _SUFFIX_TO_DEFAULTS of vllm/config/model.py, the tables of vllm/model_executor/models/
registry.py, and supports_transcription_only of its classes (0.33.0). The number of labels:
_resolve_num_labels of vllm/model_executor/models/adapters.py; PreTrainedConfig of transformers has
two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from gateway.domain import Task

# The ends of architectures that do not generate. The first that fits decides.
_ENDS: tuple[tuple[str, Task], ...] = (
    ("Classification", "classify"),
    ("ClassificationModel", "classify"),
    ("ForRanking", "rerank"),
    ("ForJointSchema", "classify"),
    ("RewardModel", "classify"),
    ("ForRewardModeling", "classify"),
    ("ForMaskedLM", "embed"),
    ("ForRetrieval", "embed"),
    ("ForTextEncoding", "embed"),
    ("EmbeddingModel", "embed"),
    ("EmbedModel", "embed"),
)
_TRANSCRIPTION_ARCHITECTURES = {
    "CohereAsrForConditionalGeneration",
    "FireRedASR2ForConditionalGeneration",
    "FunASRForConditionalGeneration",
    "MossTranscribeDiarizeForConditionalGeneration",
    "WhisperForConditionalGeneration",
}
_EMBEDDING_ARCHITECTURES = {"ColQwen3", "ColQwen3_5", "HF_ColBERT", "Terratorch"}
# Most architectures named ...Model have no head that generates; these have one. Source:
# vllm/model_executor/models/registry.py.
_GENERATION_WORDS = re.compile(
    r"(LMHead|LM|Chat|ChatGLM|Aquila|Omni|Ultravox|Audio|MTP|Draft)Model$"
)
_SOURCE = "architectures in config.json"


class ModelTask(NamedTuple):
    task: Task
    source: str


def read_task(config: Mapping[str, Any], *, is_encoder: bool, hint: Task | None) -> ModelTask:
    """The task.

    is_encoder: all attention reads in both directions.
    hint: the task that other files or the user name.
    """
    architectures = config.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    if name in _TRANSCRIPTION_ARCHITECTURES:
        return ModelTask("transcribe", _SOURCE)
    task: Task | None = next((task for end, task in _ENDS if name.endswith(end)), None)
    if name.endswith("ForSequenceClassification"):
        task = classifying_task(config)
    if task is None and (
        name in _EMBEDDING_ARCHITECTURES
        or (name.endswith("Model") and not _GENERATION_WORDS.search(name))
    ):
        task = "embed"
    if task is not None:
        return ModelTask(task, _SOURCE)
    if is_encoder:
        return ModelTask("embed", "model_type in config.json")
    if hint is not None:
        return ModelTask(hint, "the files of sentence-transformers")
    return ModelTask("generate", _SOURCE)


def classifying_task(config: Mapping[str, Any]) -> Task:
    """The task of the model with a head that classifies: a head of one label ranks."""
    return "rerank" if _labels(config) == 1 else "classify"


def _labels(config: Mapping[str, Any]) -> int:
    """The number of labels of a classifier. A reranker has one."""
    tokens = config.get("classifier_from_token")
    if isinstance(tokens, list) and tokens:
        method = str(config.get("method", ""))
        return 1 if method == "from_2_way_softmax" or _asks_yes_or_no(config) else len(tokens)
    text = config.get("text_config")
    for block in (config, text if isinstance(text, Mapping) else {}):
        labels = block.get("id2label")
        if isinstance(labels, Mapping) and labels:
            return len(labels)
        number = block.get("num_labels")
        if isinstance(number, int) and not isinstance(number, bool):
            return number
    return 2


def _asks_yes_or_no(config: Mapping[str, Any]) -> bool:
    """Whether the model is a Qwen3 reranker as published, whose score is that of one token."""
    return any(
        config.get(name) is True
        for name in ("is_original_qwen3_reranker", "is_original_qwen3_vl_reranker")
    )
