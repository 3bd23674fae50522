"""A start as a Compose file (compose-spec.io): `docker compose -f FILE up -d`."""

from __future__ import annotations

from typing import Any

from gateway.domain.running import SCRATCH_OPTIONS
from gateway.wishes.export.engine_start import EngineStart


def compose(start: EngineStart) -> dict[str, Any]:
    """The content of a Compose file with one service. Empty fields are left out."""
    service: dict[str, Any] = {
        "image": start.image,
        "entrypoint": [_compose_literal(start.argv[0])],
        "command": [_compose_literal(word) for word in start.argv[1:]],
        "environment": {name: _compose_literal(value) for name, value in start.variables.items()},
        "ports": [f"127.0.0.1:{start.port}:{start.port}"],
        "volumes": [
            {
                "type": mount.kind,
                "source": _compose_literal(mount.source),
                "target": _compose_literal(mount.target),
                "read_only": mount.is_read_only,
            }
            for mount in start.mounts
        ],
        "init": True,
        "restart": "unless-stopped",
        "shm_size": start.shm_bytes,
        "pids_limit": start.pids,
        "cap_drop": ["ALL"],
        "cap_add": list(start.capabilities),
        "security_opt": ["no-new-privileges:true"],
        "read_only": start.scratch is not None,
        "tmpfs": [f"{folder}:{SCRATCH_OPTIONS}" for folder in start.scratch or ()],
        "healthcheck": {"disable": True},
    }
    if start.memory_bytes is not None:
        service["mem_limit"] = start.memory_bytes
    if start.gpus:
        devices = [{"driver": "nvidia", "device_ids": list(start.gpus), "capabilities": ["gpu"]}]
        service["deploy"] = {"resources": {"reservations": {"devices": devices}}}
    volumes = {mount.source: {"external": True} for mount in start.mounts if mount.kind == "volume"}
    fields = {key: value for key, value in service.items() if value not in ([], {}, False)}
    return {"services": {start.name: fields}, **({"volumes": volumes} if volumes else {})}


def _compose_literal(text: str) -> str:
    """The text with `$` doubled, because Compose replaces $NAME by a variable."""
    return text.replace("$", "$$")
