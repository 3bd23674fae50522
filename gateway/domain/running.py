"""Starts, running engines, attempts, and measurements."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from gateway.domain.base import ConfigDict, Field
from gateway.domain.facts import Failure
from gateway.domain.hardware import Hardware, RdmaPort
from gateway.domain.plan import Plan
from gateway.domain.start import StartOrigin
from gateway.domain.value import EngineRef, Grade, Value, served_name
from gateway.secret import Secret

# A measured figure from outside, within the range of a clock.
Positive = Annotated[float, Field(gt=0, lt=1e9, allow_inf_nan=False)]
Tokens = Annotated[int, Field(ge=1, le=2**24)]


# Mount options of the folders in memory that `LaunchSpec.scratch` names.
SCRATCH_OPTIONS = "rw,exec,nosuid,nodev,mode=1777"


class Mount(Value):
    source: str
    target: str
    is_read_only: bool = Field(True, alias="read_only")

    @property
    def kind(self) -> Literal["bind", "volume"]:
        """A folder, or the name of a volume."""
        return "bind" if "/" in self.source else "volume"


class NodeLaunch(Value):
    """The part of a start that one of several nodes has."""

    node: str
    argv: tuple[str, ...]
    env: dict[str, str]
    gpus: tuple[str, ...]


class LaunchSpec(Value):
    """Everything that a host needs to start an engine.

    name: deterministic, so a second start of the same attempt finds the first.
    """

    name: str
    model: str
    attempt: int
    fingerprint: str
    engine: EngineRef
    argv: tuple[str, ...]
    env: dict[str, str]
    gpus: tuple[str, ...]
    node: str = Field(
        "",
        exclude_if=lambda name: not name,
        description="machine of the cluster that has to run it; empty: one with its GPUs",
    )
    nodes: tuple[NodeLaunch, ...] = Field(
        (),
        exclude_if=lambda rows: not rows,
        description=(
            "parts of an engine over several nodes; the first answers requests, and has the"
            " command of this start"
        ),
    )
    mounts: tuple[Mount, ...] = ()
    shm_bytes: int
    port: int
    memory_bytes: int | None = Field(
        None, description="most RAM of all its processes, where the host can hold them to it"
    )
    pids: int = Field(
        32768, description="most processes and threads, where the host can hold it to that"
    )
    scratch: tuple[str, ...] | None = Field(
        None,
        description=(
            "folders of its container that it writes to, and no other; None: it may write"
            " everywhere"
        ),
    )
    cache: str = Field(
        "",
        description=(
            "hash of the plan's properties that compiled kernels depend on, other than image and"
            " environment; empty: the kernels serve no other start"
        ),
    )
    caches: dict[str, str] = Field(
        {}, description="variables of the engine's profile with the folders of compiled code"
    )
    forked_calls: tuple[str, ...] = Field(
        (),
        description=(
            "functions that begin a new interpreter for one call, and that a fork may answer"
        ),
    )
    kernel_warmups: tuple[str, ...] = Field(
        (), description="functions that compile kernels, and that several processes may help"
    )
    kernel_builds: dict[str, str] = Field(
        {}, description="functions at which the engine chooses kernels -> functions that build them"
    )
    key_env: str | None = Field(
        None, description="environment variable of the engine's key, by the engine's profile"
    )
    key_option: str | None = None


class Instance(Value):
    """An engine as its host sees it. exit_code: None while it runs, or if it was not read."""

    name: str
    model: str
    attempt: int
    fingerprint: str
    state: Literal["created", "running", "exited"] = Field(
        description="created: a start was cut off before its process"
    )
    url: str | None = Field(None, description="base URL, without /v1")
    key: Secret | None = Field(
        None,
        description=("key that the engine wants of its callers; only host and gateway know it"),
    )
    exit_code: int | None = None
    is_oom_killed: bool = Field(False, alias="oom_killed")
    origin: StartOrigin | None = None
    node: str = Field("", description="machine of the cluster; empty: this machine")


class NodeView(Value):
    """A machine of a cluster, as its node service sees it."""

    name: str
    version: str = Field(description="version of fitserve")
    address: str = Field(description="address of the engines, on the interface of the cluster")
    interface: str | None = Field(None, description="the one of that address; None: not known")
    rdma: RdmaPort | None = Field(None, description="RDMA of that interface; None: not known")
    addresses: tuple[str, ...] = Field((), description="IPv4, of all interfaces but loopback")
    ports: tuple[int, ...] = Field((), description="TCP ports on which its programs listen")
    hardware: Hardware
    owner: str = Field("", description="installation of the gateway that holds the node's lease")
    lease_s: float = Field(description="seconds after which engines without a gateway are stopped")
    is_drained: bool = Field(
        False, description="whether the machine starts no engines", alias="drained"
    )
    engines: tuple[str, ...] = Field((), description="names of its running instances")
    weights: tuple[str, ...] = Field(
        (), description="commits of the Hub that are whole on its disk, as `org/name@commit`"
    )


class MachineView(Value):
    """A machine of a cluster, as users see it."""

    name: str
    state: str = Field(description="ready, drained, or the problem in words")
    address: str = Field("", description="name in the cluster; empty: the machine does not answer")
    gpus: tuple[str, ...] = Field((), description="names of its GPUs")
    engines: tuple[str, ...] = Field((), description="names of its running instances")
    owner: str = Field("", description="installation of the gateway that owns its engines")


class EngineProcess(Value):
    """A living process of an engine, or of a compiler that it runs, as Linux reports it."""

    pid: int
    is_stopped: bool = Field(
        False,
        description="whether a signal or a paused container stopped the process",
        alias="stopped",
    )
    cpu_s: float = Field(0.0, description="processor time it has taken")
    command: str = Field("", description="beginning of the command line")


class Ability(Value):
    """Whether a model can do something that apps need, as its engine has shown here."""

    state: Literal["proven", "not proven", "unknown"] = "unknown"
    evidence: str = Field("", description="observation, or the reason why there was none")


class Abilities(Value):
    """The abilities of a model other than plain answers."""

    tools: Ability = Field(
        Ability(), description="a call of a tool where the model sees fit (`tool_choice` auto)"
    )
    required_tools: Ability = Field(
        Ability(), description="a call of a tool where one is required (`tool_choice` required)"
    )
    reasoning: Ability = Field(Ability(), description="thoughts that come apart from the answer")
    json_schema: Ability = Field(
        Ability(), description="an answer that fits a JSON schema (`response_format`)"
    )

    @classmethod
    def uniform(cls, ability: Ability) -> Abilities:
        """Abilities that are all in this state."""
        return cls(tools=ability, required_tools=ability, reasoning=ability, json_schema=ability)


# The generation of attempts that only measure a plan: they follow no wish, and never serve.
TRIAL_GENERATION = -1
# Ended attempts of a replica that are remembered. The largest number of failures that a wish may
# allow in a row must be among them.
MAX_ENDED_ATTEMPTS = 50
AttemptState = Literal["starting", "ready", "failed", "stopped"]


class SleepState(Value):
    """The sleep of an engine, which still runs with its weights in RAM."""

    # Rows of older versions may have a level.
    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    since: float = Field(description="Unix seconds")
    freed_bytes: dict[str, int] | None = Field(
        None,
        description=(
            "bytes by the UUID of a GPU that came back; None: it is falling asleep or waking up,"
            " and may use all of its share"
        ),
        alias="gave",
    )

    def promised_bytes(self, uuid: str, promised_total: int) -> int:
        """The bytes of that GPU that it may still use, of the promised ones."""
        return (
            promised_total
            if self.freed_bytes is None
            else max(0, promised_total - self.freed_bytes.get(uuid, 0))
        )


class Attempt(Value):
    """A start of a replica, remembered for ever: its plan, its state, and its end."""

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
    abilities: Abilities | None = Field(None, description="None: the engine was not asked")
    generation: int = Field(
        0,
        description=(
            "generation of the planned wish: each change of a wish is one more; -1: none, as the"
            " attempt only measures a plan"
        ),
    )
    asleep: SleepState | None = Field(None, description="None: it is awake")
    phases: dict[str, float] = Field(
        {}, description="seconds of each phase of its start; empty: not measured"
    )

    @property
    def grade(self) -> Grade:
        """The grade that this attempt gives its plan."""
        if self.failure:
            return "failed"
        return "verified" if self.ready_at else self.plan.grade

    @property
    def instance_name(self) -> str:
        """The name of its instance on the host, only by the attempt."""
        slug = "".join(
            char if char.isalnum() or char in "-_" else "-" for char in self.model.lower()
        )
        return f"{slug}-r{self.replica}-a{self.id}"

    @property
    def served_name(self) -> str:
        """The model's name inside its engine."""
        return served_name(self.model)

    @property
    def is_live(self) -> bool:
        return self.state in ("starting", "ready")

    @property
    def serves(self) -> bool:
        """Whether the engine is proven and awake."""
        return self.state == "ready" and self.asleep is None

    @property
    def is_sleep_confirmed(self) -> bool:
        """Whether the engine sleeps, and the freed memory is known."""
        return self.asleep is not None and self.asleep.freed_bytes is not None

    def promised_bytes(self, uuid: str) -> int:
        """The bytes of a GPU that no other engine may use."""
        promised_total = self.plan.memory.promised_bytes
        return (
            promised_total
            if self.asleep is None
            else self.asleep.promised_bytes(uuid, promised_total)
        )


