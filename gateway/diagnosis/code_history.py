"""The history of an engine's code: functions, raised lines and messages that a version changed.

A step is the difference of one released version to the one before, as sets of hashes. The script
scripts/engine-history makes it from the published wheels. Pure.
"""

from __future__ import annotations

import re
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from gateway.domain.release import release

# Hashes have this many bits: of 10,000 in a step an unrelated name meets one in 1,700 cases.
_BITS = 24
# A message is known by the first words of each of its constant parts.
_WORDS = 5
_WORD = re.compile(r"[A-Za-z_]{2,}")
SECTIONS = ("changed", "removals", "new", "lines_gone", "texts_gone", "texts_new")
_HEADER = "fitserve engine history 1"


class CodeStep(NamedTuple):
    """The difference of a released version to the one before, as sorted hashes.

    changed, removals, new: functions by file and name.
    lines_gone: lines of functions that no longer exist.
    texts_gone, texts_new: constant words of messages.
    moved: the hash of a function in the version before, and of the same code in this one.
    """

    version: str
    before: str = ""
    changed: Sequence[int] = ()
    removals: Sequence[int] = ()
    new: Sequence[int] = ()
    lines_gone: Sequence[int] = ()
    texts_gone: Sequence[int] = ()
    texts_new: Sequence[int] = ()
    moved: Mapping[int, int] = {}


class CodeChange(NamedTuple):
    """A change of code.

    version: the first that has it.
    form: `gone`, `line` or `changed`.
    """

    version: str
    form: str


def function_hash(path: str, name: str) -> int:
    """The hash of a function.

    path: the path below the folder of packages.
    name: the function's name in a traceback.
    """
    return _text_hash(f"{path}:{name}")


def line_hash(path: str, name: str, line: str) -> int:
    """The hash of a line of code in a function, without its indent."""
    return _text_hash(f"{path}:{name}:{line.strip()}")


def text_hashes(text: str) -> Iterator[int]:
    """The hashes of all places in a text at which a constant part of a message can begin."""
    words = _WORD.findall(text)
    for at in range(len(words) - _WORDS + 1):
        yield _text_hash(" ".join(words[at : at + _WORDS]))


def _text_hash(text: str) -> int:
    return zlib.crc32(text.encode()) >> (32 - _BITS)


class CodeHistory:
    """The steps of one kind of engine, by the version that ends each.

    read: the step of a version.
    read_whole: the step from nothing to the last version.
    """

    def __init__(
        self,
        versions: Sequence[str],
        read: Callable[[str], CodeStep] = CodeStep,
        read_whole: Callable[[], CodeStep] = lambda: CodeStep(""),
    ) -> None:
        self._versions = sorted(versions, key=release)
        self._read, self._read_whole = cache(read), cache(read_whole)

    def knows_changes_since(self, version: str) -> bool:
        """Whether changes since a version are known."""
        if not self._versions:
            return False
        return release(version) >= release(self._read(self._versions[0]).before)

    def knows_changes_to(self, version: str) -> bool:
        """Whether changes up to a version are known."""
        return bool(self._versions) and release(version) <= release(self._versions[-1])

    def has(self, path: str, name: str, version: str) -> bool:
        """Whether the last version has a function that this version has there."""
        key = function_hash(path, name)
        for step in self._steps_between(version, self._versions[-1]):
            key = step.moved.get(key, key)
        return _has_key(self._read_whole().new, key)

    def _steps_between(self, older_version: str, newer_version: str) -> list[CodeStep]:
        bounds = release(older_version), release(newer_version)
        versions = [
            version for version in self._versions if bounds[0] < release(version) <= bounds[1]
        ]
        return [self._read(version) for version in versions]

    def change(self, path: str, name: str, line: str, bounds: tuple[str, str]) -> CodeChange | None:
        """The clearest change of a function after `bounds[0]`, up to and with `bounds[1]`.

        A line of it that is gone says more than any other change. None: it has the same code.
        """
        key = function_hash(path, name)
        first = None
        line_key = line_hash(path, name, line) if line.strip() else -1
        for step in self._steps_between(*bounds):
            if _has_key(step.removals, key):
                return first if first else CodeChange(step.version, "gone")
            if _has_key(step.changed, key):
                if _has_key(step.lines_gone, line_key):
                    return CodeChange(step.version, "line")
                first = first or CodeChange(step.version, "changed")
            if key in step.moved:
                key = step.moved[key]
                line_key = -1
        return first

    def has_changed(self, path: str, name: str, older_version: str, newer_version: str) -> bool:
        """Whether an older version has other code in a function of a newer one, or none."""
        key = function_hash(path, name)
        for step in reversed(self._steps_between(older_version, newer_version)):
            if _has_key(step.changed, key) or _has_key(step.new, key):
                return True
            key = next((old_key for old_key, new_key in step.moved.items() if new_key == key), key)
        return False

    def is_new(self, path: str, name: str, older_version: str, newer_version: str) -> bool:
        """Whether an older version has no such function as a newer one."""
        key = function_hash(path, name)
        for step in reversed(self._steps_between(older_version, newer_version)):
            if _has_key(step.new, key):
                return True
            key = next((old_key for old_key, new_key in step.moved.items() if new_key == key), key)
        return False

    def version_without(self, text: str, older_version: str, newer_version: str) -> str | None:
        """The first version after `older_version`, up to `newer_version`, that has no message with
        such words."""
        hashes = list(text_hashes(text))
        for step in self._steps_between(older_version, newer_version):
            if any(_has_key(step.texts_gone, key) for key in hashes):
                return step.version
        return None

    def adding_version(self, text: str, older_version: str, newer_version: str) -> str | None:
        """The last version up to `newer_version`, after `older_version`, that began to print such a
        message."""
        hashes = list(text_hashes(text))
        for step in reversed(self._steps_between(older_version, newer_version)):
            if any(_has_key(step.texts_new, key) for key in hashes):
                return step.version
        return None


