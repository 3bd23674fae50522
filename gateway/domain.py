"""The values everything speaks in. All frozen; sizes are bytes, lengths are tokens, times are Unix seconds.

probe -> Hardware, catalog -> ModelSpec, user -> Wish, store -> Fact   into the planner
Plan -> LaunchSpec -> Instance (what a host runs) and Attempt (what we remember of it)
Observation -> Failure -> Fact                                         back into the planner
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

T = TypeVar("T")
Scalar = str | int | float | bool
Task = Literal["generate", "embed", "rerank"]
# More memory than any machine has: a reading beyond it is a mistake.
MOST_BYTES = 2**50


class Value(BaseModel):
    """A frozen value: unknown fields are errors, equality is by content."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    def evolve(self, **changes: Any) -> Any:
        """A copy with `changes`, unvalidated: for our own code, never for input."""
        return self.model_copy(update=changes)


# --- hardware: what the probe reads. A reading that the machine does not give is None, never a guess. ---


class GpuProcess(Value):
    pid: int
    name: str | None = None
    used_bytes: int | None = None


class Pcie(Value):
    """The link as it is now and as it could be (a card at rest lowers its generation)."""

    generation: int | None = None
    width: int | None = None
    max_generation: int | None = None
    max_width: int | None = None


class Gpu(Value):
    index: int
    uuid: str
    name: str
    capability: str | None = Field(
        None, pattern=r"^[0-9]{1,2}\.[0-9]{1,2}$", description='CUDA compute capability, for example "8.6"'
    )
    total_bytes: int | None = Field(None, ge=1, le=MOST_BYTES)
    free_bytes: int | None = Field(None, ge=0, le=MOST_BYTES)
    memory_kind: Literal["dedicated", "unified"] = "dedicated"
    mig: bool | None = None
    pcie: Pcie = Pcie()
    processes: tuple[GpuProcess, ...] | None = None
    lost: str | None = Field(None, description="why nothing is started on it: what failed")


class Link(Value):
    """How GPUs `a` and `b` (indices) reach each other."""

    a: int
    b: int
    nvlinks: int | None = Field(None, description="active NVLink links between the two")
    p2p: bool | None = Field(None, description="whether the driver says peer-to-peer reads work")
    p2p_status: str | None = Field(None, description="the driver's reason when they do not")


class Hardware(Value):
    """One host. `gpus` is empty on a CPU-only machine, which is a normal answer."""

    schema_: Literal["fitserve.hardware/1"] = Field("fitserve.hardware/1", alias="schema")
    arch: str
    cpu_name: str | None = None
    cpu_cores: int
    cpu_features: tuple[str, ...] = Field((), description="instruction sets that decide kernels: avx2, avx512f, amx_bf16")
    ram_total_bytes: int = Field(ge=0, le=MOST_BYTES)
    ram_available_bytes: int = Field(ge=0, le=MOST_BYTES)
    shm_bytes: int | None = None
    disk_free_bytes: int | None = None
    driver: str | None = Field(None, max_length=64)
    cuda_driver: str | None = Field(None, description='highest CUDA version of the driver, for example "13.0"')
    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
    notes: tuple[str, ...] = Field((), description="what could not be read, and why")

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, serialize_by_alias=True, defer_build=True)


# --- model ---

Shard = Literal["column", "row", "kv", "vocab", "replicated", "expert_column", "expert_row"]


class TensorGroup(Value):
    """Tensors that differ only in their layer (and expert) number, with the number written `*`.

    `shape` is of one tensor as stored (out features, in features for a linear weight).
    """

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: str = Field(description="safetensors name: BF16, F16, F32, F8_E4M3, I32, U8 ...")
    shard: Shard


class Recurrent(Value):
    """What a recurrent layer keeps of each sequence in place of keys and values: a matrix per head (rows x columns), and the
    last inputs of a convolution. Sizes are of the uncut layer.

    gdn: rows are the value head size, columns the key head size, groups the key heads. mamba2: rows are the head size,
    columns the state size, groups share B and C. mamba1: heads are the channels, with one row each.
    """

    kind: Literal["gdn", "kda", "mamba1", "mamba2"]
    heads: int
    rows: int
    columns: int
    groups: int = 0
    conv_channels: int
    conv_kernel: int
    dtype: str | None = Field(None, description="of the matrices, where the config names one (mamba_ssm_dtype)")
    chunk: int | None = Field(None, description="tokens that a mamba2 kernel takes at once (mamba_chunk_size, chunk_size)")


