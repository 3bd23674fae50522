"""Builds of kernels that begin when an engine chooses them."""

from __future__ import annotations

import sys
import threading
import types
from pathlib import Path

import pytest

from gateway.hosts.process.prepared.inside import kernel_builds
from tests.support.patience import hang_s


class Kernels:
    """The answer of a builder, which notes its builds."""

    def __init__(self, *, is_aot: bool = False, fails: bool = False) -> None:
        self.is_aot = is_aot
        self.fails = fails
        self.built = threading.Event()
        self.builds = 0

    def build(self, *, verbose: bool) -> None:
        self.builds += 1
        self.built.set()
        if self.fails:
            raise RuntimeError("nvcc is not here")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module with two choices, and a module `jit` whose builders answer `kernels`."""
    engine = types.ModuleType("toy_engine.sampler")

    class Layer:
        def __init__(self, size: int) -> None:
            self.size = size

    engine.supported = lambda *, answer: answer  # type: ignore[attr-defined]
    engine.Layer = Layer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_engine.sampler", engine)
    jit = types.ModuleType("toy_jit")
    jit.kernels = Kernels()  # type: ignore[attr-defined]
    jit.generate = lambda: jit.kernels  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_jit", jit)
    engine.jit = jit  # type: ignore[attr-defined]
    return engine


def join_builds() -> None:
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and thread.daemon:
            thread.join(hang_s())


def test_a_choice_begins_one_build(engine: types.ModuleType) -> None:
    kernel_builds.build_at_choice({"toy_engine.sampler:supported": "toy_jit:generate"})
    assert engine.supported(answer=True)
    assert engine.jit.kernels.built.wait(hang_s())
    assert engine.supported(answer=True)
    join_builds()
    assert engine.jit.kernels.builds == 1


def test_a_choice_against_the_kernels_builds_nothing(engine: types.ModuleType) -> None:
    kernel_builds.build_at_choice({"toy_engine.sampler:supported": "toy_jit:generate"})
    assert not engine.supported(answer=False)
    join_builds()
    assert not engine.jit.kernels.builds


def test_a_layer_begins_a_build_and_is_made(engine: types.ModuleType) -> None:
    kernel_builds.build_at_choice({"toy_engine.sampler:Layer.__init__": "toy_jit:generate"})
    assert engine.Layer(3).size == 3
    assert engine.jit.kernels.built.wait(hang_s())


@pytest.mark.parametrize("kernels", [Kernels(is_aot=True), Kernels(fails=True)])
def test_an_engine_goes_on_with_kernels_that_are_there_or_fail(
    engine: types.ModuleType, kernels: Kernels, capfd: pytest.CaptureFixture[str]
) -> None:
    engine.jit.kernels = kernels
    kernel_builds.build_at_choice({"toy_engine.sampler:supported": "toy_jit:generate"})
    assert engine.supported(answer=True)
    join_builds()
    assert kernels.builds == (0 if kernels.is_aot else 1)
    assert ("nvcc is not here" in capfd.readouterr().err) is kernels.fails


@pytest.mark.parametrize(
    "choice", ["toy_engine.sampler:missing", "toy_engine.sampler:Missing.run", "nowhere:run"]
)
def test_a_choice_that_the_engine_lacks_is_left_out(engine: types.ModuleType, choice: str) -> None:
    before, hooks = dict(vars(engine)), list(sys.meta_path)
    kernel_builds.build_at_choice({choice: "toy_jit:generate"})
    sys.meta_path[:] = hooks
    assert vars(engine) == before


def test_a_module_that_is_imported_later_is_changed_then(
    tmp_path: Path, engine: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "later_engine.py").write_text("def supported():\n    return True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    kernel_builds.build_at_choice({"later_engine:supported": "toy_jit:generate"})
    import later_engine  # type: ignore[import-not-found]

    assert later_engine.supported()
    assert engine.jit.kernels.built.wait(hang_s())
    monkeypatch.delitem(sys.modules, "later_engine")
