"""Inquiries of an engine image: an isolated container that reads questions on standard input.

The container has no network, privileges, devices or writable disk, and is removed afterwards.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from gateway.engines.inquiry import script
from gateway.errors import HostError
from gateway.hosts.docker.container import gpu_request

if TYPE_CHECKING:
    from docker.api import APIClient

_PIDS = 1024
_BYTES_OF_A_GPU = 4 << 30
_SHM_BYTES = 1 << 30
_SCRATCH_BYTES = 1 << 30
# An older inquiry has lost its caller, and ignores the end of its input.
_LOST_INQUIRY_AGE_S = script.MAX_INQUIRY_S + 60


def create_inquiry(client: APIClient, image: str, owner: str, gpus: tuple[str, ...] = ()) -> str:
    """Create a container, not started, that answers questions from standard input.

    Docker removes it when it ends. `gpus` are visible to it, by UUID; each has a process of its own
    that imports the engine's torch.
    """
    from docker.types import LogConfig, Mount

    python, *arguments = script.command("python3")
    # Docker makes a folder on disk for each volume of an image, unless a mount is there.
    volumes = client.inspect_image(image)["Config"].get("Volumes") or {}  # type: ignore[no-untyped-call]
    memory = script.MAX_MEMORY + len(gpus) * _BYTES_OF_A_GPU
    # A default NVIDIA runtime would give an image the GPUs that it names.
    hidden = {} if gpus else {"NVIDIA_VISIBLE_DEVICES": "void"}
    container = client.create_container(
        image,
        entrypoint=[python],
        command=arguments,
        name=f"fitserve-{owner}-inquiry-{secrets.token_hex(4)}",
        # Docker ends standard input with the attached connection, unless the container is to be
        # detached.
        stdin_open=True,
        environment={"HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1", **hidden},  # noqa: S108
        use_config_proxy=False,
        labels={"fitserve.inquiry": owner},
        host_config=client.create_host_config(
            auto_remove=True,
            network_mode="none",
            ipc_mode="private",
            read_only=True,
            mounts=[
                Mount(folder, None, type="tmpfs", tmpfs_size=_SCRATCH_BYTES)
                for folder in {"/tmp", *volumes}  # noqa: S108
            ],
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            pids_limit=_PIDS,
            mem_limit=memory,
            memswap_limit=memory,
            device_requests=[gpu_request(client.info(), gpus)] if gpus else [],
            # GPUs without peer access exchange data through it.
            shm_size=_SHM_BYTES if gpus else None,
            # The output is read as it comes, and never kept on disk.
            log_config=LogConfig(type="none"),
        ),
    )
    return str(container["Id"])


def start_inquiry(client: APIClient, container: str, image: str) -> None:
    """Start an inquiry. Raises HostError for an image without Python, and docker's APIError."""
    from docker.errors import APIError

    try:
        client.start(container)
    except APIError as error:
        if "executable file not found" not in str(error.explanation):
            raise
        raise HostError(
            f"The image {image} cannot check plans: it has no python3.",
            hint="fitserve plans by its own rules. Check whether this is an engine image.",
        ) from None


def remove_lost_inquiries(
    client: APIClient, owner: str, older_s: float = _LOST_INQUIRY_AGE_S
) -> None:
    """Remove old inquiries of this owner: of a killed gateway, with an image that ignores its
    end."""
    from docker.errors import APIError

    for container in client.containers(all=True, filters={"label": [f"fitserve.inquiry={owner}"]}):
        if time.time() - container["Created"] >= older_s:
            try:
                client.remove_container(container["Id"], v=True, force=True)
            except APIError as error:
                # These codes mean that another client has removed the container or is about to.
                if error.status_code not in (404, 409):
                    raise