class AttentionGroup(Value):
    """Attention layers of one kind. Encoder and vision layers keep no KV cache.

    full, sliding: `kv_heads` keys of `head_dim` and values of `value_dim` per token; sliding ones keep `window` tokens.
    mla: one latent of `head_dim` (kv_lora_rank + rope) per token, whole on every rank; `value_dim` is kv_lora_rank.
    recurrent: a constant state per sequence, in `recurrent`.
    """

    kind: Literal["full", "sliding", "mla", "recurrent", "encoder", "vision"]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int | None = Field(None, description="size of a value head; None: head_dim")
    window: int | None = None
    sinks: bool = False
    causal: bool = True
    index_dim: int | None = Field(None, description="head size of a sparse attention's indexer (DeepSeek V3.2)")
    recurrent: Recurrent | None = None


class Experts(Value):
    count: int
    per_token: int
    intermediate: int
    shared_intermediate: int = 0


class Quant(Value):
    """The checkpoint's own quantization block: `method` as it names itself, the rest verbatim."""

    method: str
    config: dict[str, Any] = {}


class ModelSpec(Value):
    """What a plan needs to know of a model: read from config.json and safetensors headers, never from weights."""

    source: str
    revision: str | None = Field(None, description="commit (40 hex) of a Hugging Face repository")
    architecture: str
    model_type: str
    task: Task = "generate"
    dtype: Literal["bfloat16", "float16", "float32"]
    max_position: int
    hidden: int
    vocab: int
    attention: tuple[AttentionGroup, ...]
    experts: Experts | None = None
    quant: Quant | None = None
    tensors: tuple[TensorGroup, ...]
    tensors_from: Literal["headers", "config"]
    draft_tensors: tuple[TensorGroup, ...] = Field(
        (), description="of layers that only draft tokens (MTP), which no engine loads unless it is told to"
    )
    remote_code: tuple[str, ...] = Field((), description="what in the repository would run as code")
    file_bytes: int | None = Field(None, description="size of all weight files")
    config: dict[str, Any] = Field(
        {}, exclude=True, description="config.json, from which the layers of each engine version follow"
    )


# --- engine ---


class Flag(Value):
    """One command line flag of one engine version. `ours` flags are set by the gateway and refused from users."""

    type: Literal["int", "float", "str", "bool", "json"]
    choices: tuple[str, ...] | None = None
    default: Scalar | None = None
    ours: bool = False
    same_as: str | None = Field(None, description="the flag that this is another name of")


class Install(Value):
    """How an environment for an engine is built: a lock file beside its profile, or plain packages."""

    python: str = Field(pattern=r"^3\.\d+$")
    lock: str | None = Field(None, pattern=r"^[\w.-]+\.txt$", description="requirements with hashes, in the profile's folder")
    packages: tuple[str, ...] = ()
    torch_backend: str | None = Field(None, description="uv's --torch-backend, where no wheel of torch is at hand")
    module: str = Field("vllm", pattern=r"^\w+$", description="imported at the end, to prove that it works")


class Advisory(Value):
    """A published weakness of one engine version."""

    id: str = Field(description="GHSA, CVE or PYSEC number")
    summary: str
    fixed_in: str | None = Field(description="the first version without it; None: none is known")
    source: str


class Method(Value):
    """What an engine version says of one quantization method as a whole, before it looks at any layer."""

    min_capability: str | None = None
    dtypes: tuple[str, ...] = Field((), description="activations it takes; empty: any")
    deprecated: bool = Field(False, description="refused without --allow-deprecated-quantization")
    online: str | None = Field(
        None,
        description="weights that are not quantized become so while they load, within the limits of the method that this names",
    )


