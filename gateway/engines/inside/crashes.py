"""Crashes: errors in an engine's code that no statement of it raises, such as a KeyError.

A crash counts for a start where the engine would meet it too. Stand-ins, tensors without values,
missing packages, files and devices cause crashes that no engine meets. In doubt it does not count.
"""

from __future__ import annotations

import importlib
import re
import sys
import sysconfig
import traceback
import types
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

_KINDS = (
    AttributeError, TypeError, LookupError, ArithmeticError, ValueError, NameError, AssertionError,
    RuntimeError, re.error,
)  # fmt: skip
# A recursion may be one of a stand-in; torch raises NotImplementedError for a device.
_ABSENCE_ERRORS = (ImportError, OSError, NotImplementedError, RecursionError, MemoryError)
_WORDS = re.compile(
    r"\b(meta|cuda|nvml|driver|triton)\b|\b_C\b|Anything|AnyClass|StandIn", re.IGNORECASE
)
_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
_PACKAGES = re.compile(r"/(site|dist)-packages/")
_STANDARD = sysconfig.get_paths()["stdlib"] + "/"
_OWN_PACKAGE = __name__.partition(".")[0]

_touched: set[types.CodeType] = set()


def mark_stand_in_use(callers: int = 1) -> None:
    """Note that a stand-in gave a value to its caller, and to the callers of that one."""
    frame: types.FrameType | None = sys._getframe(2)
    for _ in range(callers):
        if frame is None:
            return
        _touched.add(frame.f_code)
        frame = frame.f_back


def clear_stand_in_uses() -> None:
    """Start over, before another stage."""
    _touched.clear()


def crashed_in(error: BaseException, package: str) -> traceback.FrameSummary | None:
    """The line of the engine whose values crashed it; None where a stand-in or something absent
    may be the cause. package: the engine's name as a folder."""
    if not isinstance(error, _KINDS) or any(_is_of_environment(cause) for cause in _chain(error)):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    lines = traceback.extract_tb(error.__traceback__)
    positions = [
        position
        for position, line in enumerate(lines)
        if f"/{package}/" in _relative_path(line.filename)
    ]
    if not positions or not all(_is_library(line) for line in lines[positions[-1] + 1 :]):
        return None
    if (lines[-1].line or "").startswith(("raise", "assert")) and positions[-1] == len(lines) - 1:
        # A statement of the engine has its own words.
        return None
    if any(frames[number].f_code in _touched for number in positions[-2:]):
        return None
    reached = range(positions[-1], len(lines))
    if any(_names_stand_in(frames[number], lines[number].line or "") for number in reached):
        return None
    return None if is_stand_in(getattr(error, "obj", None)) else lines[positions[-1]]


def is_stand_in(value: object) -> bool:
    """Whether the value, its class or the class of that one is of this package."""
    kinds = (type(value), type(type(value)))
    if isinstance(value, types.FunctionType):
        return value.__module__.partition(".")[0] == _OWN_PACKAGE
    return any(
        str(getattr(kind, "__module__", "")).partition(".")[0] == _OWN_PACKAGE for kind in kinds
    )


def _relative_path(filename: str) -> str:
    """The file's path below the folder of packages."""
    return "/" + filename.rpartition("/site-packages/")[2]


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, its causes, and errors that occurred together with it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_of_environment(error: BaseException) -> bool:
    return isinstance(error, _ABSENCE_ERRORS) or bool(_WORDS.search(str(error)))


def _is_library(line: traceback.FrameSummary) -> bool:
    """Whether a library crashed by itself, or is one whose checks report wrong values."""
    file = line.filename
    is_raised = (line.line or "").startswith(("raise", "assert"))
    if Path(file).is_relative_to(Path(__file__).parents[1]):
        return False
    if _PACKAGES.search(file):
        return not is_raised or "/torch/nn/" in file
    return file.startswith((_STANDARD, "<frozen "))


def _names_stand_in(frame: types.FrameType, line: str) -> bool:
    """Whether the line reads a value of a stand-in, or a collection that holds one."""
    names = (name.split(".") for name in _NAME.findall(line))
    values = [value for name in names for value in _read(frame, name)]
    parts = (part for value in values for part in _values_in(value))
    return any(is_stand_in(value) for value in (*values, *parts))


def _values_in(value: object) -> list[object]:
    """The values in a mapping or a list."""
    if isinstance(value, dict):
        return [*value.values()]
    return [*value] if isinstance(value, (list, tuple, set)) else []


def _read(frame: types.FrameType, names: list[str]) -> Iterator[Any]:
    """The values that a dotted name passes, as far as they are there."""
    value = frame.f_locals.get(names[0], frame.f_globals.get(names[0]))
    yield value
    with suppress(Exception):
        for name in names[1:]:
            value = getattr(value, name)
            yield value


def is_of_this_package(error: Exception) -> bool:
    """Whether a line of this package failed, or an object of it lacks an attribute that the engine
    reads: then this version is built differently from the known ones."""
    if not isinstance(error, (AttributeError, TypeError, ImportError)):
        return False
    if isinstance(error, AttributeError) and type(
        getattr(error, "obj", None)
    ).__module__.startswith(f"{_OWN_PACKAGE}."):
        return True
    # A stand-in that is absent fails for the engine that imports it.
    engines = Path(__file__).parents[1]
    passed_files = ("<frozen importlib", importlib.__file__, str(engines / "inside/stubs.py"))
    frames = [
        frame.filename
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(passed_files)
    ]
    return bool(frames) and Path(frames[-1]).is_relative_to(engines)
