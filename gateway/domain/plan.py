"""The planner's answer: plans with a reason for every choice, and rejected candidates."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from typing import Generic, Literal, NamedTuple

from gateway.domain.base import ConfigDict, Field
from gateway.domain.start import ExpectedStart
from gateway.domain.value import EngineRef, Grade, T, Task, Value


class Choice(Value, Generic[T]):
    """A decided value with its reason. source: of the rule: `user`, a profile, a fact."""

    value: T
    reason: str
    source: str


# The device of engines on a CPU; other devices are UUIDs of GPUs.
RAM = "RAM"

# The look-up of a parametrized model costs more than an instance.
IntChoice, StrChoice, BoolChoice = Choice[int], Choice[str], Choice[bool]


# Most plans of a decision share their choices, so equal choices are one object.
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
    measured_bytes: int | None = Field(
        None,
        exclude_if=lambda count: count is None,
        description=(
            "bytes of the budget that are no KV cache, as the engine measured them at an earlier"
            " start"
        ),
    )
    full_requests: float = Field(
        0,
        description="requests of the planned context that the KV cache holds at once;"
        " 0: no cache limits them",
    )

    @property
    def promised_bytes(self) -> int:
        """Bytes that no other engine may use."""
        return self.budget_bytes + self.beside_bytes


class Estimate(Value):
    """A number with a band. docs/speed.md: the share of published measurements within it."""

    value: float
    low: float
    high: float


class Speed(Value):
    """The expected speed of all replicas together; `stream` and first token: of a lone request."""

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
    """The model of a plan: `source` and `revision` to load, the rest for verification."""

    source: str
    revision: str | None = None
    task: Task
    vocab: int
    chat: bool | None = Field(None, description="whether it has a chat template; None: not known")
    inputs: tuple[str, ...] = Field(
        (), description="what it takes: text, image, video, audio; empty: not known"
    )


class AdapterRef(Value):
    """An adapter of a plan. source, revision: its repository or folder."""

    name: str = Field(description="that clients put in `model`")
    source: str
    revision: str | None = None


class Refusal(Value):
    """A kernel or backend that the engine rejects, with the reason.

    at_start: only a start shows it, by compiled code or as an earlier start did.
    """

    kernel: str
    reason: str
    at_start: bool = False


class LayerKernel(Value):
    """The kernel for layers of one kind. k, n: per rank; None where they cannot be divided."""

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
    """The backend for attention layers of one kind."""

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
    """The question how an engine version would run the model on one kind of GPU.

    argv: the sorted flags of a plan without its memory limits, which follow from the answer.
    """

    engine: str = Field(description='"kind==version"')
    capability: str | None = Field(description="of the GPUs; None: on the CPU")
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()


class Cap(Value):
    """The share of each GPU that a model may use beside other models.

    models: the others. Without any of them the cap is void.
    """

    bytes: int = Field(ge=1, description="bytes of each GPU")
    models: tuple[str, ...] = Field(description="the models that have the rest, or got it")


class Offer(Value):
    """Memory that a replica of one model could give to another model.

    surplus: KV cache that its wish does not need. sleep, stop: all memory, and the replica does not
    serve meanwhile. A larger offer of a replica includes its smaller ones.
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
    """The memory of the machine's GPUs that a model's engines were promised."""

    model: str
    gives: dict[str, int] = Field(description="bytes by the UUID of a GPU")
    pinned: bool = Field(False, description="it never leaves")
    words: str = Field("", description="the same for people, with the numbers of the GPUs")


class NodeRanks(Value):
    """The ranks of one copy of an engine on one node of a cluster.

    The first node of a copy answers requests; the others (`node_rank` above 0) compute alone.
    """

    node: str
    copy_number: int = Field(0, ge=0, description="of the copy, from 0")
    node_rank: int = Field(0, ge=0, description="place of the node among those of its copy")
    ranks: tuple[int, ...] = Field(description="ranks of the engine on this node, in order")
    gpus: tuple[str, ...] = Field(description="UUIDs, one per rank; empty on a CPU")
    ports: dict[str, int] = Field(
        {}, description="ports of this node at which other nodes of the copy meet, by use"
    )


