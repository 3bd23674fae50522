"""The refusals of a start path, on a package of this test."""

from __future__ import annotations

from pathlib import Path

from tests.conformance.engine.start_path import refusals

_SOURCE = """
def start(config, platform):
    if config.size < 1:
        raise ValueError("size")
    if platform.is_rocm():
        raise ValueError("rocm")
    try:
        import package
    except ImportError:
        raise ValueError("package")
    Engine().load(config)

class Engine:
    def load(self, config):
        if config.dtype == "nope":
            raise ValueError("dtype")
        self.abstract()

        wanted = config.dtype
        if wanted:
            raise ValueError("wanted")
        if self.state is None:
            raise ValueError("state")

    def abstract(self):
        raise NotImplementedError

    def forward(self, x):
        if x is None:
            raise ValueError("never in a start")

    def __getattr__(self, name):
        raise AttributeError(name)
"""


def test_refusals_of_entered_and_called_functions_are_counted_by_kind(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(_SOURCE)
    found = refusals(tmp_path, {("engine.py", 2)}, {"size", "dtype"})
    assert [(one.function, one.kind) for one in found] == [
        ("start", "config"),
        ("start", "platform"),
        ("start", "elsewhere"),
        ("Engine.load", "config"),
        ("Engine.load", "config"),
        ("Engine.load", "internal"),
        ("Engine.abstract", "abstract"),
    ]
    assert found[0].place == "engine.py:4"
