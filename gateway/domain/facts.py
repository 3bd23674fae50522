"""Facts, failures, the traffic of engines, and events."""

from __future__ import annotations

from typing import Any, Literal, get_args

from gateway.domain.base import Field
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
    "fork_fails",
    "speed_ratio",
    "speed_measured",
    "machine_speed",
    "network_speed",
]


# Kinds of facts whose value is a number of bytes.
BYTE_KINDS = frozenset({"needs_memory", "spare_memory", "beside_memory"})
# Keys of `Fact.software` for the build of an engine, which is known at its start and by no plan.
BUILD_KEYS = frozenset({"digest", "environment"})


class Fact(Value):
    """A learned fact, which holds where every key of `scope` matches.

    max_context     the engine said that `value` tokens fit
    plan_failed     the plan of this fingerprint failed; plan_verified: it generated tokens
    kernel_fails    this kernel loads and then fails. The scope has `kernel`, and of engine,
                    capability, scheme, k, n (per rank) and head_dim the part that was proven
    kernel_refuses  the engine's own check refuses this kernel for a layer of this size
    engine_fails    this engine version fails with this capability, architecture, quantization or
                    model, or at this task
    needs_memory    `value` bytes of each device were in use before there was a KV cache
    spare_memory    `value` more bytes of each device had to stay free outside the engine's share
    beside_memory   a ready engine used `value` bytes more outside its share than planned
    peers_fail      these `gpus` cannot reach each other `by` a link of diagnosis/facts/peers.py
    sleep_works     an engine of this version on this device slept and freed its memory
    sleep_fails     the engine did not free its memory, or did not wake up
    fork_fails      processes that this engine version forked on this device failed or hung
    speed_ratio     `value` thousandths of the expected `figure` were measured, `samples` times, for
                    this device, engine, kernel, attention backend and ranks. With a fingerprint in
                    the scope clients measured it, else `fitserve bench`
    speed_measured  `value` thousandths are the `figure` of the plan of this fingerprint
    machine_speed   `what` these `gpus` do, in bytes/s, FLOP/s or nanoseconds
                    (engines/common/speed/gpu_measurements.py)
    network_speed   `what` the network between two `nodes` at these `addresses` does, in bytes/s or
                    nanoseconds (planner/nodes/measured_networks.py)
    """

    kind: FactKind
    scope: dict[str, str]
    value: int | None = None
    samples: int | None = Field(None, description="how many measurements are in `value`")
    grade: Grade
    software: dict[str, str] = Field(
        {},
        description=(
            "driver and image it was learned with, and the digest of the image or of the"
            " environment; it is stale without them"
        ),
        alias="under",
    )
    source: str = Field(description="the log line that proves it, or the page it was read on")
    attempt: int | None = None
    at: float | None = None


class Failure(Value):
    """Why an attempt ended.

    line: the proof in the log.
    advice: the cure in one sentence.
    """

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
    proven_subject: Literal["kernel", "context", "memory", "engine", "peers", "plan", "nothing"] = (
        Field(
            "plan",
            description="lesson of the failure for future plans",
            alias="proves",
        )
    )
    cure: Literal["plan", "engine", "user"] = Field(
        "plan",
        description=(
            "where the cure lies: another plan may avoid it, only one of another engine, or none"
        ),
    )
    disturbed: str = Field(
        "",
        description=(
            "act of a neighbour on the same GPU meanwhile: then the failure teaches nothing"
        ),
    )


class TrafficSums(Value):
    """Sums over the requests of a period, by the counters of an engine."""

    requests: float = Field(gt=0, description="requests whose first token came")
    prompt: float = Field(ge=0, description="tokens of their prompts")
    cached: float = Field(ge=0, description="tokens of the prompts that a cache had")
    answer_tokens: float = Field(gt=0, description="tokens of answers", alias="written")
    outputs: float = Field(
        gt=0,
        description="steps in which each request got tokens: one, or the drafted ones",
    )
    steps: float = Field(gt=0, description="steps of the engine in which a request got a token")
    reading_s: float = Field(
        ge=0, description="seconds from the end of the wait in the queue to the first token"
    )
    writing_s: float = Field(ge=0, description="seconds from the first token on")

    @property
    def at_once(self) -> float:
        """The mean number of requests that got a token in one step."""
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
    "model.copies",
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
    "engine.abilities",
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
    "budget.warning",
    "budget.exhausted",
    "knowledge.changed",
    "transcripts.read",
    "transcripts.deleted",
    "transcripts.stopped",
    "transcripts.resumed",
]
EVENT_KINDS: tuple[EventKind, ...] = get_args(EventKind)


class Event(Value):
    """An event. id: grows with each event, also over restarts; 0: not recorded yet."""

    id: int = 0
    at: float = Field(description="when the gateway saw it, in Unix seconds")
    kind: EventKind
    words: str = Field(description="the event in a sentence, for people")
    model: str | None = None
    replica: int | None = None
    attempt: int | None = Field(None, description="the number of the start that it is about")
    data: dict[str, Any] = Field(
        {}, description="the evidence; docs/events.md says what each kind has"
    )