class MethodRule(Value):
    """When a checkpoint is loaded with `method` rather than with what it names. The first rule of an engine that holds decides.

    fields: what the block must have, each of one of these values, null where it may lack the field; "a|b" is the first of these
    that it has. unless: it holds where the block has not all of these.
    """

    method: str
    checkpoints: tuple[str, ...] = Field((), description="what the block calls its method; empty: anything")
    users: tuple[str, ...] | None = Field(None, description='--quantization, "" without one; None: whatever it is')
    algorithm: str | None = Field(None, description="of ModelOpt, in upper case: a regular expression for all of it")
    layer_algorithm: str | None = Field(None, description="the same, of one of the layers that ModelOpt lists")
    fields: dict[str, tuple[Scalar | None, ...]] = {}
    unless: dict[str, tuple[Scalar | None, ...]] = {}
    models: tuple[str, ...] = Field((), description="model_type of config.json; empty: any")
    min_capability: str | None = None
    renames: bool = Field(False, description="the block's method is called so from then on, and the search goes on")
    refuses: str = Field("", description="the engine refuses this, and why")
    source: str


class Engine(Value):
    """One engine version: what it is called, how it starts and what it accepts. Read from `profiles/engines/`."""

    kind: str
    version: str
    device: Literal["cuda", "cpu"]
    image: str
    machines: tuple[str, ...] = Field((), description="what its image runs on, as `uname -m` says it; empty: not known")
    cuda: str | None = Field(None, description='CUDA version of the image, for example "13.0"')
    min_driver: str | None = Field(None, description="the oldest NVIDIA driver that runs this CUDA version")
    container_command: tuple[str, ...]
    process_command: tuple[str, ...] = Field(description="`{env}` stands for the engine's virtual environment")
    install: Install | None = None
    min_capability: str | None = None
    default_utilization: float = 0.9
    default_batched_tokens: int = 2048
    default_seqs: int = 256
    block_size: int = 16
    head_dims: tuple[int, ...] = Field((), description="head sizes its attention can compute; empty: not known to be limited")
    traits: tuple[str, ...] = Field((), description="what this version builds differently; core/layers.py names them")
    architectures: tuple[str, ...] = Field((), description="architectures this version can load")
    quantizations: dict[str, Method] = {}
    method_rules: tuple[MethodRule, ...] = Field((), description="in the order in which the engine asks them")
    flags: dict[str, Flag] = {}
    spelling: dict[str, str] = Field({}, description="the planner's name of a flag -> this engine's, where they differ")
    advisories: tuple[Advisory, ...] = ()
    text_only: dict[str, Scalar] = Field(
        {},
        description="flags without which a client's media may name files of this machine; empty: none may, or there are no such",
    )
    env: dict[str, str] = Field({}, description="environment the engine always gets")
    eager_env: dict[str, str] = Field({}, description="environment added when it runs without graphs and compilation")
    user_env: tuple[str, ...] = Field((), description="environment variables a user may set")
    sources: dict[str, str] = Field({}, description="where each rule was read")

    @property
    def ref(self) -> str:
        return f"{self.kind}=={self.version}"


class EngineRef(Value):
    kind: str
    version: str
    image: str | None = None

    def __str__(self) -> str:
        return f"{self.kind}=={self.version}"


# --- what the user wants ---


class Policy(Value):
    max_attempts: int = Field(5, ge=1, le=50, description="failed starts before the model is quarantined")
    allow_remote_code: bool = Field(False, description="let the engine run code from the model's repository")
    wait_s: float = Field(
        0, ge=0, le=86400, description="how long a request waits for the model to become ready; 0: refused at once"
    )


NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}(/[A-Za-z0-9_][A-Za-z0-9_.-]{0,95})?$"


