"""`fitserve import` as users type it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.commands import fitserve
from tests.support.swap_config import SWAP


def test_a_file_of_llama_swap_becomes_a_models_file_that_the_check_accepts(tmp_path: Path) -> None:
    file, output = tmp_path / "swap.yaml", tmp_path / "models.yaml"
    file.write_text(SWAP)
    result = fitserve("import", str(file), "-o", str(output))
    assert result.returncode == 0, result.stderr
    assert f"{file}:16: llama: " in result.stderr
    assert f"1 model written to {output}" in result.stderr
    outcome = fitserve("config", "check", str(output))
    assert (outcome.returncode, "1 model" in outcome.stdout) == (0, True), outcome.stderr
    second_result = fitserve("import", str(file), "-o", str(output))
    assert (second_result.returncode, "exists already" in second_result.stderr) == (2, True)
    import_result = fitserve("import", str(file))
    assert import_result.stdout == output.read_text()
    answer = json.loads(fitserve("import", str(file), "--json").stdout)
    assert answer["models"]["qwen"]["source"] == "Qwen/Qwen3-8B"
    assert answer["notices"][0]["line"] == 1


def test_a_modelfile_is_named_by_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "pirate"
    folder.mkdir()
    (folder / "Modelfile").write_text("FROM ./weights\n")
    answer = json.loads(fitserve("import", str(folder / "Modelfile"), "--json").stdout)
    assert answer["models"] == {"pirate": {"source": "./weights"}}


def test_files_without_models_end_with_words(tmp_path: Path) -> None:
    gguf, other_file = tmp_path / "Modelfile", tmp_path / "other.yaml"
    gguf.write_text("FROM ./model.gguf\n")
    other_file.write_text("a: 1\n")
    nothing = fitserve("import", str(gguf))
    assert (nothing.returncode, nothing.stdout) == (3, "")
    assert "no model that can be taken over" in nothing.stderr
    result = fitserve("import", str(other_file))
    assert result.returncode == 2
    assert "neither a config of llama-swap, nor a Modelfile, nor a compose file" in result.stderr
    missing = fitserve("import", str(tmp_path / "gone"))
    assert (missing.returncode, "cannot be read" in missing.stderr) == (2, True)


def test_a_file_that_is_too_long_is_not_read_in_part(tmp_path: Path) -> None:
    file = tmp_path / "swap.yaml"
    file.write_text(f"models:\n  m: {{cmd: vllm serve org/name}}\n# {'ä' * 600_000}\n")
    result = fitserve("import", str(file))
    assert (result.returncode, "more than 1.0 MiB" in result.stderr) == (2, True), result.stderr


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "swap.yaml"
    file.write_text(SWAP)
    result = fitserve("import", str(file), "-o", str(tmp_path / "gone" / "models.yaml"))
    assert (result.returncode, "cannot be written" in result.stderr) == (1, True), result.stderr
