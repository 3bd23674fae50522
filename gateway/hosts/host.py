"""The contract of a host, which runs engines and outlives the gateway.

A host reports all existing instances, and the loop decides. An instance is ours if it carries our
marker: container labels, or a record with the start time of its process. Foreign instances are
never listed, stopped or removed.

    state of NAME              start(spec)                      stop(name)       list()
    absent                     -> running                       nothing          not listed
    running, same fingerprint  -> the same instance             -> absent        "running"
    created, never started     -> running                       -> absent        "created"
    exited                     -> removed, started again        -> absent        "exited", exit code
    running, other fingerprint Conflict                         -> absent        unchanged
    held by a foreign program  ForeignInstance, untouched       ForeignInstance  not listed

* `start` returns when the engine's process exists, not when it answers. Killing the gateway inside
  `start` leaves nothing, or an instance that the next `list` shows.
* `stop` ends all processes of the engine (workers too) and forgets it: SIGTERM, then SIGKILL after
  `grace_s`. Stopping an absent instance does nothing. A log inside the instance goes with it.
* `follow` yields the log from its first byte, then new lines as they come. The end comes after the
  engine's exit and its last line. Lines have no newline and are cut at MAX_LINE bytes.
* `prepare` provides the image or environment for `start`, and reports progress in words. No other
  method takes minutes. Raises HostError with the remedy.
* `resolve` says which image an engine's name means now. All other methods use exactly that image,
  even if the name moves. An engine without an image is returned unchanged.
* `run_inquiry` runs the engine's own code (gateway/engines/inquiry/inside) in its environment, if
  possible without network. Nothing is left behind, however the generator ends. It gets the `gpus`
  that it is to measure. Questions about models state their GPUs and get none.
* `conditions` returns how an engine with this `LaunchSpec.cache` would start now.
* `prepare_fork` announces a start: a host that forks engines imports this one meanwhile. The start
  itself may differ, or never come.
* `stop_command` is for users: the gateway prints it when it leaves engines behind.
* `processes` gives the living processes of the engine, its compilers included; none where the host
  cannot know, or nothing runs. In a paused container all are stopped.
* Calls for different names may run at the same time.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import NamedTuple, Protocol

from gateway.domain import (
    Cluster,
    EngineProcess,
    EngineRef,
    Instance,
    LaunchSpec,
    MachineView,
    Network,
    PreparedView,
    StartConditions,
)
from gateway.errors import Conflict

MAX_LINE = 16 * 1024
MAX_COMMAND = 4096
"""Characters of a command line that `processes` gives: a compiler names its source after hundreds
of flags."""


def running_conflict_error(spec: LaunchSpec, present_fingerprint: str) -> Conflict:
    """The error for a start next to a running instance of this name with another plan."""
    return Conflict(
        f"{spec.name} already runs with other settings ({present_fingerprint}, not"
        f" {spec.fingerprint}).",
        hint="Stop that engine, then start this one.",
    )


class HubCommit(NamedTuple):
    """The files of a repository of the Hub at a commit, as an engine needs them."""

    repo: str
    revision: str
    allows_remote_code: bool = False


class Machines(Protocol):
    """The machines of a host over several."""

    on_change: Callable[[], object]
    """Called by `list` of the host when machines have come or gone."""

    async def cluster(self) -> Cluster:
        """The machines that start engines now. Raises HostError if none does."""
        ...

    async def machine_views(self) -> Sequence[MachineView]:
        """All machines of the cluster with their states. Raises HostError."""
        ...

    async def measure_network(self, a: str, b: str) -> Network:
        """Measure the network between two machines for a few seconds, by their names. Raises
        HostError, also where one is busy."""
        ...

    async def has_weights(self, commit: HubCommit) -> bool:
        """Whether a machine has the files of the commit, checked, for the others to copy."""
        ...

    async def copy_weights(
        self, spec: LaunchSpec, commits: Sequence[HubCommit], report: Callable[[str], None]
    ) -> None:
        """Copy the missing files of commits to the machines of a start. Raises HostError."""
        ...


class Host(Protocol):
    """The module's docstring is the specification. `tests/contract/test_host.py` tests every host
    against it."""

    kind: str  # "docker" or "process"
    can_fork: bool
    """Whether `prepare_fork` prepares starts."""

    @property
    def machines(self) -> Machines | None:
        """The machines on which engines run; None: all run on this one."""
        ...

    async def prepare(self, engine: EngineRef, report: Callable[[str], None]) -> None:
        """Make the engine's image or environment ready. Raises HostError."""
        ...

    async def prepare_fork(self, spec: LaunchSpec) -> None:
        """Prepare the fork of a start that comes after its check. Raises HostError."""
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

    async def conditions(self, engine: EngineRef, cache: str) -> StartConditions:
        """The conditions of a start now. Raises HostError."""
        ...

    async def prepared_views(self) -> tuple[PreparedView, ...]:
        """The processes that fork the next engines; none where engines are not forked."""
        ...

    def follow(self, name: str) -> AsyncGenerator[bytes, None]:
        """The log of the instance, line by line."""
        ...

    async def allocate_port(self) -> int:
        """A port for the next engine, free as far as can be known."""
        ...

    async def resolve(self, engine: EngineRef) -> EngineRef:
        """The engine with the digest of its image, unless it has one. Raises HostError if the image
        is not here."""
        ...

    async def identity(self, engine: EngineRef) -> str:
        """The identity of the code that would answer an inquiry. Another image or environment has
        another one.

        Raises HostError if it is not here.
        """
        ...

    def run_inquiry(
        self, engine: EngineRef, document: bytes, gpus: tuple[str, ...] = ()
    ) -> AsyncGenerator[bytes, None]:
        """The lines that the engine's Python answers to a document of questions.

        `gpus` are visible to it, by UUID. Raises HostError.
        """
        ...

    async def stop_command(self, names: Sequence[str]) -> Sequence[str]:
        """The command that ends engines without a gateway; empty: they end by themselves. Raises
        HostError."""
        ...

    async def close(self) -> None:
        """Close connections. Engines run on."""
        ...
