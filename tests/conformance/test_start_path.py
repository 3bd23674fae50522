"""The refusals of a start path, on a package of this test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.engine.option_defaults import defaults
from tests.conformance.engine.path_conditions import OneOf
from tests.conformance.engine.planned_options import is_planned
from tests.conformance.engine.reviewed_refusals import ReviewedRefusal, reviewed_refusals
from tests.conformance.engine.start_path import KINDS, Sources, refusals

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


_OPTIONS = """
class Options:
    watermark: str | None = None
    backend: str = "none"
    steps: int = 1
    dtype: str = "auto"
"""
_CHECKS = """
def check(options, flag):
    if options.dtype == "x":
        options.backend = "deep"
    if options.watermark and options.dtype == "y":
        options.steps = 2
    if options.watermark:
        raise ValueError("watermark")
    if options.backend == "deep":
        raise ValueError("deep")
    if options.backend == "pplx":
        raise ValueError("pplx")
    if options.steps == 1:
        return
    never(options)
    raise ValueError("steps")

def never(options):
    if options.dtype == "z":
        raise ValueError("never")

def parse(options):
    try:
        if options.dtype == "w":
            raise ValueError("inner")
    except ValueError as error:
        raise TypeError("outer") from error
    if options.dtype not in ("a", "b", None):
        raise ValueError("parser")
"""


_TYPED = """
from typing import Literal

Mode = Literal["a", "b"]
NAMES = {"a": 1, "b": 2}

@config
class Typed:
    mode: Mode | None = None
    policy: Literal["default"] = "default"
    count: int = Field(default=None, gt=0)
    size: int = 1
    free: Literal["x"] = "x"

    def check(self, lowest, highest, kind):
        if self.mode is not None and self.mode not in NAMES:
            raise ValueError("mode")
        if self.policy != "default":
            raise ValueError("policy")
        if self.count <= 0:
            raise ValueError("count")
        if self.count <= 5:
            raise ValueError("few")
        if self.free != "x":
            raise ValueError("free")
        if lowest is None and highest is None:
            lowest = 5
        elif lowest is None:
            if highest is None:
                raise ValueError("both")
            lowest = highest
        elif self.size is None:
            lowest = None
            if lowest is None:
                raise ValueError("written")
        if self.size == 3:
            self.fill()
            if self.size != 3:
                raise ValueError("filled")
        if not self.size > 1 and (kind or self.size > 1):
            if not kind:
                raise ValueError("neither")
        if self.mode == "a" and kind:
            raise ValueError("reached")
        if not has_blackwell():
            return
        raise ValueError("blackwell")

    def loosen(self, name):
        self.free = name
