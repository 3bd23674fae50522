"""The evidence in one log: candidates for its failure, and the verdict over them. Pure.

failure    proven while the log still grows
verdict    proven by a log that ended: also bare exceptions, cut off tracebacks and known texts
diagnosis  the verdict, or the kind that words speak for: for a reader of the log, never for the
           gateway, which would treat the engine by it

The first proof is the cause, unless its row calls it a consequence. Structure comes next, then
words (likely.py), which prove nothing.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import replace

from gateway.diagnosis import structure
from gateway.diagnosis.candidate import DEATH, EngineLine, FailureCandidate, ProcessTrace
from gateway.diagnosis.cures import ENGINES, FAULTS, held_by_others
from gateway.diagnosis.lines import line_forms as forms
from gateway.diagnosis.options import StartOptions
from gateway.diagnosis.progress import StartProgress
from gateway.diagnosis.remedy import Case
from gateway.diagnosis.signature import FailureSignature, StructuralSignature, TextSignature
from gateway.diagnosis.signatures import Signatures
from gateway.diagnosis.structure import Shape
from gateway.domain import Failure, Scalar

# All of these are more than any engine needs, and bounded.
_MOST_PROCESSES = 256
_MOST_CANDIDATES = 64
_MOST_BARE = 8
_MOST_COMPLAINTS = 16
_CITED = 1000
_RECENT = 8
# In a log of so few lines each line is meant, even one that does not complain.
_SHORT_LINES = 4
# No dump of threads is longer.
_DUMP_LINES = 60
# An engine that stands still: SGLang's watchdog dumps the threads of an idle process, and a process
# of vLLM waits for another.
_WATCHED = ("Pyspy dump", "No available shared memory broadcast block")
# vLLM repeats this line every ten seconds. So many in a row without a progress bar are a hang.
_WAITS, _REPEATS = "Waiting for ", 5
# It doubles the time between lines of this kind, so two of them are a long wait.
_RARE_WAITS = "Waiting for creating a placement group"
_DIGITS = re.compile(r"\d+")
# Faults of requests that are noted, and those of one place that are no chance.
_MOST_FAULTS, _REPEATED = 16, 2
_REQUEST_FAULTS = FAULTS | {"NotImplementedError", "RuntimeError"}
# Code of an engine, or of a library that it calls, and none that only carries requests.
_OWN_CODE = re.compile(
    r"(?:packages/|/)(?!starlette/|fastapi/|uvicorn/|anyio/|h11/|httptools/|aiohttp/|zmq/|pydantic)"
    r"(?:vllm|sglang|transformers|tokenizers|xgrammar|outlines|torch|PIL|mistral_common)/"
)
# The frames of a crash that matter: the outer ones only called them.
_INNERMOST = 8
_UNKNOWN = FailureSignature(
    kind="unknown", message="The engine failed with an error that is not known here."
)
_CAUSE_ELSEWHERE = FailureSignature(
    kind="unknown",
    message=(
        "A process of the engine died, and this part of its log does not tell why: the cause stands"
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

Proof = tuple[TextSignature, dict[str, Scalar]]


class CrashStack:
    """The first stack that a process printed as it died in compiled code. number 0: none yet."""

    def __init__(self) -> None:
        self.number = 0
        self.line = ""
        self._frames: list[str] = []
        self._symbols: dict[str, None] = {}
        self._open = True  # also a stack without its beginning

    def read(self, message: str, text: str, number: int) -> None:
        """Read one more line of the log."""
        if frame := forms.STACK_FRAME.match(message):
            if self._open and len(self._frames) < _INNERMOST:
                self._frames.append(f"{frame['file']}:{frame['function']}")
                self._begin(text, number)
        elif native := forms.NATIVE_FRAME.match(message):
            self._symbols[native["symbol"]] = None
            self._begin(text, number)
        elif self._frames:
            self._open = False
        elif forms.STACK.match(message):
            self._open = True
            self._begin(text, number)
        elif forms.OTHER_STACK.match(message):
            self._open = False

    def _begin(self, text: str, number: int) -> None:
        if not self.number:
            self.number, self.line = number, text

    def candidate(self, phase: str) -> FailureCandidate:
        """The stack's frames as a traceback, and its symbols as the message."""
        shape = Shape("", " ".join(self._symbols), tuple(reversed(self._frames)), phase)
        return FailureCandidate(None, {}, self.line, self.number, phase, shape=shape)