class Observation(Value):
    """The watcher's view of an attempt, since this process began."""

    phase: str = "starting"
    is_healthy: bool = Field(False, description="the engine's health endpoint said 200")
    is_kv_cache_made: bool = Field(
        False,
        description="the log says that the engine's KV cache is made: it has measured its memory",
    )
    are_graphs_made: bool = Field(
        False,
        description=(
            "the log says that graphs and workspaces are made too: its memory grows no more"
        ),
    )
    is_verified: bool = Field(False, alias="verified")
    is_sleeping: bool = Field(False, description="the engine says that it sleeps", alias="sleeping")
    proof: Failure | None = Field(
        None, description="a failure that a log line, the probe or the verification proves"
    )
    abilities: Abilities | None = Field(
        None, description="abilities that the engine showed after the proof; None: none new"
    )
    freeze_reason: str = Field(
        "", description="why it gets no requests for now, though it runs; empty: it is not frozen"
    )
    has_log_ended: bool = Field(
        False, description="every line of the log was seen", alias="log_ended"
    )


class BenchLevel(Value):
    """A measurement with `concurrency` concurrent requests, each with another prompt.

    seconds: the time of all requests together; the other times are those of single requests.
    """

    concurrency: int = Field(ge=1, le=65536)
    requests: int = Field(ge=1, le=2**24, description="requests that were answered")
    seconds: Positive = Field(description="seconds from the first question to the last answer")
    tokens_per_s: Positive
    latency_p50_s: Positive
    latency_p95_s: Positive
    first_token_p50_s: Positive
    first_token_p95_s: Positive


