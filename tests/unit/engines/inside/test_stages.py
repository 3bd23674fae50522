"""A stage counts as refused only where a statement of the engine's own code ended it."""

from __future__ import annotations

import importlib.util
import io
import sys
import wave
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from gateway.engines.inside.__main__ import error_text
from gateway.engines.inside.meta import Group
from gateway.engines.inside.stages import Start
from gateway.engines.inside.stubs import Anything
from gateway.engines.vllm.inside.start import rehearse_transcription

_SOURCE = """
def says_no():
    raise ValueError("at most 3")

def asserts():
    assert 1 > 2

def lacks(config):
    return config["rope"]["theta"]

def asks(module):
    return module.of_a_package()

def counts(stand_in):
    number = int(stand_in)
    return [1][number]

def reads(group):
    rank = group.all_gather(None)
    return rank.shape

def imports():
    try:
        import a_package_that_is_not_here
    except ImportError:
        return None.shape

def chooses(kind):
    import enum
    return enum.Enum("Kind", "A B")[kind].value, enum.Enum("Kind", {"A": "a"})(kind)

def device():
    raise RuntimeError("No CUDA device is there")

def value():
    raise ValueError("A longer context may lead to CUDA errors")

def parses():
    import argparse
    try:
        says_no()
    except ValueError as error:
        raise argparse.ArgumentTypeError("bad value") from error
"""


@pytest.fixture
def engine(tmp_path: Path) -> ModuleType:
    (folder := tmp_path / "vllm").mkdir()
    (path := folder / "config.py").write_text(_SOURCE)
    spec = importlib.util.spec_from_file_location("engine_of_a_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_statement_of_the_engine_is_a_refusal_with_its_place(engine: ModuleType) -> None:
    start = Start("vllm", error_text)
    assert start.run("cache", lambda: 7) == 7
    start.run("graphs", engine.says_no)
    start.run("later", lambda: pytest.fail("nothing runs after a refusal"))
    answer = start.answer
    assert (answer["refused"], answer["stage"]) == ("ValueError: at most 3", "graphs")
    assert answer["place"] == "config.py:3"
    assert answer["ran"] == ["cache"]


def test_an_assertion_is_a_refusal_with_its_code(engine: ModuleType) -> None:
    start = Start("vllm", error_text)
    start.run("model", engine.asserts)
    assert start.refusal == "AssertionError: assert 1 > 2"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("device", ()),
        ("imports", ()),
        ("counts", (Anything(),)),
        ("reads", (object.__new__(Group),)),
        ("lacks", ({"rope": 1, "scale": Anything()},)),
    ],
)
def test_a_part_that_a_stand_in_or_a_missing_gpu_ends_is_left_out(
    engine: ModuleType, name: str, arguments: tuple[Any, ...]
) -> None:
    start = Start("vllm", error_text)
    start.run("backends", lambda: getattr(engine, name)(*arguments))
    assert not start.refusal
    (omission,) = start.left_out
    assert omission.startswith("backends: ")
    assert start.run("graphs", lambda: 1) == 1


@pytest.mark.parametrize(
    ("name", "argument", "error", "line"),
    [
        ("lacks", {}, "KeyError: 'rope'", 9),
        ("lacks", {"rope": None}, "TypeError: 'NoneType' object is not subscriptable", 9),
        ("lacks", {"rope": 1.0}, "TypeError: 'float' object is not subscriptable", 9),
        ("chooses", "C", "KeyError: 'C'", 30),
        ("chooses", "A", "ValueError: 'A' is not a valid Kind", 30),
    ],
)
def test_a_crash_by_values_of_the_start_is_a_refusal_with_its_line(
    engine: ModuleType, name: str, argument: Any, error: str, line: int
) -> None:
    start = Start("vllm", error_text)
    start.run("model", lambda: getattr(engine, name)(argument))
    assert start.has_crashed
    assert start.refusal.startswith(f"{error} (line: return ")
    assert (start.stage, start.location) == ("model", f"config.py:{line}")


