"""What the planner answers: plans with a reason for every choice, and what it ruled out."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from typing import Generic, Literal, NamedTuple

from pydantic import ConfigDict, Field

from gateway.domain.value import EngineRef, Grade, T, Task, Value


class Choice(Value, Generic[T]):
    """A decided value with why, and where the rule comes from (`user`, a profile, a fact)."""

    value: T
    reason: str
    source: str


# The one device of engines on a CPU, where others are GPUs' UUIDs.
RAM = "RAM"

# Looking a parametrized model up costs more than making one.
IntChoice, StrChoice, BoolChoice = Choice[int], Choice[str], Choice[bool]


# Of the many plans of one decision most say the same: one object for all.
@lru_cache(maxsize=1024)
def int_choice(value: int, reason: str, source: str) -> Choice[int]:
    return IntChoice(value=value, reason=reason, source=source)


@lru_cache(maxsize=1024)
def str_choice(value: str, reason: str, source: str) -> Choice[str]:
    return StrChoice(value=value, reason=reason, source=source)


@lru_cache(maxsize=1024)
def bool_choice(value: bool, reason: str, source: str) -> Choice[bool]:
    return BoolChoice(value=value, reason=reason, source=source)


class Memory(Value):
    """Predicted bytes per device. `low`..`high` bounds everything but the KV cache."""

    gpu_bytes: int = Field(description="bytes of the device (of RAM on a CPU-only host)")
    budget_bytes: int = Field(description="bytes this engine may take of it")
    weights_bytes: int
    activation_bytes: int
    graph_bytes: int
    overhead_bytes: int
    beside_bytes: int = Field(
        0,
        description=(
            "bytes that it takes beside its budget: CUDA context, NCCL, graphs that it does not"
            " count"
        ),
    )
    kv_bytes: int = Field(description="bytes left for the KV cache")
    kv_bytes_per_token: int
    kv_tokens: int
    low: int
    high: int
    full_requests: float = Field(
        0, description="requests of the planned context that the KV cache holds at once"
    )

    @property
    def promised_bytes(self) -> int:
        """What no other engine may count on."""
        return self.budget_bytes + self.beside_bytes


class Estimate(Value):
    """A number and a band around it; docs/speed.md says how many published measurements lie
    within."""

    value: float
    low: float
    high: float


class Speed(Value):
    """Of all replicas of a plan together; `stream` and the first token are of one request that is
    alone."""

    stream: Estimate = Field(description="tokens/s of one request alone, after its first token")
    total: Estimate = Field(
        description="tokens/s of `concurrency` requests at once, their prompts read meanwhile"
    )
    concurrency: int = Field(description="requests at once: as many as were asked for, and fit")
    first_token_2k_s: Estimate = Field(
        description="seconds to the first token of a prompt of 2,048 tokens"
    )
    first_token_32k_s: Estimate | None = Field(
        None, description="of 32,768 tokens; None: the context is shorter"
    )
    grade: Literal["predicted", "served", "measured"] = Field(
        "predicted",
        description=(
            "measured: of this very plan, here; served: corrected by what its clients were given,"
            " here"
        ),
    )
    source: str = Field(
        description="where the figures of the machine come from, and what was measured"
    )
    ratios: dict[str, float] = Field(
        {}, description="by field what measurements have multiplied its expectation with"
    )


class ModelRef(Value):
    """The model of a plan: `source` and `revision` say what to load, the rest is what verification
    asks for."""

    source: str
    revision: str | None = None
    task: Task
    vocab: int
    chat: bool | None = Field(None, description="whether it has a chat template; None: not known")
    inputs: tuple[str, ...] = Field(
        (), description="what it takes: text, image, video, audio; empty: not known"
    )


class AdapterRef(Value):
    """An adapter of a plan: `source` and `revision` say what to load."""

    name: str = Field(description="that clients put in `model`")
    source: str
    revision: str | None = None


class Refusal(Value):
    """One kernel or backend that the engine passes over, and why. at_start: it says so only when it
    starts, by compiled code or as was
    seen in a start."""

    kernel: str
    reason: str
    at_start: bool = False


class LayerKernel(Value):
    """What the engine computes layers of one kind with. `k`, `n` are per rank; None where they
    cannot be cut."""

    layer: str
    count: int
    k: int | None
    n: int | None
    scheme: str
    kernel: str | None = Field(
        description="None: no kernel, or not known; then `status` and `refused` say which and why"
    )
    status: Literal["ok", "none", "unknown", "crash"] = Field(
        description="crash: it loads, and fails at the first request"
    )
    padded_to: tuple[int, int] | None = None
    refused: tuple[Refusal, ...] = ()
    note: str = Field("", description="why it would crash, or why it is slow")


class LayerAttention(Value):
    """Which backend computes attention layers of one kind."""

    kind: str
    layers: int
    head_dim: int
    backend: str | None = Field(
        description=(
            "None: none is valid, or not known; then `status` and `refused` say which and why"
        )
    )
    status: Literal["ok", "none", "unknown"]
    version: int | None = Field(None, description="of FlashAttention: 2, 3 or 4")
    block: int | None = Field(
        None, description="tokens of a block of the KV cache that the backend takes"
    )
    refused: tuple[Refusal, ...] = ()


class Question(Value):
    """What one engine version makes of the model with one command line, on one kind of GPU.

    `argv` are the flags of a plan but those that only say how much memory it takes, sorted: what
    follows from the answer cannot be part of the question.
    """

    engine: str = Field(description='"kind==version"')
    capability: str | None = Field(description="of the GPUs; None: on the CPU")
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()


class Cap(Value):
    """What a model may take of each of its GPUs, which others share. models: those others; without
    them it is void."""

    bytes: int = Field(ge=1, description="bytes of each GPU")
    models: tuple[str, ...] = Field(description="the models that have the rest, or got it")


class Offer(Value):
    """What a copy of one model could give of its GPUs to another. surplus: KV cache that its wish
    does not need. sleep, stop: all of it, and the copy
    does not serve meanwhile. A copy may make several, of which each has what the smaller ones of it
    have.
    """

    model: str
    how: Literal["surplus", "sleep", "stop"]
    gives: dict[str, int] = Field(description="bytes that come back, by the UUID of a GPU")
    replica: int = Field(
        0, description="the copy of the model that gives it, while the others serve"
    )
    keeps: int = Field(
        0, description="of a surplus: bytes of each GPU that the model then may take"
    )
    tokens: int = Field(0, description="of a surplus: tokens of KV cache that stay")
    of_tokens: int = Field(0, description="of a surplus: tokens of KV cache that there are")
    of_bytes: int = Field(0, description="of a surplus: bytes of KV cache that there are")
    context: int = Field(
        0, description="of a surplus: tokens of a whole request, of which one always has room"
    )
    beside: int = Field(
        0,
        description=(
            "of a surplus that is taken: bytes of each GPU that the one who takes it has without it"
        ),
    )
    words: str = Field(description="the same for people")


class Holding(Value):
    """What a model has of the machine's GPUs, as far as engines of it were promised that."""

    model: str
    gives: dict[str, int] = Field(description="bytes by the UUID of a GPU")
    pinned: bool = Field(False, description="it never leaves")
    words: str = Field("", description="the same for people, with the numbers of the GPUs")


