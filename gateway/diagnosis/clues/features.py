"""The feature of a start whose code failed, and the switch that its engine version has. Pure.

An engine names a switch after its part: --enable-two-batch-overlap after two_batch_overlap.
A part may have the name of a value that the start gave. Others are rows of
profiles/failures/features.yaml. The feature nearest to the innermost frame is meant. A switch
counts only where the flags and variables of the version have it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from gateway.diagnosis.clues.frames import OWN_FRAME, WAY
from gateway.diagnosis.clues.switches import off_switch
from gateway.diagnosis.options import MODEL_OPTIONS, StartOptions
from gateway.diagnosis.signature import Feature, FeatureSwitch
from gateway.domain import Scalar
from gateway.domain.release import release

# A part that only a name shows is in this many of the innermost frames.
_NAME_REACH = 4
_MAX_FRAMES = 60
# Graphs hold every kernel: steps for them stand elsewhere.
_WRAPPERS = frozenset({"cuda-graph", "cuda-graph-padding"})
# A shorter name may stand in any other.
_MIN_PART_CHARACTERS = 7
# Libraries with kernels of many parts: an option that names one chose it only for its own part.
_KERNEL_LIBRARY = re.compile("triton|flashinfer|cutlass", re.IGNORECASE)
_VERB = re.compile(r"\A(?P<verb>(?:enforce-)?disable|enable|)-?(?P<part>\w+(?:-\w+)*)\Z")
_SETTING = re.compile(
    r"(?:(?P<omit>omit )?--(?P<flag>[a-z][a-z0-9-]*)(?P<keys>(?:\.\w+)*)(?:[ =](?P<value>\S+))?"
    r"|(?P<variable>[A-Z][A-Z0-9_]+)=(?P<off>\S+))\Z"
)


class VersionSettings(NamedTuple):
    """The settings that a version of an engine takes.

    version: the described one that lists them.
    flags: the flags in the form of its profile, by name without dashes.
    variables: the variables of its environment.
    """

    version: str
    flags: Mapping[str, Mapping[str, Any]]
    variables: frozenset[str]

    def has_effective_switch(self, switch: FeatureSwitch, options: StartOptions) -> bool:
        """Whether this version has a switch that changes a start with these options."""
        match = _SETTING.match(switch.setting)
        if match is None or self._precedes_version(switch.first_version):
            return False
        if variable := match["variable"]:
            return variable in self.variables and not options.gives(variable, match["off"])
        flag = match["flag"]
        value = match["value"]
        if match["omit"]:
            return flag in self.flags and options.is_set(flag) is True
        if flag not in self.flags:
            return self._has_negation(flag) and not options.gives(flag[len("no-") :], "False")
        if match["keys"]:
            return True
        choices = self.flags[flag].get("choices")
        if value is None:
            return not options.is_on(flag)
        return (not choices or value in choices) and not options.gives(flag, value)

    def may_omit(self, switch: FeatureSwitch, options: StartOptions) -> bool:
        """Whether a switch omits a flag that the start may have given: its log does not show it."""
        match = _SETTING.match(switch.setting)
        return bool(
            match
            and match["omit"]
            and match["flag"] in self.flags
            and options.is_set(match["flag"]) is None
        )

    def is_closed(self, switch: FeatureSwitch) -> bool:
        """Whether fitserve refuses the flag from its users."""
        match = _SETTING.match(switch.setting)
        name = match["flag"] if match and not match["omit"] else None
        return bool(name and self.flags.get(name, {}).get("ours"))

    def _precedes_version(self, version: str) -> bool:
        return bool(version) and release(self.version) < release(version)

    def _has_negation(self, flag: str) -> bool:
        """Whether `no-NAME` is a form of a switch. One with choices has no such form."""
        spec = self.flags.get(flag.removeprefix("no-"))
        return bool(flag.startswith("no-") and spec and _has_both_forms(spec))


class FailureCode(NamedTuple):
    """The code that failed, and the start that ran it.

    frames: `file:function`, the innermost last.
    is_fault: whether a fault of the program itself was raised.
    settings: those that the engine's version takes.
    """

    engine: str
    frames: Sequence[str]
    is_fault: bool
    settings: VersionSettings
    options: StartOptions


class Features:
    """The rows of features, compiled."""

    def __init__(self, rows: Iterable[Feature]) -> None:
        self._rows = [(row, re.compile(row.frames)) for row in rows]

    def locate(self, code: FailureCode) -> dict[str, Scalar]:
        """The `feature` of the innermost frames that a start can do without, and its
        `feature_switch`.

        Empty where no frame is of a part with a switch that this version takes.
        """
        code_frames = [frame for frame in code.frames if not WAY.search(frame)][-_MAX_FRAMES:]
        frames = list(enumerate(reversed(code_frames)))
        row_matches = (self._find_rows(code, *frame, is_standalone=True) for frame in frames)
        part_matches = (self._find_parts(code, *frame) for frame in frames)
        for name, switch in chain.from_iterable(chain(row_matches, part_matches)):
            return {"feature": name, "feature_switch": switch}
        return {}

    def _find_parts(self, code: FailureCode, depth: int, frame: str) -> Iterator[tuple[str, str]]:
        """The features of one frame with their switches: those of rows first."""
        yield from self._find_rows(code, depth, frame, is_standalone=False)
        if depth <= _NAME_REACH and OWN_FRAME.search(frame):
            yield from _parts_by_name(frame, code)
            yield from _parts_by_value(frame, code)

    def _find_rows(
        self, code: FailureCode, depth: int, frame: str, *, is_standalone: bool
    ) -> Iterator[tuple[str, str]]:
        """The rows of one frame, with the switch that this version takes."""
        for row, pattern in self._rows:
            if row.is_standalone is not is_standalone or (
                row.counts_only_faults and not code.is_fault
            ):
                continue
            if row.engines and code.engine.partition("-")[0] not in row.engines:
                continue
            if row.reach is not None and depth > row.reach:
                continue
            if row.options and not any(map(code.options.is_set, row.options)):
                continue
            if pattern.search(frame) and (setting := _setting(row.switches, code)):
                yield row.name, setting


def _setting(switches: Iterable[FeatureSwitch], code: FailureCode) -> str:
    """The first switch that a version takes, and the first that fitserve takes too."""
    settings = code.settings
    options = code.options
    usable_switches = [
        switch for switch in switches if settings.has_effective_switch(switch, options)
    ] or [switch for switch in switches if settings.may_omit(switch, options)]
    if not usable_switches:
        return ""
    open_switch = next(
        (switch for switch in usable_switches if not settings.is_closed(switch)), None
    )
    if open_switch is None or not settings.is_closed(usable_switches[0]):
        return usable_switches[0].setting
    return f"{usable_switches[0].setting}; through fitserve {open_switch.setting}"


def _parts_by_name(frame: str, code: FailureCode) -> Iterator[tuple[str, str]]:
    """The parts whose switch has the name of the frame's file or function: first those that the
    start asked for, then the longest names."""
    path, _, function = frame.rpartition(":")
    folder, _, file_name = path.rpartition("/")
    file = file_name.removesuffix(".py")
    names = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in (file, function)]
    words = {folder.rpartition("/")[2], *file.split("_"), *function.split("_")}
    named_settings: list[tuple[int, str, str]] = []
    for flag, spec in code.settings.flags.items():
        match = _VERB.match(flag)
        if match is None or match["part"] in _WRAPPERS:
            continue
        part = match["part"].replace("-", "")
        is_word = "-" not in match["part"]
        # A name of one word is a whole word of the code's, and of a feature that the start set.
        if is_word and (match["verb"] != "enable" or part not in words):
            continue
        if not is_word and (len(part) < _MIN_PART_CHARACTERS or not any(part in n for n in names)):
            continue
        setting = _off_form(flag, match["verb"], spec, code.options)
        if is_word and not setting.startswith("omit "):
            continue
        if setting and code.settings.has_effective_switch(
            FeatureSwitch(setting=setting), code.options
        ):
            named_settings.append((len(part), match["part"], setting))
    named_settings += _variable_by_name(file, function, code)
    for _, name, setting in sorted(named_settings, key=_part_rank):
        yield name, setting


def _part_rank(part: tuple[int, str, str]) -> tuple[bool, int, str]:
    length, name, setting = part
    return not setting.startswith("omit "), -length, name


def _parts_by_value(frame: str, code: FailureCode) -> Iterator[tuple[str, str]]:
    """The parts that a value of the start's own chose, which the frame's file is named after."""
    file = frame.rpartition(":")[0].rpartition("/")[2].lower()
    for flag, value in code.options.options_of_value(file):
        is_default = str(code.settings.flags.get(flag, {}).get("default")) == value
        if flag in MODEL_OPTIONS or is_default or _KERNEL_LIBRARY.search(value):
            continue
        if code.settings.has_effective_switch(
            FeatureSwitch(setting=f"omit --{flag}"), code.options
        ):
            yield f"{value} of --{flag}", f"omit --{flag}"


def _variable_by_name(file: str, function: str, code: FailureCode) -> list[tuple[int, str, str]]:
    """The variable that switches off the part of a file or function, as the length of its name, the
    name and the setting."""
    setting = off_switch("", (file, function), sorted(code.settings.variables))
    if not setting or not code.settings.has_effective_switch(
        FeatureSwitch(setting=setting), code.options
    ):
        return []
    words = setting.partition("=")[0].split("_")[1:]
    name = "-".join(word.lower() for word in words if word not in ("USE", "ENABLE", "DISABLE"))
    return [(len(name.replace("-", "")), name, setting)]


def _off_form(flag: str, verb: str, spec: Mapping[str, Any], options: StartOptions) -> str:
    """The form of a flag that takes its part out of a start; empty if it cannot."""
    if spec.get("type") != "bool":
        return ""
    if verb.endswith("disable"):
        return "" if spec.get("ours") else f"--{flag}"
    if options.is_set(flag):
        return f"omit --{flag}"
    # A part that is off unless a start asks for it did not run in this one.
    is_default = spec.get("default") is not False and _has_both_forms(spec)
    return f"--no-{flag}" if is_default and not spec.get("ours") else ""


def _has_both_forms(spec: Mapping[str, Any]) -> bool:
    return spec.get("type") == "bool" and not spec.get("choices")
