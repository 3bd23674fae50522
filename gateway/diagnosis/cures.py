"""The cure of a failure by its kind, its phase and the circumstances of its case. Pure.

Steps stand in this order: the steps of a row with a text of its own, the levers of the case, the
engine's own advice, the advice of the row, and the general steps of the kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gateway.diagnosis import remedy
from gateway.diagnosis.advice import KnownFlags, advice_of_message
from gateway.diagnosis.checks.check_index import CheckIndex, CheckMatch
from gateway.diagnosis.checks.check_steps import check_steps, source_steps
from gateway.diagnosis.clues.backends import implementation
from gateway.diagnosis.clues.distributions import Distributions, removing_version
from gateway.diagnosis.clues.features import FailureCode, Features, VersionSettings
from gateway.diagnosis.clues.folders import ComponentFolders
from gateway.diagnosis.clues.switches import off_switch
from gateway.diagnosis.code_history import CodeHistory
from gateway.diagnosis.code_versions import code_versions
from gateway.diagnosis.flags import refused_flag
from gateway.diagnosis.lines.pattern_index import IndexedRows
from gateway.diagnosis.options import StartOptions
from gateway.diagnosis.reasons import reasons
from gateway.diagnosis.remedy import Case
from gateway.diagnosis.signature import (
    Circumstance,
    ComponentFolder,
    ConditionalSteps,
    Cure,
    CureStep,
    EnginePackages,
    FailureSignature,
    Feature,
    ImportName,
    Remedy,
    TextSignature,
)
from gateway.diagnosis.structure import ExceptionShape
from gateway.domain import Failure, Scalar
from gateway.domain.release import release

_NO_REMEDY = Remedy(kind="")
# The kinds of engine whose own lines and frames are circumstances.
ENGINES = ("vllm", "sglang")
# Raised by a fault in a program only, and by no check of an input.
FAULTS = frozenset(
    {
        "AssertionError",
        "AttributeError",
        "IndexError",
        "KeyError",
        "NameError",
        "RecursionError",
        "TypeError",
        "UnboundLocalError",
        "ZeroDivisionError",
    }
)
# Kinds of failure that the engine's Python code decides, and those of which it decides the faults.
_CODE_KINDS = frozenset(
    {"engine_bug", "lora", "config_refused", "forced_choice_invalid", "illegal_parallelism"}
    | {"weights_corrupt", "weights_missing", "no_backend", "no_kernel", "unsupported_architecture"}
    | {"unsupported_quantization", "unsupported_dtype"}
)
_FAULT_KINDS = frozenset({"kernel_runtime", "multimodal", "tokenizer", "unknown"})
_MAX_SETTINGS = 3
# The reader sees this many steps first.
_MIN_STEPS = 2
# The innermost frames that may name the component that failed, and the part of the engine.
_COMPONENT_FRAMES = 8
_PART_FRAMES = 3
# A step that names settings, and no change of them.
_VAGUE_STEP = re.compile(
    r"Change or omit (?:what the line names: )?(?P<flags>--[\w-]+(?:, --[\w-]+)*)[:.]"
)
# The command in backticks, up to its arguments.
_COMMAND = re.compile(r"`(fitserve [a-z]+)")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
_ENGINE_CODE = re.compile(r"(?:packages/|python/|\A|/)(?:vllm|sglang)/\S+\Z")
# A call in the form of another version, and the text before the name of the called function.
_REFUSED_CALL = re.compile(
    r"\b(?P<name>\w+)(?:\.__init__)?\(\) (?:got an unexpected keyword|got multiple values"
    r"|missing \d+ required|takes \d+ positional)"
)
_OWN_NAMES = frozenset({"self", "cls", "super", "torch", "vllm", "sglang"})
_PACKAGE_PATH = re.compile(r"(?:site|dist)-packages/([A-Za-z]\w*)/")
_VARIABLE = re.compile(r"\b(?:VLLM|SGLANG|NCCL|CUDA|HF|TORCH|PYTORCH|FLASHINFER)_[A-Z0-9_]{2,}\b")
_SETTING_OF_VARIABLE = re.compile(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+=[\w.]*\w")
_SETTING_NAME = re.compile(r"(?<![\w-])--[a-z][\w.-]*|\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b")
# The beginning of a step that takes a setting or a part out of a start, and another way in it.
_REMOVAL = re.compile(r"(?:Start without|Disable|Omit|Change or omit|Do without)\b")
_ALTERNATIVE = re.compile(r"\bor (?:use|draft|with)\b")
_LIST_PHRASE = "one by one"
_SETTING = re.compile(
    r"(?<![\w.'/])(?:max|num|enable|disable|min|kv|block|page|tensor|pipeline|data|gpu|mem|chunked"
    r"|speculative|quantization|attention|cuda|long|rope|tokenizer|dtype|mamba|moe)"
    r"(?:_[a-z0-9]+)+\b"
)


class CureRows(NamedTuple):
    """The rows of cures, by file, and the versions of each kind of engine that are described.

    names: the names in a field (`flags`, `architectures`) of an engine's described versions, by
        version.
    flags: the flags of an engine's described versions in the form of their profiles, by version and
        name.
    history: the history of an engine's code.
    checks: the places of an engine's source that raise an error.
    packages: the distributions that engines name, which a message may ask to install.
    imports: distributions whose module has another name.
    """

    remedies: tuple[Remedy, ...] = ()
    levers: tuple[ConditionalSteps, ...] = ()
    circumstances: tuple[Circumstance, ...] = ()
    versions: Mapping[str, tuple[str, ...]] = {}
    names: Callable[[str, str], Mapping[str, frozenset[str]]] = lambda _, __: {}
    flags: Callable[[str], Mapping[str, Mapping[str, Any]]] = lambda _: {}
    history: Callable[[str], CodeHistory] = lambda _: CodeHistory(())
    checks: Callable[[str], CheckIndex] = lambda _: CheckIndex()
    packages: tuple[EnginePackages, ...] = ()
    imports: tuple[ImportName, ...] = ()
    folders: tuple[ComponentFolder, ...] = ()
    features: tuple[Feature, ...] = ()


class Description(NamedTuple):
    """The texts of a failure: its message, the step beneath the message, and all steps."""

    message: str
    advice: str
    steps: tuple[str, ...]


class Cures:
    """The rows of cures, compiled. is_narrowed: only versions for one machine are named."""

    def __init__(self, rows: CureRows) -> None:
        self.rows = rows
        self.is_narrowed = False
        self.remedies = {row.kind: row for row in reversed(rows.remedies)}
        self._packages = frozenset(name for row in rows.packages for name in row.names)
        self._distributions = Distributions(rows.imports, self._packages)
        self._lines = IndexedRows((row, row.pattern) for row in rows.circumstances if row.pattern)
        self._frames = _compile_patterns((row, row.frames) for row in rows.circumstances)
        self._messages = _compile_patterns((row, row.message) for row in rows.circumstances)
        self._codes = _compile_patterns((row, row.code) for row in rows.circumstances)
        self._folders = ComponentFolders(rows.folders)
        self._features = Features(rows.features)
        self._variables: dict[tuple[str, str], frozenset[str]] = {}

    def select_versions(self, versions: Mapping[str, tuple[str, ...]]) -> Cures:
        """Cures by these rows, which name only these versions of each kind of engine."""
        narrowed = Cures.__new__(Cures)
        vars(narrowed).update(vars(self))
        narrowed.rows = self.rows._replace(versions=versions)
        narrowed.is_narrowed = True
        return narrowed

    def cure(self, case: Case) -> Cure:
        """The kind of cure of a case: that of its kind of failure, or of one of its levers."""
        kind_cure = self.remedies.get(case.kind, _NO_REMEDY).cure
        chosen_cure = next(
            (row.cure for row in self.rows.levers if row.cure and _lever_holds(row, case)), None
        )
        return chosen_cure or kind_cure

    def line_circumstances(self, text: str) -> dict[str, Scalar]:
        """The circumstances that a line of a start shows."""
        return _read_groups(self._lines.possible_rows(text), text)

    def reads_line(self, text: str) -> bool:
        """Whether a line may show a circumstance."""
        return self._lines.has_possible_rows(text)

    def shape_circumstances(
        self, shape: ExceptionShape, libraries: Sequence[str] = ()
    ) -> dict[str, Scalar]:
        """The circumstances that the traceback and the message of a failure show.

        libraries: files of compiled code on the stack of a crash.
        """
        frames = "\n".join((*libraries, *shape.frames))
        values = _read_groups(self._frames, frames) if frames else {}
        values |= _read_groups(self._messages, shape.message)
        values |= _read_groups(self._codes, shape.source) if shape.source else {}
        settings = _settings(shape.message)
        # An assertion that names settings checks them.
        if shape.exception in FAULTS and not (shape.exception == "AssertionError" and settings):
            values["fault"] = shape.exception
            if shape.exception != "AssertionError":
                values["program_fault"] = "yes"
                values |= _raising_package(shape)
        if _ends_in_engine(shape):
            values["engine_code"] = "yes"
        values |= _called_package(shape)
        values |= self._folders.locate(shape.message, shape.frames[-_COMPONENT_FRAMES:])
        return values | settings | reasons(shape.message)

    def off_switch(
        self, engine: str | None, version: str, shape: ExceptionShape
    ) -> dict[str, Scalar]:
        """The variable of the engine that switches off the part that failed, as `switch`.

        `switch_named`: the message names the part, and not only a file of the traceback. The
        variables of a version that is not described are those of the next older one.
        """
        names_by_version = self.rows.names(engine, "user_env") if engine else {}
        if not names_by_version:
            return {}
        version = _nearest_version(version, names_by_version)
        files = [
            frame.rpartition(":")[0].rpartition("/")[2] for frame in shape.frames[-_PART_FRAMES:]
        ]
        if switch := off_switch(shape.message, (), names_by_version[version]):
            return {"switch": switch, "switch_named": "yes"}
        switch = off_switch("", files, names_by_version[version])
        return {"switch": switch} if switch else {}

    def version_settings(self, engine: str | None, version: str) -> VersionSettings | None:
        """The settings of an engine's version, or of the described one next to it."""
        flags_by_version = self.rows.flags(engine) if engine else {}
        if not engine or not flags_by_version:
            return None
        described_version = _nearest_version(version, flags_by_version)
        variables = self.rows.names(engine, "user_env").get(described_version, frozenset())
        return VersionSettings(described_version, flags_by_version[described_version], variables)

    def foreign_flags(self, engine: str | None, version: str) -> frozenset[str]:
        """The flags of other versions of an engine that this version has not.

        Empty for a version before all described ones, of which nothing is known.
        """
        flags_by_version = self.rows.flags(engine) if engine else {}
        if (
            not version
            or not flags_by_version
            or release(version) < min(map(release, flags_by_version))
        ):
            return frozenset()
        names = {name for flags in flags_by_version.values() for name in flags}
        return frozenset(
            names.difference(flags_by_version[_nearest_version(version, flags_by_version)])
        )

    def feature(
        self, engine: str | None, version: str, shape: ExceptionShape, options: StartOptions
    ) -> dict[str, Scalar]:
        """The `feature` whose code failed, with its `feature_switch` in this version, and the flag
        that chooses the implementation of the failing part, as `backend_flag`.

        `switch_version`: the described version that names the switch, where it is another one.
        """
        settings = self.version_settings(engine, version)
        if engine is None or settings is None:
            return {}
        is_fault = shape.exception in FAULTS
        code = FailureCode(engine, shape.frames, is_fault, settings, options)
        values = self._features.locate(code)
        if values and settings.version != version:
            values["switch_version"] = f"{engine} {settings.version}"
        return values | implementation(shape.frames, settings, options)

    def refused_flag(self, engine: str | None, version: str, message: str) -> dict[str, Scalar]:
        """The flags of an engine's described versions that can stand for a refused one."""
        flags = self._names_by_version(engine, "flags", version) if engine else {}
        values = refused_flag(message, version, flags)
        if "flag_in" in values:
            values["flag_in"] = f"{engine}=={values['flag_in']}"
        return values

    def having_architecture(
        self, engine: str | None, version: str, architecture: Scalar
    ) -> dict[str, Scalar]:
        """The newest described versions with an architecture: of the engine, as `model_in`, and of
        the other engine, as `model_elsewhere`. `model_nowhere`: no described version has it.
        """
        values: dict[str, Scalar] = {}
        for kind in sorted({*self.rows.versions} & {*ENGINES}):
            names = self._names_by_version(kind, "architectures", version if kind == engine else "")
            versions = [
                other_version
                for other_version, architectures in names.items()
                if architecture in architectures
            ]
            # An engine that has the architecture failed for another reason.
            if kind == engine and version in versions:
                return {}
            if versions:
                name = "model_in" if engine in (None, kind) else "model_elsewhere"
                values.setdefault(name, f"{kind}=={max(versions, key=release)}")
        return values or {"model_nowhere": "yes"}

    def _names_by_version(self, kind: str, field: str, failing: str) -> dict[str, frozenset[str]]:
        """The names in a field, by version that may be named, and of the failing version."""
        versions = {*self.rows.versions.get(kind, ()), failing}
        return {
            version: names
            for version, names in self.rows.names(kind, field).items()
            if version in versions
        }

    def advice_of_message(self, engine: str | None, version: str, message: str) -> tuple[str, ...]:
        """The steps that a message itself asks for, with the flags that the engine has."""
        flags = self.rows.names(engine, "flags") if engine else {}
        flag_names = flags.get(version) or frozenset[str]().union(*flags.values())
        engine_flags = KnownFlags(
            flag_names,
            is_complete=version in flags,
            variables=self._variables_near(engine, version),
        )
        return advice_of_message(message, engine_flags, self._packages)

    def _variables_near(self, engine: str | None, version: str) -> frozenset[str]:
        """The variables of an engine's version, or of the described one next to it."""
        key = (engine or "", version)
        if key not in self._variables:
            names_by_version = self.rows.names(engine, "user_env") if engine else {}
            self._variables[key] = (
                names_by_version[_nearest_version(version, names_by_version)]
                if names_by_version
                else frozenset()
            )
        return self._variables[key]

    def own_settings(
        self, engine: str | None, shape: ExceptionShape, settings: Scalar
    ) -> dict[str, Scalar]:
        """The settings that a message names, as `settings`: flags of the engine first.

        A fault's message has names of a program's variables, so only the engine's flags count.
        """
        names = frozenset().union(*self.rows.names(engine, "flags").values()) if engine else None
        setting_texts = str(settings).split(", ")
        flags = [
            name if name.startswith("--") or name.isupper() else f"--{name.replace('_', '-')}"
            for name in setting_texts
            if name.startswith("--") or name.isupper() or name.replace("_", "-") in (names or ())
        ]
        is_code = bool(names) and shape.exception in FAULTS
        flag_names = {flag.strip("-").replace("-", "_") for flag in flags}
        other_settings = (
            []
            if is_code
            else [
                name
                for name in setting_texts
                if name.strip("-").replace("-", "_") not in flag_names
            ]
        )
        return {"settings": ", ".join((*flags, *other_settings))} if flags or other_settings else {}

    def distributions(self, values: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """The distributions of the modules in the values of a case.

        `distribution`: of the missing or failing module, where it has another name. `known_module`:
        an engine names the module's distribution. `importing_distribution`: of a package whose own
        code failed as it was imported. `removed_in`: the version of Python that removed the module.
        """
        module = str(values.get("package", "")) or str(values.get("raising_package", ""))
        names: dict[str, Scalar] = {
            "distribution": self._distributions.other_name(module),
            "known_module": "yes" if self._distributions.name(module) else "",
            "removed_in": removing_version(module),
            "importing_distribution": self._distributions.name(str(values.get("importing", ""))),
        }
        return {name: value for name, value in names.items() if value}

    def flag_of_setting(self, engine: str | None, setting: str) -> dict[str, Scalar]:
        """The flag of the engine that sets a variable of its program, as `exceeded_flag`."""
        flag = setting.replace("_", "-")
        names = self.rows.names(engine, "flags").values() if engine else ()
        return {"exceeded_flag": f"--{flag}"} if any(flag in flags for flags in names) else {}

    def _versions_with(self, engine: str | None, architecture: str) -> tuple[str, ...] | None:
        """The described versions of an engine that serve an architecture, where any is known to."""
        described_versions = self.rows.versions.get(engine or "")
        if not architecture or not described_versions or engine is None:
            return described_versions
        names = self.rows.names(engine, "architectures")
        return (
            tuple(
                version for version in described_versions if architecture in names.get(version, ())
            )
            or described_versions
        )

    def known_versions(
        self, engine: str | None, version: str, architecture: str = ""
    ) -> dict[str, Scalar]:
        """The neighbours of an engine's version among the described ones, as `newer` and `older`.

        Without a version the newest one is `newest`. architecture: the model's, if known; versions
        without it are not named.
        """
        described_versions = self._versions_with(engine, architecture)
        ordered_versions = sorted(described_versions or (), key=release)
        if not ordered_versions:
            # Some version of an unknown engine may run here.
            return (
                {"no_version_here": "yes"} if self.is_narrowed and described_versions == () else {}
            )
        if not version:
            return dict.fromkeys(("newest", "others"), f"{engine}=={ordered_versions[-1]}")
        now = release(version)
        newer_versions = [
            other_version for other_version in ordered_versions if release(other_version) > now
        ]
        older_versions = [
            other_version for other_version in ordered_versions if release(other_version) < now
        ]
        values: dict[str, Scalar] = {"engine_version": f"{engine} {version}"}
        # The next version may have the fault too; the newest one is the least likely to.
        values |= {"newer": f"{engine}=={newer_versions[-1]}"} if newer_versions else {}
        values |= {"older": f"{engine}=={older_versions[-1]}"} if older_versions else {}
        versions = [str(values[name]) for name in ("newer", "older") if name in values]
        if versions:
            values["others"] = " or ".join(versions)
        elif self.is_narrowed:
            values["no_version_here"] = "yes"
        return values

    def code_versions(
        self,
        engine: str | None,
        version: str,
        failure: str,
        shape: ExceptionShape,
        *,
        architecture: str = "",
    ) -> dict[str, Scalar]:
        """The versions with other code where a failure was raised (code_versions.py).

        Empty where packages, compiled code or the machine decide, which may differ by versions too.
        """
        kind = (engine or "").partition("-")[0]
        is_fault = shape.exception in FAULTS and _ends_in_engine(shape)
        is_code_fault = failure in _CODE_KINDS or (failure in _FAULT_KINDS and is_fault)
        if kind not in ENGINES or not version or not is_code_fault:
            return {}
        known_versions = self._versions_with(kind, architecture) or ()
        return code_versions(self.rows.history(kind), f"{kind}=={version}", shape, known_versions)

    def check(self, engine: str | None, version: str, shape: ExceptionShape) -> CheckMatch | None:
        """The place in an engine's source that raised a failure; of an unknown engine any."""
        kinds = [(engine or "").partition("-")[0]] if engine else ENGINES
        checks = (self.rows.checks(kind).check(shape, version) for kind in kinds if kind in ENGINES)
        return next(filter(None, checks), None)

    def release_checks(self) -> None:
        """Free the tables of the engines' checks, which the next search reads once more."""
        for kind in ENGINES:
            self.rows.checks(kind).release()

    def check_steps(
        self, engine: str | None, version: str, shape: ExceptionShape, options: StartOptions
    ) -> tuple[str, ...]:
        """The changes that let the engine's own check pass which raised a failure."""
        settings = self.version_settings(engine, version)
        check = self.check(engine, version, shape)
        steps = check_steps(check, settings, options) if check is not None else ()
        return steps or source_steps(shape, settings, options)

    def describe(self, row: FailureSignature | Remedy, case: Case) -> Description:
        """The row's own texts where every value in them is known, else those of its kind."""
        kind = self.remedies.get(row.kind, _NO_REMEDY)
        levers = [lever for lever in self.rows.levers if _lever_holds(lever, case)]
        message = (
            remedy.fill_template(row.message, case.values)
            or remedy.fill_template(kind.message, case.values)
            or "The engine failed."
        )
        steps, advice = _steps_and_advice(row, kind, levers, case)
        message = " ".join(filter(None, (message, _lever_message(levers, case))))
        return Description(message, advice, steps)

    def add_remedy(self, failure: Failure, scalars: Mapping[str, Scalar]) -> Failure:
        """The failure with the steps of its kind, where it has none. The failure's own advice goes
        first."""
        if failure.steps:
            return failure
        kind = self.remedies.get(failure.kind, _NO_REMEDY)
        engine, _, version = str(scalars.get("engine", "")).partition("==")
        values = {**self.known_versions(engine, version), **scalars, **failure.culprit}
        case = Case(failure.kind, failure.phase, engine or None, values)
        steps = remedy.fill_steps(kind.steps, case)
        commands = _COMMAND.findall(failure.advice)
        is_repeated = commands and all(f"`{command}" in " ".join(steps) for command in commands)
        if failure.advice and not is_repeated:
            steps = (failure.advice, *steps)
        steps = _distinct(steps)
        return failure.evolve(steps=steps, cure=kind.cure)


def _nearest_version(version: str, described_versions: Iterable[str]) -> str:
    """The described version whose settings a version has: itself, the next older one, or else the
    oldest; the newest of an unknown version."""
    versions = sorted(described_versions, key=release)
    if version in versions or not version:
        return version or versions[-1]
    older_versions = [
        other_version for other_version in versions if release(other_version) < release(version)
    ]
    return older_versions[-1] if older_versions else versions[0]


def _lever_message(levers: Sequence[ConditionalSteps], case: Case) -> str:
    """The message of a lever for the case, else the reasons that the engine itself gave."""
    messages = (remedy.fill_template(lever.message, case.values) for lever in levers)
    reasons_text = remedy.fill_template("The engine's own reasons: {reasons}.", case.values)
    return next(filter(None, messages), "") or reasons_text or ""


def _lever_steps(
    levers: Sequence[ConditionalSteps], case: Case, *, is_first: bool
) -> tuple[str, ...]:
    """The steps of levers that stand before the row's own, or of those trailing."""
    return tuple(
        step
        for lever in levers
        if lever.is_first is is_first
        for step in remedy.fill_steps(lever.steps, case)
    )


def _steps_and_advice(
    row: FailureSignature | Remedy, kind: Remedy, levers: Sequence[ConditionalSteps], case: Case
) -> tuple[tuple[str, ...], str]:
    """(steps, advice): steps of the cure, most specific first, and the step beneath the message.

    A text row with two steps gets no general steps. Requests quoted from the message come last.
    """
    is_text_row = isinstance(row, TextSignature)
    own_steps = remedy.fill_steps(row.steps, case)
    row_advice = next(iter(remedy.fill_steps((CureStep(text=row.advice),), case)), "")
    leading, trailing = (_lever_steps(levers, case, is_first=leads) for leads in (True, False))
    advised = () if is_text_row else case.advice
    checks = () if is_text_row else _unnamed_checks(case, (*leading, *trailing))
    is_replaced = any(lever.replaces_steps for lever in levers)
    # Own steps of a row mostly suffice, so the others are filled for rows without.
    general_steps = () if own_steps or is_replaced else remedy.fill_steps(kind.steps, case)
    late_advice = _unnamed_advice(case, own_steps or general_steps) if is_text_row else ()
    step_texts = (*advised, *leading)
    if is_text_row:
        step_texts += (*own_steps, *(late_advice if own_steps else ()), *trailing)
    elif own_steps:
        # The steps of a row know more than the check.
        step_texts += (*trailing, *own_steps, *checks)
    else:
        step_texts += (*checks, *trailing)
    suffices = is_text_row and bool(own_steps) and len(_distinct(step_texts)) >= _MIN_STEPS
    if not suffices:
        if own_steps and not is_replaced:
            general_steps = remedy.fill_steps(kind.steps, case)
        # Advice for this case goes before the general steps of its kind.
        is_repeated = remedy.is_repeated_advice((*step_texts, *general_steps), row_advice)
        if row_advice and not (is_repeated or is_replaced):
            step_texts += (row_advice,)
        step_texts += general_steps[:1]
        step_texts += () if own_steps else late_advice
        step_texts += general_steps[1:]
    named_flags = set(_FLAG.findall(" ".join((*advised, *checks))))
    steps = _distinct([step for step in step_texts if not _is_vague(step, named_flags)])
    case_advice = () if suffices else (*advised, *leading, *checks, *trailing)
    advice = (
        next(iter(case_advice), "")
        or row_advice
        or remedy.fill_template(kind.advice, case.values)
        or next(iter(steps), "")
    )
    return steps or ((advice,) if advice else ()), advice


def _unnamed_advice(case: Case, steps: Sequence[str]) -> tuple[str, ...]:
    """The requests of the message without those whose flags other steps name with more details."""
    flags = set(_FLAG.findall(" ".join(steps)))
    return tuple(
        step
        for step in case.advice
        if not (named_flags := set(_FLAG.findall(step))) or not named_flags <= flags
    )


def _unnamed_checks(case: Case, lever_steps: Sequence[str]) -> tuple[str, ...]:
    """The steps from the engine's own check without those of flags that its message or levers
    name."""
    exact_steps = [step for step in lever_steps if not _VAGUE_STEP.match(step)]
    flags = set(_FLAG.findall(" ".join((*case.advice, *exact_steps))))
    return tuple(step for step in case.checks if flags.isdisjoint(_FLAG.findall(step)))


def held_by_others(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The memory of the GPU that neither is free nor belongs to the failed process, as
    `others_bytes`, from the measurement of the failure."""
    measured_sizes = [values.get(name) for name in ("total_bytes", "free_bytes", "process_bytes")]
    sizes = [size for size in measured_sizes if isinstance(size, int)]
    if len(sizes) < len(measured_sizes):
        return {}
    total, free_bytes, process = sizes
    other_bytes = total - free_bytes - process
    # Driver and context of the process itself take less.
    return {"others_bytes": other_bytes} if 0 < process < total and other_bytes > 2 * 2**30 else {}


def _raising_package(shape: ExceptionShape) -> dict[str, Scalar]:
    """The installed package whose code raised a fault, as `raising_package`, and on its stack an
    engine of another name."""
    packages = [
        match[1]
        for frame in shape.frames
        if (match := _PACKAGE_PATH.search(frame)) is not None and match[1] != "torch"
    ]
    callers = {name for name in packages if name in ENGINES}
    is_other = bool(packages) and bool(callers - {packages[-1]})
    return {"raising_package": packages[-1]} if is_other else {}


def _called_package(shape: ExceptionShape) -> dict[str, Scalar]:
    """The package of which the line of code calls a function that refused it, as `callee`."""
    refusal_match = _REFUSED_CALL.search(shape.message)
    if refusal_match is None:
        return {}
    name = re.escape(refusal_match["name"])
    call = re.search(rf"(?<![\w.])(?P<package>[a-z]\w*)(?:\.\w+)*\.{name}\(", shape.source)
    if call is None or call["package"] in _OWN_NAMES:
        return {}
    return {"callee": call["package"], "called_library": "yes"}


def _ends_in_engine(shape: ExceptionShape) -> bool:
    """Whether the engine's own code raised it."""
    return bool(shape.frames) and _ENGINE_CODE.search(shape.frames[-1]) is not None


def _lever_holds(lever: ConditionalSteps, case: Case) -> bool:
    if lever.kinds and case.kind not in lever.kinds:
        return False
    # Most levers end here, before anything is made for them.
    if lever.circumstances and case.values.keys().isdisjoint(lever.circumstances):
        return False
    version = str(case.values.get("engine_version", "")).rpartition(" ")[2]
    if lever.fixed and version and release(version) >= release(lever.fixed):
        return False
    step = CureStep(
        text="",
        engines=lever.engines,
        phases=lever.phases,
        circumstances=lever.circumstances,
        values=lever.values,
        exceptions=lever.exceptions,
    )
    return case.allows_step(step)


def _is_vague(step: str, named_flags: set[str]) -> bool:
    """Whether a step names only settings whose change the message itself names."""
    match = _VAGUE_STEP.match(step)
    return match is not None and set(_FLAG.findall(match["flags"])) <= named_flags


def _settings(message: str) -> dict[str, Scalar]:
    """The flags of a message, or else the names of settings or variables in it, as `settings`."""
    named_settings = (
        _FLAG.findall(message) or _SETTING.findall(message) or _VARIABLE.findall(message)
    )
    names = list(dict.fromkeys(named_settings))
    return {"settings": ", ".join(names[:_MAX_SETTINGS])} if names else {}


def _compile_patterns(
    patterns: Iterable[tuple[Circumstance, str]],
) -> list[tuple[Circumstance, re.Pattern[str]]]:
    return [(row, re.compile(pattern)) for row, pattern in patterns if pattern]


def _read_groups(
    patterns: Sequence[tuple[Circumstance, re.Pattern[str]]], text: str
) -> dict[str, Scalar]:
    values: dict[str, Scalar] = {}
    for row, pattern in patterns:
        if match := pattern.search(text):
            # A pattern cannot use a name twice, so a digit at its end is left out.
            groups = {
                name.rstrip("0123456789"): value
                for name, value in match.groupdict().items()
                if value
            }
            values |= dict.fromkeys((row.name, *row.implied), "yes") | groups
    return values


def _clause(step: str) -> str:
    """The first clause of a step, which says what to do."""
    return re.split(r"[,:.] |\.$", step, maxsplit=1)[0]


def _sets_only(step: str, earlier_steps: str) -> bool:
    """Whether earlier steps already set each variable of this step to the same value."""
    settings = _SETTING_OF_VARIABLE.findall(step)
    return (
        bool(settings)
        and not _FLAG.search(step)
        and all(setting in earlier_steps for setting in settings)
    )


def _omits_again(step: str, earlier_step: str) -> bool:
    """Whether a step only takes out settings that a step before takes out."""
    names, earlier_names = (_SETTING_NAME.findall(text) for text in (step, earlier_step))
    return (
        bool(names)
        and set(names) <= set(earlier_names)
        and all(_REMOVAL.match(text) for text in (step, earlier_step))
        and _LIST_PHRASE not in earlier_step
        and not _ALTERNATIVE.search(step)
    )


def _distinct(steps: Sequence[str]) -> tuple[str, ...]:
    """The steps without those that say nearly the same as one before, or give other reasons."""
    distinct_steps: list[str] = []
    for step in steps:
        if not any(
            remedy.is_repeated_advice((earlier_step,), step)
            or _clause(earlier_step) == _clause(step)
            or _omits_again(step, earlier_step)
            for earlier_step in distinct_steps
        ) and not _sets_only(step, " ".join(distinct_steps)):
            distinct_steps.append(step)
    return tuple(distinct_steps)
