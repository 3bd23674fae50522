"""What a gateway and its agent tell each other: one call per connection, one line of JSON up, lines
of JSON down.

    Prepare(engine)         -> Progress ... Done
    Start(spec)             -> Done with the instance
    ListAll()               -> Done with all instances
    Stop(name, grace_s)     -> Done
    Processes(name)         -> Done with its processes
    Follow(name)            -> Line ... Done
    Resolve(engine)         -> Done with the engine, and the digest of its image
    Identity(engine)        -> Done with what would answer
    Inquire(engine, asked)  -> Line ... Done
    any                     -> Failed, instead of Done

The gateway closes the connection to give a call up. HTTP would say the same in more words, and
would need limits for heads, bodies, pipelining and idle connections; of a line, one number is the
limit.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from gateway.domain import EngineProcess, EngineRef, Instance, LaunchSpec, Value

# Questions about a model have its config and, packed, the names and shapes of its tensors.
MOST_BYTES_OF_CALL = 1024 * 1024
# A line of an engine's log takes six bytes for each of its own, at worst; what an engine says of
# its version is plain.
MOST_BYTES_OF_ANSWER = 16 * 1024 * 1024

Name = Annotated[str, Field(min_length=1, max_length=255)]


class Prepare(Value):
    call: Literal["prepare"] = "prepare"
    engine: EngineRef


class Start(Value):
    call: Literal["start"] = "start"
    spec: LaunchSpec


class ListAll(Value):
    call: Literal["list"] = "list"


class Stop(Value):
    call: Literal["stop"] = "stop"
    name: Name
    grace_s: float = Field(ge=0, le=86400, allow_inf_nan=False)


class Processes(Value):
    call: Literal["processes"] = "processes"
    name: Name


class Follow(Value):
    call: Literal["follow"] = "follow"
    name: Name


class Resolve(Value):
    call: Literal["resolve"] = "resolve"
    engine: EngineRef


class Identity(Value):
    call: Literal["identity"] = "identity"
    engine: EngineRef


class Inquire(Value):
    """`asked` is what `gateway.engines.inquiry.document` makes, packed by zlib, in base64. What
    runs in the container is the agent's own."""

    call: Literal["inquire"] = "inquire"
    engine: EngineRef
    asked: str
    gpus: tuple[str, ...] = ()


class Progress(Value):
    answer: Literal["progress"] = "progress"
    text: str


class Line(Value):
    """A line of a log: its bytes as the characters of the same numbers."""

    answer: Literal["line"] = "line"
    text: str


class Done(Value):
    answer: Literal["done"] = "done"
    instances: tuple[Instance, ...] = ()
    processes: tuple[EngineProcess, ...] = ()
    identity: str = ""
    engine: EngineRef | None = None


class Failed(Value):
    """`error` is the name of its class in gateway/errors.py."""

    answer: Literal["failed"] = "failed"
    error: Literal["HostError", "AgentRefusal", "Conflict", "ForeignInstance"]
    message: str
    hint: str = ""


Call = Prepare | Start | ListAll | Stop | Processes | Follow | Resolve | Identity | Inquire
Answer = Progress | Line | Done | Failed
CALL: TypeAdapter[Call] = TypeAdapter(Annotated[Call, Field(discriminator="call")])
ANSWER: TypeAdapter[Answer] = TypeAdapter(Annotated[Answer, Field(discriminator="answer")])
