"""The protocol of gateway and agent: one call per connection, one JSON line up, JSON lines down.

    PrepareCall(engine)        -> ProgressAnswer ... DoneAnswer
    ExpectCall(spec)           -> DoneAnswer
    StartCall(spec)            -> DoneAnswer with the instance
    ListCall()                 -> DoneAnswer with all instances
    StopCall(name, grace_s)    -> DoneAnswer
    ProcessesCall(name)        -> DoneAnswer with its processes
    ConditionsCall(engine)     -> DoneAnswer with the conditions of a start
    FollowCall(name)           -> LineAnswer ... DoneAnswer
    ResolveCall(engine)        -> DoneAnswer with the engine, and the digest of its image
    IdentityCall(engine)       -> DoneAnswer with the identity of the engine
    InquireCall(engine, asked) -> LineAnswer ... DoneAnswer
    PortCall()                 -> DoneAnswer with a port
    PreparedCall()             -> DoneAnswer with the prepared processes
    NodeCall()                 -> DoneAnswer with the node; only a node of a cluster answers
    DrainCall(drained)         -> the same
    WeightsCall(commit)        -> DoneAnswer with the files of a commit; none: they are not there
    MissingCall(commit, files) -> ProgressAnswer ... DoneAnswer with the files that are missing
    SendCall(commit, name)     -> ChunkAnswer ... DoneAnswer
    ReceiveCall(commit, file)  -> reads the answers to a SendCall; ProgressAnswer ... DoneAnswer
    ListenCall()               -> ListenAnswer, then DoneAnswer after a measurement of the network
    MeasureCall(address, port) -> DoneAnswer with the network to a node that listens
    any                        -> FailedAnswer, instead of DoneAnswer

The gateway closes the connection to give a call up. HTTP would need limits for heads, bodies,
pipelining and idle connections. A line needs one limit.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from gateway.domain import (
    EngineProcess,
    EngineRef,
    Instance,
    LaunchSpec,
    Network,
    NodeView,
    PreparedView,
    StartConditions,
    Value,
)
from gateway.domain.value import MAX_BYTES

# Questions about a model hold its config and, packed, the names and shapes of its tensors.
MAX_BYTES_OF_CALL = 1024 * 1024
# A byte of an engine's log takes at most six bytes. The description of a version is plain text.
MAX_BYTES_OF_ANSWER = 16 * 1024 * 1024

# Bytes of a file in a ChunkAnswer: as base64, they are shorter than a call.
CHUNK_BYTES = 512 * 1024
# More than any checkpoint has; the names fit in a call.
_MAX_FILES = 2000

Name = Annotated[str, Field(min_length=1, max_length=255)]
FilePath = Annotated[str, Field(min_length=1, max_length=255)]
ByteCount = Annotated[int, Field(ge=0, le=MAX_BYTES)]


class WeightsFile(Value):
    """A file of a commit. digest: SHA-256, or git's of a small file."""

    name: FilePath
    size: ByteCount
    digest: Annotated[str, Field(pattern=r"^([0-9a-f]{40}|[0-9a-f]{64})$")]


class MissingFile(Value):
    """A file that a node lacks. offset: bytes of its beginning that are on the disk."""

    file: WeightsFile
    offset: ByteCount


ListenKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
WeightsFiles = Annotated[tuple[WeightsFile, ...], Field(max_length=_MAX_FILES)]


class OwnedCall(Value):
    owner: Annotated[str, Field(max_length=64)] = ""
    """The installation of the gateway. A node of a cluster has one owner at most."""


class PrepareCall(OwnedCall):
    call: Literal["prepare"] = "prepare"
    engine: EngineRef


class ExpectCall(OwnedCall):
    call: Literal["expect"] = "expect"
    spec: LaunchSpec


class StartCall(OwnedCall):
    call: Literal["start"] = "start"
    spec: LaunchSpec


class ListCall(OwnedCall):
    call: Literal["list"] = "list"


class StopCall(OwnedCall):
    call: Literal["stop"] = "stop"
    name: Name
    grace_s: float = Field(ge=0, le=86400, allow_inf_nan=False)


class ProcessesCall(OwnedCall):
    call: Literal["processes"] = "processes"
    name: Name


class ConditionsCall(OwnedCall):
    call: Literal["conditions"] = "conditions"
    engine: EngineRef
    cache: Annotated[str, Field(max_length=64)]


class FollowCall(OwnedCall):
    call: Literal["follow"] = "follow"
    name: Name


class ResolveCall(OwnedCall):
    call: Literal["resolve"] = "resolve"
    engine: EngineRef


