"""Stages of an engine's start, run one after the other until the engine's own code refuses.

A stage is refused where a `raise` or an `assert` of the engine ended it, or where the start's own
values crashed its code. Any other error comes from a stand-in or from this package: that stage was
not run, and the start goes on without it.
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable
from typing import Any

from .crashes import clear_stand_in_uses, crashed_in

_STATEMENTS = ("raise", "assert")
# Files of libraries that check the values of config.json for the engine.
_CHECKS = ("huggingface_hub/dataclasses.py", "transformers/modeling_rope_utils.py")
# Words of errors about a value that only a GPU would have.
_DEVICE_WORDS = ("CUDA device", "cuda device", "CUDA error", "NVML", "driver", "meta tensor")


class Start:
    """The stages of one start: the results of those that ran, the words of a refusal."""

    def __init__(self, package: str, error_text: Callable[[BaseException], str]) -> None:
        self.package = package
        self.error_text = error_text
        self.ran: list[str] = []
        self.left_out: list[str] = []
        self.refusal = self.stage = self.location = ""
        self.has_crashed = False
        self.results: dict[str, Any] = {}

    def run(
        self,
        stage: str,
        step: Callable[[], Any],
        passed_error: type[Exception] | tuple[()] = (),
    ) -> Any:
        """The result of the step; None where it was not run, or an earlier stage was refused.

        Raises errors of the kind `passed_error`.
        """
        if self.refusal:
            return None
        clear_stand_in_uses()
        try:
            result = step()
        except passed_error:
            raise
        except Exception as error:
            self._record_error(stage, error)
            return None
        if not self.refusal and stage:
            self.ran.append(stage)
        return result

    def refuse(self, stage: str, refusal_text: str, location: str) -> None:
        """The start ends at this stage, for an error that the engine would meet in a request."""
        if not self.refusal:
            self.refusal = refusal_text
            self.stage = stage
            self.location = location

    def _record_error(self, stage: str, error: Exception) -> None:
        location = raised_at(error, self.package)
        if location:
            self.refusal = self.error_text(error)
            self.stage = stage
            self.location = location
        elif (crash := crashed_in(error, self.package)) is not None:
            file = _package_path(crash.filename, self.package)
            self.location = f"{file}:{crash.lineno}"
            self.has_crashed = True
            self.stage, self.refusal = stage, f"{self.error_text(error)} (line: {crash.line})"
        else:
            self.left_out.append(f"{stage or 'engine'}: {self.error_text(error)[:200]}")

    @property
    def answer(self) -> dict[str, Any]:
        return {
            "ran": self.ran,
            "left_out": self.left_out,
            "refused": self.refusal,
            "stage": self.stage,
            "place": self.location,
            "crashed": self.has_crashed,
            **self.results,
        }


def raised_at(error: BaseException, package: str) -> str:
    """File and line of the statement that raised this error.

    "" if neither the engine's package raised it, nor a check in the libraries that read
    config.json. If a parser replaced an error by this one, the location is that of the first error.
    """
    if (inner_error := _validator_error(error)) is not None:
        return raised_at(inner_error, package) or type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    paths = [path for frame in frames if (path := _package_path(frame.filename, package))]
    first_error = error.__cause__ or error.__context__
    if not paths:
        return raised_at(first_error, package) if first_error is not None else ""
    if _is_of_a_device(error):
        return ""
    location = _statement_location(type(error).__name__, frames[-1], paths[-1], package)
    is_parser_error = paths[-1].startswith("inside/") or type(error).__name__ == "ArgumentTypeError"
    if (
        location
        and is_parser_error
        and first_error is not None
        and not _checks(frames[-1].filename)
    ):
        return raised_at(first_error, package) or location
    return location


def _validator_error(error: BaseException) -> Exception | None:
    """The error of a configuration's validator that pydantic wrapped."""
    wrapped_errors = error.errors() if hasattr(error, "errors") else ()
    inner_errors = (wrapped.get("ctx", {}).get("error") for wrapped in wrapped_errors)
    return next(
        (inner_error for inner_error in inner_errors if isinstance(inner_error, Exception)), None
    )


def _statement_location(
    error_name: str, frame: traceback.FrameSummary, path: str, package: str
) -> str:
    """File and line of the innermost frame, if it raises an error on purpose; else ""."""
    text = linecache.getline(frame.filename, frame.lineno or 0).strip()
    if checks := _checks(frame.filename):
        return f"{checks}:{frame.lineno}" if text.startswith("raise") else ""
    is_statement = _package_path(frame.filename, package) and text.startswith(_STATEMENTS)
    return f"{path}:{frame.lineno}" if is_statement or error_name == "ValidationError" else ""


def _package_path(filename: str, package: str) -> str:
    """The file's path in the package; "" for a file of another one."""
    path = "/" + filename.rpartition("/site-packages/")[2]
    return path.rpartition(f"/{package}/")[2] if f"/{package}/" in path else ""


def _checks(filename: str) -> str:
    """The file of a library, if it checks configurations; ""."""
    path = filename.rpartition("/site-packages/")[2]
    is_configuration = path.startswith("transformers/") and "/configuration_" in path
    return path if is_configuration or path in _CHECKS else ""


def _is_of_a_device(error: BaseException) -> bool:
    """Whether only a GPU could have prevented the error. A refused value may mention one."""
    is_refused = isinstance(error, (ValueError, AssertionError, NotImplementedError))
    return not is_refused and any(word in str(error) for word in _DEVICE_WORDS)