class Plan(Value):
    """One way to run a model, complete: `argv` and `env` follow from the choices and start it."""

    rank: int = 0
    grade: Grade = "predicted"
    verdict: Literal["ok", "degraded"] = "ok"
    model: ModelRef
    engine: EngineRef
    gpus: tuple[str, ...] = Field((), description="UUIDs, one per rank; empty on a CPU")
    tensor_parallel: Choice[int]
    pipeline_parallel: Choice[int]
    expert_parallel: Choice[bool]
    replicas: Choice[int]
    dtype: Choice[str]
    quantization: Choice[str]
    kv_cache_dtype: Choice[str]
    kernel_overrides: Choice[str]
    speculation: Choice[str]
    num_speculative_tokens: Choice[int]
    drafter: ModelRef | None = None
    adapters: tuple[AdapterRef, ...] = ()
    loras: Choice[str] = StrChoice(value="none", reason="nobody asked", source="planner")
    chat_template: Choice[str] = StrChoice(
        value="published", reason="nobody asked", source="planner"
    )
    tool_parser: Choice[str] = StrChoice(value="none", reason="nobody asked", source="planner")
    reasoning_parser: Choice[str] = StrChoice(value="none", reason="nobody asked", source="planner")
    max_model_len: Choice[int]
    max_num_seqs: Choice[int]
    max_num_batched_tokens: Choice[int]
    custom_all_reduce: Choice[bool]
    enforce_eager: Choice[bool]
    sleep_mode: Choice[bool] = BoolChoice(value=False, reason="nobody asked", source="planner")
    kernels: tuple[LayerKernel, ...] = Field((), description="of every linear layer")
    attention: tuple[LayerAttention, ...] = ()
    memory: Memory
    cap: Cap | None = Field(
        None,
        description="the most it takes of each GPU, which others share; None: all that is free",
    )
    speed: Speed | None = Field(
        None, description="None: nothing is known of what these GPUs can do"
    )
    argv: tuple[str, ...]
    env: dict[str, str]
    variables: dict[str, Choice[str]] = Field({}, description="why each variable of `env` is there")
    scope: dict[str, str] = Field({}, description="what a fact learned from this plan is about")
    under: dict[str, str] = Field(
        {}, description="driver and image it was made for: without them such a fact is stale"
    )
    cost: int = Field(
        0,
        description=(
            "how much of the engine's own choices was changed; of equal plans the smaller wins"
        ),
    )
    warnings: tuple[str, ...] = ()
    advice: str = Field(
        "",
        description=(
            "published weaknesses of this engine version, and which version is without them"
        ),
    )
    question: Question | None = Field(
        None, description="whose answer would check this plan; None: it was asked"
    )

    @property
    def devices(self) -> tuple[str, ...]:
        """Whose memory it takes: UUIDs, or RAM."""
        return self.gpus or (RAM,)

    @property
    def halved(self) -> bool:
        """Whether the planner, not the user or the checkpoint, quantizes the weights, because
        memory is short."""
        return self.quantization.source == "memory model"

    @property
    def fingerprint(self) -> str:
        """Identity of what would be started: the same fingerprint is the same command on the same
        devices."""
        parts = [
            self.model.source,
            self.model.revision,
            str(self.engine),
            self.engine.image,
            self.gpus,
            self.argv,
            sorted(self.env.items()),
            # Plans from before there were any are the same plans.
            *([adapter.model_dump() for adapter in self.adapters]),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


class Rejected(Value):
    """A candidate that was ruled out: `verdict` is the gate, `reasons` say why in words; the rest
    is what would have been."""

    engine: EngineRef
    tensor_parallel: int
    pipeline_parallel: int = 1
    verdict: str
    layer: str | None = Field(None, description="the layer that no kernel computes")
    reasons: tuple[str, ...]
    source: str
    kernels: tuple[LayerKernel, ...] = ()
    attention: tuple[LayerAttention, ...] = ()
    memory: Memory | None = None
    question: Question | None = Field(
        None, description="whose answer could overrule the refusal; None: no answer could"
    )


class RuleGap(Value):
    """Where an engine's own answer contradicts the rules that forecast for it: what the engine said
    wins.

    rules: the version whose rules they are. source: what answered. model: its architecture and
    shapes. about: what they say differently: a refusal, a kernel, a backend, bytes.
    """

    engine: str
    rules: str
    source: str
    capability: str | None
    model: str
    argv: tuple[str, ...]
    about: str
    forecast: str
    answer: str


class EngineHere(Value):
    """One engine version that a decision for this machine could count, and whether it did: only
    what can be started here counts.

    gain: how many more tokens/s its best plan should give than the best one here (0.2: a fifth
    more). gives: the same in words.
    """

    engine: str = Field(description='"kind==version"')
    here: bool
    why: str
    do: str = Field("", description="the command, or the setting, that brings it here")
    gain: float | None = None
    gives: str = ""


class Form(Value):
    """A form of a model that this machine could serve. source: the repository that has it; "": none
    is known, the shape would fit."""

    what: str = Field(description="how its weights are quantized")
    source: str = ""
    weights_bytes: int = Field(description="of all ranks together")
    context: int
    engine: str = Field(description='"kind==version"')
    gpus: int


class WouldFit(Value):
    """What would have to be otherwise where there is no plan. Bytes are of all ranks together."""

    weights_bytes: int = Field(description="what the model's weights have; 0: not known")
    room_bytes: int = Field(description="the largest weights that have room now")
    room_empty_bytes: int | None = Field(
        None, description="and without the engines that run; None: none do"
    )
    fits_empty: bool = Field(False, description="whether the model has a plan without them")
    context: int | None = Field(
        None,
        description=(
            "where a context was demanded: the longest that fits; None: none was, or none fits"
        ),
    )
    forms: tuple[Form, ...] = Field((), description="forms of the model that fit, best first")


class Decision(Value):
    """The planner's whole answer (schema fitserve.plan/1): plans best first, and what was ruled
    out."""

    schema_: Literal["fitserve.plan/1"] = Field("fitserve.plan/1", alias="schema")
    model: str
    hardware: str
    plans: tuple[Plan, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    gaps: tuple[RuleGap, ...] = Field(
        (), description="where engines that were asked contradict the rules"
    )
    engines: tuple[EngineHere, ...] = Field(
        (), description="which can be started on this machine, and what the others would give"
    )
    takes: tuple[Offer, ...] = Field(
        (), description="what other models give before the first plan is started"
    )
    would_fit: WouldFit | None = Field(None, description="where there is no plan: what would fit")
    holders: tuple[Holding, ...] = Field(
        (), description="where there is no plan: which models hold how much of which GPU"
    )

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        serialize_by_alias=True,
        defer_build=True,
    )


class Rival(Value):
    """A plan that is expected to be better than what runs. gain: how many times as much it is worth
    for what the model is wanted for."""

    speed: Speed = Field(description="what was measured of the plan that runs")
    plan: Plan
    gain: float


class OpenQuestions(NamedTuple):
    """What one engine can be asked about a decision."""

    engine: EngineRef
    questions: tuple[Question, ...]


class Sharing(NamedTuple):
    """How a model shares its machine. cap: what it keeps to. offers: what others could give, in the
        order in which it is asked of them.
    holders: the others. home: UUIDs of the GPUs that it had last. leaves: why it may have to leave
    its GPUs for a while; "": it does not. again: the plan that it had until something outside of
    that ended its engine, and is to have again.
    """

    cap: Cap | None = None
    offers: tuple[Offer, ...] = ()
    holders: tuple[Holding, ...] = ()
    home: tuple[str, ...] = ()
    leaves: str = ""
    again: Plan | None = None


ALONE = Sharing()
