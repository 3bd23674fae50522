"""The start of one engine as others can repeat it: without the gateway's names, keys and caches."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gateway.domain import LaunchSpec, Mount, Value
from gateway.errors import NotReady


class EngineStart(Value):
    """The start of one engine as others can repeat it.

    `image` None: a process of this machine. GPUs by UUID.
    """

    model: str
    image: str | None
    argv: tuple[str, ...]
    env: dict[str, str]
    gpus: tuple[str, ...]
    mounts: tuple[Mount, ...]
    port: int
    shm_bytes: int
    memory_bytes: int | None
    pids: int
    scratch: tuple[str, ...] | None

    @property
    def name(self) -> str:
        """A name that containers and services may have everywhere (RFC 1123)."""
        return re.sub(r"[^a-z0-9]+", "-", self.model.lower()).strip("-")[:50] or "model"

    @property
    def capabilities(self) -> Sequence[str]:
        """The needs of the container: engines on a CPU bind memory to NUMA nodes."""
        return () if self.gpus else ("SYS_NICE",)

    @property
    def variables(self) -> dict[str, str]:
        """The environment, with the order of GPUs, and the GPUs of a process."""
        gpu_order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if self.gpus else {}
        return {
            **self.env,
            **gpu_order,
            **(
                {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}
                if self.gpus and self.image is None
                else {}
            ),
        }


def engine_start(spec: LaunchSpec, *, is_in_container: bool) -> EngineStart:
    """The start of an engine for export. Raises NotReady where the engine has no image."""
    image = (spec.engine.digest or spec.engine.image) if is_in_container else None
    if is_in_container and image is None:
        raise NotReady(
            f"{spec.engine} has no container image.",
            hint="`--format argv` gives its command on this machine.",
        )
    return EngineStart(
        model=spec.model,
        image=image,
        argv=spec.argv,
        env=spec.env,
        gpus=spec.gpus,
        mounts=spec.mounts,
        port=spec.port,
        shm_bytes=spec.shm_bytes,
        memory_bytes=spec.memory_bytes,
        pids=spec.pids,
        scratch=spec.scratch,
    )