class Plan(Value):
    """A complete way to run a model. argv, env: the start, by the choices."""

    rank: int = 0
    grade: Grade = "predicted"
    verdict: Literal["ok", "degraded"] = "ok"
    model: ModelRef
    engine: EngineRef
    gpus: tuple[str, ...] = Field((), description="UUIDs, one per rank; empty on a CPU")
    nodes: tuple[NodeRanks, ...] = Field(
        (),
        exclude_if=lambda rows: not rows,
        description="in a cluster: the node of every rank; empty: there is one machine",
    )
    tensor_parallel: Choice[int]
    pipeline_parallel: Choice[int]
    expert_parallel: Choice[bool]
    data_parallel: Choice[int] = IntChoice(
        value=1, reason="all ranks work on the same requests", source="planner"
    )
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
    drops: tuple[str, ...] = Field(
        (), description="what the model takes and this plan does not serve: image, video, audio"
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
    unrehearsed: tuple[str, ...] = Field(
        (), description="stages of the start that the engine's own code did not run through"
    )

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices whose memory it uses: UUIDs, or RAM."""
        return self.gpus or (RAM,)

    @property
    def at_once(self) -> int:
        """Requests that one replica computes at once, in all its groups of ranks."""
        return self.max_num_seqs.value * self.data_parallel.value

    @property
    def span(self) -> int:
        """Nodes of one copy."""
        return max((row.node_rank + 1 for row in self.nodes), default=1)

    @property
    def halved(self) -> bool:
        """Whether the planner chose to quantize the weights, because memory is short."""
        return self.quantization.source == "memory model"

    @property
    def fingerprint(self) -> str:
        """The identity of a start: an equal fingerprint is the same command on the same devices."""
        parts = [
            self.model.source,
            self.model.revision,
            str(self.engine),
            self.engine.image,
            self.gpus,
            self.argv,
            sorted(self.env.items()),
            # A plan without adapters keeps the fingerprint that it had before adapters existed.
            *([adapter.model_dump() for adapter in self.adapters]),
            *([row.model_dump() for row in self.nodes]),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


class Rejected(Value):
    """A rejected candidate. verdict: the gate. reasons: in words. The rest: the plan so far."""

    engine: EngineRef
    tensor_parallel: int
    pipeline_parallel: int = 1
    data_parallel: int = Field(1, exclude_if=lambda groups: groups == 1)
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
    """A contradiction between an engine's own answer, which wins, and the rules that forecast it.

    rules: the version of the rules. source: of the answer. model: its architecture and shapes.
    about: a refusal, a kernel, a backend or bytes.
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
    """An engine version, and whether it can be started here: a decision uses no other.

    gain: how many more tokens/s its best plan should give than the best one here (0.2: a fifth
    more). gives: the same in words.
    """

    engine: str = Field(description='"kind==version"')
    here: bool
    why: str
    do: str = Field("", description="the command, or the setting, that brings it here")
    gain: float | None = None
    gives: str = ""


class ModelForm(Value):
    """A quantized form of a model that this machine could serve.

    source: its repository; "": none is known, but the shape would fit.
    """

    what: str = Field(description="how its weights are quantized")
    source: str = ""
    weights_bytes: int = Field(description="of all ranks together")
    context: int
    engine: str = Field(description='"kind==version"')
    gpus: int


class WouldFit(Value):
    """The changes that would give a plan where there is none. Bytes are of all ranks together."""

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
    forms: tuple[ModelForm, ...] = Field((), description="forms of the model that fit, best first")


class Decision(Value):
    """The planner's answer (schema fitserve.plan/1). plans: best first."""

    schema_: Literal["fitserve.plan/1"] = Field("fitserve.plan/1", alias="schema")
    model: str
    hardware: str
    plans: tuple[Plan, ...] = ()
    why_gpus: str = Field(
        "",
        description=(
            "why the first plan takes so many GPUs: speed, context and requests beside those of the"
            " neighbouring numbers"
        ),
    )
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
    why_nodes: str = Field(
        "",
        exclude_if=lambda why: not why,
        description="in a cluster: the nodes of a copy of the first plan, and why, in figures",
    )
    waits: str = Field(
        "",
        exclude_if=lambda why: not why,
        description="in a cluster without a plan now: what a plan over nodes waits for",
    )
    holders: tuple[Holding, ...] = Field(
        (), description="where there is no plan: which models hold how much of which GPU"
    )
    start: ExpectedStart | None = Field(
        None, description="the start of the first plan; None: this machine starts none"
    )

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)


class Rival(Value):
    """A plan that should be better than the running one. gain: the factor, by the model's goal."""

    speed: Speed = Field(description="what was measured of the plan that runs")
    plan: Plan
    gain: float


class StartSettings(Value):
    """The settings of a plan's start: the whole command line, without flags that name files, and
    bytes of KV cache on each rank."""

    argv: tuple[str, ...]
    kv_bytes: int = Field(0, ge=0)


class OpenQuestions(NamedTuple):
    """The questions of a decision that one engine can answer. starts: of the plans that some of
    them are about."""

    engine: EngineRef
    questions: tuple[Question, ...]
    starts: tuple[tuple[Question, StartSettings], ...] = ()


class Sharing(NamedTuple):
    """How a model shares its machine. cap: what it keeps to. offers: what others could give, in the
        order in which it is asked of them.
    holders: the others. home: UUIDs of the GPUs that it had last. leaves: why it may have to leave
    its GPUs for a while; "": it does not. restored: the plan that it had until something
    outside of the plan ended its engine. Its next start keeps that plan.
    """

    cap: Cap | None = None
    offers: tuple[Offer, ...] = ()
    holders: tuple[Holding, ...] = ()
    home: tuple[str, ...] = ()
    leaves: str = ""
    restored: Plan | None = None


UNSHARED = Sharing()
