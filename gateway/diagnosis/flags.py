"""Flags that an engine refused, compared with those that its versions have. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches

from gateway.domain.release import release
from gateway.domain.value import Scalar

_FLAG_REFUSAL = re.compile(r"unrecognized arguments: (?P<dashes>-{1,2})(?P<name>[A-Za-z][\w-]*)")
# Settings of requests, which no server takes as flags.
_SAMPLING = frozenset(
    {
        "frequency-penalty",
        "max-tokens",
        "min-p",
        "presence-penalty",
        "repetition-penalty",
        "temperature",
        "top-k",
        "top-p",
    }
)
_MIN_LIKENESS = 0.8


def refused_flag(
    message: str, version: str, flags: Mapping[str, frozenset[str]]
) -> dict[str, Scalar]:
    """The facts about the first flag that a message calls unrecognized. flags: by version.

    `dashed`: the flag with two dashes, where it had one. `flag_in`: another version that has it.
    `flag_near`: the flag of this version with the nearest name. `sampling`: a setting of requests.
    `flag_nowhere`: no version has it.
    """
    match = _FLAG_REFUSAL.search(message)
    if match is None or not flags:
        return {}
    name = match["name"].replace("_", "-")
    versions_with_flag = sorted(
        (version_name for version_name, names in flags.items() if name in names), key=release
    )
    if versions_with_flag and len(match["dashes"]) == 1:
        return {"dashed": f"--{name}"}
    other_versions = [
        version_name for version_name in versions_with_flag if version_name != version
    ]
    if other_versions:
        return {"flag_in": other_versions[-1]}
    values: dict[str, Scalar] = {"flag_nowhere": "yes"}
    if name in _SAMPLING:
        return values | {"sampling": name.replace("-", "_")}
    newest_version = max(flags, key=release)
    near_flags = get_close_matches(
        name, flags.get(version, flags[newest_version]), n=1, cutoff=_MIN_LIKENESS
    )
    return values | ({"flag_near": f"--{near_flags[0]}"} if near_flags else {})
