"""`fitserve diagnose`: the failure in a log file (schema fitserve.failure/1)."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from gateway.diagnosis.diagnose import diagnose
from gateway.diagnosis.facts.learn import context_limit, facts_of_log
from gateway.domain import Fact, Failure, Hardware
from gateway.domain.facts import BYTE_KINDS
from gateway.domain.phases import phase_label
from gateway.domain.units import gib
from gateway.engines.registry import KIND_THAT_LOGS_ITS_VERSION
from gateway.errors import BadRequest, NotFound
from gateway.profiles.profiles import Profiles
from gateway.visible import visible_line

SCHEMA = "fitserve.failure/1"
_PIECE = 1024 * 1024
# The end of names of values that are sizes.
_BYTES = "_bytes"
# The proofs of failures (`FailureSignature.proves`), in words.
PROVES = {
    "kernel": "this kernel fails on this GPU, and other kernels may work",
    "context": "the context does not fit, and a shorter one may",
    "memory": "the plan needs more memory than there is",
    "engine": "this engine version cannot do it, whatever the plan",
    "peers": "these GPUs cannot reach each other in this way",
    "plan": "this plan fails, and no more is certain",
    "nothing": "nothing about the plan: the cause lies outside it, or is only likely",
}
# Keys that are always present; a failure may add others.
_CULPRIT = ("kernel", "backend", "layer", "flag", "value")


class Diagnosis(NamedTuple):
    """A failure and the facts that it proves. has_answered: the log shows an answer of the engine,
    the only one that proves health."""

    failure: Failure
    facts: tuple[Fact, ...]
    has_answered: bool

    @property
    def is_healthy(self) -> bool | None:
        """Whether the engine was healthy. None: the log does not show it."""
        if self.failure.kind != "none":
            return False
        return True if self.has_answered else None


def read_log(
    source: str, engine: str | None, profiles: Profiles, machine: Hardware | None = None
) -> Diagnosis:
    """The failure in a log file (`-`: standard input) and its facts. engine: KIND or KIND==VERSION.
    machine: cures name only engine versions that run on it. Raises BadRequest, NotFound."""
    kind, _, version = (engine or "").partition("==")
    kinds = {ref.partition("==")[0] for ref in profiles.engine_files}
    if engine is not None and kind not in kinds:
        raise NotFound(
            f"{engine!r} is not a known engine.",
            hint=f"Use KIND or KIND==VERSION; the kinds are {', '.join(sorted(kinds))}.",
        )
    signatures = profiles.signatures
    if machine is not None:
        from gateway.planner.service.cure_versions import signatures_for

        signatures = signatures_for(machine, profiles)
    try:
        if source == "-":
            failure, reader = diagnose(_pieces(sys.stdin.buffer), signatures, engine)
        else:
            with Path(source).open("rb", buffering=0) as file:
                failure, reader = diagnose(_pieces(file), signatures, engine)
    except OSError as error:
        raise BadRequest(
            f"The log {source} cannot be read: {error.strerror}.",
            hint="Name a file, or - for standard input.",
        ) from None
    scope = dict(reader.progress.reported_values)
    logged_version = scope.pop("version", "")
    if version or logged_version:
        scope["engine"] = f"{kind or KIND_THAT_LOGS_ITS_VERSION}=={version or logged_version}"
    return Diagnosis(failure, facts_of_log(failure, scope), reader.has_answered)


def report(diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis as JSON."""
    failure = diagnosis.failure
    return {
        "schema": SCHEMA,
        "kind": failure.kind,
        "healthy": diagnosis.is_healthy,
        "message": failure.message,
        "phase": failure.phase,
        "culprit": {**dict.fromkeys(_CULPRIT), **failure.culprit},
        "engine_max_model_len": context_limit(failure),
        "line": failure.line,
        "line_number": failure.line_number,
        "facts": [fact.model_dump(exclude_none=True) for fact in diagnosis.facts],
        "advice": failure.advice.splitlines(),
        "steps": list(failure.steps),
        "proves": failure.proven_subject,
    }


def lines(diagnosis: Diagnosis) -> Iterator[str]:
    """The diagnosis for people, line by line."""
    failure = diagnosis.failure
    if failure.kind == "none":
        yield (
            f"{'healthy' if diagnosis.is_healthy else 'unknown'}: {failure.message} The last"
            f" phase was: {phase_label(failure.phase)}."
        )
        return
    yield f"{failure.kind} (while {phase_label(failure.phase)}): {failure.message}"
    if failure.line_number:
        yield f"line {failure.line_number}: {visible_line(failure.line)}"
    for name, value in failure.culprit.items():
        yield f"  {_figure(name, value)}"
    yield f"proves: {PROVES[failure.proven_subject]}"
    for fact in diagnosis.facts:
        scope = ", ".join(f"{key} {value}" for key, value in fact.scope.items())
        figure = gib(fact.value) if fact.kind in BYTE_KINDS else str(fact.value)
        yield f"fact: {fact.kind}{f' {figure}' if fact.value is not None else ''} ({scope})"
    if failure.steps:
        yield "do, in this order:"
    for number, step in enumerate(failure.steps, 1):
        yield f"  {number}. {visible_line(step)}"


def _figure(name: str, value: object) -> str:
    """A value of a failure for people; sizes have units: `free: 1.02 GiB` for `free_bytes`."""
    if name.endswith(_BYTES) and isinstance(value, int):
        return f"{name.removesuffix(_BYTES)}: {gib(value)}"
    return f"{name}: {visible_line(value)}"


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    """The bytes of a log file in UTF-8. PowerShell's redirection writes UTF-16 with a byte order
    mark."""
    piece = file.read(_PIECE)
    decoder = (
        codecs.getincrementaldecoder("utf-16")("replace")
        if piece[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        else None
    )
    while piece:
        yield decoder.decode(piece).encode(errors="replace") if decoder else piece
        piece = file.read(_PIECE)
