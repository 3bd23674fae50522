"""A plan: every choice with its reason, the start, expected memory and speed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from typing import Literal

from gateway.domain.base import Field
from gateway.domain.choice import (
    NOT_FOR_AGENTS,
    ONE_CLASS,
    BoolChoice,
    Choice,
    IntChoice,
    NumberChoice,
    StrChoice,
)
from gateway.domain.units import GIB, plural
from gateway.domain.value import EngineRef, Grade, Task, Value

# The device of engines on a CPU; other devices are UUIDs of GPUs.
RAM = "RAM"


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
            "bytes that it takes outside its budget: CUDA context, NCCL, graphs that it does not"
            " count"
        ),
    )
    kv_bytes: int = Field(description="bytes left for the KV cache")
    kv_bytes_per_token: int
    kv_tokens: int
    low: int
    high: int
    loaded_bytes: int | None = Field(
        None,
        exclude_if=lambda count: count is None,
        description=(
            "bytes that the engine's log will name after loading: weights, and the part of the"
            " overhead for tables of positions and unused parts of segments"
        ),
    )
    measured_bytes: int | None = Field(
        None,
        exclude_if=lambda count: count is None,
        description=(
            "bytes of the budget that are not KV cache, as the engine measured them at an earlier"
            " start"
        ),
    )
    full_requests: float = Field(
        0,
        description="requests of the planned context that the KV cache holds together;"
        " 0: no cache limits them",
    )

    @property
    def promised_bytes(self) -> int:
        """Bytes that no other engine may use."""
        return self.budget_bytes + self.beside_bytes


class Estimate(Value):
    """A number with a band. docs/speed-model.md: the share of published measurements within it."""

    value: float
    low: float
    high: float


class Speed(Value):
    """The expected speed of all replicas together; `stream` and first token: of a lone request."""

    stream: Estimate = Field(description="tokens/s of a single request, after its first token")
    total: Estimate = Field(
        description="tokens/s of `concurrency` concurrent requests, their prompts read meanwhile"
    )
    concurrency: int = Field(
        description="concurrent requests: the wished number, or as many as fit"
    )
    first_token_2k_s: Estimate = Field(
        description="seconds to the first token of a prompt of 2,048 tokens"
    )
    first_token_32k_s: Estimate | None = Field(
        None, description="seconds of a prompt of 32,768 tokens; None: the context is shorter"
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
        {}, description=("factors by which measurements have multiplied expectations, by field")
    )


class ModelRef(Value):
    """The model of a plan: `source` and `revision` to load, the rest for verification."""

    source: str
    revision: str | None = None
    task: Task
    vocab: int
    has_chat: bool | None = Field(
        None, description="whether it has a chat template; None: not known", alias="chat"
    )
    inputs: tuple[str, ...] = Field(
        (), description="kinds of input: text, image, video, audio; empty: not known"
    )
    family: str = Field(
        "",
        exclude_if=lambda name: not name,
        description="model_type of its config.json; empty: not known",
    )
    parameters: int | None = Field(
        None,
        exclude_if=lambda count: count is None,
        description="numbers that its weights hold; None: not known",
    )


class AdapterRef(Value):
    """An adapter of a plan. source, revision: its repository or folder."""

    name: str = Field(description="name that clients put in `model`")
    source: str
    revision: str | None = None


class Refusal(Value):
    """A kernel or backend that the engine rejects, with the reason.

    is_at_start: whether only a start shows the choice, by compiled code or as an earlier start did.
    """

    kernel: str
    reason: str
    is_at_start: bool = Field(False, alias="at_start")


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
    refusals: tuple[Refusal, ...] = Field((), alias="refused")
    note: str = Field("", description="why it would crash, or why it is slow")
    reason: str = Field("", description="why the engine takes this kernel; empty without a kernel")


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
    version: int | None = Field(None, description="version of FlashAttention: 2, 3 or 4")
    block: int | None = Field(
        None, description="tokens of a block of the KV cache that the backend takes"
    )
    refusals: tuple[Refusal, ...] = Field((), alias="refused")
    reason: str = Field("", description="why the engine takes this backend; empty without one")


class Question(Value):
    """The question how an engine version would run the model on one kind of GPU.

    argv: the sorted flags of a plan without its memory limits, which follow from the answer.
    """

    engine: str = Field(description='"kind==version"')
    capability: str | None = Field(description="compute capability of the GPUs; None: on the CPU")
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()


class Cap(Value):
    """The share of each GPU that a model may use next to other models.

    models: the others. Without any of them the cap is void.
    """

    bytes: int = Field(ge=1, description="bytes of each GPU")
    models: tuple[str, ...] = Field(description="the models that have the rest, or got it")


class NodeRanks(Value):
    """The ranks of one copy of an engine on one node of a cluster.

    The first node of a copy answers requests; the others (`node_rank` above 0) only compute.
    """

    node: str
    copy_number: int = Field(0, ge=0, description="number of the copy, from 0")
    node_rank: int = Field(0, ge=0, description="place of the node among those of its copy")
    ranks: tuple[int, ...] = Field(description="ranks of the engine on this node, in order")
    gpus: tuple[str, ...] = Field(description="UUIDs, one per rank; empty on a CPU")
    ports: dict[str, int] = Field(
        {}, description="ports of this node at which other nodes of the copy meet, by use"
    )
    argv: tuple[str, ...] = Field(
        (),
        exclude_if=lambda items: not items,
        description="flags of this node after those of the plan; empty: the copy has one node",
    )
    env: dict[str, str] = Field(
        {},
        exclude_if=lambda variables: not variables,
        description="variables of this node in addition to those of the plan",
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
        description="node of every rank in a cluster; empty: there is one machine",
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
    loras: Choice[str] = StrChoice(value="none", reason="not requested", source="planner")
    chat_template: Choice[str] = StrChoice(
        value="published", reason="not requested", source="planner"
    )
    tool_parser: Choice[str] = StrChoice(value="none", reason="not requested", source="planner")
    reasoning_parser: Choice[str] = StrChoice(
        value="none", reason="not requested", source="planner"
    )
    max_model_len: Choice[int]
    max_num_seqs: Choice[int]
    max_num_batched_tokens: Choice[int]
    custom_all_reduce: Choice[bool]
    enforce_eager: Choice[bool]
    sleep_mode: Choice[bool] = BoolChoice(value=False, reason="not requested", source="planner")
    kv_offload_gib: Choice[int | float] = NumberChoice(
        value=0, reason=NOT_FOR_AGENTS, source="planner"
    )
    request_order: Choice[str] = StrChoice(value="arrival", reason=ONE_CLASS, source="planner")
    kernels: tuple[LayerKernel, ...] = Field((), description="kernel of every linear layer")
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
    scope: dict[str, str] = Field(
        {}, description="subject of a fact that is learned from this plan"
    )
    software: dict[str, str] = Field(
        {},
        description="driver and image it was made for: without them such a fact is stale",
        alias="under",
    )
    drops: tuple[str, ...] = Field(
        (), description="kinds of input that this plan does not serve: image, video, audio"
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
        None, description="question whose answer would check this plan; None: answered already"
    )
    unrehearsed: tuple[str, ...] = Field(
        (), description="stages of the start that the engine's own code did not run through"
    )

    def __repr__(self) -> str:
        """One line for a notebook. `model_dump()` has all fields."""
        gpus = plural(len(self.gpus), "GPU") if self.gpus else "the CPU"
        context = f"{self.max_model_len.value:,} tokens of context"
        return f"<Plan {self.engine} on {gpus}, {context}, {self.grade}>"

    __str__ = __repr__

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices whose memory it uses: UUIDs, or RAM."""
        return self.gpus or (RAM,)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of RAM for its second KV cache."""
        return math.ceil(self.kv_offload_gib.value * GIB)

    def promises(self, device_bytes: Callable[[str], int]) -> Iterator[tuple[str, int]]:
        """Devices and the bytes of each that no other engine may use, a second KV cache included.

        device_bytes: a function that gives the memory of one of `devices`.
        """
        for device in self.devices:
            yield device, device_bytes(device)
        if self.offloaded_bytes:
            yield RAM, self.offloaded_bytes

    @property
    def at_once(self) -> int:
        """Requests that one replica computes concurrently, in all its groups of ranks."""
        return self.max_num_seqs.value * self.data_parallel.value

    @property
    def span(self) -> int:
        """Nodes of one copy."""
        return max((node_ranks.node_rank + 1 for node_ranks in self.nodes), default=1)

    @property
    def quantizes_weights(self) -> bool:
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
            *([node_ranks.model_dump() for node_ranks in self.nodes]),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


class StartSettings(Value):
    """The settings of a plan's start: the whole command line, without flags that name files, and
    bytes of KV cache on each rank."""

    argv: tuple[str, ...]
    kv_bytes: int = Field(0, ge=0)
