"""Rows of `profiles/failures/`: failures as engines print them, cures, and progress. Pure.

texts/*.yaml     TextSignature        a failure known by its text
structures.yaml  StructuralSignature  a failure known by exception, frames and phase
remedies.yaml    Remedy               words and steps of a kind of failure
levers.yaml      Lever                steps that a circumstance of the case calls for
features.yaml    Feature              a part of an engine that a start can do without
circumstances.yaml  Circumstance      a fact of machine, plan or place that a log shows
folders.yaml     ComponentFolder      a folder of a component, and the variable that moves it
progress.yaml    ProgressLine         a line that shows how far a start has come
endings.yaml     EndingLine           a line that shows that the whole engine ends
frames.yaml      FrameMark            a function that shows a phase or a kernel
words.yaml       KindWords            words of a kind of failure (likely.py)
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ValidationInfo

from gateway.domain.base import Field
from gateway.domain.value import TRUSTED_KEY, Value

Cure = Literal["plan", "engine", "user"]
Proves = Literal["kernel", "context", "memory", "engine", "peers", "plan", "nothing"]


def _joined_pattern(pattern: Any) -> Any:
    return "|".join(pattern) if isinstance(pattern, list | tuple) else pattern


def _check_pattern(pattern: str, info: ValidationInfo) -> str:
    if info.context and info.context.get(TRUSTED_KEY):
        return pattern
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return pattern


# A regular expression, or the list of its alternatives.
Pattern = Annotated[str, BeforeValidator(_joined_pattern), AfterValidator(_check_pattern)]


class CureStep(Value):
    """A step of a cure, as a template (remedy.py), for the cases in which its conditions hold.

    engines, phases: the only engines and phases in which the step applies; (): all.
    circumstances: names of circumstances or values. The step applies if at least one is known, and
    at least
        one of `values`.
    exceptions: none of these is known.
    """

    text: str
    engines: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    circumstances: tuple[str, ...] = Field((), alias="when")
    values: tuple[str, ...] = Field((), alias="also")
    exceptions: tuple[str, ...] = Field((), alias="unless")


def _read_steps(steps: Any) -> Any:
    if not isinstance(steps, list | tuple):
        return steps
    return [{"text": step} if isinstance(step, str) else step for step in steps]


# Steps in order: a template, or one with its conditions.
Steps = Annotated[tuple[CureStep, ...], BeforeValidator(_read_steps)]


class FailureSignature(Value):
    """The failure that a row proves, and its words.

    kind, phase: those of the failure; without a phase, the log gives it.
    engines: the kinds of engine that print it; empty for all.
    proves: the subject of the fact that is learned (facts/learn.py).
    message, advice, steps: templates (remedy.py); where they are empty, those of the kind hold.
    source: the place of the text.
    examples: lines in the engine's form, each of which must be diagnosed as this row.
    """

    kind: str
    phase: str | None = None
    engines: tuple[str, ...] = ()
    proves: Proves = "plan"
    message: str = ""
    advice: str = ""
    steps: Steps = ()
    source: str = ""
    examples: tuple[str, ...] = ()


class TextSignature(FailureSignature):
    """A failure that is known by its text. The first row that matches wins.

    pattern: searched in the message of an exception and in the lines that belong to it. The named
        groups of a pattern become the culprit and may be used as {group} in message, advice and
        steps. `x_gib` is a number of GiB, `x_bytes` a number with its unit, and `x_cuda` a version
        as one number.
    line_start: the pattern is matched at the start of any line instead, unless the line is
        information or a warning.
    printed_as_warning: a warning counts, too: the engine prints it and then ends.
    detail_pattern: searched in the later lines of the same message.
    frame: a function that must stand in the traceback.
    kernel: the kernel that failed.
    kernel_pattern: a matching kernel that the log named before is meant instead.
    consequence: often a consequence of another failure, which is preferred.
    is_symptom: an error that any cause can have, so a cause next to it is preferred.
    is_reference: the text only refers to an error above it, which is preferred.
    is_end_only: the text counts only where the log ends next to it: programs survive it, too.
    while_serving: whether the text counts while the engine serves, as users cannot write it into
        the log.
    """

    pattern: Pattern
    line_start: bool = False
    printed_as_warning: bool = False
    detail_pattern: Pattern = ""
    frame: str = ""
    kernel: str = ""
    kernel_pattern: Pattern = ""
    consequence: bool = False
    is_symptom: bool = Field(False, alias="symptom")
    while_serving: bool = False
    is_reference: bool = Field(False, alias="reason_above")
    is_end_only: bool = Field(False, alias="at_end")


class StructuralSignature(FailureSignature):
    """A failure that no text proves. The first row wins of which every condition holds.

    exception: the whole name of its type.
    frames: searched in the innermost frames of the traceback (`file:function`, one a line).
    pattern: searched in the message.
    phases: the phases that it holds in; without them those of the kind (words.yaml).
    circumstance: the name of one that the lines of the start must have shown.
    yields_to_words: whether another kind, for which words speak, replaces this kind (likely.py).
    reads_source: the message is Python's own and of no field, so words are looked for in the line
        of code that failed.
    """

    proves: Literal["plan", "nothing"] = "plan"
    exception: Pattern = ""
    frames: Pattern = ""
    pattern: Pattern = ""
    phases: tuple[str, ...] = ()
    circumstance: str = Field("", alias="when")
    yields_to_words: bool = False
    reads_source: bool = False


class Remedy(Value):
    """Message, advice and steps of every failure of a kind, as templates (remedy.py).

    cure: the place of the cure. `plan`: another plan of the same engine may start. `engine`:
    another plan may, if it is of another version or kind of engine. `user`: no plan avoids it.
    """

    kind: str
    cure: Cure = "plan"
    message: str = ""
    advice: str = ""
    steps: Steps = ()


class Circumstance(Value):
    """A trait of the machine, the plan, or the place of a failure, as a log shows it.

    pattern: searched in the lines of a start.
    frames: searched in the whole traceback, a `file:function` a line.
    message: searched in the message of the failure.
    code: searched in the line of code that failed, whose words say more than Python's own message
        of a fault. Each named group becomes a value.
    implied: names that are known with it.
    """

    name: str
    pattern: Pattern = ""
    frames: Pattern = ""
    message: Pattern = ""
    code: Pattern = ""
    implied: tuple[str, ...] = ()
    source: str = ""
    examples: tuple[str, ...] = ()


class ConditionalSteps(Value):
    """Steps that help where a circumstance is known. These steps stand before the general steps.

    kinds, phases, engines: those of the failures that the steps help with; (): all.
    circumstances: names of circumstances or values, of which at least one is known; none: only the
        phase decides.
    values: further circumstances, of which at least one must be known too.
    exceptions: none of these is known.
    fixed: the version of the engine that has no such fault; the lever does not help with it and
        with newer ones.
    cure: the place of the cure in this case.
    is_first: its steps stand before those of a row with a text of its own, too.
    replaces_steps: the kind's own steps are for another cause, and are left out.
    """

    kinds: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()
    circumstances: tuple[str, ...] = Field(alias="when")
    values: tuple[str, ...] = Field((), alias="also")
    exceptions: tuple[str, ...] = Field((), alias="unless")
    fixed: str = ""
    is_first: bool = Field(False, alias="leads")
    replaces_steps: bool = Field(False, alias="replaces")
    cure: Cure | None = None
    message: str = ""
    steps: Steps
    source: str = ""


class FeatureSwitch(Value):
    """A setting that takes a feature out of a start.

    setting: `omit --flag`, `--flag`, `--flag value` or `VARIABLE=value`. A key of a flag's JSON
        object follows a dot.
    first_version: the first version that is known to have the key; empty where the flags list all
        keys.
    """

    setting: str
    first_version: str = ""


def _read_switches(switches: Any) -> Any:
    if not isinstance(switches, list | tuple):
        return switches
    return [{"setting": item} if isinstance(item, str) else item for item in switches]


class Feature(Value):
    """A part of an engine whose code has another name than its switch (features.py).

    name: a noun phrase.
    frames: searched in each frame (`file:function`) of a traceback.
    reach: the number of frames that may lie further in, not counting frames that every call passes.
        Without it the feature may be anywhere on the stack.
    is_standalone: it runs next to the model, so whatever fails in it is its own, and no part of the
        model is meant.
    options: options of which the start must have given one, as every start runs the code.
    counts_only_faults: whether only faults of the program count, as other errors show here late.
    switches: the most exact first. The first that the engine's version takes is meant.
    source: the place of the code and its switches.
    """

    name: str
    engines: tuple[str, ...] = ()
    frames: Pattern
    reach: int | None = None
    is_standalone: bool = Field(False, alias="standalone")
    options: tuple[str, ...] = ()
    counts_only_faults: bool = Field(False, alias="faults")
    switches: Annotated[tuple[FeatureSwitch, ...], BeforeValidator(_read_switches)]
    source: str


class ComponentFolder(Value):
    """A folder to which a component writes, and the environment variable that moves it.

    path: searched in the paths of a message.
    frames: searched in the innermost frames.
    local_copy: the files that a machine without internet needs in the folder.
    """

    variable: str
    path: Pattern = ""
    frames: Pattern = ""
    local_copy: str = ""
    source: str


class ProgressLine(Value):
    """A line of a start that goes on. Groups of its pattern are remembered, `kernel` as chosen.

    phase: the phase that begins.
    step: the name of a step within a phase that begins, such as `connection`; empty where one ends.
    activity: the step in words: "connecting its ranks".
    is_setting: its groups say how the engine is set.
    is_answer: whether only an engine that gave tokens or vectors prints the text.
    shows_cache: once the size of the KV cache is known, the cache is made.
    shows_warmup: nothing more is to be made before the engine serves.
    """

    pattern: Pattern
    phase: str | None = None
    step: str | None = None
    activity: str = ""
    is_setting: bool = False
    is_answer: bool = False
    shows_cache: bool = Field(False, alias="cache_ready")
    shows_warmup: bool = Field(False, alias="warmed_up")
    source: str = ""


class EndingLine(Value):
    """The beginning of a record that says that the whole engine ends, also one that served."""

    pattern: Pattern
    source: str = ""


class FrameMark(Value):
    """A function whose frame in a traceback shows the phase of the start, or the kernel that ran.

    is_main_loop: the function is the main loop of a process: an error that leaves it ends the
        engine.
    is_thread_loop: the function is the loop of a thread, without which the engine answers no more:
        an error that ends the thread ends the engine.
    """

    function: str
    phase: str | None = None
    kernel: str = ""
    kernel_pattern: Pattern = ""
    is_main_loop: bool = Field(False, alias="main_loop")
    is_thread_loop: bool = Field(False, alias="thread_loop")
    source: str = ""


class EnginePackages(Value):
    """The distributions that an engine names: its requirements, and texts of its code.

    names: the names in the form of `distribution_name` in `advice.py`.
    """

    names: frozenset[str]
    source: str


class ImportName(Value):
    """A distribution whose module has another name than itself.

    module: the name that code imports.
    distribution: the name on package registries.
    source: the place of its files.
    """

    module: str
    distribution: str
    source: str
