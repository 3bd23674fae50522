"""The likely kind of a failure that no row knows, by the words of its message and frames. Pure.

Each kind gets points, and the kind with the most wins. Three points: a word that hardly belongs to
another kind, or an exception of only this kind. One point: a word of the field, a file or function
in the innermost frames, or a usual exception. At most three words of each sort count. The words
are data (`profiles/failures/words.yaml`). The result is for readers of a log and proves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property

from pydantic import field_validator

from gateway.diagnosis.lines.line_forms import FRAME
from gateway.diagnosis.structure import ExceptionShape
from gateway.domain.base import Field
from gateway.domain.value import Value

_SENTENCE_POINTS = 3
_MAX_SENTENCES = 3
# The least points of a likely kind: every log has one word of some field.
_MIN_POINTS = 3
_INNER_FRAMES = 3
_MAX_TRACES = 3
_MAX_MESSAGE_CHARACTERS = 400
# Boundaries of words: inside MixedCase, and at characters that are neither letter nor digit.
_WORD_BOUNDARY = re.compile(r"(?<=[a-z])(?=[A-Z])|[^A-Za-z0-9+<>]+")
# The place where a library was built (`build/CMakeFiles/x.dir/compiler_depend.ts:39`), which its
# errors name, is not a hint at the failure.
_BUILD_PATH = re.compile(r"\S*\bCMakeFiles/\S*")
_PACKAGE_PATH = re.compile(r".*(?:(?:site|dist)-packages/|/python/(?=sglang))")


class KindWords(Value):
    """The words of one kind, as regular expressions that begin where a word begins.

    profiles/failures/words.yaml explains the fields. phases: empty for every phase.
    """

    kind: str
    sure: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()
    exceptions: tuple[str, ...] = ()
    common_words: tuple[str, ...] = Field((), alias="usual")
    phases: tuple[str, ...] = ()

    @field_validator("sure", "words", "frames")
    @classmethod
    def _compile_patterns(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
        return patterns


class KindClassifier:
    """The words of all kinds. Of kinds with equally many points the first is meant."""

    def __init__(self, kinds: tuple[KindWords, ...]) -> None:
        self._kinds = kinds

    @cached_property
    def _word_patterns(
        self,
    ) -> list[tuple[KindWords, re.Pattern[str], re.Pattern[str], re.Pattern[str]]]:
        # The import waits until it is needed: most logs are named without it.
        return [
            (
                kind,
                _join_patterns(kind.sure),
                _join_patterns(kind.words),
                _join_patterns(kind.frames),
            )
            for kind in self._kinds
        ]

    def guess(self, shapes: Sequence[ExceptionShape]) -> tuple[str, tuple[str, ...]] | None:
        """The kind that the words of all shapes together speak for, and these words."""
        # The frame is all that remains of a traceback that was cut off in it.
        message = " . ".join(
            normalize(_BUILD_PATH.sub("", shape.message[:_MAX_MESSAGE_CHARACTERS]))
            for shape in shapes
            if not FRAME.match(shape.message)
        )
        traces = dict.fromkeys(shape.frames[-_INNER_FRAMES:] for shape in shapes if shape.frames)
        frames = " . ".join(
            normalize(_PACKAGE_PATH.sub("", frame))
            for trace in list(traces)[-_MAX_TRACES:]
            for frame in trace
        )
        raised_names = {shape.exception for shape in shapes}
        best_guess: tuple[int, str, tuple[str, ...]] = (_MIN_POINTS - 1, "", ())
        phases = {shape.phase for shape in shapes}
        for kind, decisive_words, words, files in self._word_patterns:
            if kind.phases and phases.isdisjoint(kind.phases):
                continue
            sentences = _find_words(decisive_words, message)
            reports = _find_words(words, message)
            files_seen = _find_words(files, frames)
            decisive = raised_names.intersection(kind.exceptions)
            usual_names = raised_names.intersection(kind.common_words)
            points = (
                _SENTENCE_POINTS * (min(len(sentences), _MAX_SENTENCES) + bool(decisive))
                + min(len(reports), _MAX_SENTENCES)
                + min(len(files_seen), _MAX_SENTENCES)
                + bool(usual_names)
            )
            if points > best_guess[0]:
                best_guess = (
                    points,
                    kind.kind,
                    (*sentences, *sorted(decisive), *files_seen, *reports, *sorted(usual_names)),
                )
        return best_guess[1:] if best_guess[1] else None


def normalize(text: str) -> str:
    """A text as words in small letters with one space between."""
    return _WORD_BOUNDARY.sub(" ", text.replace("LoRA", "Lora")).strip().lower()


def _join_patterns(patterns: Iterable[str]) -> re.Pattern[str]:
    joined_pattern = "|".join(patterns)
    return re.compile(rf"(?:\b|(?=<))(?:{joined_pattern})" if joined_pattern else r"(?!)")


def _find_words(pattern: re.Pattern[str], text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(match[0] for match in pattern.finditer(text)))
