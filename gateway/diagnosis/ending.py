"""The end of an engine: its cause, and an end without a known cause. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.domain import Failure, Instance

# Signals of a crash: SIGILL, SIGABRT, SIGBUS, SIGFPE and SIGSEGV.
_CRASH_SIGNALS = frozenset({4, 6, 7, 8, 11})


def is_environmental(failure: Failure) -> bool:
    """Whether the cause lies outside the plan, which may then be started again.

    The first hang proves nothing.
    """
    return failure.proven_subject == "nothing"


def exit_failure(
    instance: Instance, phase: str, tail: Iterable[str], *, was_ready: bool
) -> Failure:
    """The Failure of an engine that exited without a line that proves a cause."""
    lines = [line for line in tail if line.strip()]
    last = lines[-1] if lines else None
    code = instance.exit_code
    if instance.is_oom_killed:
        return Failure(
            kind="host_oom",
            phase=phase,
            message=(
                "The kernel killed the engine because the memory of the host, or of its container,"
                " ran out."
            ),
            line=last,
            culprit={"exit_code": -9 if code is None else code},
            advice="Free memory, or use a smaller context.",
        )
    if code is None:
        ending_text = "The engine is gone; its exit code was not seen"
        kind = "exited"
    elif (number := -code if code < 0 else code - 128) in _CRASH_SIGNALS:
        ending_text = f"The engine crashed in compiled code (signal {number})"
        kind = "exited"
    elif code < 0 or code in (137, 143):
        ending_text = f"The engine was killed (signal {number})"
        kind = "killed"
    elif code == 0:
        # SGLang as the first process of a container reports a dead scheduler like this. An engine
        # that was ordered to stop ends in the same way: by hand, or by a gateway before a restore.
        ending_text = "The engine ended with exit code 0, without an order of this gateway"
        kind = "exited"
    else:
        ending_text = f"The engine ended with exit code {code}"
        kind = "exited" if was_ready else "unknown"
    stage = "while it was serving" if was_ready else f"while {phase}"
    return Failure(
        kind=kind,
        phase=phase,
        message=f"{ending_text} {stage}, and its log names no known cause.",
        line=last,
        culprit={} if code is None else {"exit_code": code},
        advice="Read the whole log with `fitserve logs`.",
        proven_subject="plan" if kind == "unknown" else "nothing",
    )
