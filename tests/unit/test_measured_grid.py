"""The grid that is measured on rented machines is well-formed: a misspelt flag would cost a start
of a minute there."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import yaml

from tests.support.paths import ROOT
from tests.support.published import model_from_config

sys.path.insert(0, str(ROOT / "benchmarks"))

from speed import models
from speed.grid import GRID, LOADS, ONE_GPU
from speed.load import Answer, equal_shares, figures
from speed.run import finished_settings

FLAGS = [*yaml.safe_load_all((ROOT / "profiles/engines/vllm/0.26.0.yaml").read_text())][1]["flags"]


def test_every_flag_is_one_of_the_engine() -> None:
    for setting in GRID:
        for flag in setting.flags:
            name, dashed_name, value = flag.removeprefix("--").partition("=")
            engine_flag = FLAGS[name] if name in FLAGS else FLAGS[name.removeprefix("no-")]
            assert dashed_name or engine_flag["type"] == "bool", flag
            assert not dashed_name or value in engine_flag.get("choices", [value]), flag
            assert engine_flag["type"] != "int" or value.isdigit(), flag


def test_each_model_has_its_defaults_and_five_other_settings() -> None:
    assert len(set(GRID)) == len(GRID)
    assert len({(setting.model, setting.name) for setting in GRID}) == len(GRID)
    counter = Counter(setting.model for setting in GRID)
    assert {model for model, count in counter.items() if count >= 6} >= set(ONE_GPU)
    assert [setting.name for setting in GRID[: len(ONE_GPU)]] == ["defaults"] * len(ONE_GPU)
    assert all(not setting.flags for setting in GRID if setting.name == "defaults")


def test_a_setting_has_the_gpus_that_its_flags_take() -> None:
    for setting in GRID:
        gpu_count = 1
        for flag in setting.flags:
            if "parallel-size=" in flag:
                gpu_count *= int(flag.partition("=")[2])
        assert gpu_count == setting.gpus, setting


def test_models_of_the_grid_have_their_names_and_sizes(tmp_path: Path) -> None:
    for name in {setting.model for setting in GRID}:
        spec = model_from_config(models.config(name), source=name)
        assert spec.max_position > max(load.tokens_in + load.tokens_out for load in LOADS)
    folder = models.write(tmp_path, "tiny")
    assert json.loads((folder / "config.json").read_text()) == models.config("tiny")
    assert (
        len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
        == models.config("tiny")["vocab_size"]
    )


def test_the_figures_of_answers_are_summed() -> None:
    answers = [
        Answer(0.1, 1.1, 11),
        Answer(0.3, 2.3, 11),
        Answer(0.2, 1.7, 11),
        Answer(error="refused"),
    ]
    values = figures(answers, 3.0)
    assert (values["answers"], values["errors"], values["error"]) == (3, 1, "refused")
    assert (values["tokens_s"], values["ttft_ms"], values["ttft_most_ms"], values["tpot_ms"]) == (
        11.0,
        200.0,
        300.0,
        150.0,
    )
    assert "tpot_ms" not in figures([Answer(0.1, 0.1, 1)], 0.1)
    assert equal_shares(10, 4) == [3, 3, 2, 2]


def test_a_setting_that_was_cut_or_failed_once_is_measured_again(tmp_path: Path) -> None:
    lines = [
        {"model": "a", "setting": "whole"},
        {"model": "a", "setting": "cut", "cut": True},
        {"model": "a", "setting": "once", "failed": "x"},
        *[{"model": "a", "setting": "twice", "failed": "x"}] * 2,
    ]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert finished_settings(tmp_path) == {("a", "whole"), ("a", "twice")}
    assert finished_settings(tmp_path / "none") == set()