class Wish(Value):
    """What a user asks for: a model to run (`source`), or an engine that already runs elsewhere (`endpoints`)."""

    name: str = Field(pattern=NAME_PATTERN, description="name that clients put in `model`")
    source: str | None = Field(None, min_length=1, max_length=4096, description="model folder or Hugging Face repository")
    revision: str | None = Field(None, pattern=r"^[\w][\w./-]{0,127}$", description="branch, tag or commit")
    endpoints: tuple[str, ...] = Field(
        (), max_length=64, description="base URLs (ending in /v1) of engines we never start or stop"
    )
    engines: tuple[str, ...] = Field((), description='allowed engines, "kind" or "kind==version"; empty: all')
    tensor_parallel: int | None = Field(None, ge=1, le=64)
    replicas: int | None = Field(None, ge=1, le=64, description="None: one, or as many as the plan finds useful")
    min_context: int | None = Field(None, ge=1, description="tokens; a plan with less is refused")
    max_context: int | None = Field(None, ge=1, description="tokens; never plan more")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    drafter: str | None = Field(
        None,
        min_length=1,
        max_length=4096,
        description="folder or Hugging Face repository of a model that drafts tokens for this one",
    )
    speculative: Literal["auto", "off", "mtp", "ngram"] | None = Field(
        None,
        description="draft tokens without a drafter: mtp by layers of the checkpoint, ngram by what the prompt repeats, auto by mtp "
        "where that is there; None: only where a drafter is named",
    )
    num_speculative_tokens: int | None = Field(
        None, ge=1, le=64, description="tokens drafted at once; None: what the drafter names"
    )
    args: dict[str, Scalar] = Field({}, max_length=64, description="engine flags that win over the planner")
    env: dict[str, str] = Field({}, max_length=64)
    policy: Policy = Policy()

    @model_validator(mode="after")
    def _speculation_is_one(self) -> Self:
        if self.drafter is not None and self.speculative not in (None, "auto"):
            raise ValueError(f"a drafter is named, and speculative is {self.speculative}; drop one of them")
        if self.num_speculative_tokens is not None and self.drafter is None and self.speculative in (None, "off"):
            raise ValueError("num_speculative_tokens needs a drafter, or speculative set to auto, mtp or ngram")
        return self


# --- facts and failures ---

Grade = Literal["predicted", "checked", "verified", "failed"]


class Fact(Value):
    """Something learned, with a scope no wider than its evidence: it holds where every key of `scope` matches.

    max_context: the engine said that `value` tokens fit. plan_failed, plan_verified: the plan of this fingerprint.
    kernel_fails: this kernel loads and then fails; its scope names `kernel`, and of engine, capability, scheme, k and n
    (per rank) what the evidence covers; of an attention backend head_dim. engine_fails: this engine version cannot do what its
    scope names of capability, architecture and quantization. needs_memory: `value` bytes of each device were in use before
    there was a KV cache. spare_memory: `value` bytes more of each device had to be left free beside the engine's share.
    """

    kind: Literal["max_context", "plan_failed", "plan_verified", "kernel_fails", "engine_fails", "needs_memory", "spare_memory"]
    scope: dict[str, str]
    value: int | None = None
    grade: Grade
    under: dict[str, str] = Field({}, description="driver and image it was learned with; it is stale without them")
    source: str = Field(description="the log line that proves it, or the page it was read on")
    attempt: int | None = None
    at: float | None = None


class Failure(Value):
    """Why an attempt ended: `kind` names the class, `line` proves it, `advice` says what to do."""

    kind: str
    phase: str
    message: str
    line: str | None = None
    line_number: int | None = None
    culprit: dict[str, Scalar] = {}
    advice: str = ""
    proves: Literal["kernel", "context", "memory", "engine", "plan", "nothing"] = Field(
        "plan", description="what it teaches about future plans"
    )


# --- plans ---


class Choice(Value, Generic[T]):
    """A decided value with why, and where the rule comes from (`user`, a profile, a fact)."""

    value: T
    reason: str
    source: str


class Memory(Value):
    """Predicted bytes per device. `low`..`high` bounds everything but the KV cache."""

    gpu_bytes: int = Field(description="bytes of the device (of RAM on a CPU-only host)")
    budget_bytes: int = Field(description="bytes this engine may take of it")
    weights_bytes: int
    activation_bytes: int
    graph_bytes: int
    overhead_bytes: int
    kv_bytes: int = Field(description="bytes left for the KV cache")
    kv_bytes_per_token: int
    kv_tokens: int
    low: int
    high: int
    full_requests: float = Field(0, description="requests of the planned context that the KV cache holds at once")


class ModelRef(Value):
    """The model of a plan: `source` and `revision` say what to load, the rest is what verification asks for."""

    source: str
    revision: str | None = None
    task: Task
    vocab: int


class Refusal(Value):
    """One kernel or backend that the engine passes over, and why."""

    kernel: str
    reason: str


class LayerKernel(Value):
    """What the engine computes layers of one kind with. `k`, `n` are per rank; None where they cannot be cut."""

    layer: str
    count: int
    k: int | None
    n: int | None
    scheme: str
    kernel: str | None = Field(description="None: no kernel, or not known; then `status` and `refused` say which and why")
    status: Literal["ok", "none", "unknown", "crash"] = Field(description="crash: it loads, and fails at the first request")
    padded_to: tuple[int, int] | None = None
    refused: tuple[Refusal, ...] = ()
    note: str = Field("", description="why it would crash, or why it is slow")


