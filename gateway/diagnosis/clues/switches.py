"""The variable of an engine that switches off the part of it that a message names. Pure.

An engine names a switch after its part: `VLLM_USE_FROB_CACHE` for "the frob cache" of a message or
for a file `frob_cache` of a traceback.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# The words of a switch's name, and the value that switches its part off.
_OFF_VALUES = {"USE": "0", "ENABLE": "0", "DISABLE": "1", "SKIP": "1"}
_PREFIX = re.compile(r"\A(?:VLLM|SGLANG|SGL)_")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# The words of a name stand together in a text, with at most this many others between them.
_OTHER_WORDS_MAX = 1
# A single short word may mean anything.
_MIN_PART_CHARACTERS = 7


def off_switch(message: str, files: Iterable[str], variables: Iterable[str]) -> str:
    """The variable, with its value, that switches off the feature in a message or a file's name.

    Empty without one; the longest name of several. The message says what to do with a variable that
    it names, so such a variable does not count.

    files: names of the innermost files of the traceback.
    variables: the environment variables of the engine's version.
    """
    texts = [_split_words(message), *map(_split_words, files)]
    switches: list[tuple[int, str]] = []
    for variable in variables:
        words = _PREFIX.sub("", variable).split("_")
        off_value = next((_OFF_VALUES[word] for word in words if word in _OFF_VALUES), None)
        part = [word.lower() for word in words if word not in _OFF_VALUES]
        if off_value is None or len("".join(part)) < _MIN_PART_CHARACTERS or variable in message:
            continue
        if any(_names(part, text) for text in texts):
            switches.append((len("".join(part)), f"{variable}={off_value}"))
    # The first name wins among equal lengths, so that the answer is the same each time.
    return min(switches, key=lambda item: (-item[0], item[1]))[1] if switches else ""


def _split_words(text: str) -> list[str]:
    """The words of a text: `DeepGEMM`, `deep_gemm` and `Deep GEMM` are two words each."""
    return [
        word for name in re.findall(r"[A-Za-z0-9]+", text) for word in map(str.lower, _split(name))
    ]


def _split(name: str) -> list[str]:
    """The words of a name in camel case. A name with digits stays whole, as `V2` or `fp8`."""
    return [name] if any(map(str.isdigit, name)) else _WORD.findall(name)


def _names(part: list[str], text: list[str]) -> bool:
    """Whether all words of a part stand close together in a text, in any order."""
    width = len(part) + (_OTHER_WORDS_MAX if len(part) > 1 else 0)
    words = set(part)
    return any(words <= set(text[at : at + width]) for at in range(len(text)))
