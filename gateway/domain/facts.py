"""What was learned, why an attempt ended, what an engine gave its clients, and what happened."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field

from gateway.domain.value import Grade, Scalar, Value

FactKind = Literal[
    "max_context",
    "plan_failed",
    "plan_verified",
    "kernel_fails",
    "kernel_refuses",
    "engine_fails",
    "needs_memory",
    "spare_memory",
    "beside_memory",
    "peers_fail",
    "sleep_works",
    "sleep_fails",
    "speed_ratio",
    "speed_measured",
    "machine_speed",
]


class Fact(Value):
    """Something learned, with a scope no wider than its evidence: it holds where every key of
    `scope` matches.

    max_context: the engine said that `value` tokens fit. plan_failed, plan_verified: the plan of
    this fingerprint. kernel_fails: this kernel loads and then fails; its scope names `kernel`, and
    of engine, capability, scheme, k and n (per rank) what the evidence covers; of an attention
    backend head_dim. kernel_refuses: the engine's own check turns a layer of this size away from
    this kernel, which other layers get. engine_fails: this engine version cannot do what its scope
    names of capability, architecture and quantization. needs_memory: `value` bytes of each device
    were in use before there was a KV cache. spare_memory: `value` bytes more of each device had to
    be left free beside the engine's share. beside_memory: of each device an engine that was ready
    took `value` bytes more beside its share than its plan had said. peers_fail: these `gpus` cannot
    reach each other `by` one of the links of diagnosis/facts/peers.py. sleep_works: an engine of
    this version on this device was put to sleep and gave its memory back, of which `value`
    thousandths were expected to come. sleep_fails: it did not, or did not wake up. speed_ratio:
    `value` thousandths of what was expected were measured of the `figure` of plans of this device,
    engine, kernel, attention backend and ranks, `samples` times; with a fingerprint in its scope by
    what clients were served by that plan, else by `fitserve bench`. speed_measured: `value`
    thousandths are the `figure` of the plan of this fingerprint. machine_speed: `what` these `gpus`
    do, in bytes/s, FLOP/s or nanoseconds (engines/common/speed/measured.py).
    """

    kind: FactKind
    scope: dict[str, str]
    value: int | None = None
    samples: int | None = Field(None, description="how many measurements are in `value`")
    grade: Grade
    under: dict[str, str] = Field(
        {}, description="driver and image it was learned with; it is stale without them"
    )
    source: str = Field(description="the log line that proves it, or the page it was read on")
    attempt: int | None = None
    at: float | None = None


class Failure(Value):
    """Why an attempt ended: `kind` names the class, `line` proves it, `advice` says what to do in a
    sentence, `steps` in order."""

    kind: str
    phase: str
    message: str
    line: str | None = None
    line_number: int | None = None
    culprit: dict[str, Scalar] = Field({})
    advice: str = ""
    steps: tuple[str, ...] = Field(
        (), description="the cure, in order, with the numbers of this case"
    )
    proves: Literal["kernel", "context", "memory", "engine", "peers", "plan", "nothing"] = Field(
        "plan", description="what it teaches about future plans"
    )
    disturbed: str = Field(
        "", description="what a neighbour on the same GPU did meanwhile: then it teaches nothing"
    )


class Served(Value):
    """What the counters of an engine say of a stretch of time in which it answered clients. Each is
    a sum over requests."""

    requests: float = Field(gt=0, description="whose first token came")
    prompt: float = Field(ge=0, description="tokens of their prompts")
    cached: float = Field(ge=0, description="those among them that a cache had")
    written: float = Field(gt=0, description="tokens of answers")
    outputs: float = Field(
        gt=0,
        description="in how many steps each request got something: one token, or what was drafted",
    )
    steps: float = Field(gt=0, description="of the engine, in which somebody got something")
    reading_s: float = Field(
        ge=0, description="from the end of its wait in the queue to its first token"
    )
    writing_s: float = Field(ge=0, description="from its first token on")

    @property
    def at_once(self) -> float:
        """Requests that got something in one step, in the mean."""
        return max(1.0, self.outputs / self.steps)


EventKind = Literal[
    "gateway.started",
    "gateway.stopped",
    "model.added",
    "model.changing",
    "model.changed",
    "model.change_refused",
    "model.removing",
    "model.removed",
    "model.stopped",
    "model.started",
    "model.retried",
    "model.state",
    "model.leaving",
    "plan.chosen",
    "plan.fallback",
    "plan.shrunk",
    "plan.waits",
    "plan.none",
    "weights.downloading",
    "weights.downloaded",
    "engine.pulling",
    "engine.started",
    "engine.phase",
    "engine.proven",
    "engine.ready",
    "engine.failed",
    "engine.retry",
    "engine.quarantined",
    "engine.frozen",
    "engine.answers",
    "engine.stopped",
    "engine.installed",
    "engine.uninstalled",
    "endpoint.reached",
    "endpoint.lost",
    "gpu.lost",
    "gpu.back",
    "gpu.error",
    "gpu.throttled",
    "gpu.unthrottled",
    "key.added",
    "key.removed",
]
EVENT_KINDS: tuple[EventKind, ...] = get_args(EventKind)


class Event(Value):
    """`id` grows with each event, over restarts too; 0: it is not recorded yet."""

    id: int = 0
    at: float = Field(description="when the gateway saw it, in Unix seconds")
    kind: EventKind
    words: str = Field(description="the same in a sentence, for people")
    model: str | None = None
    replica: int | None = None
    attempt: int | None = Field(None, description="the number of the start that it is about")
    data: dict[str, Any] = Field(
        {}, description="the evidence; docs/events.md says what each kind has"
    )
