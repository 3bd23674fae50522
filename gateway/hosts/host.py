"""The contract of a host: the thing that runs engines for us and outlives the gateway.

A host is asked, never trusted to remember what we meant: it reports what is there, and the loop
decides.
An instance is ours when it carries our marker (container labels, or a record with the start time of
its process); an instance that is not ours is never listed, stopped or removed.

    state of NAME              start(spec)                             stop(name)            list()
    absent                     -> running                              nothing               not listed
    running, same fingerprint  -> the same instance (nothing starts)   -> absent             "running"
    created, never started     -> running                              -> absent             "created"
    exited                     -> removed, started anew                -> absent             "exited", with exit code
    running, other fingerprint Conflict                                -> absent             as it is
    held by somebody else      ForeignInstance, untouched              ForeignInstance       not listed

* `start` returns when the engine's process exists, not when it answers. Killing the gateway at any
  instruction inside `start` leaves nothing, or an instance that the next `list` shows.
* `stop` ends the whole family of the engine (workers too) and forgets it: SIGTERM, then SIGKILL
  after `grace_s`. Stopping what is absent is fine. A log that is a part of the instance goes with
  it.
* `follow` yields the log from its first byte, then new lines as they come, and ends after the
  engine has exited and its last line was given. Lines have no newline and at most MAX_LINE bytes (a
  longer one is cut there).
* `prepare` makes ready what `start` needs (an image, an engine's environment) and reports progress
  in words; the only method that may take minutes. Raises HostError with what to do when it cannot
  be had.
* `resolve` says which image an engine's name means now: what it returns means that image for all
  other methods, whatever becomes of the name. `prepare` brings exactly that image. Of an engine
  without an image it is the engine as it was given.
* `inquire` runs the engine's own code (gateway/engines/inquiry/inside) in the engine's environment,
  without network where the host can take it away, and leaves nothing behind, however the generator
  ends. It gets the `gpus` that it is to measure; questions about models are about GPUs that are
  stated, and it gets none.
* `processes` gives the living processes of the engine's family, compilers that it runs included;
  nothing where the host cannot tell, or where nothing runs. In a container that is paused all are
  stopped.
* Calls for different names may run at the same time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from gateway.domain import EngineProcess, EngineRef, Instance, LaunchSpec

MAX_LINE = 16 * 1024
MOST_COMMAND = 4096
"""Characters of a command line that `processes` gives: a compiler's names its source behind
hundreds of flags."""


class Host(Protocol):
    """See the module's docstring: it is the specification, and `tests/contract/test_host.py` tests
    every host against it."""

    kind: str  # "docker" or "process"

    async def prepare(self, engine: EngineRef, report: Callable[[str], None]) -> None:
        """Make the engine's image or environment ready. Raises HostError."""
        ...

    async def start(self, spec: LaunchSpec) -> Instance:
        """Start, or find, the instance named `spec.name`. Raises ForeignInstance, Conflict,
        HostError."""
        ...

    async def list(self) -> list[Instance]:
        """All our instances, running and exited. Raises HostError when the host does not answer."""
        ...

    async def stop(self, name: str, grace_s: float) -> None:
        """End and forget the instance. Raises ForeignInstance, HostError."""
        ...

    async def processes(self, name: str) -> tuple[EngineProcess, ...]:
        """The living processes of the instance. Raises ForeignInstance, HostError."""
        ...

    def follow(self, name: str) -> AsyncGenerator[bytes, None]:
        """The log of the instance, line by line."""
        ...

    async def allocate_port(self) -> int:
        """A port for the next engine, free as far as can be known."""
        ...

    async def resolve(self, engine: EngineRef) -> EngineRef:
        """The engine with the digest of its image; as it is where it has one already. Raises
        HostError where it is not here."""
        ...

    async def identity(self, engine: EngineRef) -> str:
        """What would answer an inquiry: another image or environment has another identity. Raises
        HostError where it is not here."""
        ...

    def inquire(
        self, engine: EngineRef, asked: bytes, gpus: tuple[str, ...] = ()
    ) -> AsyncGenerator[bytes, None]:
        """The lines that the engine's own Python answers to the document of questions. gpus: those
        that it gets, by UUID. Raises HostError."""
        ...

    async def close(self) -> None:
        """Let go of connections; engines go on running."""
        ...