class BenchReport(Value):
    """The result of `fitserve bench`. prompt, answer: tokens of each request of `levels`."""

    model_config = ConfigDict(defer_build=False)

    prompt: Tokens
    answer: Tokens
    stream: Positive | None = Field(
        None, description="tokens/s of a single request, after its first token"
    )
    first_token_2k_s: Positive | None = None
    first_token_32k_s: Positive | None = None
    levels: tuple[BenchLevel, ...] = Field((), max_length=32)
    fingerprint: str | None = Field(
        None,
        max_length=64,
        description="attempt of the plan that ran at the begin; None: an endpoint",
    )
    disturbed: str = Field(
        "",
        max_length=400,
        description="disturbance meanwhile: then nothing is learned from the measurement",
    )


class Bench(BenchReport):
    """A run as it is stored."""

    model: str
    at: float
    engine: str | None = None


class StoredBench(NamedTuple):
    """A stored run, and the one before. why: the reason if nothing was learned from it."""

    bench: Bench
    last: Bench | None
    why: str


# An attempt that served so long forgives earlier failures.
FORGIVE_S = 600.0


def failures_in_a_row(history: tuple[Attempt, ...]) -> tuple[Attempt, ...]:
    """The failed attempts in a row at the end of the history, oldest first.

    An attempt that served for ten minutes begins a new row.
    """
    streak: list[Attempt] = []
    for attempt in reversed(history):
        if attempt.state != "failed":
            break
        streak.append(attempt)
        if _serving_time_s(attempt) >= FORGIVE_S:
            break
    return tuple(reversed(streak))


def _serving_time_s(attempt: Attempt) -> float:
    """Seconds from the proof that the engine generates to its end; 0 if it never served."""
    return (attempt.ended_at or 0) - attempt.ready_at if attempt.ready_at is not None else 0.0