def _has_key(keys: Sequence[int], key: int) -> bool:
    at = bisect_left(keys, key)
    return at < len(keys) and keys[at] == key


def encode(step: CodeStep) -> bytes:
    """A step as the bytes of its file: a header in text, then gaps between hashes."""
    counts = [len(getattr(step, name)) for name in SECTIONS]
    header = " ".join([_HEADER, step.before, step.version, *map(str, counts), str(len(step.moved))])
    moved_keys = sorted(step.moved.items())
    body = b"".join(_key_gaps(getattr(step, name)) for name in SECTIONS)
    body += _key_gaps([old_key for old_key, _ in moved_keys])
    return (
        header.encode()
        + b"\n"
        + body
        + b"".join(_packed_number(new_key) for _, new_key in moved_keys)
    )


def decode(data: bytes) -> CodeStep:
    """The step of a file. Raises ValueError for another form."""
    header, _, body = data.partition(b"\n")
    words = header.decode("utf-8", "replace").split(" ")
    if words[:4] != _HEADER.split(" ") or len(words) != 6 + len(SECTIONS) + 1:
        raise ValueError("not a step of an engine's history")
    counts = list(map(int, words[6:]))
    numbers = _unpacked_numbers(body, sum(counts) + counts[-1])
    sections = []
    at = 0
    for count in counts:
        total = 0
        keys = []
        for gap in numbers[at : at + count]:
            total += gap
            keys.append(total)
        sections.append(keys)
        at += count
    *sections_of_keys, old_keys = sections
    keys_by_section = dict(zip(SECTIONS, sections_of_keys, strict=True))
    moved_keys = dict(zip(old_keys, numbers[at:], strict=True))
    return CodeStep(version=words[5], before=words[4], moved=moved_keys, **keys_by_section)


def _key_gaps(keys: Sequence[int]) -> bytes:
    return b"".join(
        _packed_number(key - former_key) for former_key, key in zip((0, *keys), keys, strict=False)
    )


def _packed_number(value: int) -> bytes:
    """A number in groups of seven bits, the lowest first."""
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _unpacked_numbers(data: bytes, count: int) -> list[int]:
    numbers = []
    value = 0
    shift = 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            numbers.append(value)
            value = shift = 0
    if len(numbers) != count:
        raise ValueError(f"{len(numbers)} numbers instead of {count}")
    return numbers