class IdentityCall(OwnedCall):
    call: Literal["identity"] = "identity"
    engine: EngineRef


class InquireCall(OwnedCall):
    """The call that asks an engine about models.

    `question_texts` is the document of `gateway.engines.inquiry.inquiry_document`, packed by zlib,
    in
    base64. The code in the container is the agent's own.
    """

    call: Literal["inquire"] = "inquire"
    engine: EngineRef
    question_texts: str = Field(alias="asked")
    gpus: tuple[str, ...] = ()


class PortCall(OwnedCall):
    call: Literal["port"] = "port"


class PreparedCall(OwnedCall):
    call: Literal["prepared"] = "prepared"


class NodeCall(OwnedCall):
    call: Literal["node"] = "node"


class DrainCall(OwnedCall):
    """The call that lets a node start engines or not.

    `is_drained`: whether the node starts no engines from now on.
    """

    call: Literal["drain"] = "drain"
    is_drained: bool = Field(alias="drained")


class CommitCall(OwnedCall):
    """A call about the files of a repository of the Hub at a commit.

    remote_code: code is one of these files.
    """

    repo: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,96}/[A-Za-z0-9_.-]{1,96}$")]
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
    remote_code: bool = False


class WeightsCall(CommitCall):
    call: Literal["weights"] = "weights"


class MissingCall(CommitCall):
    """The call that notes the commit as whole where no file is missing."""

    call: Literal["missing"] = "missing"
    files: WeightsFiles


class SendCall(CommitCall):
    """The call for the bytes of a file from `offset` on."""

    call: Literal["send"] = "send"
    name: FilePath
    offset: ByteCount = 0


class ReceiveCall(CommitCall):
    """The call that writes a file from `offset` on.

    The answers of another node to a SendCall come on the same connection.
    """

    call: Literal["receive"] = "receive"
    file: WeightsFile
    offset: ByteCount = 0


class ListenCall(OwnedCall):
    call: Literal["listen"] = "listen"


class MeasureCall(OwnedCall):
    """The call that measures the network to the node of a ListenAnswer."""

    call: Literal["measure"] = "measure"
    address: Annotated[str, Field(min_length=1, max_length=64)]
    port: Annotated[int, Field(ge=1, le=65535)]
    key: ListenKey


class ProgressAnswer(Value):
    answer: Literal["progress"] = "progress"
    text: str


class LineAnswer(Value):
    """A line of a log. Each character has the number of its byte."""

    answer: Literal["line"] = "line"
    text: str


class ChunkAnswer(Value):
    """Bytes of a file, in base64."""

    answer: Literal["chunk"] = "chunk"
    data: str


class ListenAnswer(Value):
    """The place of a measurement, and the key that admits to it."""

    answer: Literal["listen"] = "listen"
    address: str
    port: int
    key: ListenKey


class DoneAnswer(Value):
    answer: Literal["done"] = "done"
    instances: tuple[Instance, ...] = ()
    processes: tuple[EngineProcess, ...] = ()
    conditions: StartConditions = StartConditions()
    identity: str = ""
    engine: EngineRef | None = None
    port: int = 0
    prepared: tuple[PreparedView, ...] = ()
    node: NodeView | None = None
    files: WeightsFiles = ()
    missing: Annotated[tuple[MissingFile, ...], Field(max_length=_MAX_FILES)] = ()
    network: Network | None = None


class FailedAnswer(Value):
    """The answer to a call that failed.

    `error` names a class of gateway/errors.py.
    """

    answer: Literal["failed"] = "failed"
    error: Literal["HostError", "AgentAway", "AgentRefusal", "Conflict", "ForeignInstance"]
    message: str
    hint: str = ""


Call = (
    PrepareCall
    | ExpectCall
    | StartCall
    | ListCall
    | StopCall
    | ProcessesCall
    | ConditionsCall
    | FollowCall
    | ResolveCall
    | IdentityCall
    | InquireCall
    | PortCall
    | PreparedCall
    | NodeCall
    | DrainCall
    | WeightsCall
    | MissingCall
    | SendCall
    | ReceiveCall
    | ListenCall
    | MeasureCall
)
Answer = ProgressAnswer | LineAnswer | ChunkAnswer | ListenAnswer | DoneAnswer | FailedAnswer
CALL: TypeAdapter[Call] = TypeAdapter(Annotated[Call, Field(discriminator="call")])
ANSWER: TypeAdapter[Answer] = TypeAdapter(Annotated[Answer, Field(discriminator="answer")])