class LayerAttention(Value):
    """Which backend computes attention layers of one kind."""

    kind: str
    layers: int
    head_dim: int
    backend: str | None = Field(description="None: none is valid, or not known; then `status` and `refused` say which and why")
    status: Literal["ok", "none", "unknown"]
    version: int | None = Field(None, description="of FlashAttention: 2, 3 or 4")
    block: int | None = Field(None, description="tokens of a block of the KV cache that the backend takes")
    refused: tuple[Refusal, ...] = ()


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
    max_model_len: Choice[int]
    max_num_seqs: Choice[int]
    max_num_batched_tokens: Choice[int]
    custom_all_reduce: Choice[bool]
    enforce_eager: Choice[bool]
    kernels: tuple[LayerKernel, ...] = Field((), description="of every linear layer")
    attention: tuple[LayerAttention, ...] = ()
    memory: Memory
    argv: tuple[str, ...]
    env: dict[str, str]
    scope: dict[str, str] = Field({}, description="what a fact learned from this plan is about")
    under: dict[str, str] = Field({}, description="driver and image it was made for: without them such a fact is stale")
    cost: int = Field(0, description="how much of the engine's own choices was changed; of equal plans the smaller wins")
    warnings: tuple[str, ...] = ()
    advice: str = Field("", description="published weaknesses of this engine version, and which version is without them")

    @property
    def fingerprint(self) -> str:
        """Identity of what would be started: the same fingerprint is the same command on the same devices."""
        parts = [
            self.model.source,
            self.model.revision,
            str(self.engine),
            self.engine.image,
            self.gpus,
            self.argv,
            sorted(self.env.items()),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


class Rejected(Value):
    """A candidate that was ruled out: `verdict` is the gate, `reasons` say why in words; the rest is what would have been."""

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


class Decision(Value):
    """The planner's whole answer (schema fitserve.plan/1): plans best first, and what was ruled out."""

    schema_: Literal["fitserve.plan/1"] = Field("fitserve.plan/1", alias="schema")
    model: str
    hardware: str
    plans: tuple[Plan, ...] = ()
    rejected: tuple[Rejected, ...] = ()

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, serialize_by_alias=True, defer_build=True)


# --- running things ---


class Mount(Value):
    source: str
    target: str
    read_only: bool = True


class LaunchSpec(Value):
    """Everything a host needs to start one engine. `name` is deterministic, so starting twice is starting once."""

    name: str
    model: str
    attempt: int
    fingerprint: str
    engine: EngineRef
    argv: tuple[str, ...]
    env: dict[str, str]
    gpus: tuple[str, ...]
    mounts: tuple[Mount, ...] = ()
    shm_bytes: int
    port: int


class Instance(Value):
    """An engine as a host sees it. `exit_code` is None while it runs, and when nobody was there to read it."""

    name: str
    model: str
    attempt: int
    fingerprint: str
    state: Literal["created", "running", "exited"] = Field(description="created: a start was cut off before its process")
    url: str | None = Field(None, description="base URL, without /v1")
    exit_code: int | None = None
    oom_killed: bool = False


AttemptState = Literal["starting", "ready", "failed", "stopped"]


class Attempt(Value):
    """One start of one replica, as remembered for ever: the plan, how far it came, and what ended it."""

    id: int
    model: str
    replica: int
    state: AttemptState
    plan: Plan
    fingerprint: str
    port: int
    started_at: float
    ready_at: float | None = None
    ended_at: float | None = None
    failure: Failure | None = None

    @property
    def grade(self) -> Grade:
        """What this attempt proves of its plan."""
        return "failed" if self.failure else "verified" if self.ready_at else self.plan.grade

    @property
    def live(self) -> bool:
        return self.state in ("starting", "ready")


class Observation(Value):
    """What the watcher has seen of one attempt in this process's lifetime."""

    phase: str = "starting"
    answering: bool = Field(False, description="the engine's health endpoint said 200")
    verified: bool = False
    proof: Failure | None = Field(None, description="a failure that a log line, the probe or the verification proves")
    log_ended: bool = Field(False, description="every line of the log was seen")
