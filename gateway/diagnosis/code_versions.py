"""The versions of an engine with other code where a failure was raised. Pure.

Other code is not a promise: the fault may be elsewhere. The same code is nearly one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gateway.diagnosis.code_history import CodeChange, CodeHistory
from gateway.domain.release import release

if TYPE_CHECKING:
    from gateway.diagnosis.structure import ExceptionShape
    from gateway.domain.value import Scalar

# Frames further out call every failing function alike.
_INNER_FRAMES = 3
_FRAME = re.compile(r"(?:.*/|\A)(?P<path>(?:vllm|sglang)/.+\.py):(?P<name>.+)\Z")
# The code of models: a version without it does not know the model.
_MODEL_CODE = re.compile(r"/models/\w+\.py\Z")
# The clearest change first.
_WORDS = {
    "line": "the line of {name} that led here is gone since {version}",
    "text": "this message is gone since {version}",
    "gone": "{name}, which led here, is gone since {version}",
    "changed": "{name}, which led here, has other code since {version}",
}
_FORMS = tuple(_WORDS)
_UNCERTAINTY = "whether that mends it is not known"


class EngineFrame(NamedTuple):
    """A frame of the engine's own code.

    path: the path below the folder of packages.
    line: a line of code.
    """

    path: str
    name: str
    line: str


def engine_frames(shape: ExceptionShape) -> list[EngineFrame]:
    """The innermost frames of the engine's own code, the innermost first."""
    codes = shape.codes if len(shape.codes) == len(shape.frames) else ("",) * len(shape.frames)
    frames = (
        EngineFrame(match["path"], match["name"], line)
        for frame, line in zip(reversed(shape.frames), reversed(codes), strict=True)
        if (match := _FRAME.match(frame))
    )
    return [frame for frame, _ in zip(frames, range(_INNER_FRAMES), strict=False)]


def code_versions(
    history: CodeHistory, engine: str, shape: ExceptionShape, versions: Iterable[str]
) -> dict[str, Scalar]:
    """The described versions that may not have a failure of `engine` (KIND==VERSION), by the code.

    others: versions to use. code_change: the reason. code_gone: the version without the line or the
    message. no_other_code: no version has other code in the innermost frames. Empty: nothing is
    known.
    """
    kind, _, version = engine.partition("==")
    frames = engine_frames(shape)
    if not history.knows_changes_since(version):
        return {}
    ordered_versions = sorted(versions, key=release)
    newest_version = next(
        (
            known_version
            for known_version in reversed(ordered_versions)
            if release(known_version) > release(version)
        ),
        None,
    )
    change = (
        _clearest(history, frames, shape.message, (version, newest_version))
        if newest_version
        else None
    )
    older_version = _older(history, frames, shape.message, version, ordered_versions)
    if (
        change is None
        and newest_version is not None
        and not history.knows_changes_to(newest_version)
    ):
        return {}
    # A function that no version has, as in a changed copy of the engine, is not the same code.
    is_known = any(history.has(frame.path, frame.name, version) for frame in frames[:1])
    if change is None and older_version is None and not is_known:
        return {}
    refs = [
        f"{kind}=={part}" for part in (newest_version if change else None, older_version) if part
    ]
    values: dict[str, Scalar] = {"others": " or ".join(refs)} if refs else {}
    if change is not None:
        name, (first, form) = change
        text = _WORDS[form].format(name=name, version=first)
        values["code_change"] = f"{text}; {_UNCERTAINTY}"
        if form in ("line", "text"):
            values["code_gone"] = first
    elif older_version and frames:
        text = f"{frames[0].name}, which led here, has other code there"
        addition = ", and newer versions have the same" if newest_version else ""
        values["code_change"] = f"{text}{addition}; {_UNCERTAINTY}"
    if not refs:
        values["no_other_code"] = "yes"
    return values


def _clearest(
    history: CodeHistory, frames: Sequence[EngineFrame], message: str, bounds: tuple[str, str]
) -> tuple[str, CodeChange] | None:
    """The clearest change between two versions, with the name of its function."""
    changes = [
        (frame.name, change)
        for frame in frames
        if (change := history.change(frame.path, frame.name, frame.line, bounds)) is not None
    ]
    if (version := history.version_without(message, *bounds)) is not None:
        changes.append(("", CodeChange(version, "text")))
    return min(changes, key=lambda pair: _FORMS.index(pair[1].form), default=None)


def _older(
    history: CodeHistory,
    frames: Sequence[EngineFrame],
    message: str,
    version: str,
    versions: Sequence[str],
) -> str | None:
    """The newest older version with other code in the innermost frame, or without the message.

    A version before the model's own code is none: it does not know the model.
    """
    older_versions = [
        known_version
        for known_version in reversed(versions)
        if release(known_version) < release(version) and history.knows_changes_since(known_version)
    ]
    frame = frames[0] if frames else None
    for older_version in older_versions:
        if (
            frame is not None
            and _MODEL_CODE.search(frame.path)
            and history.is_new(frame.path, frame.name, older_version, version)
        ):
            return None
        if frame is not None and history.has_changed(
            frame.path, frame.name, older_version, version
        ):
            return older_version
        if frame is None and history.adding_version(message, older_version, version) is not None:
            return older_version
    return None
