"""From what an engine prints and how it ends to a Failure, and from a Failure to the Fact it proves. Pure.

Signatures are data (`profiles/failures.yaml`); `Signatures` matches one log line at a time, so a failure is known
the moment its line appears, long before the process gives up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from gateway.domain import Attempt, Fact, Failure, Instance, Value

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_MAX_LINE = 1000

# Causes outside the plan: the same plan may work the next time, so they teach nothing about it.
ENVIRONMENTAL = frozenset(
    {"killed", "exited", "hang", "port_in_use", "gpu_shared", "ram_shared", "host_error", "disk_full", "download"}
)


class Signature(Value):
    """One row of failures.yaml: a line that matches `pattern` proves `kind`, or, without a kind, that `phase` began.

    Named groups of the pattern become the culprit, and may be used as {group} in message and advice.
    """

    pattern: str
    kind: str | None = None
    phase: str | None = None
    engines: tuple[str, ...] = ()
    message: str = ""
    advice: str = ""
    source: str = ""
    when: Literal["starting", "always"] = "starting"


class Signatures:
    """All signatures, compiled. First match in file order wins."""

    def __init__(self, rows: tuple[Signature, ...]) -> None:
        self.rows = rows
        self._compiled = [(row, re.compile(row.pattern)) for row in rows]
        # One alternation decides most lines (those that match nothing) in a single scan.
        self._any = (
            re.compile("|".join(f"(?:{re.sub(r'[(][?]P<[^>]+>', '(?:', row.pattern)})" for row in rows)) if rows else None
        )

    def match(self, line: str, *, engine: str, serving: bool) -> tuple[Signature, dict[str, str]] | None:
        """The signature that `line` carries, with its named groups."""
        if self._any is None or not self._any.search(line):
            return None
        for row, pattern in self._compiled:
            if row.engines and engine not in row.engines:
                continue
            if serving and row.when == "starting":
                continue
            if found := pattern.search(line):
                return row, {name: value for name, value in found.groupdict().items() if value is not None}
        return None


def clean(raw: bytes) -> str:
    """A log line as text: no colours, at most 1,000 characters, undecodable bytes replaced."""
    return _ANSI.sub("", raw[: 4 * _MAX_LINE].decode("utf-8", "replace")).rstrip()[:_MAX_LINE]


def proven(row: Signature, groups: dict[str, str], line: str, number: int, phase: str) -> Failure:
    """The Failure that a matching line proves."""
    return Failure(
        kind=row.kind or "unknown",
        phase=phase,
        message=_fill(row.message, groups),
        line=line,
        line_number=number,
        culprit={name: int(value) if value.isdigit() and len(value) < 16 else value for name, value in groups.items()},
        advice=_fill(row.advice, groups),
    )


def ended(instance: Instance, phase: str, tail: Iterable[str], *, was_ready: bool) -> Failure:
    """The Failure of an engine that exited without a line that proves a cause."""
    lines = [line for line in tail if line.strip()]
    last = lines[-1] if lines else None
    code = instance.exit_code
    if instance.oom_killed:
        return Failure(
            kind="host_oom",
            phase=phase,
            message="The kernel killed the engine because the memory of the host, or of its container, ran out.",
            line=last,
            culprit={"exit_code": -9 if code is None else code},
            advice="Free memory, or ask for a smaller context.",
        )
    if code is None:
        how, kind = "The engine is gone; its exit code was not seen", "exited"
    elif code < 0 or code in (137, 143):
        how, kind = f"The engine was killed (signal {-code if code < 0 else code - 128})", "killed"
    else:
        how, kind = f"The engine ended with exit code {code}", "exited" if was_ready else "unknown"
    when = "while it was serving" if was_ready else f"while {phase}"
    return Failure(
        kind=kind,
        phase=phase,
        message=f"{how} {when}, and its log names no known cause.",
        line=last,
        culprit={} if code is None else {"exit_code": code},
        advice="Read the whole log with `fitserve logs`.",
    )


def learn(attempt: Attempt, failure: Failure, at: float) -> Fact | None:
    """What the failure of this attempt proves about future plans, with a scope no wider than the evidence."""
    proof = failure.line or failure.message
    limit = failure.culprit.get("engine_max_model_len")
    if isinstance(limit, int) and limit > 0:
        return Fact(
            kind="max_context", scope=attempt.plan.scope, value=limit, grade="failed", source=proof, attempt=attempt.id, at=at
        )
    if failure.kind in ENVIRONMENTAL:
        return None
    return Fact(
        kind="plan_failed", scope={"fingerprint": attempt.fingerprint}, grade="failed", source=proof, attempt=attempt.id, at=at
    )


def _fill(text: str, groups: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: groups.get(found.group(1), "?"), text)
