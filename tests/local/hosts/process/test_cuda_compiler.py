"""The compiler's option for many cores, asked of the compiler that an engine would take."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.hosts.process import cuda_compiler
from gateway.hosts.process.cuda_compiler import VARIABLE, build_variables

HELP = "--split-compile <number>   (-split-compile)"


def make_compiler(folder: Path, help_text: str) -> Path:
    compiler = folder / "bin" / "nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.write_text(f"#!/bin/sh\necho '{help_text}'\n")
    compiler.chmod(0o755)
    return compiler


@pytest.mark.parametrize("name", ["CUDA_HOME", "CUDA_PATH"])
def test_a_compiler_with_the_option_uses_all_cores(tmp_path: Path, name: str) -> None:
    make_compiler(tmp_path, HELP)
    assert build_variables({name: str(tmp_path)}) == {VARIABLE: "--split-compile=0"}


def test_a_compiler_on_the_path_is_asked(tmp_path: Path) -> None:
    folder = make_compiler(tmp_path, HELP).parent
    assert build_variables({"PATH": str(folder)}) == {VARIABLE: "--split-compile=0"}


def test_a_compiler_in_the_usual_folder_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_compiler, "_DEFAULT_FOLDER", tmp_path)
    assert not build_variables({})
    make_compiler(tmp_path, HELP)
    assert build_variables({}) == {VARIABLE: "--split-compile=0"}


@pytest.mark.parametrize("help_text", ["--threads <number>", "--split-compile-extended <number>"])
def test_a_compiler_without_the_option_stays_as_it_is(tmp_path: Path, help_text: str) -> None:
    make_compiler(tmp_path, help_text)
    assert not build_variables({"CUDA_HOME": str(tmp_path)})


def test_a_compiler_that_does_not_run_stays_as_it_is(tmp_path: Path) -> None:
    make_compiler(tmp_path, HELP).chmod(0o644)
    assert not build_variables({"CUDA_HOME": str(tmp_path)})


def test_options_of_the_owner_stay(tmp_path: Path) -> None:
    make_compiler(tmp_path, HELP)
    assert not build_variables({"CUDA_HOME": str(tmp_path), VARIABLE: "-O1"})
