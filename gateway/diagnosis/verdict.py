"""The verdict over the evidence of one log. Pure.

failure    proven while the log still grows
verdict    proven by a log that ended: also bare exceptions, cut off tracebacks and known texts
diagnosis  the verdict, or the kind that words speak for: for a reader of the log, never for the
           gateway, which would treat the engine by it

The first proof is the cause, unless its row calls it a consequence. Structure comes next, then
words (likely.py), which prove nothing.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from gateway.diagnosis import structure
from gateway.diagnosis.candidate import (
    CAUSE,
    CONSEQUENCE,
    DEATH,
    MAX_FAILED_REQUESTS,
    SYMPTOM,
    WAKE_PHASE,
    FailureCandidate,
)
from gateway.diagnosis.checks.check_kinds import check_kind, context_kind
from gateway.diagnosis.clues.figures import conclude, short_table
from gateway.diagnosis.cures import ENGINES, held_by_others
from gateway.diagnosis.lines import line_forms as forms
from gateway.diagnosis.remedy import Case, fill_steps
from gateway.diagnosis.signature import (
    CureStep,
    FailureSignature,
    StructuralSignature,
    TextSignature,
)
from gateway.diagnosis.signatures import Signatures
from gateway.diagnosis.structure import ExceptionShape
from gateway.domain import Failure, Scalar

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gateway.diagnosis.evidence import LogEvidence

_MAX_LINE_CHARACTERS = 1000
# Failures that the libraries on a stack of compiled code can explain.
_CRASH_KINDS = frozenset({"exited", "killed", "kernel_runtime", "nccl"})
# A failing engine prints fewer lines between a symptom and its cause.
_EPISODE_LINES = 200
# Failures by a resource that is taken. The ranks of an engine that failed still hold it.
_TAKEN_KINDS = frozenset({"gpu_shared", "ram_shared", "port_in_use"})
# Faults in one place that are not due to chance. A missing package fails each request alike.
_MIN_REPEATS = 2
_SURE_FAULTS = frozenset({"ImportError", "ModuleNotFoundError"})
# A client cannot cause the failure of a transfer.
_TRANSFER_FAULT = "TransferError"
# The exception of a program that only reports the end of another one.
_FAILED_PROGRAM = "CalledProcessError"
# Advice that changes nothing where the engine runs one rank.
_LESS_RANKS = re.compile(r"(?:Lower|Reduce|Decrease) --(?:tensor-parallel-size|tp-size|tp)\b")
# Failures in which a process waited for another until its time was over.
_WAIT_KINDS = frozenset({"start_timeout", "hang"})
_HELD_CALL = FailureSignature(
    kind="hang",
    proves="nothing",
    message=(
        "The ranks stood still as they connected. A library that is not a part of CUDA stands"
        " between the engine and the driver[[ ({foreign_library})]], and may hold their calls."
    ),
)
_REFUSED_REQUEST = FailureSignature(
    kind="config_refused",
    proves="nothing",
    message="The options of the start leave no room for some requests: {problem}",
)
_LOST_ANSWER_STEPS = (
    CureStep(
        text=(
            "Send one such request by hand: the body of the answer has the engine's error"
            " (`error.message`)."
        )
    ),
    CureStep(
        text=(
            "Start with --log-error-stack, or with VLLM_LOGGING_LEVEL=DEBUG: the engine then prints"
            " the traceback of a failed request."
        ),
        engines=("vllm",),
    ),
    CureStep(
        text=("Start with --log-level debug: the engine then prints more about a failed request."),
        engines=("sglang",),
    ),
    CureStep(
        text=(
            "Read the logs of the engine's other processes and machines at that time: this one may"
            " only be that of the web server."
        )
    ),
)
_UNKNOWN_FAILURE = FailureSignature(
    kind="unknown", message="The engine failed with an error that is not known here."
)
_PEER_FAILURE = FailureSignature(
    kind="unknown",
    message=(
        "A process of the engine died, and this part of its log does not say why: the cause is"
        " further up, or in another rank's log."
    ),
    steps=(
        "Look for the first error above this line: `fitserve diagnose` finds it in the whole log.",
        "Of several machines or ranks read the log of each: the first that failed has the cause.",
        (
            "Where there is none, see `dmesg`: a process that the kernel ended for lack of memory"
            " says nothing."
        ),
    ),
)


class LogVerdict:
    """The failures that the evidence of a log proves. engine: KIND or KIND==VERSION; None: any."""

    def __init__(self, evidence: LogEvidence, signatures: Signatures, engine: str | None) -> None:
        self._evidence = evidence
        self._signatures = signatures
        kind, _, self._version = (engine or "").partition("==")
        self._engine = kind or None

    @property
    def has_failure(self) -> bool:
        """Whether a failure is proven so far."""
        return self._proven_candidate() is not None

    @property
    def failure(self) -> Failure | None:
        """The failure that is proven so far; later lines of its message may make it clearer."""
        return self._build_failure(self._proven_candidate())

    @property
    def verdict(self) -> Failure | None:
        """The failure that the log proves if it ends here."""
        return self._build_failure(self._cause())

    @property
    def diagnosis(self) -> Failure | None:
        """The kind that words speak for where the verdict names no cause, else the verdict."""
        cause = self._cause()
        likely = self._likely(cause)
        checked = self._find_check(cause, likely)
        return (
            self._build_failure(checked or likely or cause) or self._fault() or self._lost_answers()
        )

    def _proven_candidate(self) -> FailureCandidate | None:
        unproven_candidates = (
            [candidate for candidate in self._unproven_candidates() if not candidate.is_bare]
            if self._evidence.death
            else []
        )
        proven = [
            candidate for candidate in self._evidence.candidates if candidate.row is not None
        ] + unproven_candidates
        if not proven:
            return self._death(self._evidence.progress.phase) if self._evidence.death else None
        first = min(proven, key=_strength)
        if first.rank == CAUSE:
            first = _unexplained_symptom(first, proven) or first
        return (
            first if first.row is not None else self._best_candidate(unproven_candidates) or first
        )

    def _cause(self) -> FailureCandidate | None:
        """The candidate of the verdict."""
        proven = self._proven_candidate()
        if proven is not None and proven.kind != "unknown":
            return self._precise(
                self._dead_thread(proven)
                or self._reason_above(proven)
                or self._error_before_death(proven)
                or self._known_hint(proven)
                or self._held_call(proven)
            )
        if self._evidence.is_serving and proven is None:
            return None
        unproven_candidates = self._unproven_candidates()
        quoted_candidates = [*self._evidence.quoted_candidates[:1]]
        cut_off = self._cut_tracebacks()
        for candidates in (
            [candidate for candidate in unproven_candidates if not candidate.is_bare],
            [self._evidence.hint] if self._evidence.hint is not None else [],
            [candidate for candidate in unproven_candidates if candidate.is_bare],
            cut_off,
            quoted_candidates,
            self._quote_context(),
        ):
            best_candidate = self._best_candidate(candidates)
            if best_candidate is not None and best_candidate.row is not None:
                return self._precise(best_candidate)
        if tolerated := self._tolerated_error(proven):
            return tolerated
        if self._evidence.warning is not None and not unproven_candidates:
            return self._evidence.warning
        return proven or next(iter([*unproven_candidates, *cut_off, *quoted_candidates]), None)

    def _dead_thread(self, proven: FailureCandidate) -> FailureCandidate | None:
        """The exception that ended a thread before the start was given up: nothing restarted it."""
        thread_failure = self._evidence.thread_failure
        is_before = thread_failure is not None and thread_failure.number < proven.number
        is_given_up = proven.kind in _WAIT_KINDS or proven.rank in (CONSEQUENCE, DEATH)
        return thread_failure if is_before and is_given_up else None

    def _reason_above(self, proven: FailureCandidate) -> FailureCandidate | None:
        """The error above a message that only refers to it."""
        row = proven.row
        if not isinstance(row, TextSignature) or not row.is_reference:
            return None
        reason = self._best_candidate(
            [
                candidate
                for candidate in self._unproven_candidates()
                if candidate.shape.frames
                and candidate.shape.exception != _FAILED_PROGRAM
                and proven.number - _EPISODE_LINES <= candidate.number < proven.number
            ]
        )
        return reason if reason is not None and reason.row is not None else None

    def _tolerated_error(self, death: FailureCandidate | None) -> FailureCandidate | None:
        """The error before a death without a cause that the engine said it ignores."""
        tolerated = self._evidence.tolerated
        if tolerated is None or death is None or tolerated.row is None:
            return None
        is_before = 0 < death.number - tolerated.number <= _EPISODE_LINES
        return tolerated if is_before else None

    def _known_hint(self, proven: FailureCandidate) -> FailureCandidate | None:
        """The known text before a failure whose structure alone says little."""
        hint = self._evidence.hint
        is_vague = isinstance(proven.row, StructuralSignature) and proven.row.yields_to_words
        is_sure = hint is not None and hint.rank == CAUSE and hint.number < proven.number
        return hint if is_vague and is_sure else None

    def _precise(self, proven: FailureCandidate) -> FailureCandidate:
        """The proven failure with the line near it that names the tool, file or call of the same
        kind."""
        line = self._evidence.precise_lines.get(proven.kind)
        is_general = isinstance(proven.row, StructuralSignature) or not proven.culprit
        if line is None or not is_general or abs(line.number - proven.number) > _EPISODE_LINES:
            return proven
        shape = proven.shape._replace(message=f"{line.line} {proven.shape.message}")
        return replace(line, phase=proven.phase, shape=shape, is_bare=proven.is_bare)

    def _held_call(self, proven: FailureCandidate) -> FailureCandidate:
        """A start that ended in time-out while a call waited in a library before the driver."""
        library = self._evidence.circumstances.get("sharing_library")
        is_connecting = "during_connection" in self._evidence.progress.step_values(proven.phase)
        if proven.kind != "start_timeout" or library is None or not is_connecting:
            return proven
        return replace(proven, row=_HELD_CALL)

    def _likely(self, cause: FailureCandidate | None) -> FailureCandidate | None:
        """The failure kind that the words of unexplained errors suggest.

        None: the verdict names a cause, or the engine serves, so it survived these errors.
        """
        death = cause if cause is not None and cause.rank == DEATH else None
        if (self._evidence.is_serving and self._evidence.death is None) or (
            death is None and _is_named(cause)
        ):
            return None
        raised_candidates = [
            *self._unproven_candidates(),
            *self._quoted_death(""),
            *self._cut_tracebacks(),
            *self._evidence.quoted_candidates[:1],
        ]
        numbers = {candidate.number for candidate in raised_candidates}
        candidates = raised_candidates + [
            candidate
            for candidate in self._evidence.complaints
            if candidate.number not in numbers
            and (not raised_candidates or forms.ERROR_WORD.search(candidate.line))
        ]
        candidates = [
            candidate
            for candidate in candidates
            if death is None or candidate.number < death.number
        ]
        if self._evidence.crashed is not None and self._signatures.guess(
            [self._evidence.crashed.shape]
        ):
            candidates = [self._evidence.crashed]
        if cause is not None and cause.phase == "serving":
            candidates = [candidate for candidate in candidates if candidate.phase == "serving"]
        candidates += self._quote_context()
        proof = self._signatures.guess(
            [
                self._signatures.shape_for_words(candidate.shape, self._engine)
                for candidate in candidates
            ]
        )
        # Words of requests do not outweigh a fault that is named.
        vague = {cause.kind, *(["unknown"] if cause.row is not None else [])} if cause else set()
        if proof is None or proof[0].kind in vague:
            return None
        row, words, index = proof
        return replace(candidates[index], row=row, culprit={"words": ", ".join(words)})

    def _find_check(
        self, cause: FailureCandidate | None, likely: FailureCandidate | None
    ) -> FailureCandidate | None:
        """The kind that the engine's own check speaks for, in whose source the failure was raised.

        Nothing outweighs a cause that is named. Words yield to a check with the failure's message.
        """
        is_survived = self._evidence.is_serving and self._evidence.death is None
        if is_survived or _is_named(cause):
            return None
        candidates = [*self._unproven_candidates(), *self._cut_tracebacks()]
        candidates += self._evidence.quoted_candidates[:1]
        if cause is not None and cause.rank != DEATH and cause not in candidates:
            candidates.append(cause)
        for candidate in candidates:
            check = self._signatures.cures.check(*self._engine_of_log, candidate.shape)
            kind = check_kind(check.site) if check is not None else ""
            if check is None or not kind:
                continue
            # A check of no setting says less than words, and than the structure of a failure.
            has_kind = likely is not None or (cause is not None and cause.row is not None)
            if has_kind and not (check.is_sure and check.has_settings):
                continue
            if cause is not None and cause.kind == kind:
                # The row of a structure says more of the same kind.
                return None
            row = self._signatures.check_row(kind, check.site)
            return replace(candidate, row=row, culprit=structure.culprit_values(candidate.shape))
        if likely is not None or (cause is not None and cause.row is not None):
            return None
        return self._find_context(candidates)

    def _find_context(self, candidates: Iterable[FailureCandidate]) -> FailureCandidate | None:
        """The kind of the engine's part that called the code which raised the first failure."""
        for candidate in candidates:
            if kind := context_kind(candidate.shape):
                row = self._signatures.context_row(kind)
                return replace(
                    candidate, row=row, culprit=structure.culprit_values(candidate.shape)
                )
        return None

    @property
    def _engine_of_log(self) -> tuple[str | None, str]:
        """The kind of engine and its version, as far as they are known."""
        circumstances = self._evidence.circumstances
        engine = self._engine or next((kind for kind in ENGINES if kind in circumstances), None)
        version = self._version or self._evidence.progress.reported_values.get("version", "")
        return engine, str(version)

    def _unproven_candidates(self) -> list[FailureCandidate]:
        return [
            candidate
            for candidate in self._evidence.candidates
            if not candidate.is_survived and candidate.row is None
        ]

    def _cut_tracebacks(self) -> list[FailureCandidate]:
        return [
            trace.cut_off
            for trace in self._evidence.processes.values()
            if trace.cut_off is not None
        ]

    def _quote_context(self) -> list[FailureCandidate]:
        """The line around a quote, where the quote alone names nothing."""
        if len(self._evidence.quoted_candidates) < 2:
            return []
        shape = self._evidence.quoted_candidates[0].shape
        names = self._signatures.match_structure(shape, self._engine)
        return (
            []
            if names or self._signatures.guess([shape])
            else [*self._evidence.quoted_candidates[1:]]
        )

    def _error_before_death(self, death: FailureCandidate) -> FailureCandidate | None:
        """The error before a process was reported dead, in a traceback without its beginning."""
        if death.rank != DEATH:
            return None
        raised_candidates = [
            candidate for candidate in self._unproven_candidates() if candidate.shape.frames
        ]
        raised_candidates += self._quoted_death(death.phase)
        best_candidate = self._best_candidate(
            [candidate for candidate in raised_candidates if candidate.number < death.number]
        )
        return (
            best_candidate
            if best_candidate is not None and best_candidate.row is not None
            else None
        )

    def _best_candidate(self, candidates: list[FailureCandidate]) -> FailureCandidate | None:
        """The first with a row, also by its structure; without any the first."""
        for candidate in candidates:
            if candidate.row is not None:
                return candidate
            proof = self._signatures.match_structure(
                candidate.shape, self._engine, self._evidence.circumstances
            )
            if proof is not None:
                row, groups = proof
                phase = row.phase or candidate.phase
                return replace(
                    candidate,
                    row=row,
                    culprit=groups | structure.culprit_values(candidate.shape),
                    phase=phase,
                )
        return candidates[0] if candidates else None

    def _quoted_death(self, phase: str) -> list[FailureCandidate]:
        """The error of another process that a report of its death quotes."""
        candidate = self._death(phase)
        return [candidate] if candidate.shape.message else []

    def _death(self, phase: str) -> FailureCandidate:
        """The report that a process died, at best with its error in quotes."""
        line, number = self._evidence.death or ("", 0)
        quote = forms.RELAYED_ERROR.search(line)
        name = forms.EXCEPTION.match(quote[1]) if quote else None
        message = quote[1][name.end() if name else 0 :] if quote else ""
        if not message:
            return FailureCandidate(_PEER_FAILURE, {}, line, number, phase)
        shape = ExceptionShape(name["name"] if name else "", message, (), phase)
        candidate = FailureCandidate(
            row=None, culprit={}, line=line, number=number, phase=phase, shape=shape
        )
        return self._best_candidate([candidate]) or candidate

    def _build_failure(self, candidate: FailureCandidate | None) -> Failure | None:
        if candidate is None:
            return None
        row = candidate.row or _UNKNOWN_FAILURE
        case = self._case(row, candidate)
        message, advice, steps = self._signatures.cures.describe(row, case)
        return Failure(
            kind=candidate.kind,
            phase=candidate.phase,
            message=message,
            line=candidate.line[:_MAX_LINE_CHARACTERS],
            line_number=candidate.number,
            culprit=candidate.culprit,
            advice=advice,
            steps=steps,
            proven_subject=row.proves,
            cure=self._signatures.cures.cure(case),
        )

    def _fault(self) -> Failure | None:
        """The error with which several requests failed while the engine went on, or one call to
        wake up, which no user makes."""
        first, number = max(
            self._evidence.faults.values(),
            key=lambda fault: (fault[0].phase == WAKE_PHASE, fault[1]),
            default=(None, 0),
        )
        is_waking = first is not None and first.phase == WAKE_PHASE
        is_sure = first is not None and (
            is_waking
            or first.shape.exception in _SURE_FAULTS
            or first.shape.exception.endswith(_TRANSFER_FAULT)
            or structure.asks_for_option(first.shape)
        )
        failure = (
            self._build_failure(self._match_fault(first))
            if first and (number >= _MIN_REPEATS or is_sure)
            else None
        )
        if failure is None:
            return None
        call = "call" if is_waking else "request"
        calls = f"{number} {call}s" if number > 1 else f"A {call}"
        purpose = " to wake up" if is_waking else ""
        message = f"{failure.message} {calls}{purpose} failed so, and the engine serves on."
        phase = WAKE_PHASE if is_waking else "serving"
        return failure.evolve(message=message, phase=phase, proven_subject="nothing")

    def _lost_answers(self) -> Failure | None:
        """Answers with status 500 of an engine that serves on, if no error in the log explains
        them."""
        number = self._evidence.failed_requests
        if not number or self._evidence.has_request_error:
            return None
        requests = "A request" if number == 1 else f"{number} requests"
        if number >= MAX_FAILED_REQUESTS:
            requests = f"At least {requests}"
        case = Case("unknown", "serving", self._engine_of_log[0], {})
        steps = fill_steps(_LOST_ANSWER_STEPS, case)
        return Failure(
            kind="unknown",
            phase="serving",
            message=(
                f"{requests} failed with status 500 while the engine serves on, and this log does"
                " not show why."
            ),
            advice=steps[0],
            steps=steps,
            proven_subject="nothing",
        )

    def _match_fault(self, candidate: FailureCandidate) -> FailureCandidate | None:
        """An error of a request with the row of its text, or else of its structure."""
        proof = self._evidence.prove_text(f"{candidate.shape.exception}: {candidate.shape.message}")
        if proof is not None and self._signatures.can_fail_serving(proof[0].kind):
            return replace(candidate, row=proof[0], culprit=proof[1])
        best_candidate = self._best_candidate([candidate])
        if structure.asks_for_option(candidate.shape):
            problem = candidate.shape.message
            return replace(candidate, row=_REFUSED_REQUEST, culprit={"problem": problem})
        return best_candidate

    def _case(self, row: FailureSignature, candidate: FailureCandidate) -> Case:
        """The case that the cure of a failure depends on."""
        cures = self._signatures.cures
        shape = self._case_shape(row, candidate)
        libraries = self._evidence.crash.libraries if row.kind in _CRASH_KINDS else ()
        is_dumped = row.kind == "hang" and not shape.frames and bool(self._evidence.dump.frames)
        if is_dumped:
            shape = shape._replace(frames=self._evidence.dump.frames)
        circumstances = self._evidence.circumstances | cures.shape_circumstances(shape, libraries)
        circumstances |= {"dumped": "yes"} if is_dumped else {}
        engine = self._engine or next((kind for kind in ENGINES if kind in circumstances), None)
        version = self._version or self._evidence.progress.reported_values.get("version", "")
        failing = " ".join((shape.message, *shape.frames[-2:]))
        model_class = str(circumstances.get("model_class", ""))
        values = (
            self._evidence.progress.settings
            | self._evidence.progress.step_values(candidate.phase)
            | circumstances
            | cures.known_versions(engine, version, model_class)
            | cures.code_versions(engine, version, row.kind, shape, architecture=model_class)
            | candidate.culprit
        )
        self._add_engine_facts(values, row, engine, version, shape)
        values |= self._option_values(shape, failing, model_class)
        if values.get("ranks") == 1:
            del values["ranks"]
            values["one_rank"] = "yes"
        texts = (shape.message, *self._evidence.advice_near(candidate.number))
        values |= cures.off_switch(engine, version, shape)
        values |= cures.feature(engine, version, shape, self._evidence.options)
        values |= held_by_others(values) | conclude(shape.message, values)
        if row.kind == "kernel_runtime":
            context = self._evidence.options.number("max-model-len", "context-length")
            values |= short_table(self._evidence.kernel_check, context)
        advice = self._advice(engine, version, texts)
        if any(step.startswith("Install ") for step in advice):
            values["asked_package"] = "yes"
        return Case(
            kind=row.kind,
            phase=candidate.phase,
            engine=engine,
            values=values,
            options=self._evidence.options,
            advice=tuple(
                step for step in advice if "one_rank" not in values or not _LESS_RANKS.match(step)
            ),
            checks=()
            if isinstance(row, TextSignature)
            else cures.check_steps(engine, version, shape, self._evidence.options),
            failing=failing,
            settings=cures.version_settings(engine, version),
            foreign_flags=cures.foreign_flags(engine, version),
        )

    def _case_shape(self, row: FailureSignature, candidate: FailureCandidate) -> ExceptionShape:
        """The shape of a failure, with the line and the frames that stand elsewhere in the log."""
        shape = candidate.shape
        if not shape.exception and shape.message not in candidate.line:
            # A line that is not an exception is its own message, and the next ones may belong to
            # it.
            shape = shape._replace(message=f"{candidate.line} {shape.message}")
        elif not shape.message:
            shape = shape._replace(message=candidate.line)
        if row.kind in _CRASH_KINDS and not shape.frames:
            shape = shape._replace(frames=self._evidence.crash.frames)
        return shape

    def _add_engine_facts(
        self,
        values: dict[str, Scalar],
        row: FailureSignature,
        engine: str | None,
        version: str,
        shape: ExceptionShape,
    ) -> None:
        """Add the facts of the engine's profiles to the values of a case."""
        cures = self._signatures.cures
        if "no_other_code" in values:
            values.pop("others", None)
        if row.kind == "bad_flag":
            values |= cures.refused_flag(engine, version, shape.message)
        elif settings := values.pop("settings", None):
            values |= cures.own_settings(engine, shape, settings)
        package = str(values.get("package", ""))
        own_kinds = (engine.partition("-")[0],) if engine else ENGINES
        if package.partition(".")[0] in own_kinds:
            values["own_part"] = values.pop("package")
        values |= cures.distributions(values)
        if architecture := values.get("architecture"):
            values |= cures.having_architecture(engine, version, architecture)
        if setting := values.get("exceeded_setting"):
            values |= cures.flag_of_setting(engine, str(setting))

    def _advice(self, engine: str | None, version: str, texts: Iterable[str]) -> tuple[str, ...]:
        """The steps that messages themselves ask for."""
        cures = self._signatures.cures
        options = self._evidence.options
        steps = dict.fromkeys(
            step for text in texts for step in cures.advice_of_message(engine, version, text)
        )
        return tuple(step for step in steps if not options.rules_out(step))

    def _option_values(
        self, shape: ExceptionShape, failing: str, model_class: str
    ) -> dict[str, Scalar]:
        """The facts of the start's options that belong to a failure."""
        options = self._evidence.options
        values: dict[str, Scalar] = {
            "named": options.options_in(shape.message),
            "chosen": options.chosen_option(
                " ".join((shape.message, *shape.frames[-3:], shape.source))
            ),
            "features": options.features,
            "related": options.options_about(
                " ".join((shape.message, *shape.frames[-2:], shape.source))
            ),
        }
        values["refused_value"], values["refused_by"] = options.refused_value(shape.message)
        values["own_variable"], values["own_value"] = options.variable_about(failing)
        if shape.exception == "ZeroDivisionError":
            values["zero_option"] = options.zero_option(f"{shape.source} {shape.message}")
        if model_class and re.search(rf"\b{re.escape(model_class)}\b", shape.message):
            frames = " ".join(shape.frames)
            values["unset_option"], values["unset_by"] = options.unset_part(frames)
        return {name: value for name, value in values.items() if value}


def _strength(candidate: FailureCandidate) -> tuple[int, int]:
    """The order of evidence: by its rank, then by its place in the log."""
    return candidate.rank, candidate.number


def _unexplained_symptom(
    cause: FailureCandidate, candidates: Iterable[FailureCandidate]
) -> FailureCandidate | None:
    """The first symptom before a cause that does not explain it: of a former start, or the reason
    for which a resource is still taken."""
    lines = 0 if cause.kind in _TAKEN_KINDS else _EPISODE_LINES
    symptoms = [
        candidate
        for candidate in candidates
        if candidate.rank == SYMPTOM and candidate.number < cause.number - lines
    ]
    return min(symptoms, key=_strength, default=None)


def _is_named(cause: FailureCandidate | None) -> bool:
    """Whether a verdict names a cause that outweighs words."""
    if cause is None or cause.row is None:
        return False
    if isinstance(cause.row, StructuralSignature):
        return not cause.row.yields_to_words
    return cause.kind != "unknown"
