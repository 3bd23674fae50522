"""Sources of models as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.model_folder import model_folder
from gateway.models.catalog.hub import repository_hint


@pytest.mark.parametrize(
    "page",
    [
        "https://huggingface.co/Qwen/Qwen3-8B",
        "http://www.huggingface.co/Qwen/Qwen3-8B/",
        "huggingface.co/Qwen/Qwen3-8B/tree/main",
        "hf.co/Qwen/Qwen3-8B",
    ],
)
def test_a_page_is_its_repository(page: str) -> None:
    assert model_folder(page) == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    "source",
    [
        "Qwen/Qwen3-8B",
        "https://huggingface.co/Qwen/Qwen3-8B/tree/v2",  # another revision is never main
        "https://example.com/Qwen/Qwen3-8B",
        "hf.co/Qwen/Qwen3-8B-GGUF:Q4_K_M",
        "model.safetensors",
        "models--Qwen--Qwen3-8B",
    ],
)
def test_other_sources_stay_as_written(source: str) -> None:
    assert model_folder(source) == source


def test_a_file_is_its_folder(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).touch()
        assert model_folder(str(tmp_path / name)) == str(tmp_path)
    (tmp_path / "model.gguf").touch()
    assert model_folder(str(tmp_path / "model.gguf")) == str(tmp_path / "model.gguf")


def test_a_folder_of_the_cache_is_its_main_commit(tmp_path: Path) -> None:
    repository, commit = tmp_path / "models--Qwen--Qwen3-8B", "b" * 40
    (repository / "refs").mkdir(parents=True)
    assert model_folder(str(repository)) == str(repository)
    (repository / "refs/main").write_text(commit)
    assert model_folder(str(repository)) == str(repository)  # never downloaded
    (repository / "snapshots" / commit).mkdir(parents=True)
    assert model_folder(str(repository)) == str(repository / "snapshots" / commit)
    (repository / "refs/main").write_text("../../..")
    assert model_folder(str(repository)) == str(repository)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("unsloth/Qwen3.6-27B-GGUF:Q4_K_M", "Qwen3.6-27B"),
        ("hf.co/bartowski/Qwen3-8B-GGUF:Q8_0", "Qwen3-8B"),
        ("Qwen3.8-27B-UD-Q3_K_XL.gguf", "Qwen3.8-27B"),
        ("gemma-4-31b-it-IQ4_XS.gguf", "gemma-4-31b-it"),
        ("org/model:Q4_K_M", "model"),
    ],
)
def test_a_gguf_source_names_the_search_for_its_model(name: str, model: str) -> None:
    assert "GGUF is not planned here" in repository_hint(name)
    assert f"`fitserve search {model}`" in repository_hint(name)


def test_another_wrong_source_has_no_word_of_gguf() -> None:
    assert "GGUF" not in repository_hint("qwen3:8b")
    assert "GGUF" not in repository_hint("a/b/c")