def test_a_crash_of_this_package_is_left_out(engine: ModuleType) -> None:
    """Its own step expects another version of the engine."""
    start = Start("vllm", error_text)
    start.run("model", engine.lacks)
    assert not start.refusal
    assert start.left_out


def test_an_error_of_a_package_beside_the_engine_is_left_out(engine: ModuleType) -> None:
    class Package:
        @staticmethod
        def of_a_package() -> None:
            raise ValueError("not built")

    start = Start("vllm", error_text)
    start.run("backends", lambda: engine.asks(Package))
    assert not start.refusal


def test_a_validator_of_a_configuration_is_found_behind_pydantic(tmp_path: Path) -> None:
    class Configuration(BaseModel):
        size: int

    def wrong() -> None:
        Configuration.model_validate({"size": "x"})

    start = Start(Path(__file__).parent.parent.name, error_text)  # this test is in its "package"
    start.run("configuration", wrong)
    assert start.refusal.startswith("ValidationError")


def test_a_refused_value_may_mention_cuda(engine: ModuleType) -> None:
    start = Start("vllm", error_text)
    start.run("configuration", engine.value)
    assert start.refusal.startswith("ValueError: A longer context")


def test_the_place_of_a_parsers_error_is_its_inner_check(engine: ModuleType) -> None:
    start = Start("vllm", error_text)
    start.run("parser", engine.parses)
    assert (start.refusal, start.location) == ("ArgumentTypeError: bad value", "config.py:3")


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        ("site-packages/transformers/models/llama/configuration_llama.py", True),
        ("site-packages/huggingface_hub/dataclasses.py", True),
        ("site-packages/transformers/processing_utils.py", False),
        ("lib/vllm/lib/site-packages/torch/config.py", False),
    ],
)
def test_checks_of_config_json_count_and_other_libraries_do_not(
    tmp_path: Path, engine: ModuleType, path: str, counts: bool
) -> None:
    (file := tmp_path / path).parent.mkdir(parents=True)
    file.write_text(_SOURCE)
    spec = importlib.util.spec_from_file_location("library_of_a_test", file)
    assert spec is not None
    assert spec.loader is not None
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)

    class Package:
        of_a_package = staticmethod(library.says_no)

    start = Start("vllm", error_text)
    start.run("configuration", lambda: engine.asks(Package))
    assert bool(start.refusal) == counts


def test_an_error_of_a_kind_that_is_asked_for_is_passed_on(engine: ModuleType) -> None:
    start = Start("vllm", error_text)
    with pytest.raises(ValueError, match="at most 3"):
        start.run("sound", engine.says_no, passed_error=ValueError)
    start.refuse("sound", "packages are missing", "audio.py")
    start.refuse("later", "the first refusal counts", "")
    answer = start.answer
    assert (answer["stage"], answer["refused"], answer["place"]) == (
        "sound",
        "packages are missing",
        "audio.py",
    )


class _Registry:
    def __init__(self, transcribes: bool) -> None:
        self.transcribes = transcribes

    def is_transcription_only_model(self, *_: object) -> bool:
        return self.transcribes


@pytest.mark.parametrize(
    ("transcribes", "lacks", "refused_package"),
    [(True, True, "soundfile"), (True, False, ""), (False, True, "")],
)
def test_a_model_that_transcribes_is_refused_where_sound_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, transcribes: bool, lacks: bool, refused_package: str
) -> None:
    def load_audio(file: io.BytesIO, sr: int) -> int:
        with wave.open(file) as sound:
            assert sound.getnframes() == sound.getframerate() != sr
        if lacks:
            raise ImportError("install the extra")
        return sr

    reading = SimpleNamespace(load_audio=load_audio)
    monkeypatch.setitem(sys.modules, "vllm.multimodal.media.audio", reading)
    start = Start("vllm", error_text)
    model = SimpleNamespace(registry=_Registry(transcribes), architectures=["WhisperModel"])
    rehearse_transcription(start, model)
    assert refused_package in start.refusal
    assert bool(start.refusal) is bool(refused_package)
    assert start.ran == (["sound"] if transcribes and not lacks else [])