class LogEvidence:
    """The state of one log's evidence. engine: KIND or KIND==VERSION; None: any row may hold.

    circumstances: what the lines of the start showed. options: those of the start.

    death: the first line that says that a process ended, with its number.
    hint: a known text in a line that is no exception.
    quoted: an exception in the middle of a line, as quoted and as the whole line.
    is_ending: the engine itself ends.
    """

    def __init__(self, signatures: Signatures, engine: str | None) -> None:
        self.progress = StartProgress()
        self.circumstances: dict[str, Scalar] = {}
        self.options = StartOptions()
        self.serving = False
        self.is_ending = False
        self.processes: dict[str, ProcessTrace] = {}
        self.candidates: list[FailureCandidate] = []
        self.death: tuple[str, int] | None = None
        self.hint: FailureCandidate | None = None
        self.quoted: tuple[FailureCandidate, ...] = ()
        self.crash = CrashStack()
        self._complaints: list[FailureCandidate] = []
        self._faults: dict[tuple[str, str], tuple[FailureCandidate, int]] = {}
        self._crashed: FailureCandidate | None = None
        self._warning: FailureCandidate | None = None
        self._first: list[EngineLine] = []
        self._recent: deque[EngineLine] = deque(maxlen=_RECENT)
        self._records: deque[EngineLine] = deque(maxlen=_REPEATS)
        self._signatures = signatures
        kind, _, self._version = (engine or "").partition("==")
        self._engine = kind or None

    def process(self, name: str) -> ProcessTrace:
        """The process of that name; beyond a bound the first one."""
        if name not in self.processes:
            if len(self.processes) >= _MOST_PROCESSES:
                return next(iter(self.processes.values()))
            self.processes[name] = ProcessTrace()
        return self.processes[name]

    def disregards(self, process: ProcessTrace) -> bool:
        """Whether errors of this process prove nothing, because the engine serves."""
        return self.serving and not (self.is_ending or process.is_fatal)

    # Proofs

    def prove_line(
        self, text: str, process: ProcessTrace, *, warning: bool = False
    ) -> Proof | None:
        """The proof in a line that is no exception."""
        proof = self._signatures.match_text(
            text, self._engine, frozenset(process.frames), line=True
        )
        if proof is None or (warning and not proof[0].printed_as_warning):
            return None
        return proof if proof[0].while_serving or not self.disregards(process) else None

    def prove_text(self, text: str, process: ProcessTrace) -> Proof | None:
        """The proof in a text, whether or not an exception says it."""
        return self._signatures.match_text(
            text, self._engine, frozenset(process.frames), line=False
        )

    def prove_exception(self, text: str, process: ProcessTrace) -> Proof | None:
        """The proof in the text of an exception. A request meets no failure of a start."""
        proof = self.prove_text(text, process)
        possible = proof and (
            self._signatures.can_fail_serving(proof[0].kind) or not process.in_handler
        )
        return proof if possible else None

    def culprit(self, proof: Proof, process: ProcessTrace) -> dict[str, Scalar]:
        """The values of a proof, with kernel and layer where a kernel or engine failed."""
        row, groups = proof
        if row.proves not in ("kernel", "engine"):
            return groups
        kernel, pattern = row.kernel, row.kernel_pattern
        for function in process.frames:
            if (mark := self._signatures.frames.get(function)) and mark.kernel:
                kernel, pattern = mark.kernel, mark.kernel_pattern
        chosen = reversed(self.progress.kernels) if pattern else ()
        kernel = next((name for name in chosen if re.fullmatch(pattern, name)), kernel)
        traced: dict[str, Scalar] = {"kernel": kernel} if kernel else {}
        return traced | ({"layer": process.layer} if process.layer else {}) | groups

    def phase(self, row: FailureSignature | None, process: ProcessTrace) -> str:
        """The phase of a failure: by its row, its traceback, or the progress of the start."""
        if row is not None and row.phase:
            return row.phase
        if process.in_handler:
            return "serving"
        phases = [
            mark.phase
            for function in process.frames
            if (mark := self._signatures.frames.get(function)) and mark.phase
        ]
        # A start computes too, in order to measure; an engine that serves does not start.
        starting = (phase for phase in reversed(phases) if phase != "serving")
        return next(starting, phases[-1] if phases else self.progress.phase)

    # Collecting

    def add(self, candidate: FailureCandidate) -> None:
        """Add a candidate, as far as there is room."""
        bare = [item for item in self.candidates if item.bare] if candidate.bare else []
        if len(bare) < _MOST_BARE and len(self.candidates) < _MOST_CANDIDATES:
            self.candidates.append(candidate)

    def add_death(self, text: str, number: int) -> None:
        """Add a line that says that a process ended.

        The first counts, unless a later item quotes the error of the process.
        """
        quotes = forms.RELAYED_ERROR.search
        if self.death is None or (quotes(text) and not quotes(self.death[0])):
            self.death = text, number

    def add_complaint(self, candidate: FailureCandidate) -> None:
        """Add a line that complains of nothing known, as far as there is room."""
        if len(self._complaints) < _MOST_COMPLAINTS:
            self._complaints.append(candidate)

    def add_hint(self, message: str, text: str, number: int, process: ProcessTrace) -> bool:
        """Add a known text in a line that is no exception. Whether the log has a hint now."""
        self.hint = self.hint or self._known_text(message, text, number, process)
        return self.hint is not None

    def add_record(self, line: EngineLine) -> bool:
        """Remember a line that begins a record. Whether it is one of an engine that hangs."""
        self._records.append(line)
        if not line.quiet or not forms.HARMLESS.search(line.message):
            self._recent.append(line)
        return line.message.startswith(_WATCHED)

    def add_plain_line(self, line: EngineLine) -> None:
        """Remember a line that is no exception and belongs to none."""
        if len(self._first) < _SHORT_LINES:
            self._first.append(line)

    def end_engine(self, text: str, number: int) -> None:
        """Note that the engine ends: errors since it serves that it did not survive count now."""
        self.add_death(text, number)
        if self.serving and not self.is_ending:
            errors = [item.serving_error for item in self.processes.values() if item.serving_error]
            for candidate in sorted(errors, key=lambda item: item.number):
                self.add(candidate)
        self.is_ending = True

    @property
    def has_faults(self) -> bool:
        """Whether enough faults of requests are noted."""
        return sum(number for _, number in self._faults.values()) >= _MOST_FAULTS

    def note_fault(self, candidate: FailureCandidate) -> None:
        """Note an error of a request that the serving engine survives."""
        shape = candidate.shape
        raised = shape.frames[-1] if shape.frames else ""
        # A request can be wrong; a program's own fault is the program's.
        if (
            self.has_faults
            or shape.exception not in _REQUEST_FAULTS
            or not _OWN_CODE.search(raised)
        ):
            return
        first, number = self._faults.get((shape.exception, raised), (candidate, 0))
        self._faults[shape.exception, raised] = first, number + 1

    def close(self, lines: int, *, healthy: bool) -> None:
        """End the log after so many lines. healthy: the engine had started."""
        phase = self.progress.phase
        if self.crash.number:
            self._crashed = self.crash.candidate(phase)
        if not self.candidates and (hang := self._hang(lines, healthy=healthy)) is not None:
            self.add(hang)
        if self.candidates or self.death is not None or healthy:
            return
        if lines <= _SHORT_LINES:
            for line in self._first:
                self._add_pasted(line, phase)
        # Where the log ends in a traceback, the failure may stand before it.
        is_cut = any(item.in_traceback or item.cut_off for item in self.processes.values())
        for line in self._recent:
            known_text = self._known_text(line.message, line.text, line.number, line.process)
            if known_text is not None and (
                is_cut
                or (isinstance(known_text.row, TextSignature) and known_text.row.printed_as_warning)
            ):
                self._warning = known_text
                return

    def _known_text(
        self, message: str, text: str, number: int, process: ProcessTrace
    ) -> FailureCandidate | None:
        proof = self.prove_text(message, process)
        if proof is None:
            return None
        phase = self.phase(proof[0], process)
        return FailureCandidate(*proof, text, number, phase, bare=True)

    def _hang(self, lines: int, *, healthy: bool) -> FailureCandidate | None:
        """The engine waits, as its last records repeat, or as one of a serving engine says."""
        last = self._records[-1] if self._records else None
        if last is None or lines - last.number > _DUMP_LINES:
            return None
        starts = last.message.startswith(_WAITS) and not last.message.startswith(_RARE_WAITS)
        several = list(self._records)[-_REPEATS if starts else -2 :]
        equal = len({_DIGITS.sub("", line.message) for line in several}) == 1 < len(several)
        in_a_row = last.number - several[0].number == len(several) - 1 == _REPEATS - 1
        if not ((equal and (in_a_row or not starts)) or healthy or not last.quiet):
            return None
        known_text = self._known_text(last.message, last.text, last.number, last.process)
        return known_text if known_text is not None and known_text.kind == "hang" else None

    def _add_pasted(self, line: EngineLine, phase: str) -> None:
        """Add one of a few pasted lines, which may lack the name of the exception."""
        code = forms.CODE.search(line.message)
        message = code[1] if code else line.message
        shape = Shape("", message, (), phase)
        if forms.WRAPPER.match(message):
            self.add_death(line.text, line.number)
        elif self.add_hint(message, line.text, line.number, line.process) or self._records:
            return  # beside records it may be the rest of item
        elif worded := forms.PYTHON.match(message.strip()):
            shape = Shape(worded.lastgroup or "", message.strip(), (), phase)
            self.add(FailureCandidate.unproven(line.text, line.number, shape))
        elif not (
            forms.DOES.match(message) or (forms.COMPLAINT.search(line.text) and code is None)
        ):
            self.add_complaint(FailureCandidate.unproven(line.text, line.number, shape))
        elif forms.LEVEL.match(line.text):
            self.add(FailureCandidate.unproven(line.text, line.number, shape))

    # Answers

    @property
    def failure(self) -> Failure | None:
        """The failure that is proven so far; later lines of its message may make it clearer."""
        return self._failure(self._proof())

    @property
    def verdict(self) -> Failure | None:
        """The failure that the log proves if it ends here."""
        return self._failure(self._cause())

    @property
    def diagnosis(self) -> Failure | None:
        """The kind that words speak for where the verdict names no cause, else the verdict."""
        cause = self._cause()
        return self._failure(self._likely(cause) or cause) or self._fault()

    def _proof(self) -> FailureCandidate | None:
        unproven = [item for item in self._unproven() if not item.bare] if self.death else []
        proven = [item for item in self.candidates if item.row is not None] + unproven
        if not proven:
            return self._death(self.progress.phase) if self.death else None
        first = min(proven, key=lambda item: (item.rank, item.number))
        return first if first.row is not None else self._best(unproven) or first

    def _cause(self) -> FailureCandidate | None:
        """The candidate of the verdict."""
        proven = self._proof()
        if proven is not None and proven.kind != "unknown":
            return self._raised_before(proven) or proven
        if self.serving and proven is None:
            return None
        unproven, quoted, cut_off = self._unproven(), [*self.quoted[:1]], self._cut_off()
        for several in (
            [item for item in unproven if not item.bare],
            [self.hint] if self.hint is not None else [],
            [item for item in unproven if item.bare],
            cut_off,
            quoted,
            self._around_quote(),
        ):
            best = self._best(several)
            if best is not None and best.row is not None:
                return best
        if self._warning is not None and not unproven:
            return self._warning
        return proven or next(iter([*unproven, *cut_off, *quoted]), None)

    def _likely(self, cause: FailureCandidate | None) -> FailureCandidate | None:
        """The kind that words of all unknown errors speak for, unless the verdict names a cause.

        An engine that serves survived all errors but fatal ones.
        """
        death = cause if cause is not None and cause.rank == DEATH else None
        if (self.serving and self.death is None) or (death is None and _is_named(cause)):
            return None
        raised = [*self._unproven(), *self._quoted_death(""), *self._cut_off(), *self.quoted[:1]]
        numbers = {item.number for item in raised}
        several = raised + [
            item
            for item in self._complaints
            if item.number not in numbers and (not raised or forms.LOUD.search(item.line))
        ]
        several = [item for item in several if death is None or item.number < death.number]
        if self._crashed is not None and self._signatures.guess([self._crashed.shape]):
            several = [self._crashed]
        if cause is not None and cause.phase == "serving":
            several = [item for item in several if item.phase == "serving"]
        several += self._around_quote()
        proof = self._signatures.guess(
            [self._signatures.shape_for_words(item.shape, self._engine) for item in several]
        )
        # Words of requests do not outweigh a fault that is named.
        vague = {cause.kind, *(["unknown"] if cause.row is not None else [])} if cause else set()
        if proof is None or proof[0].kind in vague:
            return None
        row, words, index = proof
        return replace(several[index], row=row, culprit={"words": ", ".join(words)})

    def _unproven(self) -> list[FailureCandidate]:
        return [item for item in self.candidates if not item.survived and item.row is None]

    def _cut_off(self) -> list[FailureCandidate]:
        return [item.cut_off for item in self.processes.values() if item.cut_off is not None]

    def _around_quote(self) -> list[FailureCandidate]:
        """The line around a quote, where the quote alone names nothing."""
        if len(self.quoted) < 2:
            return []
        shape = self.quoted[0].shape
        names = self._signatures.match_structure(shape, self._engine)
        return [] if names or self._signatures.guess([shape]) else [*self.quoted[1:]]

    def _raised_before(self, death: FailureCandidate) -> FailureCandidate | None:
        """The error before a process was reported dead, in a traceback without its beginning."""
        if death.rank != DEATH:
            return None
        raised = [item for item in self._unproven() if item.shape.frames]
        raised += self._quoted_death(death.phase)
        best = self._best([item for item in raised if item.number < death.number])
        return best if best is not None and best.row is not None else None

    def _best(self, several: list[FailureCandidate]) -> FailureCandidate | None:
        """The first with a row, also by its structure; without any the first."""
        for item in several:
            if item.row is not None:
                return item
            if proof := self._signatures.match_structure(item.shape, self._engine):
                row, groups = proof
                phase = row.phase or item.phase
                return replace(
                    item, row=row, culprit=groups | structure.culprit(item.shape), phase=phase
                )
        return several[0] if several else None

    def _quoted_death(self, phase: str) -> list[FailureCandidate]:
        """The error of another process that a report of its death quotes."""
        item = self._death(phase)
        return [item] if item.shape.message else []

    def _death(self, phase: str) -> FailureCandidate:
        """The report that a process died, at best with its error in quotes."""
        line, number = self.death or ("", 0)
        quote = forms.RELAYED_ERROR.search(line)
        name = forms.EXCEPTION.match(quote[1]) if quote else None
        message = quote[1][name.end() if name else 0 :] if quote else ""
        if not message:
            return FailureCandidate(_CAUSE_ELSEWHERE, {}, line, number, phase)
        shape = Shape(name["name"] if name else "", message, (), phase)
        item = FailureCandidate(None, {}, line, number, phase, shape=shape)
        return self._best([item]) or item

    def _failure(self, item: FailureCandidate | None) -> Failure | None:
        if item is None:
            return None
        row = item.row or _UNKNOWN
        case = self._case(row, item)
        message, advice, steps = self._signatures.cures.describe(row, case)
        return Failure(
            kind=item.kind,
            phase=item.phase,
            message=message,
            line=item.line[:_CITED],
            line_number=item.number,
            culprit=item.culprit,
            advice=advice,
            steps=steps,
            proves=row.proves,
            cure=self._signatures.cures.cure(case),
        )

    def _fault(self) -> Failure | None:
        """The error with which several requests failed while the engine went on."""
        first, number = max(self._faults.values(), key=lambda fault: fault[1], default=(None, 0))
        failure = self._failure(self._best([first])) if first and number >= _REPEATED else None
        if failure is None:
            return None
        message = f"{failure.message} {number} requests failed so, and the engine serves on."
        return failure.evolve(message=message, phase="serving", proves="nothing")

    def _case(self, row: FailureSignature, item: FailureCandidate) -> Case:
        """The case that the cure of a failure depends on."""
        cures = self._signatures.cures
        shape = item.shape
        if not shape.exception and shape.message not in item.line:
            # A line that is no exception is its own message, and the next ones may belong to it.
            shape = shape._replace(message=f"{item.line} {shape.message}")
        elif not shape.message:
            shape = shape._replace(message=item.line)
        circumstances = self.circumstances | cures.in_shape(shape)
        engine = self._engine or next((kind for kind in ENGINES if kind in circumstances), None)
        version = self._version or self.progress.reported.get("version", "")
        values = (
            self.progress.settings
            | circumstances
            | cures.known_versions(engine, version)
            | item.culprit
        )
        if row.kind == "bad_flag":
            values |= cures.refused_flag(engine, version, shape.message)
        elif settings := values.pop("settings", None):
            values |= cures.own_settings(engine, shape, settings)
        package = str(values.get("package", ""))
        own_kinds = (engine.partition("-")[0],) if engine else ENGINES
        if package.partition(".")[0] in own_kinds:
            values["own_part"] = values.pop("package")
        if architecture := values.get("architecture"):
            values |= cures.having_architecture(engine, version, architecture)
        if option := self.options.named(shape.message):
            values["named"] = option
        if features := self.options.features:
            values["features"] = features
        if related := self.options.related(" ".join((shape.message, *shape.frames[-2:]))):
            values["related"] = related
        if values.get("ranks") == 1:
            del values["ranks"]
            values["one_rank"] = "yes"
        steps = cures.advised(engine, version, shape.message)
        advice = tuple(step for step in steps if not self.options.rules_out(step))
        values |= held_by_others(values)
        return Case(row.kind, item.phase, engine, values, self.options, advice)


def _is_named(cause: FailureCandidate | None) -> bool:
    """Whether a verdict names a cause that outweighs words."""
    if cause is None or cause.row is None:
        return False
    if isinstance(cause.row, StructuralSignature):
        return not cause.row.yields_to_words
    return cause.kind != "unknown"