"""


def _sources(folder: Path, choices: dict[str, tuple[str, ...]]) -> Sources:
    (folder / "config").mkdir()
    (folder / "config/options.py").write_text(_OPTIONS)
    (folder / "checks.py").write_text(_CHECKS)
    known_defaults = defaults(folder, "vllm", {"dtype"}, choices, {"checks.py"})
    return Sources(
        folder, {"checks.py"}, {"dtype", "backend", "steps", "watermark"}, known_defaults
    )


def test_a_refusal_that_needs_an_option_of_no_plan_is_none_of_a_configuration(
    tmp_path: Path,
) -> None:
    refusal_rows = refusals(_sources(tmp_path, {}), {("checks.py", 2)})
    assert [(refusal.text[18:-2], refusal.kind) for refusal in refusal_rows] == [
        ("watermark", "option"),
        ("deep", "config"),  # the engine itself chooses it by the type
        ("pplx", "option"),
        ("steps", "option"),
    ]


def test_handled_errors_count_once_and_choices_of_the_parser_stay(
    tmp_path: Path,
) -> None:
    entries = {("checks.py", _CHECKS[: _CHECKS.index("def parse")].count("\n") + 1)}
    sources = _sources(tmp_path, {"dtype": ("a", "b")})
    kinds_by_text = {refusal.text: refusal.kind for refusal in refusals(sources, entries)}
    assert kinds_by_text["raise ValueError('inner')"] == "wrapped"
    assert kinds_by_text["raise ValueError('parser')"] == "option"
    assert {*kinds_by_text.values()} <= {*KINDS}


def test_the_default_of_an_option_is_a_value_of_the_engine(
    tmp_path: Path,
) -> None:
    _sources(tmp_path, {})
    known_defaults = defaults(tmp_path, "vllm", {"dtype"}, {}, {"checks.py"})
    assert known_defaults == {"watermark": None, "backend": OneOf(("none", "deep")), "steps": 1}


def test_a_start_has_only_options_and_fields_that_the_planner_knows() -> None:
    options = {"max_model_len", "speculative_config", "method", "VLLM_X"}
    ngram = '--speculative-config={"method":"ngram"}'
    assert is_planned(["--max-model-len=5", ngram], ["VLLM_X"], options)
    assert not is_planned(["--grpc"], [], options)
    assert not is_planned(['--speculative-config={"fly":1}'], [], options)
    assert not is_planned([], ["VLLM_Y"], options)


def test_values_that_types_refuse_and_contrary_conditions_lead_to_no_refusal(
    tmp_path: Path,
) -> None:
    (tmp_path / "typed.py").write_text(_TYPED)
    settings = {"mode", "policy", "count", "size", "free", "kind"}
    devices = {"has_blackwell()": False}
    sources = Sources(tmp_path, {"typed.py"}, settings, {}, devices)
    first = _TYPED[: _TYPED.index("    def check")].count("\n") + 1
    texts_and_kinds = [
        (refusal.text[18:-2], refusal.kind) for refusal in refusals(sources, {("typed.py", first)})
    ]
    assert texts_and_kinds == [
        ("mode", "contrary"),
        ("policy", "typed"),
        ("count", "typed"),
        ("few", "config"),
        ("free", "config"),  # a method gives it another value
        ("both", "contrary"),
        ("written", "config"),
        ("filled", "config"),  # a call may change it
        ("neither", "contrary"),
        ("reached", "config"),
        ("blackwell", "platform"),
    ]


def test_refusals_of_entered_and_called_functions_are_counted_by_kind(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(_SOURCE)
    sources = Sources(tmp_path, {"engine.py"}, {"size", "dtype"}, {})
    refusal_rows = refusals(sources, {("engine.py", 2)})
    assert [(refusal.function, refusal.kind) for refusal in refusal_rows] == [
        ("start", "config"),
        ("start", "platform"),
        ("start", "elsewhere"),
        ("Engine.load", "config"),
        ("Engine.load", "config"),
        ("Engine.load", "internal"),
        ("Engine.abstract", "abstract"),
    ]
    assert refusal_rows[0].place == "engine.py:4"


def test_a_reviewed_refusal_has_the_kind_of_its_row_and_is_counted(
    tmp_path: Path,
) -> None:
    (tmp_path / "engine.py").write_text(_SOURCE)
    sources = Sources(tmp_path, {"engine.py"}, {"size", "dtype"}, {})
    row = ReviewedRefusal("engine.py", "Engine.load", "'wanted'", "chosen", "no such value")
    refusal_rows = refusals(sources, {("engine.py", 2)}, [row])
    assert [refusal.text for refusal in refusal_rows if refusal.kind == "chosen"] == [
        "raise ValueError('wanted')"
    ]
    assert [each_found_refusal.kind for each_found_refusal in refusal_rows].count("config") == 2
    for stale_row in (row._replace(words="state"), row._replace(function="start")):
        with pytest.raises(LookupError, match="no refusal of a configuration"):
            refusals(sources, {("engine.py", 2)}, [stale_row])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_each_reviewed_refusal_has_a_reason_and_one_row(engine: str) -> None:
    rows = reviewed_refusals(engine)
    assert len({row[:3] for row in rows}) == len(rows) > 0
    assert all(row.kind in KINDS and row.reason for row in rows)
