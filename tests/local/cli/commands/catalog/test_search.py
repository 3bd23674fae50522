"""`fitserve search` and `fits` as users type them, with a Hub on a socket."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import fitserve
from tests.support.fake_hub import FakeHub
from tests.support.found_models import REPOS, ROWS


def test_models_are_found_and_the_first_that_fits_is_proposed(tmp_path: Path) -> None:
    with FakeHub(REPOS) as hub:
        hub.listed = ROWS
        hub.variants = {name: [] for name in REPOS}
        place = {"FITSERVE_HF_ENDPOINT": hub.url(), "FITSERVE_DATA_DIR": str(tmp_path)}
        result = fitserve("search", "qwen", "8b", "--hardware", "3090", **place, COLUMNS="80")
        assert result.returncode == 0
        lines = result.stdout.splitlines()
        assert lines[0].split() == ["MODEL", "CONTEXT", "TOK/S", "GPUS", "SIZE", "FORM"]
        assert lines[1].split()[0] == "qwen/plain-8b"
        assert "`fitserve run qwen/plain-8b` serves the first" in result.stdout
        assert all(len(line) <= 80 for line in lines)
        rows = json.loads(
            fitserve("fits", "--hardware", "3060", "--limit", "20", "--json", **place).stdout
        )
        fits = {row["name"]: row["fits"] for row in rows}
        assert (fits["qwen/small-1b"], fits["org/huge"]) == (True, False)
        assert all(row["why"] for row in rows if not row["fits"])
        nothing = fitserve("search", "huge", "--hardware", "3060", **place)
        assert (nothing.returncode, "No model was found that fits" in nothing.stdout) == (3, True)
        assert "These do not fit (1)" in nothing.stdout


def test_a_folder_of_models_is_planned_without_the_hub(tmp_path: Path) -> None:
    for name, files in ((name, repo.files) for name, repo in REPOS.items()):
        (folder := tmp_path / "models" / name).mkdir(parents=True)
        (folder / "config.json").write_bytes(files["config.json"])
    place = {"FITSERVE_HF_ENDPOINT": "http://127.0.0.1:9", "FITSERVE_DATA_DIR": str(tmp_path)}
    result = fitserve("fits", str(tmp_path / "models"), "--hardware", "3090", "--json", **place)
    assert result.returncode == 0, result.stderr
    sources = {
        row["source"].removeprefix(f"{tmp_path}/models/") for row in json.loads(result.stdout)
    }
    assert sources == {*REPOS}
    assert "only models on this machine" not in result.stderr
    wish = ("--for", "embed", "--hardware", "3090")
    empty = fitserve("fits", str(tmp_path / "models"), *wish, **place)
    assert (empty.returncode, "Other words" in empty.stdout) == (3, False)
    assert "Without `--for`, all models of the folders count" in " ".join(empty.stdout.split())
    lines = result.stderr.splitlines()
    assert lines == [
        "Searching for models",
        f"Reading {len(REPOS)} models",
        f"Planning {len(REPOS)} models",
    ]


def test_each_model_of_a_given_folder_is_planned(tmp_path: Path) -> None:
    config = REPOS["qwen/small-1b"].files["config.json"]
    names = {f"model-{number}" for number in range(35)}
    for name in names:
        (folder := tmp_path / "models" / name).mkdir(parents=True)
        (folder / "config.json").write_bytes(config)
    place = {"FITSERVE_HF_ENDPOINT": "http://127.0.0.1:9", "FITSERVE_DATA_DIR": str(tmp_path)}
    command = ("fits", str(tmp_path / "models"), "--hardware", "3090", "--json")
    rows = json.loads(fitserve(*command, **place).stdout)
    assert {Path(row["source"]).name for row in rows} == names
    assert len(json.loads(fitserve(*command, "--limit", "3", **place).stdout)) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fits", "--for", "vison"), "did you mean vision"),
        (("search",), "Missing argument"),
        (("fits", "--hardware", "nothing"), "nothing"),
    ],
)
def test_mistakes_of_a_search_are_explained(
    tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    result = fitserve(*arguments, FITSERVE_DATA_DIR=str(tmp_path))
    assert result.returncode in (1, 2)
    assert words.lower() in result.stderr.lower()
