"""Decides whether a serving engine is frozen, from its processes, health endpoint, metrics and
clients. Pure.

    frozen part          signs                                             frozen after
    any of its processes Linux says "stopped" (SIGSTOP, a paused           CONFIRM_S after the first
                         container), twice                                 look
    its HTTP server      no health check is answered, and its processes    silent_after_s
                         do not work
    its core, deadlocked clients wait, no byte comes, metrics stand        silent_after_s
                         still, its processes do not work, and the
                         smallest request is not answered either
    its core, in a loop  clients wait, no byte comes, and metrics stand    twice silent_after_s
                         still for longer than a step; from then on the
                         smallest request is not answered either

An engine at work is never frozen, however silent. A long prefill moves its metrics with each step.
Garbage collection, autotuning and compilation take processor time in the engine or its children.

Processor time alone proves no work: a core that waits for its GPU takes a whole processor. A
healthy `/health` proves little: the HTTP server answers while the core hangs (vLLM 0.26.0,
vllm/v1/engine/async_llm.py:900).
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.diagnosis.compilers import compiling
from gateway.domain import EngineProcess, Plan

# A debugger or a profiler stops a process for a moment.
CONFIRM_S = 1.0
# The share is that of one core. An idle engine needs far less to answer health checks.
_BUSY_SHARE = 0.2
# Layers that store something for every token: each prefill step fills the KV cache, and the metrics
# show it.
_CACHE_LAYER_KINDS = {"full", "mla"}


def longest_step_s(plan: Plan, tokens: int, prefill_s: float) -> float:
    """The longest time that the metrics of a working engine may stand still, in seconds.

    `prefill_s` is the time that a prompt of `tokens` tokens took, at most one step.

    Only the attention part of a step grows with the context: from half that prompt on average to
    the whole context. Without a layer that stores every token, all steps of a prompt look like one.
    """
    context = plan.max_model_len.value / tokens
    prompts = max(1.0, plan.max_num_batched_tokens.value / tokens)
    steps = (
        1.0
        if any(layer.kind in _CACHE_LAYER_KINDS for layer in plan.attention)
        else max(1.0, context)
    )
    return prefill_s * prompts * steps * max(2.0, 2 * context)


class FreezeDetector:
    """The observations of one engine. Times are seconds of one monotonic clock."""

    def __init__(self, now: float, silent_after_s: float) -> None:
        self._silent_after_s = silent_after_s
        self._answered_at = self._moved_at = now
        self._unanswered_s = 0.0
        self._metrics: object = None
        self._silent_since: float | None = None
        self.step_s: float | None = None
        """How long its metrics may stand still while it works; None: unknown."""
        self._stopped_processes: tuple[EngineProcess, ...] = ()
        self._stopped_since: float | None = None
        self._stays_stopped = False
        self._cpu: tuple[float, dict[int, float]] | None = None
        self._worked = now

    # --- observations ---

    def record_health(self, now: float, *, is_healthy: bool) -> None:
        """Note whether the health check was answered."""
        if is_healthy:
            self._answered_at = now
        self._unanswered_s = now - self._answered_at

    def record_processes(self, now: float, processes: Sequence[EngineProcess]) -> None:
        """Note all processes of the engine; none if the host does not report them."""
        self._stopped_processes = tuple(process for process in processes if process.is_stopped)
        self._stopped_since = (self._stopped_since or now) if self._stopped_processes else None
        self._stays_stopped = self.stopped_s(now) >= CONFIRM_S
        cpu = {process.pid: process.cpu_s for process in processes}
        if self._cpu is not None:
            measured_at, former_cpu = self._cpu
            used_s = sum(max(0.0, cpu_s - former_cpu.get(pid, 0.0)) for pid, cpu_s in cpu.items())
            if used_s >= _BUSY_SHARE * (now - measured_at):
                self._worked = now
        self._cpu = (now, cpu) if cpu else None
        if compiling(process.command for process in processes):
            self._moved_at = now

    def record_metrics(self, now: float, metrics: object) -> None:
        """Note its metrics in any comparable form; None if it has none."""
        if metrics is None or metrics != self._metrics:
            self._metrics = metrics
            self._moved_at = now
            self._silent_since = None

    def record_probe(self, now: float, *, is_alive: bool) -> None:
        """Note whether the engine answered the smallest request, sent at `now`."""
        self._silent_since = None if is_alive else self._silent_since or now
        if is_alive:
            self._moved_at = now

    # --- conclusions ---

    @property
    def is_suspicious(self) -> bool:
        """Whether the next look should come soon."""
        return self._stopped_since is not None

    def silent_seconds(self, now: float) -> float:
        """How long it has not answered the smallest request."""
        return now - self._silent_since if self._silent_since is not None else 0.0

    def stopped_s(self, now: float) -> float:
        """How long its processes have been stopped."""
        return now - self._stopped_since if self._stopped_since is not None else 0.0

    def needs_probe(self, now: float, waited_s: float | None, ask_s: float) -> bool:
        """Whether the engine should get a test request, which takes up to `ask_s`.

        `waited_s`: how long clients have waited without a byte; None: no client waits.
        """
        still_s = min(now - self._moved_at, waited_s or 0.0)
        if min(still_s, self._idle_s(now)) >= self._silent_after_s - ask_s:
            return True
        return self.step_s is not None and still_s >= max(self._silent_after_s, self.step_s)

    def _idle_s(self, now: float) -> float:
        """Seconds since its processes last worked; 0: unknown."""
        return now - self._worked if self._cpu is not None else 0.0

    def freeze_reason(self, now: float) -> str:
        """Why it is frozen; "" if it is not."""
        if self._stays_stopped:
            pids = ", ".join(str(process.pid) for process in self._stopped_processes[:4])
            return f"processes of the engine are stopped ({pids}), as by SIGSTOP or `docker pause`"
        is_idle = self._idle_s(now) >= self._silent_after_s / 2
        if self._unanswered_s >= self._silent_after_s and (is_idle or self._cpu is None):
            return f"the engine has answered no health check for {round(self._unanswered_s)} s"
        # An engine that takes processor time may be finishing its work.
        if self._silent_since is not None and (
            is_idle or self.silent_seconds(now) >= self._silent_after_s
        ):
            verb_phrase = "does nothing" if is_idle else "computes without an end"
            return (
                f"the engine gives its clients nothing, {verb_phrase}, and does not answer the"
                " smallest request either"
            )
        return ""
