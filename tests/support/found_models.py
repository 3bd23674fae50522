"""Repositories of a Hub, and the rows of a search for them."""

from __future__ import annotations

import json
from typing import Any

from tests.support.fake_hub import FakeRepo
from tests.support.paths import MODELS

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


TEMPLATE = json.dumps({"chat_template": "{{ messages[0]['content'] }}"}).encode()


def published_repo(model: str, *, chats: bool = True, **config: Any) -> FakeRepo:
    """A repository with the published config.json of a model, and a chat template."""
    document = json.loads((MODELS / f"{model}.json").read_bytes()) | config
    files = {"config.json": json.dumps(document).encode()}
    return FakeRepo(files | ({"tokenizer_config.json": TEMPLATE} if chats else {}))


def embedding_repo() -> FakeRepo:
    """A repository that sentence-transformers made: its modules say that it embeds."""
    repo = published_repo("qwen3-embedding-0.6b")
    return FakeRepo(repo.files | {"modules.json": b"[]"})


def row(name: str, downloads: int, *tags: str, pipeline: str = "text-generation") -> dict[str, Any]:
    return {
        "id": name,
        "tags": ["safetensors", "conversational", *tags],
        "pipeline_tag": pipeline,
        "downloads": downloads,
        "trendingScore": -downloads,
    }


REPOS = {
    "qwen/small-1b": published_repo("qwen2.5-1.5b"),
    "qwen/plain-8b": published_repo("qwen3-8b"),
    "qwen/base-8b": published_repo("qwen3-8b", chats=False),
    "qwen/large-30b": published_repo("qwen3-30b-a3b"),
    "other/large-30b-awq": published_repo("qwen3-30b-a3b", quantization_config=AWQ),
    "qwen/eyes-8b": published_repo("qwen3-vl-8b"),
    "qwen/vectors": embedding_repo(),
    "some/gguf-8b": published_repo("qwen3-8b"),
    "org/huge": published_repo("deepseek-v3", quantization_config=FP8),
}


ROWS = [
    row("qwen/small-1b", 900),
    row("qwen/plain-8b", 500),
    row("qwen/base-8b", 450),
    row("some/gguf-8b", 420, "gguf"),
    row("qwen/large-30b", 400, "code"),
    row("org/huge", 300),
    row("qwen/eyes-8b", 200, pipeline="image-text-to-text"),
    row("qwen/vectors", 100, "code", pipeline="feature-extraction"),
    row("no name", 1000),
]
