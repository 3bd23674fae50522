"""Regular expressions that a checkpoint brings: refused before they are matched where that could
take for ever. Pure.

Python's matcher tries every way to divide a name over the parts of a pattern: `(a+)+$` has 2^length
of them. Names of layers are short, so a bound on how many ways a pattern leaves open bounds the
time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

# Most steps of matching one name (about ten nanoseconds each); most characters of a name, and of a
# number within a name.
_MAX_STEPS = 2**17
_NAME = 64
_DIGITS = 4
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_REPEATS = "*+{"
# A repeat of these characters matches only a short part of a name.
_SHORT_ATOM = re.compile(r"\\d|\[0-9\]|\\[^wWsSdD]|[^\\.\[(]")


class SlowPatternError(ValueError):
    """Patterns that could take for ever to match."""


def refuse_slow_patterns(patterns: Iterable[str], *, matches_anywhere: bool = False) -> None:
    """Refuse patterns with which matching one layer's name could take long. Raises
    SlowPatternError.

    `matches_anywhere`: re.search, not re.match.
    """
    steps = 0.0
    for pattern in patterns:
        starts = _NAME if matches_anywhere and not pattern.startswith(("^", ".*")) else 1
        steps += starts * _ways(pattern)
        if steps > _MAX_STEPS:
            raise SlowPatternError(
                f"matching the pattern {pattern[:60]!r} of its quantization block could take for"
                " ever"
            )


def _ways(pattern: str) -> float:
    """An upper bound of the ways to divide a name over this pattern; infinite where a group
    repeats."""
    width_of_group = 0
    ways = 1.0
    choices = [1]  # of each open group
    former_part = ""
    for part in _TOKEN.findall(pattern):
        if part in _REPEATS and former_part not in _REPEATS:
            if former_part == ")":
                return math.inf
            if _SHORT_ATOM.fullmatch(former_part):
                ways *= _DIGITS
            else:
                width_of_group += 1
        elif part == "?" and former_part not in ("(", *_REPEATS):
            ways *= 2
        elif part == "(":
            choices.append(1)
        elif part == "|":
            choices[-1] += 1
        elif part == ")" and len(choices) > 1:
            ways *= choices.pop()
        former_part = part
    # All wide repeats together match one name.
    return (
        ways * math.prod(choices) * _NAME**width_of_group / math.factorial(width_of_group)
        if width_of_group < 20
        else math.inf
    )
