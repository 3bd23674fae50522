"""Compatibility of compiled kernels with GPUs. Pure.

https://docs.nvidia.com/cuda/cuda-c-programming-guide/#binary-compatibility, and
#family-specific-features for the letters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

_NAME = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")


@lru_cache(maxsize=256)
def binary_support(compiled: tuple[str, ...], capability: str) -> Literal["code", "ptx", "no"]:
    """The form of compiled code that a GPU runs: "code" for this GPU, "ptx" of an older one, which
    the driver translates, or "no".

    compiled: sm_90a, compute_80, ...
    """
    major, _, minor = capability.partition(".")
    device = (int(major), int(minor))
    result = {"no"}
    for match in filter(None, map(_NAME.fullmatch, compiled)):
        kind = match[1]
        built_for = (int(match[2]), int(match[3]))
        letter = match[4]
        runs_here = (
            built_for == device
            if letter == "a"
            else built_for[0] == device[0] and built_for <= device
        )
        if kind == "sm" and runs_here:
            result.add("code")
        elif kind == "compute" and (runs_here if letter else built_for <= device):
            result.add("ptx")
    if "code" in result:
        return "code"
    return "ptx" if "ptx" in result else "no"


def capabilities(compiled: Sequence[str]) -> list[str]:
    """The compute capabilities that there is code for, in words of users."""
    result = {
        (int(match[2]), int(match[3]))
        for item in compiled
        if (match := _NAME.fullmatch(item)) and match[1] == "sm"
    }
    return [f"{major}.{minor}" for major, minor in sorted(result)]
